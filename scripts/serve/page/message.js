// One message on the page: its text, reasoning, tool calls, errors, and the buttons below it.
import { correctionField, correctionView } from "./corrections.js";
import { copyButton, h, iconButton } from "./dom.js";
import { render } from "./markdown.js";
import { t } from "./text.js";

/**
 * A view of a message. `act` has edit(text), regenerate(), correct(text) and results(list of texts). `update` shows the present message:
 * {writing} while it arrives, {last} if it is the last one.
 */
export function messageView(message, act) {
  const body = h("div", { class: "body" });
  const foot = h("div", { class: "foot" });
  const who = { user: "you", assistant: "assistant", tool: "toolResult" }[message.role];
  const element = h("article", { class: `message ${message.role}`, "aria-label": t(who) }, body, foot);
  if (message.role === "assistant") return answerView(message, element, body, foot, act);
  body.textContent = message.content;
  if (message.role === "user") {
    foot.append(copyButton(t("copy"), () => message.content));
    foot.append(iconButton("edit", t("edit"), () => edit(element, message, act)));
  }
  return { element, update() {} };
}

function answerView(message, element, body, foot, act) {
  const title = h("summary");
  const thoughts = h("div", { class: "prose" });
  const fold = h("details", { class: "reasoning", hidden: true }, title, thoughts);
  const text = h("div", { class: "prose" });
  const rest = h("div");
  const correction = h("div");
  body.append(fold, text, rest, correction);
  const showCorrection = () => correction.replaceChildren(...(message.correction ? [correctionView(message.correction)] : []));
  const correct = () => correction.replaceChildren(correctionField(message, act.correct, showCorrection));
  const update = ({ writing, last }) => {
    const { content, reasoning_content: reasoning = "", tool_calls: calls = [], tokens, rate } = message;
    element.classList.toggle("writing", writing);
    element.classList.toggle("silent", writing && !content);
    fold.hidden = !reasoning;
    title.textContent = t(writing && !content ? "reasoningNow" : "reasoning");
    render(thoughts, reasoning);
    render(text, content);
    rest.replaceChildren(...calls.map(callView));
    foot.replaceChildren();
    if (writing) return;
    if (message.note) rest.append(h("p", { class: "note" }, t(message.note)));
    if (message.dropped) rest.append(h("p", { class: "note" }, t("dropped", { n: message.dropped })));
    if (message.error) rest.append(h("div", { class: "error", role: "alert" }, message.error));
    if (last && calls.length && !message.error) rest.append(resultForm(calls, act));
    if (!correction.querySelector("textarea")) showCorrection();
    if (content) foot.append(copyButton(t("copy"), () => content));
    if (content && !message.continues && !message.error) foot.append(iconButton("edit", t("correct"), correct));
    if (last) foot.append(iconButton("again", t("regenerate"), act.regenerate));
    const facts = [tokens && t("usage", { tokens }), rate && t("speed", { rate }), message.model];
    foot.append(h("span", {}, facts.filter(Boolean).join(" · ")));
  };
  return { element, update };
}

function callView({ function: { name, arguments: given } }) {
  return h("details", { class: "call", open: true }, h("summary", {}, t("toolCall", { name })), h("pre", {}, given));
}

/** Fields for the results of the called tools, which the user runs. */
function resultForm(calls, act) {
  const areas = calls.map(() => h("textarea", { rows: "2" }));
  const labels = calls.map((call, i) => h("label", {}, t("resultLabel", { name: call.function.name }), areas[i]));
  const onsubmit = (event) => {
    event.preventDefault();
    act.results(areas.map((area) => area.value));
  };
  const button = h("button", { type: "submit", class: "primary" }, t("sendResult"));
  return h("form", { class: "results", onsubmit }, ...labels, button);
}

/** The message as an input field. When it is sent, the answers after it are generated again. */
function edit(element, message, act) {
  const area = h("textarea", { rows: Math.min(12, message.content.split("\n").length + 1), "aria-label": t("edit") });
  area.value = message.content;
  const before = [...element.childNodes];
  const back = () => element.replaceChildren(...before);
  const send = () => area.value.trim() && act.edit(area.value.trim());
  const onkeydown = (event) => {
    if (event.key === "Escape") back();
    else if (sends(event)) send();
    else return;
    event.preventDefault();
    event.stopPropagation();
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
