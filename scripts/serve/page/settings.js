// The settings of sampling, and the dialog that asks for the server's key.
import { setKey } from "./api.js";
import { byId, h } from "./dom.js";
import { read, write } from "./store.js";
import { t } from "./text.js";

const KEY = "minimind.settings";
const FIELDS = [
  { name: "temperature", text: "temperature", help: "temperatureHelp", min: 0, max: 2, step: 0.05 },
  { name: "top_p", text: "topP", help: "topPHelp", min: 0.01, max: 1, step: 0.01 },
  { name: "max_tokens", text: "maxTokens", help: "maxTokensHelp", min: 1, max: 1000000, step: 1 },
  { name: "seed", text: "seed", help: "seedHelp", min: 0, max: 4294967295, step: 1 },
  { name: "thinking", text: "thinking", kind: "checkbox" },
  { name: "system", text: "system", help: "systemHelp", kind: "textarea", rows: 4 },
  { name: "tools", text: "tools", help: "toolsHelp", kind: "textarea", rows: 5 },
];

let values = read(KEY, {});

/** The model chosen last. */
export const chosenModel = () => values.model ?? "";
export const chooseModel = (model) => store("model", model);

function store(name, value) {
  values = { ...values, [name]: value };
  if (value === "" || value === false) delete values[name];
  write(KEY, values);
}

/** The fields of a request; what is not set is left to the server. */
export function requestFields() {
  const fields = {};
  for (const { name, kind } of FIELDS) if (!kind && typeof values[name] === "number") fields[name] = values[name];
  if (values.thinking) fields.chat_template_kwargs = { enable_thinking: true };
  const tools = toolList(values.tools ?? "");
  if (tools?.length) fields.tools = tools;
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

function fieldNode({ name, text, help, kind, rows, ...limits }) {
  const id = `set-${name}`;
  const number = { type: "number", placeholder: t("auto"), inputmode: "decimal", ...limits };
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
  const label = h("label", { for: id }, h("span", {}, t(text)));
  if (kind === "checkbox") return h("div", { class: "field row" }, input, label);
  return h("div", { class: "field" }, label, input, wrong, note);
}

/** Make the dialog work. */
export function startSettings() {
  const dialog = byId("settings");
  const fill = () => byId("fields").replaceChildren(...FIELDS.map(fieldNode));
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
