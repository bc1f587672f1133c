// The server: models, streamed answers, runs. What goes wrong becomes a ServerError whose message a person can read.
import { t } from "./text.js";

const KEY = "minimind.key"; // kept until the tab is closed
let key = storedKey();

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // no storage: it lasts as long as the page
  }
}

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Use this key from now on. */
export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // as above
  }
}

export const hasKey = () => key !== "";

async function request(path, options = {}) {
  const headers = options.body ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  let response = null;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(t("errorNetwork"));
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let message = "";
  let code = "";
  try {
    const body = await response.json();
    message = String(body.error?.message ?? body.detail ?? "");
    code = String(body.error?.code ?? "");
  } catch {
    // no JSON: the status has to do
  }
  return describe(response.status, message, code);
}

function describe(status, message, code) {
  if (status === 401) return new ServerError(t("errorKey"), 401);
  if (status === 429) return new ServerError(t("errorBusy"), status);
  if (code === "context_length_exceeded" || status === 413) return new ServerError(t("errorLong"), status);
  if (status >= 500) return new ServerError(t("errorServer", { status, message }), status);
  return new ServerError(t("errorRequest", { message: message || status }), status);
}

/** The models: [{id, sampling: its defaults}]. */
export async function models() {
  const answer = await (await request("v1/models")).json();
  return (answer.data ?? []).map(({ id, sampling }) => ({ id: String(id), sampling: sampling ?? {} }));
}

/** What the server can run: [{name, tools: schemas}]. */
export const toolboxes = async () => (await (await request("api/tools")).json()).toolboxes;

/** Have the server run calls; returns the text of each result. */
export async function runCalls(calls, signal) {
  const body = JSON.stringify({ calls });
  return (await (await request("api/tools", { method: "POST", body, signal })).json()).results.map(String);
}

export const runs = async () => (await (await request("api/runs")).json()).runs;

/** The curves of a run, each of at most so many points. */
export async function run(name, points) {
  const path = name.split("/").map(encodeURIComponent).join("/");
  return (await request(`api/runs/${path}?points=${points}`)).json();
}

/** Ask for an answer; `onChunk` gets every chunk of it. Ends when the answer is complete. */
export async function streamChat(body, signal, onChunk) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(asked), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    let chunk = null;
    try {
      chunk = JSON.parse(data);
    } catch {
      continue; // a line that is no chunk
    }
    if (chunk.error) throw describe(500, String(chunk.error.message ?? ""), String(chunk.error.code ?? ""));
    onChunk(chunk);
  }
  throw new ServerError(t("errorCut"));
}

/** The data of server-sent events, one after the other; an event may arrive in several pieces. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await readOrFail(reader);
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function readOrFail(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(t("errorCut"));
  }
}
