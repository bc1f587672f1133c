// The card "New model": files, a plan, a training and its result. The server derives all of it from files, so this page
// keeps only the fields of the form and which training it shows.
import * as api from "./api.js";
import { announce, button, byId, copyButton, download, h, line } from "./dom.js";
import { savePage } from "./sending.js";
import { read, write } from "./store.js";
import { keptView, resultView, teachingView } from "./teach.js";
import { clock, currentLanguage, date, duration, knows, rough, size, t, times } from "./text.js";

const KEY = "minimind.train";
const EVERY = 2000; // milliseconds between two requests while the tab is open
const SELDOM = 15000; // the same while it is not
const LIVING = ["planning", "training", "saving"];
const HOURS = [10 / 60, 1, 8];
const START = 12; // seconds in which a stage starts, as in scripts/planning/stages.py
const SLOW_SAVE = 60000; // milliseconds of saving, after which it may be ended at once
const SILENCE = 180; // seconds without a record
const NAME_LENGTH = 40;
const MEDIA = /\.(jpe?g|png|gif|heic|webp|bmp|svg|mp3|mp4|m4a|mov|avi|wav|zip|exe)$/i;
const MOST_HOURS = 168;
const LEAST_HOURS = 0.02;
// what is wrong with a record (dataset/records.py, dataset/messages.py): how it begins or ends, and its text here
const REASONS = [
  [/^not valid JSON/, "why_json"],
  [/^no '.*\(its keys: (.*?)\)/, "why_keys"],
  [/ is (?:null|blank)\b| has no content\b|is '' instead of text/, "why_empty"],
  [/^no assistant turn/, "why_no_answer"],
];
const FEW_RIGHT = 0.5; // as in trainer/report/warnings.py
const KINDS = /(\.(?:txt|md|jsonl|json|csv|tsv)(?:\.gz)?|\.(?:parquet|arrow|docx|epub|pdf|html?|srt|vtt))$/i;

// the fields, the training that is shown ("": the form), and the files that are arriving
// files: names of those that are chosen, in their order; isNamed: the name was typed, else it follows the files
// start: the model that is trained on ("": a new one)
const form = { name: "", isNamed: false, start: "", hours: HOURS[0], depth: "", files: [], skip: false, shown: null, arriving: [], ...read(KEY, {}) };
const uploads = new Map(); // name -> {size, percent, cancel}
const assistants = new Map(); // name of an exported chat -> the speaker who was chosen
const converting = new Set(); // names of exported chats of which conversations are being made
let overview = null; // the server's answer; null: none yet, or it does not train
let formError = null; // the result of `sentence`
let isChanging = false; // whether the user is changing the plan of the shown training
let isOpen = false;
let view = { key: "", update() {} };
let timer = 0;
let savingSince = 0;
let announced = -1; // percent

const keep = () => write(KEY, form);
const choose = (names) => ((form.files = names), keep());
const refuse = (error) => ((formError = error), draw());
const living = () => overview?.jobs.find((job) => LIVING.includes(job.state));
const jobNamed = (name) => overview.jobs.find((job) => job.name === name);
const joined = (...sentences) => sentences.filter(Boolean).join(currentLanguage() === "zh" ? "" : " ");

/** The training that is shown: the chosen one, otherwise the running one, otherwise the last one; null: the form. */
function shown() {
  if (form.shown === "") return null;
  return jobNamed(form.shown) ?? living() ?? overview.jobs[0] ?? null;
}

/** Show a training, or the form (""). start: the model that is trained on. */
function show(name, start = "") {
  Object.assign(form, { shown: name, start });
  [isChanging, formError] = [false, null];
  keep();
  draw();
}

// --- following the server

async function look() {
  clearTimeout(timer);
  try {
    overview = await api.training();
    draw();
  } catch (error) {
    if (!overview) throw error; // otherwise the curves report that there is no server
  }
  timer = setTimeout(look, isOpen && !document.hidden ? EVERY : SELDOM);
}

/** Have the server do something. True if it did; otherwise `say` gets the error. */
async function act(doing, say) {
  try {
    await doing;
    await look();
    return true;
  } catch (error) {
    say(error);
    return false;
  }
}

/** What is wrong with a record, in the words of the page if it has some: the others are for who writes such files. */
function reasonOf(why) {
  const [pattern, key] = REASONS.find(([pattern]) => pattern.test(why)) ?? [/^/, "why_other"];
  return t(key, { why, keys: why.match(pattern)[1] });
}

/** That a training runs, and how long it still takes if that is known. */
function busyText(name) {
  const left = living()?.seconds_left;
  return left === undefined ? t("error_busy_now", { name }) : t("error_busy", { name, time: duration(left) });
}

/** An error of the server in the language of the page. */
export function sentence({ code, param, values = {}, message }) {
  const { need, free, most, seconds, file, line, index, why, name, n, question } = values;
  const record = index === undefined ? values.record : Number(index) + 1; // of a JSON array
  if (code === "busy") return busyText(name);
  const reason = code === "bad_record" ? reasonOf(why ?? "") : why;
  const filled = { need: size(need), free: size(free), most: n ? most : size(most), seconds, file, line, record, why: reason, name, n, question, text: message };
  if (code === "bad_record" && record) return t("error_bad_element", filled);
  if (code === "other" && file) return t("error_unreadable", { file });
  if (code === "field" && knows(`error_field_${param}`)) return t(`error_field_${param}`);
  return knows(`error_${code}`) ? t(`error_${code}`, filled) : message;
}

// --- drawing: a view is built once for each state and then only updated, so that the focus stays

function draw() {
  const job = shown();
  const state = job && !isChanging ? job.state : "form";
  const key = [state, job?.name, currentLanguage(), job?.error?.text].join("/");
  if (key !== view.key) {
    const isFirst = !view.key;
    const place = `${state}/${job?.name}`;
    const asked = ((isChanging || state === "new") && job?.asked) || {};
    // a reloaded page keeps later changes
    if (asked.name && place !== view.place && !(isFirst && form.name === asked.name)) Object.assign(form, fieldsOf(asked));
    if (place !== view.place) savingSince = Date.now();
    const isElsewhere = place !== view.place;
    view = { key, place, ...build(state, job) };
    byId("train-body").replaceChildren(...view.elements);
    byId("train-title").textContent = job && !isChanging ? job.name : t("newModel");
    announced = -1;
    if (job && !isChanging) announce(`${job.name}: ${t(`state_${state}`)}`);
    if (!isFirst && isOpen) byId("train-title").focus();
    if (isElsewhere && !(isFirst && !job)) showRuns(job); // a page that is loaded again keeps what was chosen
  }
  view.update(job);
  drawModels(state === "form");
  drawChoice(job);
  drawTitle();
}

const TEACHING = { training: teachingView, taught: resultView, ready: keptView }; // the other states are those of trainings

function build(state, job) {
  if (state === "form") return formView();
  const card = { act, say, stopButton, waysToUse, logDetails, manageRow, followProgress, percentOf };
  if (job.kind === "teaching" && TEACHING[state]) return TEACHING[state](job, card);
  const views = { planning: planningView, planned: planView, training: trainingView, saving: savingView, failed: failedView };
  return { ready: readyView, stopped: endedView, cut: endedView, new: formView, ...views }[state](job);
}

function drawChoice(job) {
  const names = overview.jobs.map(({ name }) => name);
  const option = (name) => h("option", { value: name, selected: name === (job?.name ?? "") }, name || t("newModel"));
  const select = byId("train-choice");
  if (select.dataset.names !== JSON.stringify([names, job?.name, currentLanguage()])) {
    select.dataset.names = JSON.stringify([names, job?.name, currentLanguage()]);
    select.replaceChildren(...["", ...names].map(option));
  }
  select.hidden = !names.length;
}

function drawTitle() {
  const job = living();
  document.title = job?.update ? `${percentOf(job)} % MiniMind` : "MiniMind";
}

/** The curves below the card are those of its runs; below a form there are none. */
function showRuns(job) {
  const stages = (!isChanging && job?.plan?.stages) || [];
  document.dispatchEvent(new CustomEvent("show-runs", { detail: stages.map(({ run }) => `${job.name}/${run}`) }));
}

// --- the form

function formView() {
  const job = shown();
  const namesake = jobNamed(form.name);
  if (!job && namesake && namesake.state !== "failed") form.isNamed = false; // that name has been used
  const files = h("ul", { class: "files" });
  const input = h("input", { type: "file", multiple: true, class: "visually-hidden", id: "train-files" });
  input.addEventListener("change", () => (addFiles([...input.files]), (input.value = "")));
  const drop = h("label", { class: "drop", for: "train-files" }, h("strong", {}, t("dropFiles")), h("small", {}, t("fileKinds")), input);
  drop.addEventListener("dragover", (event) => event.preventDefault());
  drop.addEventListener("drop", async (event) => (event.preventDefault(), addFiles(await filesOf(event.dataTransfer))));
  const tryExample = button(t("tryExample"), "quiet", () => giveExample());
  const what = line("");
  const waits = line("", "note");
  const name = h("input", { type: "text", id: "train-name", maxlength: NAME_LENGTH, autocomplete: "off" });
  name.value = form.name;
  name.addEventListener("input", () => (Object.assign(form, { name: name.value, isNamed: name.value !== "" }), keep(), update()));
  const skip = h("input", { type: "checkbox", id: "train-skip", checked: form.skip, onchange: () => ((form.skip = skip.checked), keep(), update()) });
  const skipRow = h("label", { class: "check" }, skip, h("span", {}, t("skipBad")));
  const unfinished = line(job?.state === "new" ? t("planUnfinished", { name: job.name }) : "");
  const busy = line("", "note");
  const error = h("div", { class: "error", role: "alert", hidden: true });
  const submit = h("button", { type: "submit", class: "primary" }, t("makePlan"));
  const back = isChanging && button(t("cancel"), "quiet", () => ((isChanging = false), draw()));
  const onsubmit = (event) => (event.preventDefault(), makePlan());
  const [start, sizeChoice] = [startField(), sizeField()];
  const fields = [h("div", { class: "field" }, h("label", { for: "train-name" }, t("modelName")), name), start.element, hoursField(), sizeChoice];
  const element = h("form", { onsubmit, novalidate: true }, unfinished, drop, tryExample, files, waits, what, skipRow, ...fields, busy, error, h("div", { class: "buttons" }, back, submit));
  let drawn = "";
  function update() {
    const chosen = chosenFiles();
    const state = JSON.stringify([overview.files, [...uploads], form.files]);
    tryExample.hidden = Boolean(overview.files.length || uploads.size);
    if (drawn !== state) files.replaceChildren(...[...uploads].map(uploadRow), ...overview.files.map((file) => fileRow(file, chosen)));
    drawn = state;
    const undecided = overview.files.filter(({ name, export: found }) => found && !form.files.includes(name) && !isMade(name));
    waits.textContent = undecided.length ? t("notUsed", { files: undecided.map(({ name }) => name).join(", ") }) : "";
    const kinds = chosen.map(({ kind }) => kind);
    start.update();
    const readsChats = form.start ? "willLearnAnswers" : "willReadChats";
    const will = t(!kinds.includes("chat") ? "willContinue" : kinds.includes("text") ? "willDoBoth" : readsChats);
    const goesOn = form.start ? [t("goesOn", { name: form.start }), t("forgets")] : [];
    what.textContent = joined(goesOn[0], chosen.length && will, goesOn[1]);
    sizeChoice.hidden = Boolean(form.start); // it is given
    if (!form.isNamed) form.name = freeJobName(chosen[0]?.name.replace(/\..*$/, ""));
    const other = living();
    busy.textContent = other ? busyText(other.name) : "";
    skipRow.hidden = !chosen.some((file) => file.bad) && !form.skip && !isChanging;
    error.textContent = formError ? sentence(formError) : "";
    error.hidden = !formError;
    submit.disabled = !chosen.length || !form.name.trim() || Boolean(other) || converting.size > 0;
    if (name.value !== form.name) name.value = form.name;
  }
  return { elements: job?.state === "new" ? [element, logDetails(job), manageRow(job)] : [element], update };
}

const fieldsOf = ({ name, files, start, hours, depth, skip_bad: skip }) => ({ name, isNamed: true, hours, skip, files, start: start ?? "", depth: depth ?? "" });

/** The models that are completed. */
const readyModels = () => overview.jobs.filter(({ state, plan }) => state === "ready" && plan);

/** The files that are chosen, in the order in which they are read. */
const chosenFiles = () => form.files.map((name) => overview.files.find((file) => file.name === name)).filter((file) => file?.kind);

/** A name of a training that no other one has. */
function freeJobName(stem) {
  for (let number = 1; ; number++) {
    const name = stem && number > 1 ? `${stem} ${number}` : (stem ?? "");
    if (!jobNamed(name)) return name;
  }
}

function hoursField() {
  const other = h("input", { type: "number", min: LEAST_HOURS, max: MOST_HOURS, step: "any", "aria-label": t("otherHours"), value: HOURS.includes(form.hours) ? "" : form.hours });
  const choose = (hours) => ((form.hours = hours), keep());
  const radio = (hours, i) => {
    const input = h("input", { type: "radio", name: "hours", checked: form.hours === hours, onchange: () => choose(hours) });
    return h("label", { class: "check" }, input, h("span", {}, t(`hours_${i}`)));
  };
  const own = h("input", { type: "radio", name: "hours", checked: !HOURS.includes(form.hours), onchange: () => other.focus() });
  other.addEventListener("input", () => ((own.checked = true), choose(Number(other.value))));
  const row = h("label", { class: "check" }, own, h("span", {}, t("otherHours")), other);
  return h("fieldset", { class: "field choices" }, h("legend", {}, t("howLong")), ...HOURS.map(radio), row);
}

/** The choice of the model that is trained on. */
function startField() {
  const select = h("select", { id: "train-start" });
  select.addEventListener("change", () => ((form.start = select.value), keep(), draw()));
  const element = h("div", { class: "field" }, h("label", { for: "train-start" }, t("startFrom")), select);
  const update = () => {
    const names = ["", ...readyModels().map(({ name }) => name), ...overview.weights];
    if (!names.includes(form.start)) form.start = "";
    if (names.length !== select.options.length || names.some((name, i) => select.options[i].value !== name))
      select.replaceChildren(...names.map((name) => h("option", { value: name }, name || t("startNew"))));
    select.value = form.start;
    element.hidden = names.length === 1;
  };
  return { element, update };
}

function sizeField() {
  const option = ([depth, width]) => h("option", { value: depth, selected: String(depth) === String(form.depth) }, t(depth === 1 ? "layers_1" : "layers", { d: depth, w: width }));
  const select = h("select", { id: "train-size" }, h("option", { value: "" }, t("planChooses")), ...overview.sizes.map(option));
  select.addEventListener("change", () => ((form.depth = select.value), keep()));
  return h("div", { class: "field" }, h("label", { for: "train-size" }, t("modelSize")), select);
}

function fileRow(file, chosen) {
  const { name, kind, bytes, records, more, first = [], bad, pages } = file;
  if (file.export && !form.files.includes(name)) return exportRow(file);
  const others = form.files.filter((each) => each !== name);
  const onchange = (event) => ((form.files = event.target.checked ? [...others, name] : others), keep(), draw());
  const check = kind && h("input", { type: "checkbox", checked: form.files.includes(name), onchange, id: `file-${name}` });
  const values = { name, size: size(bytes), n: more ? `${records}+` : records };
  const about = kind ? t(`file_${kind}${records === 1 ? "_1" : ""}`, values) + shareOf(file, chosen) : `${name}: ${sentence(file)}`;
  const texts = h("details", { hidden: !first.length }, h("summary", {}, t(first.length === 1 ? "showFirst_1" : "showFirst", { n: first.length })), ...first.map((text) => h("pre", {}, text)));
  const remove = removeButton(name);
  const warning = bad && line(sentence({ code: "bad_record", values: { file: name, ...bad } }), "trouble");
  const gaps = pages && line(t("pagesWithoutText", { which: pages[0], pages: pages[1] }), "trouble");
  return h("li", {}, h("label", { class: "check", for: `file-${name}` }, check, h("span", {}, about)), remove, texts, gaps, warning);
}

const removeButton = (name) => button(t("removeFile"), "quiet", () => act(api.removeFile(name), refuse));

/** Whether conversations were made of an exported chat: their names begin with its name. */
const isMade = (name) => overview.files.some((file) => file.kind === "chat" && file.name.startsWith(`${name.replace(/\.\w+$/, "")} `));

/** An exported chat: who is the assistant, how it is then read, and the button that makes conversations of it. */
function exportRow({ name, kind, export: found }) {
  const { form: program, messages, speakers, assistant } = found;
  const byName = (speaker) => speakers.find((each) => each.name === speaker);
  const who = (speaker) => (program === "chatgpt" ? t(speaker === "assistant" ? "assistant" : "you") : speaker);
  const turns = h("div", { class: "turns" });
  const make = button("", "primary", async () => {
    make.disabled = true;
    converting.add(name);
    draw(); // no plan without these conversations meanwhile
    const chosen = assistants.get(name);
    await act(api.convertChat(name, chosen).then(({ name: made }) => choose([...form.files.filter((each) => each !== made), made])), refuse);
    converting.delete(name);
    make.disabled = false;
    draw();
  });
  const update = () => {
    const chosen = byName(assistants.get(name));
    const shown = chosen.turns.map(([role, text]) => h("p", {}, h("b", {}, t(role === "assistant" ? "turnAnswer" : "turnQuestion")), text));
    turns.replaceChildren(...shown);
    make.textContent = t(chosen.conversations === 1 ? "makeConversations_1" : "makeConversations", { n: chosen.conversations });
  };
  if (!byName(assistants.get(name))) assistants.set(name, byName(assistant)?.name ?? speakers[0].name);
  const radio = (speaker) => {
    const onchange = () => (assistants.set(name, speaker.name), update());
    const input = h("input", { type: "radio", name: `assistant-${name}`, checked: assistants.get(name) === speaker.name, onchange });
    return h("label", { class: "check" }, input, h("span", {}, t("speaker", { name: who(speaker.name), n: speaker.messages.toLocaleString("en") })));
  };
  const choice = h("fieldset", { class: "choices" }, h("legend", {}, t("whoAnswers")), ...speakers.map(radio));
  const asText = kind && button(t("readAsText"), "quiet", () => (choose([...form.files, name]), draw()));
  const content = [choice, line(t("howItIsRead"), "muted"), turns, h("div", { class: "buttons" }, make, asText)];
  update();
  const about = h("span", {}, t("file_export", { name, program: t(`program_${program}`), n: messages.toLocaleString("en") }));
  return h("li", { class: "export" }, h("div", {}, about), removeButton(name), h("details", { open: !isMade(name) }, h("summary", {}, t("chooseAssistant")), ...content));
}

/** Take the example that comes with the program: texts and conversations about an invented valley. */
async function giveExample() {
  const done = await act(api.giveExample(), refuse);
  if (!done) return;
  const isChat = ({ kind }) => Number(kind === "chat");
  choose([...overview.files].sort((a, b) => isChat(a) - isChat(b)).map(({ name }) => name));
  draw();
}

/** How much of what is read a file is, if others of its kind are chosen, too. */
function shareOf(file, chosen) {
  const { name, kind } = file;
  const textOf = ({ text_bytes: text, bytes }) => text ?? bytes;
  const alike = chosen.filter((file) => file.kind === kind);
  if (alike.length < 2 || !alike.some((file) => file.name === name)) return "";
  const percent = Math.round((100 * textOf(file)) / alike.reduce((sum, each) => sum + textOf(each), 0));
  return t(kind === "text" ? "shareOfText" : "shareOfChats", { percent: percent || "< 1" });
}

function uploadRow([name, { size: bytes, percent, cancel }]) {
  return h("li", {}, h("span", {}, t("uploading", { name, percent, size: size(bytes) })), button(t("cancel"), "quiet", cancel));
}

/** A free name that the server accepts: letters, digits, blanks and dashes, within the limit of length. */
function freeName(original) {
  const suffix = original.match(KINDS)[0].toLowerCase();
  const stem = original.slice(0, original.length - suffix.length).normalize("NFC").replace(/[^\p{L}\p{N}_ -]+/gu, "_").replace(/^[ -]+/, "");
  const taken = new Set([...overview.files.map((file) => file.name), ...uploads.keys()]);
  for (let number = 1; ; number++) {
    const ending = number > 1 ? ` ${number}` : "";
    const name = ((stem || "file").slice(0, NAME_LENGTH - ending.length) + ending).trim() + suffix;
    if (!taken.has(name)) return name;
  }
}

/** The files that were dropped, also those in folders, by name. */
async function filesOf({ items, files }) {
  const entries = [...items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...files];
  const inside = async (entry) => {
    if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
    const reader = entry.createReader();
    const found = [];
    for (let some; (some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject))).length; ) found.push(...some);
    const within = await Promise.all(found.filter(({ name }) => !name.startsWith(".")).map(inside));
    return within.flat();
  };
  const found = await Promise.all(entries.map(inside));
  return found.flat().sort((a, b) => (a.name < b.name ? -1 : 1));
}

function addFiles(files) {
  formError = null;
  const n = form.files.length + files.length;
  if (n > overview.most_files) return refuse({ code: "many_files", values: { n, most: overview.most_files } });
  for (const file of files) {
    formError ??= whyNot(file);
    if (whyNot(file)) continue;
    const name = freeName(file.name);
    const entry = { size: file.size, percent: 0 };
    const { done, cancel } = api.upload(name, file, (percent) => ((entry.percent = percent), draw()));
    entry.cancel = cancel;
    uploads.set(name, entry);
    form.files = [...form.files, name]; // in the order in which they were given, whichever arrives first
    keepArriving();
    done
      .then(({ export: found }) => {
        if (found) form.files = form.files.filter((each) => each !== name); // first the user looks at it
      })
      .catch((error) => {
        form.files = form.files.filter((each) => each !== name);
        if (error.name !== "AbortError") formError = error;
      })
      .finally(() => (uploads.delete(name), keepArriving(), look()));
  }
  draw();
}

/** Remember the uploads, so that a reloaded page can say which were interrupted. */
function keepArriving() {
  form.arriving = [...uploads.keys()];
  keep();
}

/** Why a file is not sent. If the server refused it while it arrives, that would look like a lost connection. */
function whyNot({ name, size: bytes }) {
  const { most, room, disk_free: free } = overview;
  if (/\.zip$/i.test(name)) return { code: "zip", values: { file: name } };
  if (!KINDS.test(name)) return { code: MEDIA.test(name) ? "not_text" : "kind", values: { file: name } };
  if (bytes > most) return { code: "too_large", values: { most } };
  return bytes > room ? { code: "room", values: { need: free + 3 * (bytes - room), free } } : null;
}

async function makePlan() {
  const { name, start, hours, depth, skip } = form;
  if (!(hours >= LEAST_HOURS && hours <= MOST_HOURS)) return refuse({ code: "field", param: "hours" });
  const asked = { name: name.trim(), files: chosenFiles().map((file) => file.name), start: start || null, hours, depth: depth && !start ? Number(depth) : null };
  const done = await act(api.newJob({ ...asked, lang: currentLanguage(), skip_bad: skip }), refuse);
  if (done) show(asked.name);
}

// --- planning, the plan

const stopButton = (job, text, now = false) => button(text, "quiet", (event) => ((event.target.disabled = true), act(api.stopJob(job.name, now), say)));

/** The server's refusal, below the buttons of the card. */
function say(error) {
  byId("train-body").append(h("div", { class: "error", role: "alert" }, sentence(error)));
}

function planningView(job) {
  return { elements: [line(t("planningHelp")), h("div", { class: "buttons" }, stopButton(job, t("stop"))), logDetails(job)], update() {} };
}

function planView(job) {
  const plan = job.plan;
  const start = button(t("startJob"), "primary", () => act(api.startJob(job.name), say));
  const elements = [...(plan ? planLines(plan) : []), madeOfLine(job), h("div", { class: "buttons" }, start, changePlan(job)), terminalLine(job), manageRow(job)];
  return { elements, update() {} };
}

/** The button back to the form, as long as nothing has been trained. */
function changePlan({ name, update }) {
  return update === undefined && button(t("changePlan"), "quiet", () => ((isChanging = true), (form.shown = name), draw()));
}

function planLines(plan) {
  const [first, second] = plan.stages;
  const kind = t(`kind_${plan.parameters < 1e6 ? 0 : plan.parameters < 2e7 ? 1 : 2}`);
  const shape = t(plan.depth === 1 ? "layers_1" : "layers", { d: plan.depth, w: plan.width });
  const model = t("planModel", { kind, weights: rough(plan.parameters), shape });
  const learns = !first.is_pretraining && t("planLearns", { times: times(first.passes) });
  const reads = learns || (first.passes < 1 ? t("planReadsPart", { percent: Math.round(100 * first.passes) }) : t("planReads", { times: times(first.passes) }));
  const then = second ? t("planThen", { times: times(second.passes) }) : "";
  const time = t("planTime", { time: duration(plan.seconds), clock: clock(plan.seconds) });
  const needs = t("planNeeds", { a: size(plan.memory), b: size(plan.disk), c: size(plan.memory_free), e: size(plan.disk_free) });
  const what = (stage) => t(stage === "pretrain" ? "whatReading" : "whatAnswering");
  const short = (value) => (typeof value === "number" ? value.toLocaleString("en", { maximumFractionDigits: 1 }) : value);
  const shown = (values) => Object.fromEntries(Object.entries(values).map(([name, value]) => [name, short(value)]));
  const advice = ({ key, stage, ...values }) => [`unwise_${key.replaceAll(" ", "_")}`, { ...shown(values), what: what(stage) }];
  const unwise = plan.unwise.map(advice).filter(([key]) => knows(key)); // others are for a terminal
  return [
    line(joined(model, `${reads}${then}${t("fullStop")}`)), line(joined(time, t(`limit_${plan.limit}`))), line(needs),
    ...(unwise.length ? [line(t("unwise")), h("ul", { class: "unwise" }, ...unwise.map((each) => h("li", {}, t(...each))))] : []),
  ];
}

function terminalLine({ name }) {
  const command = `bash out/${name.includes(" ") ? `'${name}'` : name}/run.sh`;
  const row = h("div", { class: "command" }, h("code", {}, command), copyButton(t("copy"), () => command));
  return h("details", { class: "terminal" }, h("summary", {}, t("inTerminal")), row);
}

// --- training

const percentOf = ({ stage, stages, update, updates }) => Math.min(100, Math.floor((100 * (stage + update / updates)) / stages));

/** A bar, with the text that it stands for. `update` gets percent and text; each tenth is read out. */
function followProgress() {
  const facts = line("", "numbers");
  const bar = h("div", { role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-labelledby": "train-title" }, h("i", {}));
  const update = (percent, text) => {
    facts.textContent = text;
    bar.firstChild.style.width = `${percent}%`;
    bar.setAttribute("aria-valuenow", percent);
    bar.setAttribute("aria-valuetext", text);
    const ten = Math.floor(percent / 10) * 10;
    if (announced >= 0 && ten > announced) announce(`${ten} %`);
    announced = ten;
  };
  return { elements: [bar, facts], update };
}

function trainingView(job) {
  const [title, learnt, silence] = [h("h3", {}), line(""), line("", "note")];
  const follow = followProgress();
  const buttons = h("div", { class: "buttons" }, job.is_own && stopButton(job, t("stopAndSave")));
  const update = (now) => {
    const { plan, stage, stages, record_age: age } = now;
    const isWriting = now.update >= now.updates && stage === stages - 1;
    title.textContent = isWriting ? t("writingReport") : stageTitle(now);
    const planned = plan ? duration(plan.seconds) : "–";
    if (now.update === undefined) follow.update(0, t("starting"));
    else follow.update(percentOf(now), progressText(now, planned));
    learnt.textContent = learntText(now);
    silence.textContent = age > SILENCE ? t("noNews", { time: duration(age) }) : "";
  };
  return { elements: [title, ...follow.elements, learnt, silence, line(t("canClose"), "muted"), buttons, logDetails(job)], update };
}

function stageTitle({ plan, stage, stages }) {
  const isReading = plan?.stages[stage]?.is_pretraining ?? true;
  return t(isReading ? "stageReading" : "stageAnswering", { i: stage + 1, n: stages || 1 });
}

function progressText(job, planned) {
  const { update, updates, seconds_left: left } = job;
  return t("progress", { u: update, v: updates, left: duration(left), clock: clock(left), planned });
}

function learntText({ eval_loss: losses, sample }) {
  const loss = losses ? t("heldOut", { now: losses[1].toFixed(2), first: losses[0].toFixed(2) }) : "";
  const says = sample ? t("itWrites", { prompt: sample[0], answer: sample[1] }) : "";
  return joined(loss, says);
}

function savingView(job) {
  const slow = h("div", { class: "slow", hidden: true }, line(t("slowSave")), h("div", { class: "buttons" }, stopButton(job, t("endAtOnce"), true)), line(t("endAtOnceHelp"), "muted"));
  const update = () => (slow.hidden = Date.now() - savingSince < SLOW_SAVE);
  return { elements: [line(t("saving")), slow, logDetails(job)], update };
}

function logDetails({ name }) {
  const text = h("pre", { class: "log" });
  const fold = h("details", {}, h("summary", {}, t("showLog")), text);
  const load = async () => {
    if (!fold.open || !fold.isConnected) return;
    text.textContent = await api.jobLog(name).catch((error) => error.message);
    text.scrollTop = text.scrollHeight;
    setTimeout(load, EVERY);
  };
  fold.addEventListener("toggle", load);
  return fold;
}

// --- stopped, failed, ready

/** Buttons to rename a model and to delete a training. */
function manageRow({ name, state }) {
  const rename = () => {
    const to = prompt(t("newName", { name }), name)?.trim();
    if (to && to !== name) act(api.renameJob(name, to), say).then((done) => done && show(to));
  };
  const remove = () => confirm(t("deleteAsk", { name })) && act(api.deleteJob(name), say).then((done) => done && show(null));
  const renameButton = state === "ready" && button(t("rename"), "quiet", rename);
  return h("div", { class: "manage" }, renameButton, button(t("remove"), "quiet", remove));
}

const goOn = (job) => button(t("goOn"), "primary", () => act(api.startJob(job.name), say));
const newModel = () => button(t("newModel"), "quiet", () => show(""));

function endedView(job) {
  const how = line("");
  const update = ({ state, saved_at: saved, update: last, updates, stage, stages }) => {
    if (state === "cut") how.textContent = t("wasCut");
    else if (saved !== undefined && saved < updates) how.textContent = t("wasStopped", { u: saved, v: updates });
    else how.textContent = t(last === updates && stage + 1 < stages ? "wasBetween" : "wasEnded");
  };
  const isTeaching = job.kind === "teaching";
  const buttons = h("div", { class: "buttons" }, goOn(job), !isTeaching && changePlan(job), newModel());
  return { elements: [how, buttons, !isTeaching && terminalLine(job), logDetails(job), manageRow(job)].filter(Boolean), update };
}

function failedView(job) {
  const { code, text: message, ...values } = job.error;
  const error = h("div", { class: "error", role: "alert" }, sentence({ code, message, values: { free: overview.disk_free, ...values } }));
  const anyway = code === "no_old_data" && button(t("teachAnyway"), "primary", () => act(api.startJob(job.name, { without_old_data: true }), say));
  const again = job.kind === "teaching" && !anyway && goOn(job);
  const skip = code === "bad_record" && button(t("skipBad"), "primary", () => {
    Object.assign(form, fieldsOf(job.asked), { skip: true });
    makePlan();
  });
  const change = job.kind !== "teaching" && changePlan(job);
  return { elements: [error, h("div", { class: "buttons" }, skip, anyway, again, job.plan && goOn(job), change, newModel()), logDetails(job), manageRow(job)], update() {} };
}

function readyView(job) {
  const { plan, name } = job;
  const { right, verdict } = job;
  const figures = verdict && h("details", {}, h("summary", {}, t("inFigures")), line(verdict[currentLanguage()]));
  const next = right && right[0] < FEW_RIGHT * right[1] ? t("notYet") : "";
  const buttons = h("div", { class: "buttons" }, ...waysOn(job, "primary", say), newModel());
  const facts = line(plan ? modelFacts(job) : "", "muted");
  return { elements: [line(joined(t("ready"), canDo(job), next)), facts, madeOfLine(job), buttons, figures, manageRow(job)].filter(Boolean), update() {} };
}

const madeOfLine = ({ asked }) => line(asked.start ? t("madeOf", { name: asked.start }) : "", "muted");

/** What a completed model can do. */
function canDo({ plan, right }) {
  if (right) return t("answersRight", { right: right[0], asked: right[1] });
  return plan && !plan.stages.at(-1).is_pretraining ? "" : t("continuesTexts");
}

/** When a completed model was made, and how large it is. */
const modelFacts = ({ plan, made, bytes }) => t("modelFacts", { date: date(made), weights: rough(plan.parameters), size: size(bytes) });

/** The buttons to chat with a model, and to save it as a page to send. weights: its name in the chat. */
function waysToUse(weights, kind) {
  const chat = () => document.dispatchEvent(new CustomEvent("chat-with", { detail: weights }));
  return [button(t("chatWithIt"), kind, chat), button(t("savePage"), "quiet", (event) => savePage(event.target, weights))];
}

/** The buttons of a completed model: chat, page to send, report, more to learn. */
function waysOn({ name, plan }, kind, say) {
  const weights = plan && `${name}/${plan.stages.at(-1).run}`;
  const [chat, save] = waysToUse(weights, kind);
  const report = async () => download(`${name}.html`, await api.jobReport(name));
  const teach = () => {
    Object.assign(form, { files: [], isNamed: false }); // it has read those that were chosen
    show("", name);
    byId("train-title").focus();
  };
  return [
    weights && chat,
    weights && save,
    button(t("downloadReport"), "quiet", () => report().catch(say)),
    weights && button(t("teachMore"), "quiet", teach),
  ];
}

/** A card for each completed model, below the form. */
function drawModels(isForm) {
  const models = isForm ? readyModels() : [];
  const section = byId("models");
  const card = (job) => {
    const say = (error) => row.append(h("div", { class: "error", role: "alert" }, sentence(error)));
    const open = button(job.name, "quiet", () => show(job.name));
    const row = h("li", {}, h("h3", {}, open), line(modelFacts(job), "muted"), line(canDo(job)), h("div", { class: "buttons" }, ...waysOn(job, "quiet", say)));
    return row;
  };
  const key = JSON.stringify([currentLanguage(), models.map(({ name, made, bytes, right }) => [name, made, bytes, right])]);
  if (section.dataset.shown !== key) {
    section.dataset.shown = key;
    section.replaceChildren(h("h2", {}, t("models")), h("ul", {}, ...models.map(card)));
  }
  section.hidden = !models.length;
}

/** Start the card if the server trains. It then follows the server's state. */
export async function startTraining() {
  document.addEventListener("show-job", async ({ detail }) => {
    document.dispatchEvent(new CustomEvent("open-tab", { detail: "training" }));
    await look();
    show(detail);
  });
  document.addEventListener("tab", (event) => {
    isOpen = event.detail === "training";
    if (overview) look();
  });
  document.addEventListener("visibilitychange", () => overview && look());
  document.addEventListener("language", () => overview && draw());
  byId("train-choice").addEventListener("change", (event) => show(event.target.value));
  const { train } = await api.runs().catch(() => ({ train: false }));
  document.dispatchEvent(new CustomEvent("trains", { detail: Boolean(train) }));
  if (!train) return;
  await look();
  if (form.arriving.length) formError = { code: "cut" };
  keepArriving();
  if (formError) draw();
  byId("train-card").hidden = false;
}
