// The settings of sampling, the tools that the server runs, and the dialog that asks for the server's key.
import { runCalls as runOnServer, setKey, toolboxes as serversToolboxes } from "./api.js";
import { byId, h } from "./dom.js";
import { read, write } from "./store.js";
import { t } from "./text.js";

const KEY = "minimind.settings";
const FIELDS = [
  { name: "temperature", text: "temperature", help: "temperatureHelp", min: 0, max: 2, step: 0.05 },
  { name: "top_p", text: "topP", help: "topPHelp", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", text: "topK", help: "topKHelp", min: 0, max: 1000000, step: 1 },
  { name: "max_tokens", text: "maxTokens", help: "maxTokensHelp", min: 1, max: 1000000, step: 1 },
  { name: "seed", text: "seed", help: "seedHelp", min: 0, max: 4294967295, step: 1 },
  { name: "thinking", text: "thinking", kind: "checkbox" },
  { name: "tokenProbabilities", text: "tokenProbabilities", kind: "checkbox" },
  { name: "system", text: "system", help: "systemHelp", kind: "textarea", rows: 4 },
  { name: "tools", text: "tools", help: "toolsHelp", kind: "textarea", rows: 5 },
];

let values = read(KEY, {});
let defaults = {}; // of the chosen model, by name of the field
let toolboxes = []; // what the server can run: [{name, tools}]

/** The model chosen last. */
export const chosenModel = () => values.model ?? "";
export const chooseModel = (model) => store("model", model);

function store(name, value) {
  values = { ...values, [name]: value };
  if (value === "" || value === false) delete values[name];
  write(KEY, values);
}

/** Show these as the values of fields that are left empty. */
export function setDefaults(sampling) {
  defaults = sampling;
  for (const { name, kind } of FIELDS) {
    const input = byId(`set-${name}`);
    if (input && !kind) input.placeholder = defaults[name] ?? t("auto");
  }
}

/** Ask the server what it can run; one that runs nothing has no such switches. */
export async function loadToolboxes() {
  try {
    toolboxes = await serversToolboxes();
  } catch (error) {
    if (error.status === 401) throw error;
    toolboxes = [];
  }
}

const switchOf = (toolbox) => `run_${toolbox.name}`;
const nameOf = (tool) => tool.function?.name;

/** The user's own tools, and those that the server runs; of two with the same name the user's own counts. */
function tools() {
  const own = toolList(values.tools ?? "") ?? [];
  const names = new Set(own.map(nameOf));
  const switchedOn = toolboxes.filter((toolbox) => values[switchOf(toolbox)]).flatMap((toolbox) => toolbox.tools);
  return { own, run: switchedOn.filter((tool) => !names.has(nameOf(tool))) };
}

/** Run calls where every one is of a tool that is switched on; returns the texts of their results, else null. */
export async function runCalls(calls, signal) {
  const names = new Set(tools().run.map(nameOf));
  if (!calls.length || !calls.every((call) => names.has(call.function.name))) return null;
  return runOnServer(calls.map((call) => call.function), signal);
}

/** The fields of a request; what is not set is left to the server. */
export function requestFields() {
  const fields = {};
  for (const { name, kind } of FIELDS) if (!kind && typeof values[name] === "number") fields[name] = values[name];
  if (values.tokenProbabilities) Object.assign(fields, { logprobs: true, top_logprobs: 4 });
  if (values.thinking) fields.chat_template_kwargs = { enable_thinking: true };
  const { own, run } = tools();
  if (own.length + run.length) fields.tools = [...run, ...own];
  return fields;
}

export const systemPrompt = () => (values.system ?? "").trim();

/** The list that a text spells; null if it is none. */
function toolList(text) {
  try {
    const list = text.trim() ? JSON.parse(text) : [];
    return Array.isArray(list) ? list : null;
  } catch {
    return null;
  }
}

function fieldNode({ name, text, help, kind, rows, tool, ...limits }) {
  const id = `set-${name}`;
  const placeholder = String(defaults[name] ?? t("auto"));
  const number = { type: "number", placeholder, inputmode: "decimal", ...limits };
  const input = kind === "textarea" ? h("textarea", { id, rows }) : h("input", { id, ...(kind ? { type: kind } : number) });
  const wrong = h("span", { class: "error", role: "alert", hidden: true });
  const note = help && h("small", { id: `${id}-help` }, t(help));
  if (note) input.setAttribute("aria-describedby", note.id);
  if (kind === "checkbox") input.checked = Boolean(values[name]);
  else input.value = values[name] ?? "";
  input.addEventListener("input", () => {
    const badTools = name === "tools" && toolList(input.value) === null;
    const problem = badTools ? t("toolsBad") : input.validationMessage;
    wrong.textContent = problem;
    wrong.hidden = !problem;
    input.setAttribute("aria-invalid", String(Boolean(problem)));
    if (problem && name !== "tools") return;
    if (kind === "checkbox") store(name, input.checked);
    else store(name, kind || input.value === "" ? input.value : Number(input.value));
  });
  const label = h("label", { for: id }, h("span", {}, t(text, { name: tool })));
  if (kind === "checkbox") return h("div", { class: "field row" }, input, label);
  return h("div", { class: "field" }, label, input, wrong, note);
}

/** Make the dialog work. */
export function startSettings() {
  const dialog = byId("settings");
  const run = (toolbox) => ({ name: switchOf(toolbox), text: "runTool", kind: "checkbox", tool: toolbox.name });
  const fill = () => byId("fields").replaceChildren(...[...FIELDS, ...toolboxes.map(run)].map(fieldNode));
  byId("open-settings").addEventListener("click", () => (fill(), dialog.showModal()));
  byId("close-settings").addEventListener("click", () => dialog.close());
  byId("reset").addEventListener("click", () => {
    values = values.model ? { model: values.model } : {};
    write(KEY, values);
    fill();
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside it
  document.addEventListener("language", fill);
}

let asking = null;

/** Ask for the key once, however many requests miss it; true if one was given. */
export function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    let given = false;
    byId("key-wrong").hidden = !wrong;
    byId("key").value = "";
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      setKey(byId("key").value.trim());
      given = true;
      dialog.close();
    };
    byId("key-cancel").onclick = () => dialog.close();
    dialog.addEventListener("close", () => ((asking = null), resolve(given)), { once: true });
    dialog.showModal();
  });
  return asking;
}
