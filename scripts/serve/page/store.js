// What the browser keeps: settings, and conversations, one entry each:
// {id, title, updated, messages, system, tools} and, where two models answer, {other: {model, messages}}.
import { notice } from "./dom.js";
import { t } from "./text.js";

export const CHAT = "minimind.chat."; // prefix of the names of their entries

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

/** The lists of messages of a conversation, one for each model: itself and, if two models are compared, `other`. */
export const threads = (conversation) => [conversation, conversation.other].filter(Boolean);

// --- several tabs: messages that one tab has added or removed since it read a conversation are merged into all

const known = new WeakMap(); // thread -> ids of the messages that it had when it was last read or written
const written = new WeakSet(); // messages that were created in this tab
let ids = 0;

/** A message that this tab adds. */
export function ownMessage(fields) {
  const message = { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}-${ids++}`, ...fields };
  written.add(message);
  return message;
}

function remember(thread) {
  thread.messages.forEach((message, i) => (message.id ??= `old-${i}`)); // saved before messages had ids
  known.set(thread, new Set(thread.messages.map(({ id }) => id)));
}

/** Merge the changes of other tabs into this tab's copy of a conversation. */
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
  const kept = stored.messages.filter(({ id }) => byId.has(id) || !before.has(id)); // otherwise it was removed here
  const current = kept.map((message) => {
    const here = byId.get(message.id);
    if (!here) return message;
    const { correction, corrected = 0 } = (message.corrected ?? 0) > (here.corrected ?? 0) ? message : here;
    if (!written.has(here)) {
      for (const name of Object.keys(here)) delete here[name];
      Object.assign(here, message); // it may be longer there
    }
    return Object.assign(here, corrected && { correction, corrected }); // the later one, whichever tab it is from
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

/** A message in the form of the API, without the fields of this page. */
export function forApi({ role, content, reasoning_content, tool_calls, tool_call_id }) {
  return { role, content, reasoning_content, tool_calls, tool_call_id }; // JSON leaves out those that are undefined
}

/** Messages grouped into turns: a question with everything up to the next question. */
export function turns(messages) {
  const grouped = [];
  for (const message of messages) {
    if (message.role === "user" || !grouped.length) grouped.push([]);
    grouped.at(-1).push(message);
  }
  return grouped;
}

const CHARACTERS = 16; // limit of a token

/** The newest turns that may fit into a context of this many tokens, at least the last one. The server counts exactly. */
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

const isWhole = (turn) => turn.at(-1).role === "assistant" && !turn.some(({ error, continues }) => error || continues);

/**
 * Conversations as JSONL for SFT: a record for each model that answered, with the system prompt and the tools of the
 * requests. Failed turns and continued texts are left out. Answers that were stopped or cut are not trained.
 */
export function exported(list) {
  const sent = ({ note, ...message }) => ({ ...forApi(message), ...(note && { train: false }) });
  const record = ({ system = [], tools }, { messages }) => {
    const kept = turns(messages).filter(isWhole).flat().map(sent);
    return kept.length ? `${JSON.stringify({ messages: [...system, ...kept], tools })}\n` : "";
  };
  return list.flatMap((one) => [one, one.other].filter(Boolean).map((thread) => record(one, thread))).join("");
}

/**
 * All corrected answers: {conversation, thread, message, question, before: the messages before the answer}. isWanted: which
 * messages are taken.
 */
export function corrections(isWanted = ({ correction }) => correction) {
  const found = [];
  for (const one of conversations()) {
    for (const thread of threads(one)) {
      const grouped = turns(thread.messages);
      grouped.forEach((turn, i) => {
        for (const message of turn.filter(isWanted)) {
          const earlier = grouped.slice(0, i).filter(isWhole).flat();
          const before = [...earlier, ...turn.slice(0, turn.indexOf(message))];
          found.push({ conversation: one, thread, message, question: turn[0].content, before });
        }
      });
    }
  }
  return found;
}

const jsonLines = (records) => records.map((record) => `${JSON.stringify(record)}\n`).join("");
const untrained = (message) => (message.role === "assistant" ? { ...forApi(message), train: false } : forApi(message));

/** A record for SFT that trains this answer alone, after what was said before. */
const record = ({ conversation: { system = [], tools }, before }, content) => ({ messages: [...system, ...before.map(untrained), { role: "assistant", content }], tools });

/** The corrections as JSONL for SFT: of each conversation the corrected answer alone is trained. */
export const correctionRecords = () => jsonLines(corrections().map((entry) => record(entry, entry.message.correction)));

const MOST_REMOVED = 1000; // as MOST_CORRECTIONS in scripts/serve/training.py

/** What is sent to teach models: the corrections of their answers, and those that were taken back. */
export function toTeach(models) {
  const own = ({ message }) => models.includes(message.model);
  const takenBack = corrections(({ correction, corrected }) => corrected && !correction);
  return {
    corrections: corrections().filter(own).map((entry) => record(entry, entry.message.correction)),
    removed: takenBack.filter(own).slice(-MOST_REMOVED).map((entry) => record(entry, entry.message.content || "-")),
  };
}

/** The corrections as JSONL for DPO: the corrected answer is chosen, the model's rejected. */
export function preferenceRecords() {
  return jsonLines(corrections().map(({ conversation: { system = [], tools }, message, before }) => {
    const messages = [...system, ...before.map(forApi)];
    return { messages, tools, chosen: message.correction, rejected: message.content };
  }));
}
