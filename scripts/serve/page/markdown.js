// An answer's markdown as elements: marked reads it, DOMPurify lets only these elements through, KaTeX sets formulas.
import { copyButton, h } from "./dom.js";
import { t } from "./text.js";

const { DOMPurify, katex, marked } = globalThis;
const ELEMENTS = "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul";
const ALLOWED = {
  ALLOWED_TAGS: ELEMENTS.split(" "),
  ALLOWED_ATTR: ["href", "class", "align", "start"],
  ALLOWED_URI_REGEXP: /^https?:/i,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

/** A kind of formula for marked; the formula itself is put in when the text is sanitized. */
function formula(name, level, pattern, begins) {
  const tokenizer = (text) => {
    const found = pattern.exec(text);
    return found ? { type: name, raw: found[0], tex: found[1] ?? found[2] } : undefined;
  };
  const renderer = ({ tex }) => `<span class="math ${name}">${escaped(tex)}</span>`;
  return { name, level, start: (text) => text.match(begins)?.index, tokenizer, renderer };
}

const parser = new marked.Marked({
  gfm: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)), // shown, never obeyed
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`, // nothing is loaded
  },
  extensions: [
    formula("display", "block", /^(?:\$\$([^$]+)\$\$|\\\[([\s\S]+?)\\\])(?:\n|$)/, /\$\$|\\\[/),
    formula("display", "inline", /^(?:\$\$([^$]+)\$\$|\\\[([\s\S]+?)\\\])/, /\$\$|\\\[/),
    // no space inside, no digit behind: "$5 and $6" is money
    formula("inline", "inline", /^(?:\$(?!\s)((?:\\.|[^$\\\n])+?)(?<!\s)\$(?!\d)|\\\(([\s\S]+?)\\\))/, /\$|\\\(/),
  ],
});

/** Show a text as markdown in an element. A text that is nested too deeply for marked is shown unchanged. */
export function render(element, text) {
  try {
    element.replaceChildren(DOMPurify.sanitize(parser.parse(text), ALLOWED));
  } catch {
    element.replaceChildren(h("p", {}, text));
  }
  for (const link of element.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const table of element.querySelectorAll("table")) wrap(table, h("div", { class: "table", tabindex: "0" }));
  for (const code of element.querySelectorAll("pre > code")) {
    const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
    const head = h("div", { class: "code-head" }, h("span", {}, language), copyButton(t("copy"), () => code.textContent));
    wrap(code.parentNode, h("div", { class: "code" }, head));
  }
  for (const math of element.querySelectorAll(".math")) setFormula(math);
}

function wrap(element, around) {
  element.replaceWith(around);
  around.append(element);
}

/** A formula that KaTeX does not know is shown as its source. Nothing in a formula is larger than 20 em. */
function setFormula(element) {
  const tex = element.textContent;
  try {
    katex.render(tex, element, { displayMode: element.classList.contains("display"), maxSize: 20 });
  } catch {
    element.replaceChildren(h("code", {}, tex));
  }
}
