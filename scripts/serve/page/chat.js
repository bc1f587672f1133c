// The chat: what is sent, how the answer arrives, stop, edit, answer again. Several conversations may be answered at
// the same time; the page shows one of them.
import * as api from "./api.js";
import { announce, byId, h, notice } from "./dom.js";
import { startHistory } from "./history.js";
import { messageView, sends, tokenLogprobs } from "./message.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { t } from "./text.js";

const CURRENT = "minimind.current";
const SAVE_EVERY = 1000; // milliseconds, while an answer arrives
const LONG_ENOUGH = 0.3; // seconds that an answer must take for its speed to mean something
const ROUNDS = 8; // of tools that run, to one question

// A thread is a list of messages that one model answers: the conversation itself, and `other` where two are compared.
const threads = (conversation) => [conversation, conversation.other].filter(Boolean);

const running = new Map(); // thread -> {stop, conversation} of its answer
let current = store.conversation(store.read(CURRENT, "")) ?? store.newConversation();
let views = new Map(); // thread -> views of its messages, in their order
let made = new WeakMap(); // message -> view; one that is open, folded or being edited stays so
let drawHistory = () => {};

const jobs = (id) => [...running].filter(([, job]) => job.conversation.id === id);
const isRunning = () => jobs(current.id).length > 0;

function open(conversation) {
  current = jobs(conversation.id)[0]?.[1].conversation ?? conversation; // the one that is being answered
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
  const viewOf = (thread) => (message) => {
    if (!made.has(message)) made.set(message, messageView(message, actions(current, thread, message)));
    return made.get(message);
  };
  views = new Map(threads(current).map((thread) => [thread, thread.messages.map(viewOf(thread))]));
  const empty = !current.messages.length;
  byId("messages").replaceChildren(...(empty ? [welcome()] : current.other ? rows() : elements(current.messages)));
  byId("messages").classList.toggle("two", Boolean(current.other) && !empty);
  for (const [thread, list] of views) list.forEach((_, index) => update(thread, index));
  byId("export-one").disabled = empty;
  drawControls();
  toEnd();
}

const elements = (messages) => messages.map((message) => made.get(message).element);

/** Two models side by side: each question above, below it the answer of each, under the name of who gave it. */
function rows() {
  const [left, right] = threads(current).map((thread) => store.turns(thread.messages));
  const side = (turn = []) => {
    const name = turn.findLast((message) => message.model)?.model;
    return h("div", { class: "side-of-two" }, name && h("strong", { class: "muted" }, name), ...elements(turn.slice(1)));
  };
  return left.flatMap((turn, i) => [...elements(turn.slice(0, 1)), side(turn), side(right[i])]);
}

function update(thread, index) {
  const list = views.get(thread);
  const last = index === list.length - 1;
  list[index].update({ last, writing: last && running.has(thread) });
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

function actions(conversation, thread, message) {
  return {
    edit: (text) => {
      const turn = store.turns(thread.messages).findIndex((turn) => turn[0] === message);
      const before = (each) => store.turns(each.messages).slice(0, turn).flat();
      const asked = { role: "user", content: text };
      replace(conversation, threads(conversation), (each) => (each === thread ? [...before(each), asked] : before(each)));
    },
    regenerate: () => replace(conversation, [thread], ({ messages }) => messages.slice(0, messages.indexOf(message))),
    results: (texts) => {
      thread.messages.push(...results(message.tool_calls, texts));
      answer(conversation, thread);
    },
  };
}

const results = (calls, texts) => calls.map(({ id }, i) => ({ role: "tool", tool_call_id: id, content: texts[i] }));

/** Give threads other messages and ask for answers; what was there can be put back. */
function replace(conversation, list, changed) {
  list.forEach(stop);
  const before = list.map((thread) => thread.messages);
  for (const thread of list) thread.messages = changed(thread);
  const undo = () => {
    list.forEach(stop);
    list.forEach((thread, i) => (thread.messages = before[i]));
    save(conversation);
    open(conversation);
  };
  const kept = list[0].messages.filter((message) => before[0].includes(message));
  if (before[0].length > kept.length + 1) notice(t("replaced"), t("undo"), undo);
  for (const thread of list) {
    const isAsked = thread.messages.length && thread.messages.at(-1).role !== "assistant";
    if (isAsked) answer(conversation, thread);
    else catchUp(conversation);
  }
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
  answer(current, current);
  catchUp(current);
}

/**
 * Ask the second model the next question that it has not been asked. It answers every question of the conversation
 * itself, also those from before it was chosen: the first model's answers would be shown and sent as its own.
 */
function catchUp(conversation) {
  const { other } = conversation;
  if (!other || running.has(other)) return;
  const asked = store.turns(other.messages).length;
  for (const [first] of store.turns(conversation.messages).slice(asked)) {
    other.messages.push({ ...first });
    if (first.role === "user") {
      answer(conversation, other);
      return;
    }
  }
}

function stop(thread) {
  running.get(thread)?.stop.abort();
  running.delete(thread);
}

const stopAll = (id) => jobs(id).forEach(([thread]) => stop(thread));

/**
 * The body of a request: answers go back as they came, failed ones stay here. The conversation keeps the system prompt
 * and the tools that it was asked with; an imported one has its own where the settings have none.
 */
function payload(conversation, thread, model) {
  const { tools, ...fields } = settings.requestFields();
  const own = conversation.isImported ? conversation : {};
  Object.assign(conversation, { system: settings.systemPrompt() || own.system, tools: tools ?? own.tools });
  const system = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  const sent = thread.messages.filter(({ role, content, tool_calls }) => role !== "assistant" || content || tool_calls);
  return { model, messages: [...system, ...sent.map(store.forApi)], tools: conversation.tools, ...fields };
}

async function answer(conversation, thread) {
  const model = thread.model ?? (byId("model").value || undefined); // unknown yet: the server's default
  const body = payload(conversation, thread, model);
  const message = { role: "assistant", content: "", model, note: "stopped" }; // what it is if the page is closed now
  const job = { stop: new AbortController(), conversation };
  thread.messages.push(message);
  running.set(thread, job);
  save(conversation);
  if (current.id === conversation.id) open(conversation);
  announce(t("answering"));
  let texts = null; // of the tools that ran
  try {
    await receive(body, message, thread, job);
    announce(t("answered", { text: message.content }));
    if (roundsOf(thread) < ROUNDS) texts = await settings.runCalls(message.tool_calls ?? [], job.stop.signal);
  } catch (error) {
    if (error.name !== "AbortError") message.error = error.message;
    if (message.error) delete message.note;
    if (error.status === 401) askAgain(conversation, thread, message);
  }
  if (running.get(thread) === job) running.delete(thread);
  if (!thread.messages.includes(message)) return; // it was replaced
  if (store.conversation(conversation.id)) save(conversation); // else it was deleted
  if (texts && !job.stop.signal.aborted) {
    thread.messages.push(...results(message.tool_calls, texts));
    return answer(conversation, thread);
  }
  if (views.has(thread)) {
    update(thread, thread.messages.length - 1);
    drawControls();
  }
  const isComplete = !message.error && !message.tool_calls && !job.stop.signal.aborted;
  if (isComplete && thread === conversation.other) catchUp(conversation);
}

/** How often the model has called tools since the last question. */
const roundsOf = (thread) => store.turns(thread.messages).at(-1).filter((message) => message.tool_calls).length - 1;

async function receive(body, message, thread, job) {
  let [first, saved, drawn] = [0, Date.now(), false];
  const draw = () => {
    drawn = false;
    if (running.get(thread) === job && views.has(thread)) update(thread, thread.messages.length - 1);
  };
  await api.streamChat(body, job.stop.signal, (chunk) => {
    const choice = chunk.choices?.[0];
    if (choice?.delta && take(message, choice.delta)) first ||= performance.now();
    if (choice?.finish_reason === "length") message.note = "cut";
    else if (choice?.finish_reason) delete message.note;
    const likely = choice?.logprobs?.content ?? [];
    if (likely.length) tokenLogprobs.set(message, [...(tokenLogprobs.get(message) ?? []), ...likely]);
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
    save(job.conversation);
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

async function askAgain(conversation, thread, message) {
  if (!(await settings.askForKey(api.hasKey()))) return;
  if (thread.messages.includes(message)) actions(conversation, thread, message).regenerate();
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
  byId("stop").addEventListener("click", () => (stopAll(current.id), drawControls(), input.focus()));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stopAll(current.id);
  });
}

// --- models

let models = null; // as the server lists them
let retry = 0; // timer

function startModels() {
  byId("model").addEventListener("change", (event) => {
    settings.chooseModel(event.target.value);
    drawModels();
    drawMessages();
  });
  byId("other").addEventListener("change", (event) => compare(event.target.value));
  document.addEventListener("opened", drawModels);
  document.addEventListener("tab", (event) => event.detail === "chat" && models && loadModels()); // a training may have made more
}

/** Have another model answer the same questions beside the first one; "": none any more. */
function compare(model) {
  const conversation = current;
  const { other } = conversation;
  if (other) stop(other);
  if (model) conversation.other = { model, messages: [] };
  else delete conversation.other;
  if (conversation.messages.length) save(conversation);
  drawMessages();
  const back = () => {
    if (conversation.other) stop(conversation.other);
    conversation.other = other;
    save(conversation);
    open(conversation);
  };
  if (other?.messages.length) notice(t("comparedNoMore"), t("undo"), back);
  catchUp(conversation);
}

function drawModels() {
  if (!models) return;
  const option = (chosen) => (name) => h("option", { value: name, selected: name === chosen }, name);
  const names = models.map((model) => model.id);
  const nothing = h("option", { value: "" }, t("noModels"));
  byId("model").replaceChildren(...(names.length ? names.map(option(settings.chosenModel())) : [nothing]));
  const chosen = byId("model").value;
  settings.setDefaults(models.find((model) => model.id === chosen)?.sampling ?? {});
  const other = current.other?.model ?? "";
  const others = names.filter((name) => name !== chosen || name === other);
  byId("other").hidden = !others.length && !other;
  byId("other").replaceChildren(h("option", { value: "" }, t("compareWith")), ...others.map(option(other)));
}

async function loadModels() {
  const error = byId("chat-error");
  try {
    models = await api.models();
    await settings.loadToolboxes();
    drawModels();
    error.hidden = true;
  } catch (problem) {
    if (problem.status === 401) return (await settings.askForKey(api.hasKey())) ? loadModels() : undefined;
    error.textContent = problem.message;
    error.hidden = false;
    clearTimeout(retry);
    retry = setTimeout(loadModels, 3000); // until the server is back
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
  startModels();
  drawHistory = startHistory({ open, stop: stopAll, rename, current: () => current });
  byId("new-chat").addEventListener("click", () => {
    const models = current.other && { other: { model: current.other.model, messages: [] } };
    open({ ...store.newConversation(), ...models });
    byId("input").focus();
  });
  document.addEventListener("language", () => {
    made = new WeakMap();
    drawMessages();
    drawModels();
  });
  open(current);
  loadModels();
  if (matchMedia("(min-width: 801px)").matches) byId("input").focus(); // on a phone the keyboard would cover the page
}
