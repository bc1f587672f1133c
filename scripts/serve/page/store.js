// What the browser keeps: settings, and conversations, one entry each:
// {id, title, updated, messages, system, tools} and, where two models answer, {other: {model, messages}}.
import { notice } from "./dom.js";
import { t } from "./text.js";

export const CHAT = "minimind.chat."; // what the names of their entries begin with

export function read(key, fallback) {
  try {
    return JSON.parse(localStorage.getItem(key) ?? "null") ?? fallback;
  } catch {
    return fallback; // no storage, or another program's entry
  }
}

export function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    notice(t("storageFull"));
  }
}

export function newConversation(other) {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: "", updated: Date.now(), messages: [], ...(other && { other: { model: other, messages: [] } }) };
}

export function conversation(id) {
  const stored = read(CHAT + id, null);
  if (!Array.isArray(stored?.messages)) return null;
  threads(stored).forEach(remember);
  return stored;
}

/** The lists of messages of a conversation, which one model each answers: itself and, if two are compared, `other`. */
export const threads = (conversation) => [conversation, conversation.other].filter(Boolean);

// --- several tabs: what each of them added or removed since it read a conversation holds for all

const known = new WeakMap(); // thread -> ids of the messages that it had when it was last read or written
const written = new WeakSet(); // messages that came into being in this tab
let ids = 0;

/** A message that this tab adds. */
export function ownMessage(fields) {
  const message = { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}-${ids++}`, ...fields };
  written.add(message);
  return message;
}

function remember(thread) {
  thread.messages.forEach((message, i) => (message.id ??= `old-${i}`)); // kept before messages had ids
  known.set(thread, new Set(thread.messages.map(({ id }) => id)));
}

/** Bring what other tabs did to a conversation into this tab's copy. */
export function merge(conversation) {
  const stored = read(CHAT + conversation.id, null);
  if (!Array.isArray(stored?.messages)) return;
  conversation.title ||= stored.title;
  mergeThread(conversation, stored);
  if (conversation.other && stored.other?.model === conversation.other.model) mergeThread(conversation.other, stored.other);
}

function mergeThread(mine, stored) {
  stored.messages.forEach((message, i) => (message.id ??= `old-${i}`));
  const before = known.get(mine) ?? new Set();
  const byId = new Map(mine.messages.map((message) => [message.id, message]));
  const there = new Set(stored.messages.map(({ id }) => id));
  const kept = stored.messages.filter(({ id }) => byId.has(id) || !before.has(id)); // else it was removed here
  const current = kept.map((message) => {
    const here = byId.get(message.id);
    if (!here) return message;
    if (written.has(here)) return here;
    for (const name of Object.keys(here)) delete here[name];
    return Object.assign(here, message); // it may have grown there
  });
  const added = mine.messages.filter(({ id }) => !there.has(id) && !before.has(id));
  mine.messages = [...current, ...added];
  remember(mine);
}

/** All conversations, the latest first. */
export function conversations() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(CHAT)).map((key) => key.slice(CHAT.length));
  return ids.map(conversation).filter(Boolean).sort((a, b) => b.updated - a.updated);
}

export function keep(conversation) {
  merge(conversation);
  threads(conversation).forEach(remember);
  conversation.updated = Date.now();
  write(CHAT + conversation.id, conversation);
}

export const drop = (id) => localStorage.removeItem(CHAT + id);

/** A message in the form of the API, without what only this page knows of it. */
export function forApi({ role, content, reasoning_content, tool_calls, tool_call_id }) {
  return { role, content, reasoning_content, tool_calls, tool_call_id }; // JSON leaves out those that are undefined
}

/** Messages in turns: a question with all that follows up to the next one. */
export function turns(messages) {
  const grouped = [];
  for (const message of messages) {
    if (message.role === "user" || !grouped.length) grouped.push([]);
    grouped.at(-1).push(message);
  }
  return grouped;
}

const CHARACTERS = 16; // of a token, at most

/** The newest turns that a context of so many tokens can hold, at least the last one; the server counts their tokens. */
export function newest(messages, context = Infinity) {
  const grouped = turns(messages);
  let [characters, count] = [0, 0];
  const first = grouped.findLastIndex((turn) => {
    count += turn.length;
    characters += JSON.stringify(turn.map(forApi)).length - 40 * turn.length; // without the names of their fields
    return characters > CHARACTERS * context || count > context;
  });
  return grouped.slice(Math.min(first + 1, grouped.length - 1)).flat();
}

/**
 * Conversations as JSONL that SFT can train on, a record for each model that answered, with the system prompt and the
 * tools that were asked with. Turns that failed are left out, and texts that were continued; answers that were stopped or cut are not trained.
 */
export function exported(list) {
  const isWhole = (turn) => turn.at(-1).role === "assistant" && !turn.some(({ error, continues }) => error || continues);
  const sent = ({ note, ...message }) => ({ ...forApi(message), ...(note && { train: false }) });
  const record = ({ system = [], tools }, { messages }) => {
    const kept = turns(messages).filter(isWhole).flat().map(sent);
    return kept.length ? `${JSON.stringify({ messages: [...system, ...kept], tools })}\n` : "";
  };
  return list.flatMap((one) => [one, one.other].filter(Boolean).map((thread) => record(one, thread))).join("");
}
