// What the browser keeps: conversations (one entry each), settings, language and theme. Without storage, or when it is
// full, the page goes on from memory.

const CHAT = "minimind.chat.";
const memory = new Map(); // what the storage did not take
let onFull = () => {};

/** Call `listener` when the storage takes no more. */
export const whenFull = (listener) => (onFull = listener);

export function read(key, fallback) {
  try {
    const text = memory.get(key) ?? localStorage.getItem(key);
    return JSON.parse(text ?? "null") ?? fallback;
  } catch {
    return fallback;
  }
}

export function write(key, value) {
  const text = JSON.stringify(value);
  try {
    localStorage.setItem(key, text);
    memory.delete(key);
  } catch {
    memory.set(key, text);
    onFull();
  }
}

/** The theme is read before the page's modules run (theme.js), as a bare word. */
export function writeTheme(theme) {
  try {
    localStorage.setItem("minimind.theme", theme);
  } catch {
    // it lasts as long as the page
  }
}

function keys() {
  const names = new Set(memory.keys());
  try {
    for (let i = 0; i < localStorage.length; i++) names.add(localStorage.key(i));
  } catch {
    // no storage
  }
  return [...names].filter((key) => key.startsWith(CHAT));
}

/**
 * A conversation: {id, title, updated, messages} and, if it has them, {system, tools} as they were asked with,
 * {isImported}, and {other: {model, messages}}, the same questions answered by another model.
 */
export function newConversation() {
  const id = Date.now().toString(36) + crypto.getRandomValues(new Uint32Array(1))[0].toString(36);
  return { id, title: "", updated: Date.now(), messages: [] };
}

/** All conversations, the latest first. */
export function conversations() {
  const stored = keys().map((key) => conversation(key.slice(CHAT.length))).filter(Boolean);
  return stored.sort((a, b) => b.updated - a.updated);
}

export function conversation(id) {
  const stored = read(CHAT + id, null);
  const messages = cleanMessages(stored && stored.messages);
  if (!messages) return null;
  const one = { id, title: String(stored.title ?? ""), updated: Number(stored.updated) || 0, messages };
  const others = cleanMessages(stored.other?.messages);
  if (others) one.other = { model: text(stored.other.model), messages: others };
  return Object.assign(one, asked(stored), stored.isImported && { isImported: true });
}

const text = (value) => (typeof value === "string" ? value : "");

/** The system prompt and tools that a conversation was asked with, as far as it has them. */
function asked({ system, tools }) {
  const list = Array.isArray(tools) ? tools.filter((tool) => typeof tool?.function?.name === "string") : [];
  return { ...(text(system) && { system }), ...(list.length && { tools: list }) };
}

export function keep(conversation) {
  write(CHAT + conversation.id, conversation);
}

export function drop(id) {
  memory.delete(CHAT + id);
  try {
    localStorage.removeItem(CHAT + id);
  } catch {
    // it was in memory
  }
}

/**
 * Conversations as the text of a JSONL file that SFT can train on: one record for each model that answered. Questions
 * whose answer failed are left out, answers that were stopped or cut are not trained ("train": false).
 */
export function exported(list) {
  return list.map((one) => record(one, one.messages) + record(one, one.other?.messages ?? [])).join("");
}

function record({ system, tools }, messages) {
  const kept = turns(messages).filter((turn) => turn.every(isAnswered) && turn.at(-1).role === "assistant").flat();
  if (!kept.length) return "";
  const sent = kept.map(({ note, ...message }) => ({ ...forApi(message), ...(note && { train: false }) }));
  const first = system ? [{ role: "system", content: system }] : [];
  return `${JSON.stringify({ messages: [...first, ...sent], tools })}\n`;
}

const isAnswered = ({ role, content, tool_calls, error }) => role !== "assistant" || (!error && (content || tool_calls));

/** Messages in turns: a question with all that follows up to the next one. */
export function turns(messages) {
  const grouped = [];
  for (const message of messages) {
    if (message.role === "user" || !grouped.length) grouped.push([]);
    grouped.at(-1).push(message);
  }
  return grouped;
}

/** A message in the form of the API, without what only this page knows of it. */
export function forApi({ role, content, reasoning_content, tool_calls, tool_call_id }) {
  return { role, content, reasoning_content, tool_calls, tool_call_id }; // JSON leaves out those that are undefined
}

/**
 * Keep the conversations of a file's text: JSONL of this page or of SFT, or a JSON array of records. Returns them and
 * how many records and messages were dropped.
 */
export function imported(text) {
  const result = { ids: [], records: 0, messages: 0 };
  for (const item of recordsIn(text)) {
    const list = item?.messages ?? item?.conversations;
    const messages = cleanMessages(list);
    if (!messages?.length) {
      result.records++;
      continue;
    }
    const system = list.find((message) => message?.role === "system");
    const dropped = list.length - messages.length - (system ? 1 : 0);
    const title = messages[0].content.split("\n")[0].slice(0, 200);
    const one = { ...newConversation(), title, messages, ...asked({ system: system?.content, tools: item.tools }) };
    one.isImported = true;
    keep(one);
    result.ids.push(one);
    result.messages += dropped;
  }
  return result;
}

/** The records of a file; null for a line that is none. */
function recordsIn(text) {
  const parsed = (part) => {
    try {
      return JSON.parse(part);
    } catch {
      return null;
    }
  };
  const whole = parsed(text); // a file of one record, or of a list of records
  return whole === null ? text.split("\n").filter((line) => line.trim()).map(parsed) : [whole].flat();
}

/** Messages with known roles and texts, whatever the storage or a file says; null if it is no list. */
function cleanMessages(messages) {
  if (!Array.isArray(messages)) return null;
  return messages
    .filter((message) => ["user", "assistant", "tool"].includes(message?.role))
    .map((message) => {
      const clean = { role: message.role, content: text(message.content) };
      for (const name of ["reasoning_content", "tool_call_id", "note", "error", "model"]) {
        if (text(message[name])) clean[name] = message[name];
      }
      if (message.train === false) clean.note ??= "stopped";
      const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
      const tools = calls.filter((call) => typeof call?.function?.name === "string").map(cleanCall);
      if (tools.length) clean.tool_calls = tools;
      if (Number(message.tokens) > 0) clean.tokens = Number(message.tokens);
      if (Number(message.rate) > 0) clean.rate = Number(message.rate);
      return clean;
    });
}

function cleanCall(call) {
  const { name, arguments: given } = call.function;
  const text = typeof given === "object" && given ? JSON.stringify(given) : String(given ?? "");
  return { id: String(call.id ?? ""), type: "function", function: { name, arguments: text } };
}
