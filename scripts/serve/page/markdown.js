// Markdown to DOM nodes. Text reaches the page as text nodes only: a model's output is never markup that runs.
// Links lead to http and https alone, pictures are not loaded but linked. The work grows with the length of the text,
// whatever the text is.
import { copyButton, h, table, visible } from "./dom.js";
import { formulaAt } from "./math.js";
import { t } from "./text.js";

const DEPTH = 6; // of lists and quotes within each other
const OPEN = 24; // emphasis marks that wait for their end
const REACH = 2000; // characters in which a link has to end
const FORMULA_LINES = 40; // in which a formula has to end

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const DIVIDER = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/; // on lines of its own; its end is not far
const TARGET = /^\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)?)>?(?:\s+"[^"]*")?\s*\)/;

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM, FORMULA].some((mark) => mark.test(line));
const isDivider = (line) => line !== undefined && line.includes("-") && DIVIDER.test(line);
const isTable = (lines, at) => lines[at].includes("|") && isDivider(lines[at + 1]);
const indent = (line) => line.length - line.trimStart().length;

/** Where the block that begins at a line ends (not blank, not included), and what it is. */
function blockAt(lines, at) {
  const line = lines[at];
  let end = at + 1;
  const fence = FENCE.exec(line);
  if (fence) {
    const closes = (text) => text.length >= fence[1].length && text === fence[1][0].repeat(text.length);
    while (end < lines.length && !closes(lines[end].trim())) end++;
    return { kind: "code", end: Math.min(end + 1, lines.length), inner: end };
  }
  const formula = FORMULA.test(line) ? formulaEnd(lines, at) : 0;
  if (formula) return { kind: "paragraph", end: formula };
  if (HEADING.test(line)) return { kind: "heading", end };
  if (RULE.test(line)) return { kind: "rule", end };
  if (QUOTE.test(line)) {
    while (end < lines.length && QUOTE.test(lines[end])) end++;
    return { kind: "quote", end };
  }
  if (ITEM.test(line)) return { kind: "list", end: listEnd(lines, at) };
  if (isTable(lines, at)) {
    while (end < lines.length && lines[end].includes("|")) end++;
    return { kind: "table", end };
  }
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end]) && !isTable(lines, end)) end++;
  return { kind: "paragraph", end };
}

/** Where a formula on lines of its own ends, whatever they begin with; 0 if it has no end. */
function formulaEnd(lines, at) {
  const close = FORMULA.exec(lines[at])[1] === "$$" ? "$$" : "\\]";
  const rest = [lines[at].trimStart().slice(2), ...lines.slice(at + 1, at + FORMULA_LINES)];
  const last = rest.findIndex((line) => line.includes(close));
  return last < 0 ? 0 : at + last + 1;
}

function listEnd(lines, at) {
  const first = ITEM.exec(lines[at]);
  const ordered = first[2].length > 1;
  let end = at + 1;
  for (let i = at + 1; i < lines.length; i++) {
    const line = lines[i];
    if (!line.trim()) continue;
    const item = ITEM.exec(line);
    const alike = item && item[1].length >= first[1].length && item[2].length > 1 === ordered && !RULE.test(line);
    const goesOn = indent(line) > first[1].length || alike;
    const lazy = lines[i - 1].trim() && !startsBlock(line);
    if (!goesOn && !lazy) break;
    end = i + 1;
  }
  return end;
}

function listNode(lines, depth) {
  const base = ITEM.exec(lines[0]);
  const ordered = base[2].length > 1;
  const list = h(ordered ? "ol" : "ul", ordered && parseInt(base[2]) !== 1 ? { start: parseInt(base[2]) } : {});
  let item = null;
  const finish = () => item && list.append(itemNode(item, depth));
  for (const line of lines) {
    const mark = ITEM.exec(line);
    if (mark && mark[1].length <= base[1].length + 1) {
      finish();
      item = { width: mark[0].length, lines: [line.slice(mark[0].length)] };
    } else item.lines.push(line.slice(Math.min(indent(line), item.width)));
  }
  finish();
  return list;
}

function itemNode(item, depth) {
  const nodes = blockNodes(item.lines, depth + 1);
  const loose = item.lines.some((line, i) => !line.trim() && i < item.lines.length - 1 && i > 0);
  const flat = nodes.flatMap((node) => (node.tagName === "P" && !loose ? [...node.childNodes] : [node]));
  return h("li", {}, ...flat);
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function tableNode(lines) {
  const align = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const cell = (tag) => (text, i) => h(tag, { class: align[i] || null }, ...inline(text));
  const row = (line, tag) => h("tr", {}, ...cells(line).slice(0, align.length).map(cell(tag)));
  return table(row(lines[0], "th"), lines.slice(2).map((line) => row(line, "td")));
}

function codeNode(lines, inner) {
  const code = lines.slice(1, inner).join("\n");
  const language = FENCE.exec(lines[0])[2];
  const head = h("div", { class: "code-head" }, h("span", {}, language), copyButton(t("copy"), () => code));
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", {}, code)));
}

function blockNode(lines, block, depth) {
  if (block.kind === "code") return codeNode(lines, block.inner);
  if (block.kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    const level = Math.min(marks.length + 2, 6); // the page's own headings stand above
    return h(`h${level}`, {}, ...inline(text.trim().replace(/ #+$/, "")));
  }
  if (block.kind === "rule") return h("hr");
  if (block.kind === "table") return tableNode(lines);
  if (depth < DEPTH && block.kind === "quote") {
    return h("blockquote", {}, ...blockNodes(lines.map((line) => line.replace(QUOTE, "")), depth + 1));
  }
  if (depth < DEPTH && block.kind === "list") return listNode(lines, depth);
  return h("p", {}, ...inline(lines.map((line) => line.trim()).join("\n")));
}

function* blocksOf(lines) {
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = blockAt(lines, at);
    yield { own: lines.slice(at, block.end), block: { ...block, inner: block.inner - at } };
    at = block.end;
  }
}

const blockNodes = (lines, depth) => [...blocksOf(lines)].map(({ own, block }) => blockNode(own, block, depth));

/** Show a text in an element. While it grows, the blocks that did not change keep their nodes. */
export function render(element, text) {
  const before = element.blocks || [];
  const after = [...blocksOf(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"))];
  const sources = after.map(({ own }) => own.join("\n"));
  let same = 0;
  while (same < sources.length && sources[same] === before[same]) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const { own, block } of after.slice(same)) element.append(blockNode(own, block, 0));
  element.blocks = sources;
}

/** An address that a link may lead to, or an empty text. */
export function safeAddress(text) {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : "";
  } catch {
    return "";
  }
}

const REL = "noopener noreferrer nofollow";
const link = (href, children) => h("a", { href, target: "_blank", rel: REL }, ...children);

/** Nodes of a line of text. */
export function inline(text, links = true) {
  const open = [{ mark: "", nodes: [] }]; // emphasis that has begun, innermost last
  const noCode = new Set(); // lengths of backtick runs that have no partner any more
  let plain = "";
  const put = (...nodes) => {
    if (plain) open.at(-1).nodes.push(document.createTextNode(visible(plain)));
    plain = "";
    open.at(-1).nodes.push(...nodes);
  };
  const close = (mark) => {
    put();
    while (open.at(-1).mark !== mark) {
      const { mark: lost, nodes } = open.pop(); // it has no end: it was text
      open.at(-1).nodes.push(document.createTextNode(lost), ...nodes);
    }
    const tag = mark === "~~" ? "del" : mark.length === 2 ? "strong" : "em";
    const done = open.pop();
    put(h(tag, {}, ...done.nodes));
  };
  for (let i = 0; i < text.length; ) {
    const token = special(text, i, links, noCode);
    if (token.nodes) put(...token.nodes);
    else if (token.run) emphasis(token, open, put, close, (more) => (plain += more));
    else plain += token.text;
    i = token.end;
  }
  put();
  while (open.length > 1) {
    const { mark, nodes } = open.pop();
    open.at(-1).nodes.push(document.createTextNode(mark), ...nodes);
  }
  return open[0].nodes;
}

/** What stands at a place: a node, a run of emphasis marks, or text up to the next place of interest. */
function special(text, i, links, noCode) {
  const char = text[i];
  if (char === "\n") return { nodes: [h("br")], end: i + 1 };
  const formula = char === "$" || char === "\\" ? formulaAt(text, i) : null;
  if (formula) return formula;
  if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] || "")) return { text: text[i + 1], end: i + 2 };
  if (char === "`") return codeSpan(text, i, noCode);
  const bracket = char === "[" || (char === "!" && text[i + 1] === "[");
  if (links && bracket) return linkAt(text, i) || { text: char, end: i + 1 };
  if (links && char === "h" && /^https?:\/\//.test(text.slice(i, i + 8))) return bareLink(text, i);
  if (char === "*" || char === "_" || char === "~") return emphasisRun(text, i);
  const next = text.slice(i + 1, i + 1 + REACH).search(/[\n\\`[!h*_~$]/);
  const end = next < 0 ? Math.min(text.length, i + 1 + REACH) : i + 1 + next;
  return { text: text.slice(i, end), end };
}

function codeSpan(text, i, noCode) {
  let end = i;
  while (text[end] === "`") end++;
  const ticks = text.slice(i, end);
  for (let at = end; !noCode.has(ticks.length) && at < text.length; ) {
    at = text.indexOf(ticks, at);
    if (at < 0) break;
    let stop = at;
    while (text[stop] === "`") stop++;
    if (stop - at === ticks.length) {
      const code = text.slice(end, at).replaceAll("\n", " ");
      const bare = code.length > 2 && code.startsWith(" ") && code.endsWith(" ") ? code.slice(1, -1) : code;
      return { nodes: [h("code", {}, bare)], end: stop };
    }
    at = stop;
  }
  noCode.add(ticks.length);
  return { text: ticks, end };
}

function linkAt(text, i) {
  const start = text[i] === "!" ? i + 2 : i + 1;
  const middle = text.slice(start, start + REACH).indexOf("](");
  if (middle < 0) return null;
  const target = TARGET.exec(text.slice(start + middle, start + middle + REACH));
  const label = text.slice(start, start + middle);
  const address = target && safeAddress(target[1]);
  if (!address) return null;
  return { nodes: [link(address, inline(label || target[1], false))], end: start + middle + target[0].length };
}

function bareLink(text, i) {
  const match = /^https?:\/\/[^\s<>"'`，。；：！？、（）【】《》“”]+/.exec(text.slice(i, i + REACH));
  const shown = match ? match[0].replace(/[.,;:!?*_~)\]]+$/, "") : "";
  const address = safeAddress(shown);
  return address ? { nodes: [link(address, [shown])], end: i + shown.length } : { text: "h", end: i + 1 };
}

const isBlank = (char) => char === undefined || /\s/.test(char);
const isChinese = (char) => char !== undefined && /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\u3000-\u303f\uff00-\uffef]/u.test(char);
const isMark = (char) => char !== undefined && /[\p{P}\p{S}]/u.test(char) && !isChinese(char);
const isWord = (char) => char !== undefined && /[\p{L}\p{N}]/u.test(char) && !isChinese(char);

/**
 * A run of emphasis marks, and whether emphasis may begin or end with it: CommonMark's rules of flanking. Chinese has
 * no blanks between words, so its characters count as such; and a `*` between two operands is a sign of multiplication.
 */
function emphasisRun(text, i) {
  let end = i;
  while (text[end] === text[i]) end++;
  const run = text.slice(i, end);
  if (run.length > 3 || (run[0] === "~" && run.length !== 2)) return { text: run, end };
  const [left, right] = [text[i - 1], text[end]];
  if (run[0] === "*" && isOperator(run, left, right)) return { text: run, end };
  const isApart = (char) => isBlank(char) || isMark(char) || isChinese(char);
  const opens = !isBlank(right) && (!isMark(right) || isApart(left));
  const closes = !isBlank(left) && (!isMark(left) || isApart(right));
  if (run[0] === "_") return { run, end, opens: opens && !isWord(left), closes: closes && !isWord(right) }; // snake_case
  return { run, end, opens, closes };
}

/** `*` as in 2*3 and (a+b)*c, `**` as in 2**10. */
function isOperator(run, left, right) {
  if (run === "*") return (isWord(left) || left === ")") && (isWord(right) || right === "(");
  return isWord(left) && isWord(right) && /\d/.test(left + right);
}

function emphasis({ run, opens, closes }, open, put, close, text) {
  let left = run.length;
  const has = (mark) => open.some((frame) => frame.mark === mark);
  const marks = run[0] === "~" ? ["~~"] : [run[0].repeat(2), run[0]];
  const nearest = () => {
    const frames = open.filter((frame) => marks.includes(frame.mark) && frame.mark.length <= left).reverse();
    return frames.find((frame) => left === 2 && frame.mark.length === 2) ?? frames[0];
  };
  while (closes && left && nearest()) {
    const { mark } = nearest();
    left -= mark.length;
    close(mark);
  }
  for (const mark of marks) {
    if (left < mark.length) continue;
    left -= mark.length;
    if (opens && open.length < OPEN && !has(mark)) {
      put();
      open.push({ mark, nodes: [] });
    } else text(mark);
  }
}
