// The chat: sending messages, receiving answers, stop, edit, answer again. Several conversations may be answered at the
// same time; the page shows one of them.
import * as api from "./api.js";
import { startCorrections } from "./corrections.js";
import { announce, byId, h, notice } from "./dom.js";
import { startHistory } from "./history.js";
import { messageView, sends } from "./message.js";
import { savePage } from "./sending.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { t } from "./text.js";

const CURRENT = "minimind.current";

const { threads } = store;
const running = new Map(); // thread -> {stop, conversation, message} of its answer
let current = store.conversation(store.read(CURRENT, "")) ?? store.newConversation();
let views = new Map(); // message -> its view
let models = null; // null: the server has not said yet
let trains = false; // whether the server does
let drawHistory = () => {};
let drawCorrections = () => {};

const jobs = (id) => [...running].filter(([, job]) => job.conversation.id === id);
const isRunning = () => jobs(current.id).length > 0;

function open(conversation) {
  current = jobs(conversation.id)[0]?.[1].conversation ?? conversation; // the copy that is being answered
  store.write(CURRENT, current.id);
  views = new Map();
  drawMessages();
  drawHistory();
  drawCorrections();
  drawModels();
  document.dispatchEvent(new Event("opened"));
}

// --- what the page shows

function drawMessages() {
  for (const thread of threads(current)) {
    for (const message of thread.messages) {
      if (!views.has(message)) views.set(message, messageView(message, actions(current, thread, message)));
    }
  }
  const isTwo = Boolean(current.other) && current.messages.length > 0;
  const shown = isTwo ? rows() : elements(current.messages);
  byId("messages").replaceChildren(...(shown.length ? shown : [welcome()]));
  byId("messages").classList.toggle("two", isTwo);
  for (const thread of threads(current)) thread.messages.forEach((message) => update(thread, message));
  byId("export-one").disabled = !current.messages.length;
  drawControls();
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}

const elements = (messages) => messages.map((message) => views.get(message).element);

/** Two models side by side: each question, and below it the answer of each model under its name. */
function rows() {
  const [left, right] = threads(current).map((thread) => store.turns(thread.messages));
  const side = (turn = []) => {
    const name = turn.findLast((message) => message.model)?.model;
    return h("div", { class: "side-of-two" }, name && h("strong", { class: "muted" }, name), ...elements(turn.slice(1)));
  };
  return left.flatMap((turn, i) => [...elements(turn.slice(0, 1)), side(turn), side(right[i])]);
}

function update(thread, message) {
  const last = message === thread.messages.at(-1);
  views.get(message)?.update({ last, writing: running.get(thread)?.message === message });
}

function drawControls() {
  byId("stop").hidden = !isRunning();
  byId("send").hidden = isRunning();
  byId("send").disabled = !byId("input").value.trim() || models?.length === 0;
}

function welcome() {
  if (models?.length === 0) {
    const open = () => document.dispatchEvent(new CustomEvent("open-tab", { detail: "training" }));
    const train = trains && h("button", { type: "button", class: "primary", onclick: open }, t("trainOne"));
    return h("div", { class: "welcome" }, h("h1", {}, t("noModel")), train || h("p", { class: "muted" }, t("trainOff")));
  }
  const example = (text) => h("button", { type: "button", onclick: () => send(text) }, text);
  const examples = h("div", { class: "examples" }, ...t("examples").split("\n").map(example));
  return h("div", { class: "welcome" }, h("h1", {}, t("greeting")), h("p", { class: "muted" }, t("greetingMore")), examples);
}

/** Scroll along with an answer, unless the reader has scrolled up. */
function startScrolling() {
  const area = byId("scroll");
  let follow = true;
  area.addEventListener("scroll", () => (follow = area.scrollHeight - area.scrollTop - area.clientHeight < 60));
  new ResizeObserver(() => follow && (area.scrollTop = area.scrollHeight)).observe(byId("messages"));
}

// --- actions on a message

function actions(conversation, thread, message) {
  return {
    edit(text) {
      const turn = store.turns(thread.messages).findIndex((turn) => turn[0] === message);
      if (turn + 1 < store.turns(thread.messages).length) offerUndo(conversation);
      for (const each of threads(conversation)) {
        stop(each);
        each.messages = store.turns(each.messages).slice(0, turn).flat();
        each.messages.push(store.ownMessage({ role: "user", content: text }));
        answer(conversation, each);
      }
    },
    correct(text) {
      correct({ conversation, message }, text);
    },
    regenerate() {
      thread.messages = thread.messages.slice(0, thread.messages.indexOf(message));
      answer(conversation, thread);
    },
    results(texts) {
      const result = ({ id }, i) => store.ownMessage({ role: "tool", tool_call_id: id, content: texts[i] });
      const results = message.tool_calls.map(result);
      thread.messages.push(...results);
      answer(conversation, thread);
    },
  };
}

/** Keep what an answer should have said; an empty text, or the answer itself, takes the correction back. */
function correct({ conversation, message }, text) {
  Object.assign(message, { correction: text === message.content ? "" : text, corrected: Date.now() });
  store.keep(conversation);
  drawCorrections();
}

/** Take back a correction of any conversation; if that one is open, its answer is drawn again. */
function takeBack({ conversation, message }) {
  const isOpen = conversation.id === current.id;
  const here = threads(current).flatMap(({ messages }) => messages).find(({ id }) => isOpen && id === message.id);
  correct(here ? { conversation: current, message: here } : { conversation, message }, "");
  if (here) open(current);
}

/** A notice with a button that restores the present messages of a conversation. */
function offerUndo(conversation) {
  const before = threads(conversation).map((thread) => [thread, thread.messages]);
  notice(t("replaced"), () => {
    for (const [thread, messages] of before) {
      stop(thread);
      thread.messages = messages;
    }
    store.keep(conversation);
    open(conversation);
  });
}

function send(text) {
  if (isRunning() || !text.trim() || models?.length === 0) return;
  if (!current.title) current.title = text.trim().split("\n")[0].slice(0, 60);
  store.merge(current);
  current.messages.push(store.ownMessage({ role: "user", content: text.trim() }));
  byId("input").value = "";
  answer(current, current);
  catchUp(current);
  grow();
}

/** Ask the second model the next question that it has not answered, including those from before it was chosen. */
function catchUp(conversation) {
  const { other, messages } = conversation;
  if (!other || running.has(other)) return;
  const next = store.turns(messages)[store.turns(other.messages).length];
  if (!next) return;
  other.messages.push(store.ownMessage({ role: next[0].role, content: next[0].content }));
  answer(conversation, other).then(() => other.messages.at(-1).note || catchUp(conversation));
}

function stop(thread) {
  running.get(thread)?.stop.abort();
  running.delete(thread);
}

// --- asking and answering

async function answer(conversation, thread) {
  const model = thread.model ?? byId("model").value;
  const prompt = settings.systemPrompt();
  const system = prompt ? [{ role: "system", content: prompt }] : [];
  const sent = thread.messages.filter(({ role, content, tool_calls }) => role !== "assistant" || content || tool_calls);
  const fields = settings.requestFields();
  Object.assign(conversation, { system, tools: fields.tools });
  const about = models?.find(({ id }) => id === model);
  const continues = about?.continues_text || undefined;
  const newest = continues ? sent : store.newest(sent, about?.max_model_len);
  const chat = { messages: [...system, ...newest.map(store.forApi)], truncation: "auto", ...fields };
  const body = { model: model || undefined, ...(continues ? textFields(sent.at(-1).content, fields) : chat) };
  // its state if the page is closed now
  const message = store.ownMessage({ role: "assistant", content: "", model, note: "stopped", continues });
  message.dropped = sent.length - newest.length;
  const job = { stop: new AbortController(), conversation, message };
  thread.messages.push(message);
  running.set(thread, job);
  store.keep(conversation);
  if (current.id === conversation.id) drawMessages();
  drawHistory();
  announce(t("answering"));
  try {
    await receive(body, message, thread, job);
    announce(t("answered", { text: message.content }));
  } catch (error) {
    if (error.name !== "AbortError") {
      message.error = error.message;
      delete message.note;
      if (error.code === "model_not_found") loadModels(); // it was deleted
    }
  }
  if (running.get(thread) === job) running.delete(thread);
  if (store.conversation(conversation.id)) store.keep(conversation); // otherwise it was deleted
  update(thread, message);
  drawControls();
}

/** The fields of a request to continue a text: the settings of a chat, without those that only a chat has. */
function textFields(prompt, { tools, chat_template_kwargs, ...fields }) {
  return { prompt, max_tokens: -1, ...fields };
}

async function receive(body, message, thread, job) {
  let [first, drawn] = [0, false];
  const draw = () => {
    drawn = false;
    if (running.get(thread) === job) update(thread, message);
  };
  const stream = message.continues ? api.streamText : api.streamChat;
  await stream(body, job.stop.signal, ({ choices: [choice], usage, dropped }) => {
    if (dropped) message.dropped += dropped;
    if (choice) add(message, choice.delta);
    if (message.content || message.reasoning_content) first ||= performance.now();
    if (choice?.finish_reason === "length") message.note = "cut";
    else if (choice?.finish_reason) delete message.note;
    if (usage) {
      message.tokens = usage.completion_tokens;
      const seconds = (performance.now() - first) / 1000;
      if (first && seconds > 0.3) message.rate = Math.round((message.tokens - 1) / seconds); // otherwise the rate means nothing
    }
    if (!drawn) requestAnimationFrame(draw);
    drawn = true;
  });
}

/** Add a piece to an answer. */
function add(message, { content, reasoning_content: reasoning, tool_calls: calls }) {
  if (content) message.content += content;
  if (reasoning) message.reasoning_content = (message.reasoning_content ?? "") + reasoning;
  for (const { index, id, function: part } of calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.name ?? "";
    call.function.arguments += part.arguments ?? "";
  }
}

// --- the composer and the models

function grow() {
  const input = byId("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  drawControls();
}

function stopAll(id = current.id) {
  jobs(id).forEach(([thread]) => stop(thread));
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
  });
  byId("stop").addEventListener("click", () => stopAll());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stopAll();
  });
}

function drawModels() {
  const option = (chosen) => (name) => h("option", { value: name, selected: name === chosen }, name);
  const names = (models ?? []).map((model) => model.id);
  byId("model").hidden = byId("save-page").hidden = !names.length;
  byId("model").replaceChildren(...names.map(option(settings.chosenModel())));
  const chosen = byId("model").value;
  const about = models?.find((model) => model.id === chosen);
  settings.setDefaults(about?.sampling ?? {});
  byId("continues").hidden = !about?.continues_text;
  byId("input").placeholder = t(about?.continues_text ? "placeholderText" : "placeholder");
  const other = current.other?.model ?? "";
  const others = names.filter((name) => name !== chosen || name === other);
  byId("other").hidden = !others.length;
  byId("other").replaceChildren(h("option", { value: "" }, t("compareWith")), ...others.map(option(other)));
}

/** Have a second model answer the same questions beside the first one; "": stop this. */
function compare(model) {
  if (current.other) stop(current.other);
  current.other = model ? { model, messages: [] } : undefined;
  drawMessages();
  catchUp(current);
}

async function loadModels() {
  const error = byId("chat-error");
  try {
    const had = models?.length ?? 1; // shown until the server has answered
    models = await api.models();
    drawModels();
    if (!had !== !models.length) drawMessages();
    error.hidden = true;
  } catch (problem) {
    error.textContent = problem.message;
    error.hidden = false;
    setTimeout(loadModels, 3000); // try again until the server is back
  }
}

/** Show what another tab did to a conversation. */
function follow(id) {
  for (const one of new Set([current, ...[...running.values()].map((job) => job.conversation)])) {
    if (one.id === id) store.merge(one);
  }
  if (id === current.id) drawMessages();
  drawHistory();
}

/** Start the chat; it opens the conversation that was open last. */
export function startChat() {
  startScrolling();
  startComposer();
  drawCorrections = startCorrections({ takeBack, models: () => ({ models: models ?? [], chosen: byId("model").value }) });
  drawHistory = startHistory({ open, stop: stopAll, current: () => current });
  byId("model").addEventListener("change", (event) => {
    settings.chooseModel(event.target.value);
    drawModels();
  });
  byId("save-page").addEventListener("click", (event) => savePage(event.currentTarget, byId("model").value));
  byId("other").addEventListener("change", (event) => compare(event.target.value));
  byId("new-chat").addEventListener("click", () => {
    open(store.newConversation(current.other?.model));
    byId("input").focus();
  });
  document.addEventListener("language", () => open(current));
  window.addEventListener("beforeunload", () => {
    for (const { conversation, stop } of running.values()) {
      store.keep(conversation); // with the incomplete answer
      stop.abort();
    }
  });
  document.addEventListener("tab", (event) => event.detail === "chat" && loadModels()); // training may have added some
  document.addEventListener("visibilitychange", () => document.hidden || loadModels());
  document.addEventListener("trains", ({ detail }) => {
    trains = detail;
    if (!models?.length) drawMessages();
  });
  document.addEventListener("chat-with", async ({ detail }) => {
    settings.chooseModel(detail);
    await loadModels();
    open(store.newConversation());
    byId("input").focus();
  });
  window.addEventListener("storage", ({ key }) => key?.startsWith(store.CHAT) && follow(key.slice(store.CHAT.length)));
  open(current);
}
