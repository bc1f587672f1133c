// One message on the page: its text, reasoning, tool calls, what went wrong, and the buttons below it.
import { copyButton, h, icon, iconButton, visible } from "./dom.js";
import { render } from "./markdown.js";
import { t } from "./text.js";

/** Message -> its tokens as the API gives them, with log-probabilities; until the page is closed. */
export const tokenLogprobs = new WeakMap();
const SHADES = [0.9, 0.6, 0.3, 0.1]; // probabilities from which on a token has the shade of its place

/**
 * A view of a message. `act` has edit(text), regenerate() and results(list of texts); `update` shows what the message
 * has become: {writing} while it arrives, {last} if no other stands below it.
 */
export function messageView(message, act) {
  const body = h("div", { class: "body" });
  const foot = h("div", { class: "foot" });
  const who = { user: "you", assistant: "assistant", tool: "toolResult" }[message.role];
  const element = h("article", { class: `message ${message.role}`, "aria-label": t(who) }, body, foot);
  if (message.role !== "assistant") {
    if (message.role === "tool") body.before(h("div", { class: "who" }, t("toolResult")));
    body.textContent = visible(message.content);
    if (message.role === "user") {
      foot.append(copyButton(t("copy"), () => message.content));
      foot.append(iconButton("edit", t("edit"), () => edit(element, message, act)));
    }
    return { element, update() {} };
  }
  const parts = answerParts(body);
  return { element, update: (state) => updateAnswer({ element, body, foot, parts, message, act }, state) };
}

function answerParts(body) {
  const title = h("span");
  const reasoning = h("div", { class: "text" });
  const fold = h("details", { class: "reasoning", hidden: true }, h("summary", {}, foldIcon(), title), reasoning);
  const text = h("div", { class: "text" });
  const rest = h("div");
  body.append(fold, text, rest);
  return { fold, title, reasoning, text, rest };
}

function foldIcon() {
  const sign = icon("fold");
  sign.classList.add("fold");
  return sign;
}

function updateAnswer({ element, foot, parts, message, act }, { writing, last }) {
  const { content, reasoning_content: reasoning = "", tool_calls: calls = [] } = message;
  element.classList.toggle("writing", writing);
  element.classList.toggle("silent", writing && !content);
  element.setAttribute("aria-busy", String(writing));
  parts.fold.hidden = !reasoning;
  parts.title.textContent = t(writing && !content ? "reasoningNow" : "reasoning");
  show(parts.reasoning, reasoning);
  show(parts.text, content);
  parts.rest.replaceChildren(...calls.map(callView));
  foot.replaceChildren();
  if (writing) return;
  if (tokenLogprobs.has(message)) parts.rest.append(tokenProbabilitiesView(tokenLogprobs.get(message)));
  if (message.note) parts.rest.append(h("p", { class: "note" }, t(message.note)));
  if (message.error) parts.rest.append(h("div", { class: "error", role: "alert" }, message.error));
  if (last && calls.length && !message.error) parts.rest.append(resultForm(calls, act));
  if (content) foot.append(copyButton(t("copy"), () => content));
  if (last) foot.append(iconButton("again", t("regenerate"), act.regenerate));
  const { tokens, rate, model } = message;
  const facts = [tokens && t("usage", { tokens }), rate && t("speed", { rate }), model];
  foot.append(h("span", {}, facts.filter(Boolean).join(" · ")));
}

/** Markdown; a text that is too much for it (a stored one of megabytes) is shown as it is. */
function show(element, text) {
  if (element.shown === text) return;
  element.shown = text;
  try {
    render(element, text);
  } catch {
    element.blocks = null;
    element.replaceChildren(h("p", {}, text));
  }
}

/** The tokens of an answer, shaded by how likely each was; its rivals stand in the tooltip. */
function tokenProbabilitiesView(tokens) {
  const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  const line = ({ token, logprob }) => `${JSON.stringify(token)} ${percent(logprob)}`;
  const shade = (logprob) => SHADES.findIndex((least) => Math.exp(logprob) >= least);
  const node = (one) => {
    const others = one.top_logprobs.filter((other) => other.token !== one.token);
    const place = shade(one.logprob);
    const kind = `shade${place < 0 ? SHADES.length : place}`;
    return h("span", { class: kind, title: [one, ...others].map(line).join("\n") }, one.token);
  };
  const summary = h("summary", {}, foldIcon(), t("tokenProbabilitiesShown"));
  return h("details", { class: "call token-probabilities", open: true }, summary, h("pre", {}, ...tokens.map(node)));
}

function callView(call) {
  const { name, arguments: given } = call.function;
  let shown = given;
  try {
    shown = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // still arriving, or no JSON: as it is
  }
  const sign = icon("tool");
  sign.classList.add("tool");
  const summary = h("summary", {}, foldIcon(), sign, t("toolCall", { name }));
  return h("details", { class: "call", open: true }, summary, h("pre", {}, shown));
}

function resultForm(calls, act) {
  const areas = calls.map(() => h("textarea", { rows: "2" }));
  const title = (call) => h("span", {}, t("resultLabel", { name: call.function.name }));
  const labels = calls.map((call, i) => h("label", {}, title(call), areas[i]));
  const onsubmit = (event) => {
    event.preventDefault();
    act.results(areas.map((area) => area.value));
  };
  const button = h("button", { type: "submit", class: "primary" }, t("sendResult"));
  return h("form", { class: "results", onsubmit }, ...labels, button);
}

/** The message as a field; what follows it is asked anew when it is sent. */
function edit(element, message, act) {
  const rows = Math.min(12, message.content.split("\n").length + 1);
  const area = h("textarea", { rows, "aria-label": t("edit") });
  area.value = message.content;
  const before = [...element.childNodes];
  const back = () => {
    element.replaceChildren(...before);
    element.querySelector(`[aria-label="${t("edit")}"]`)?.focus();
  };
  const send = () => {
    if (!area.value.trim()) return;
    back(); // the message is as it was, should this be undone
    act.edit(area.value.trim());
  };
  const onkeydown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      back();
    } else if (sends(event)) {
      event.preventDefault();
      send();
    }
  };
  const cancel = h("button", { type: "button", class: "quiet", onclick: back }, t("cancel"));
  const submit = h("button", { type: "button", class: "primary", onclick: send }, t("send"));
  element.replaceChildren(h("div", { class: "edit", onkeydown }, area, h("div", { class: "buttons" }, cancel, submit)));
  area.focus();
}

/** Whether a key press in a field sends: Enter alone, and not while an input method composes Chinese. */
export function sends(event) {
  const composing = event.isComposing || event.keyCode === 229;
  return event.key === "Enter" && !event.shiftKey && !composing && event.target.tagName === "TEXTAREA";
}
