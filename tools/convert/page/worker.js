// The worker of the page reads the weights and generates answers, while the page stays responsive.
//
// in   {load: {spec, weights: parts of base64 text, products: base64}}   {ask: text, sampling, most}   {stop}   {reset}
// out  {ready: seconds}   {answer: {thoughts, content}}   {done: {...}}   {tooLong: {tokens, room}}   {error: text}

const BETWEEN_BREAKS = 30; // milliseconds between two checks for messages such as {stop}
let [spec, tokenizer, model, conversation, isStopped] = [null, null, null, null, false];

/** The bytes of base64 text. */
function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function load({ spec: given, weights, products }) {
  const started = performance.now();
  spec = given;
  tokenizer = new Tokenizer(spec.tokenizer);
  model = new Model(spec, new WebAssembly.Module(bytesOf(products)));
  const { readable, writable } = new DecompressionStream("gzip");
  const writer = writable.getWriter();
  const written = (async () => {
    while (weights.length) await writer.write(bytesOf(weights.shift()));
    await writer.close();
  })();
  let at = 0;
  for (const reader = readable.getReader(); ; ) {
    const { value, done } = await reader.read();
    if (done) break;
    new Uint8Array(model.memory).set(value, at);
    at += value.length;
  }
  await written;
  if (at !== spec.bytes) throw new Error(`${at} bytes of weights, not ${spec.bytes}`);
  conversation = new Conversation(spec, tokenizer);
  postMessage({ ready: (performance.now() - started) / 1000 });
}

/** Receive messages, if the last check was long ago. */
let lastBreak = 0;
async function pause() {
  if (performance.now() - lastBreak < BETWEEN_BREAKS) return;
  await new Promise((resolve) => setTimeout(resolve));
  lastBreak = performance.now();
}

/** Read a prompt. The part of it that is cached is not read again. */
async function read(ids) {
  let same = 0;
  while (same < ids.length - 1 && model.tokens[same] === ids[same]) same++;
  model.forget(same);
  for (const id of ids.slice(same)) {
    await pause();
    if (isStopped) return;
    model.read(id);
  }
}

/** What the page shows of an answer. */
const shown = (text, isWhole) => (spec.continues_text ? { thoughts: "", content: text } : parseAnswer(text, isWhole));

async function answer({ ask: text, sampling = spec.sampling, most = spec.most_new_tokens }) {
  isStopped = false;
  const started = performance.now();
  const asked = spec.continues_text ? conversation.continued(text) : conversation.ask(text);
  if (asked.tooLong) return postMessage({ tooLong: { tokens: asked.tooLong, room: conversation.room, context: spec.context } });
  const { ids, dropped } = asked;
  await read(ids);
  const [tokens, decode] = [[], tokenizer.decoder()];
  const room = Math.min(most, spec.context - ids.length);
  let [written, finish, first] = ["", "stopped", 0];
  while (!isStopped) {
    const id = draw(model.head(), sampling, [...ids, ...tokens], Math.random());
    first ||= performance.now();
    tokens.push(id);
    if (spec.ends.includes(id)) finish = "end";
    else written += decode(id);
    if (finish === "end") break;
    if (tokens.length === room) {
      finish = "length";
      break;
    }
    postMessage({ answer: shown(written, false) });
    await pause();
    if (!isStopped) model.read(id);
  }
  written += decode();
  if (!spec.continues_text) conversation.answer(written);
  const seconds = { first: (first - started) / 1000, rest: (performance.now() - first) / 1000 };
  postMessage({ done: { ...shown(written, true), text: written, prompt: ids, tokens, finish, room, most, dropped, seconds } });
}

self.onmessage = async ({ data }) => {
  try {
    if (data.load) await load(data.load);
    else if (data.ask !== undefined) await answer(data);
    else if (data.stop) isStopped = true;
    else if (data.reset) conversation = new Conversation(spec, tokenizer);
  } catch (error) {
    postMessage({ error: String(error.message) });
  }
};
