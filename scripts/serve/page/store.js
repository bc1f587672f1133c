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
  const found = new Set(memory.keys());
  try {
    for (let i = 0; i < localStorage.length; i++) found.add(localStorage.key(i));
  } catch {
    // no storage
  }
  return [...found].filter((key) => key.startsWith(CHAT));
}

export function newConversation() {
  const id = Date.now().toString(36) + crypto.getRandomValues(new Uint32Array(1))[0].toString(36);
  return { id, title: "", updated: Date.now(), messages: [] };
}

/** All conversations, the latest first. */
export function conversations() {
  const found = keys().map((key) => conversation(key.slice(CHAT.length))).filter(Boolean);
  return found.sort((a, b) => b.updated - a.updated);
}

export function conversation(id) {
  const found = read(CHAT + id, null);
  const messages = cleanMessages(found && found.messages);
  return messages ? { id, title: String(found.title ?? ""), updated: Number(found.updated) || 0, messages } : null;
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

/** Conversations as the text of a file; `messages` have the form of the API. */
export function exported(list) {
  const conversations = list.map(({ title, updated, messages }) => ({ title, updated, messages }));
  return JSON.stringify({ conversations }, null, 2);
}

/** Keep the conversations of a file's text; returns them, none if it is something else. */
export function imported(text) {
  let file = null;
  try {
    file = JSON.parse(text);
  } catch {
    return [];
  }
  const list = Array.isArray(file) ? file : (file?.conversations ?? [file]);
  if (!Array.isArray(list)) return [];
  const found = [];
  for (const item of list) {
    const messages = cleanMessages(item?.messages);
    if (!messages?.length) continue;
    const one = { ...newConversation(), title: String(item.title ?? "").slice(0, 200), messages };
    one.updated = Number(item.updated) || one.updated;
    keep(one);
    found.push(one);
  }
  return found;
}

/** Messages with known roles and texts, whatever the storage or a file says; null if it is no list. */
function cleanMessages(messages) {
  if (!Array.isArray(messages)) return null;
  const text = (value) => (typeof value === "string" ? value : "");
  return messages
    .filter((message) => ["user", "assistant", "tool"].includes(message?.role))
    .map((message) => {
      const clean = { role: message.role, content: text(message.content) };
      for (const name of ["reasoning_content", "tool_call_id", "note", "error"]) {
        if (text(message[name])) clean[name] = message[name];
      }
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
  return { id: String(call.id ?? ""), type: "function", function: { name, arguments: String(given ?? "") } };
}
