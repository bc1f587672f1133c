// Runs the worker of a page to send in Node, to check it: node run_in_node.js PAGE.html. Each line of stdin is a JSON value
// {ids: text} or {ask: text, most}. Each line of stdout is the reply: the ids, or the worker's final message.
"use strict";
const fs = require("node:fs");
const readline = require("node:readline");

const page = fs.readFileSync(process.argv[2], "utf8");
const element = (id) => page.match(new RegExp(`<script [^>]*id="${id}">([^]*?)</script>`))[1];
const weights = [...page.matchAll(/<script [^>]*class="weights">([^]*?)<\/script>/g)].map((match) => match[1]);
const spec = JSON.parse(element("spec"));
const likeliest = { ...spec.sampling, temperature: 0 };

let receive = () => {};
const worker = {};
const postMessage = (message) => receive(message);
const tokenize = new Function("self", "postMessage", `${element("worker")}\nreturn (text) => tokenizer.encode(text);`)(worker, postMessage);

/** Send the worker a message, and wait for its final reply. */
function tell(data) {
  return new Promise((resolve, reject) => {
    receive = (message) => {
      if (message.error) reject(new Error(message.error));
      else if (!message.answer) resolve(message);
    };
    worker.onmessage({ data });
  });
}

(async () => {
  await tell({ load: { spec, weights, products: element("products") } });
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { ids, ask, most } = JSON.parse(line);
    if (ids === undefined) worker.onmessage({ data: { reset: true } });
    const result = ids === undefined ? (await tell({ ask, most, sampling: likeliest })).done : tokenize(ids);
    console.log(JSON.stringify(result ?? null));
  }
})();
