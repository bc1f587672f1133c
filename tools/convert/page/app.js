// What the page shows. Texts are put into it as text, never as markup; the model runs in a worker.
"use strict";

const TEXT = {
  en: {
    send: "Send", stop: "Stop", reset: "New chat", language: "中文", message: "Your message", loading: "Loading the model …",
    about: "The model runs in this page, on this device. Nothing you write leaves it, and nothing is kept.",
    ask: "Write a message", begin: "Write a beginning; the model continues it",
    continues: "This model was pretrained only: it has not learnt to answer and continues your text.",
    dropped: "The context is full: the oldest {n} messages were dropped.", stopped: "stopped", speed: "{tokens} tokens, {rate} tokens/s",
    length: "cut after {room} tokens", context: "cut after {room} tokens: the context is full",
    tooLong: "The message is too long: {tokens} tokens, and {room} of the {context} are for it.",
    old: "This browser is too old for this page. It needs WebAssembly and DecompressionStream: Chrome or Edge 91, Firefox 113, Safari 16.4 or newer.",
    error: "This did not work: {text}",
  },
  zh: {
    send: "发送", stop: "停止", reset: "新对话", language: "English", message: "你的消息", loading: "正在加载模型……",
    about: "模型在此页面中、在这台设备上运行。你写的内容不会离开这里，也不会被保存。",
    ask: "写一条消息", begin: "写一个开头，模型接着写",
    continues: "这个模型只做过预训练：它没有学过回答，只会接着写你的文字。",
    dropped: "上下文已满：最早的 {n} 条消息已被移除。", stopped: "已停止", speed: "{tokens} 个 token，{rate} token/s",
    length: "在 {room} 个 token 后截断", context: "在 {room} 个 token 后截断：上下文已满",
    tooLong: "消息太长：共 {tokens} 个 token，而 {context} 中留给它的是 {room} 个。",
    old: "浏览器太旧，无法运行此页面。它需要 WebAssembly 和 DecompressionStream：Chrome 或 Edge 91、Firefox 113、Safari 16.4 或更新版本。",
    error: "出错了：{text}",
  },
};

const byId = (id) => document.getElementById(id);
const spec = JSON.parse(byId("spec").textContent);
let language = navigator.language.startsWith("zh") ? "zh" : "en";
let worker = null;
let state = "loading"; // ready, writing, failed
let shown = null; // the answer that is being generated

const t = (key, values = {}) => TEXT[language][key].replace(/\{(\w+)\}/g, (_, name) => values[name]);

/** An element with a text. `say` returns the text of its notes, which is set again when the language changes. */
function element(tag, kind, say = "") {
  const made = document.createElement(tag);
  made.className = kind;
  made.say = typeof say === "string" ? () => say : say;
  made.textContent = made.say();
  return made;
}

function draw() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const each of document.querySelectorAll("[data-text]")) each.textContent = t(each.dataset.text);
  for (const note of document.querySelectorAll(".note")) note.textContent = note.say();
  byId("input").placeholder = t(spec.continues_text ? "begin" : "ask");
  byId("input").setAttribute("aria-label", t("message"));
  if (state === "loading") byId("state").textContent = t("loading");
  else if (state !== "failed") byId("state").textContent = spec.continues_text ? t("continues") : "";
  byId("send").hidden = state === "writing";
  byId("stop").hidden = state !== "writing";
  byId("send").disabled = state !== "ready" || !byId("input").value.trim();
  document.documentElement.dataset.state = state;
}

function become(next) {
  state = next;
  draw();
}

/** Show what went wrong. The page cannot continue. */
function fail(key, values) {
  byId("state").className = "error";
  byId("state").textContent = t(key, values);
  become("failed");
}

/** Change the messages. If they were scrolled to the end, they stay there. */
function change(doing) {
  const area = byId("messages");
  const isAtEnd = area.scrollHeight - area.scrollTop - area.clientHeight < 60;
  doing(area);
  if (isAtEnd) area.scrollTop = area.scrollHeight;
}

function ask(text) {
  change((area) => {
    if (!spec.continues_text) area.append(element("div", "message user", text));
    const message = element("div", "message model");
    shown = { message, text, thoughts: element("div", "thoughts"), content: element("span", "content") };
    if (spec.continues_text) message.append(element("span", "begun", text));
    shown.thoughts.hidden = true;
    message.append(shown.thoughts, shown.content);
    area.append(message);
  });
  byId("input").value = "";
  grow();
  become("writing");
  worker.postMessage({ ask: text });
}

function show({ thoughts, content }) {
  change(() => {
    shown.thoughts.hidden = !thoughts;
    shown.thoughts.textContent = thoughts;
    shown.content.textContent = content;
  });
}

/** The notes below a finished answer. */
function finish({ tokens, finish, room, most, dropped, seconds, ...answer }) {
  show(answer);
  const note = (say) => change(() => shown.message.append(element("p", "note", say)));
  if (dropped) note(() => t("dropped", { n: dropped }));
  if (finish === "stopped") note(() => t("stopped"));
  if (finish === "length") note(() => t(room === most ? "length" : "context", { room }));
  const rate = Math.round((tokens.length - 1) / seconds.rest);
  if (tokens.length > 8) note(() => t("speed", { tokens: tokens.length, rate }));
  become("ready");
}

/** Put a message that is too long back into the input field. */
function refuse(values) {
  change(() => {
    const question = spec.continues_text ? null : shown.message.previousElementSibling;
    question?.remove();
    shown.message.replaceChildren(element("p", "note", () => t("tooLong", values)));
  });
  byId("input").value = shown.text;
  grow();
  become("ready");
}

function grow() {
  const input = byId("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
  draw();
}

function startWorker() {
  const products = byId("products").textContent;
  const knowsVectors = () => WebAssembly.validate(Uint8Array.from(atob(products), (character) => character.charCodeAt(0)));
  if (typeof DecompressionStream !== "function" || typeof WebAssembly !== "object" || !knowsVectors()) return fail("old");
  const code = new Blob([byId("worker").textContent], { type: "text/javascript" });
  worker = new Worker(URL.createObjectURL(code));
  worker.onerror = (event) => fail("error", { text: event.message });
  worker.onmessage = ({ data }) => {
    if (data.ready !== undefined) become("ready");
    else if (data.answer) show(data.answer);
    else if (data.done) finish(data.done);
    else if (data.tooLong) refuse(data.tooLong);
    else if (data.error) fail("error", { text: data.error });
  };
  const parts = [...document.querySelectorAll(".weights")];
  worker.postMessage({ load: { spec, weights: parts.map((part) => part.textContent), products } });
  for (const part of parts) part.remove(); // the worker has them
}

function startComposer() {
  const input = byId("input");
  const submit = () => state === "ready" && input.value.trim() && ask(spec.continues_text ? input.value : input.value.trim());
  input.addEventListener("input", grow);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // a new line, or an input method that is composing
    event.preventDefault();
    submit();
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("stop").addEventListener("click", () => worker.postMessage({ stop: true }));
  document.addEventListener("keydown", ({ key }) => key === "Escape" && state === "writing" && worker.postMessage({ stop: true }));
  byId("new").addEventListener("click", () => {
    if (state !== "ready") return;
    byId("messages").replaceChildren();
    worker.postMessage({ reset: true });
    input.focus();
  });
  byId("language").addEventListener("click", () => {
    language = language === "zh" ? "en" : "zh";
    draw();
  });
}

draw();
startComposer();
startWorker();
