// The chat: what is sent, how the answer arrives, stop, edit, answer again. Several conversations may be answered at
// the same time; the page shows one of them.
import * as api from "./api.js";
import { announce, byId, h, notice } from "./dom.js";
import { startHistory } from "./history.js";
import { messageView, sends } from "./message.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { t } from "./text.js";

const CURRENT = "minimind.current";
const SAVE_EVERY = 1000; // milliseconds, while an answer arrives
const LONG_ENOUGH = 0.3; // seconds that an answer must take for its speed to mean something

const running = new Map(); // conversation's id -> {stop, conversation} of its answer
let current = store.conversation(store.read(CURRENT, "")) ?? store.newConversation();
let views = []; // of the messages, in their order
let made = new WeakMap(); // message -> view; one that is open, folded or being edited stays so
let drawHistory = () => {};

const isRunning = () => running.has(current.id);

function open(conversation) {
  current = running.get(conversation.id)?.conversation ?? conversation; // the one that is being answered
  store.write(CURRENT, current.id);
  drawMessages();
  drawHistory();
  document.dispatchEvent(new Event("opened"));
}

function save(conversation) {
  conversation.updated = Date.now();
  store.keep(conversation);
}

// --- the messages on the page

function drawMessages() {
  views = current.messages.map((message) => {
    if (!made.has(message)) made.set(message, messageView(message, actions(current, message)));
    return made.get(message);
  });
  const place = byId("messages");
  place.replaceChildren(...(views.length ? views.map((view) => view.element) : [welcome()]));
  views.forEach((_, index) => update(index));
  byId("export-one").disabled = !views.length;
  drawControls();
  toEnd();
}

function update(index) {
  const last = index === views.length - 1;
  views[index].update({ last, writing: last && isRunning() });
}

function drawControls() {
  byId("stop").hidden = !isRunning();
  byId("send").hidden = isRunning();
  byId("send").disabled = !byId("input").value.trim();
}

function welcome() {
  const example = (text) => h("button", { type: "button", onclick: () => send(text) }, text);
  const examples = h("div", { class: "examples" }, ...t("examples").split("\n").map(example));
  const title = h("h1", {}, t("greeting"));
  return h("div", { class: "welcome" }, title, h("p", { class: "muted" }, t("greetingMore")), examples);
}

function actions(conversation, message) {
  const place = () => conversation.messages.indexOf(message);
  return {
    edit: (text) => replaceFrom(conversation, place(), [{ role: "user", content: text }]),
    regenerate: () => replaceFrom(conversation, place(), []),
    results: (texts) => {
      const result = (call, i) => ({ role: "tool", tool_call_id: call.id, content: texts[i] });
      conversation.messages.push(...message.tool_calls.map(result));
      answer(conversation);
    },
  };
}

/** Put other messages in the place of those from `index` on and ask for an answer; what was there can be put back. */
function replaceFrom(conversation, index, messages) {
  stop(conversation.id);
  const before = [...conversation.messages];
  conversation.messages = [...before.slice(0, index), ...messages];
  const undo = () => {
    stop(conversation.id);
    conversation.messages = before;
    save(conversation);
    open(conversation);
  };
  if (before.length > index + 1) notice(t("replaced"), t("undo"), undo);
  answer(conversation);
  byId("input").focus();
}

// --- scrolling: the page follows the answer unless the reader has gone up

let follow = true;

function toEnd() {
  follow = true;
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}

function startScrolling() {
  const area = byId("scroll");
  area.addEventListener("scroll", () => {
    follow = area.scrollHeight - area.scrollTop - area.clientHeight < 60;
    byId("latest").hidden = follow;
  });
  byId("latest").addEventListener("click", toEnd);
  new ResizeObserver(() => follow && toEnd()).observe(byId("messages"));
}

// --- asking and answering

function send(text) {
  if (isRunning() || !text.trim()) return;
  if (!current.title) current.title = text.trim().split("\n")[0].slice(0, 60);
  current.messages.push({ role: "user", content: text.trim() });
  byId("input").value = "";
  grow();
  answer(current);
}

function stop(id) {
  running.get(id)?.stop.abort();
  running.delete(id);
}

/** The messages as the API takes them: answers go back as they came, failed ones stay here. */
function payload(conversation) {
  const system = settings.systemPrompt();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { role, content, reasoning_content, tool_calls, tool_call_id } of conversation.messages) {
    if (role === "assistant" && !content && !tool_calls) continue;
    messages.push({ role, content, reasoning_content, tool_calls, tool_call_id }); // without those that are undefined
  }
  return { model: byId("model").value, messages, ...settings.requestFields() };
}

async function answer(conversation) {
  const body = payload(conversation);
  const message = { role: "assistant", content: "", note: "stopped" }; // what it is if the page is closed now
  const job = { stop: new AbortController(), conversation };
  conversation.messages.push(message);
  running.set(conversation.id, job);
  save(conversation);
  open(conversation);
  announce(t("answering"));
  try {
    await receive(body, message, conversation, job);
    announce(t("answered", { text: message.content }));
  } catch (error) {
    if (error.name !== "AbortError") message.error = error.message;
    if (message.error) delete message.note;
    if (error.status === 401) askAgain(conversation, message);
  }
  if (running.get(conversation.id) === job) running.delete(conversation.id);
  if (!conversation.messages.includes(message)) return; // it was replaced
  if (store.conversation(conversation.id)) save(conversation); // else it was deleted
  if (current.id !== conversation.id) return;
  update(views.length - 1);
  drawControls();
}

async function receive(body, message, conversation, job) {
  let [first, saved, drawn] = [0, Date.now(), false];
  const draw = () => {
    drawn = false;
    if (running.get(conversation.id) === job && current.id === conversation.id) update(views.length - 1);
  };
  await api.streamChat(body, job.stop.signal, (chunk) => {
    const choice = chunk.choices?.[0];
    if (choice?.delta && take(message, choice.delta)) first ||= performance.now();
    if (choice?.finish_reason === "length") message.note = "cut";
    else if (choice?.finish_reason) delete message.note;
    const tokens = chunk.usage?.completion_tokens;
    if (tokens) {
      message.tokens = tokens;
      const seconds = (performance.now() - first) / 1000;
      if (seconds > LONG_ENOUGH) message.rate = Math.round((tokens - 1) / seconds);
    }
    if (!drawn) requestAnimationFrame(draw);
    drawn = true;
    if (Date.now() - saved < SAVE_EVERY) return;
    saved = Date.now();
    save(conversation);
  });
}

/** Add a piece of an answer to it; false if the piece is empty. */
function take(message, delta) {
  const { content, reasoning_content: reasoning, tool_calls: calls } = delta;
  if (content) message.content += content;
  if (reasoning) message.reasoning_content = (message.reasoning_content ?? "") + reasoning;
  for (const call of calls ?? []) {
    message.tool_calls ??= [];
    const none = { id: "", type: "function", function: { name: "", arguments: "" } };
    const whole = (message.tool_calls[call.index ?? 0] ??= none);
    if (call.id) whole.id = call.id;
    whole.function.name += call.function?.name ?? "";
    whole.function.arguments += call.function?.arguments ?? "";
  }
  return Boolean(content || reasoning || calls);
}

async function askAgain(conversation, message) {
  if (!(await settings.askForKey(api.hasKey()))) return;
  const at = conversation.messages.indexOf(message);
  if (at >= 0) replaceFrom(conversation, at, []);
  loadModels();
}

// --- the composer

function grow() {
  const input = byId("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  drawControls();
}

function startComposer() {
  const input = byId("input");
  input.addEventListener("input", grow);
  input.addEventListener("keydown", (event) => {
    if (!sends(event)) return;
    event.preventDefault();
    send(input.value);
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(input.value);
    input.focus();
  });
  byId("stop").addEventListener("click", () => (stop(current.id), drawControls(), input.focus()));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop(current.id);
  });
  byId("model").addEventListener("change", (event) => settings.chooseModel(event.target.value));
}

async function loadModels() {
  const error = byId("chat-error");
  try {
    const names = await api.models();
    const options = names.map((name) => h("option", { value: name, selected: name === settings.chosenModel() }, name));
    byId("model").replaceChildren(...(options.length ? options : [h("option", { value: "" }, t("noModels"))]));
    error.hidden = true;
  } catch (problem) {
    if (problem.status === 401) return (await settings.askForKey(api.hasKey())) ? loadModels() : undefined;
    error.textContent = problem.message;
    error.hidden = false;
    setTimeout(loadModels, 3000); // until the server is back
  }
}

/** Start the chat; it opens the conversation that was open last. */
export function startChat() {
  const rename = (id, title) => {
    const one = id === current.id ? current : store.conversation(id);
    one.title = title;
    store.keep(one);
  };
  store.whenFull(() => notice(t("storageFull")));
  startScrolling();
  startComposer();
  drawHistory = startHistory({ open, stop, rename, current: () => current });
  byId("new-chat").addEventListener("click", () => {
    open(store.newConversation());
    byId("input").focus();
  });
  document.addEventListener("language", () => {
    made = new WeakMap();
    drawMessages();
  });
  open(current);
  loadModels();
  if (matchMedia("(min-width: 801px)").matches) byId("input").focus(); // on a phone the keyboard would cover the page
}
