// The training curves: which runs there are, which are shown, and how; they follow the files while the tab is open.
import * as api from "./api.js";
import { byId, h, table } from "./dom.js";
import { Plot } from "./plot.js";
import { duration, joined, short, smooth } from "./series.js";
import { askForKey } from "./settings.js";
import { read, write } from "./store.js";
import { knows, t } from "./text.js";

const KEY = "minimind.curves";
const EVERY = 2000; // milliseconds between two looks at the folder
const LIVE = 90; // seconds since the last record, for a run that counts as running
const COLORS = 8;
const MANY = 10; // runs from which on the list has a filter
const FIRST = 3; // runs shown at the first visit
const LEARNING = ["reward", "eval_reward", "kl", "entropy", "completion_length"]; // from rewards
const MAIN = ["loss", "eval_loss", ...LEARNING, "learning_rate", "grad_norm", "tokens_per_second", "expert_load"];
const SOURCES = { loss: ["mean_loss", "loss"] }; // the first column that a run has
const SMOOTHED = ["loss", "reward", "kl", "entropy", "completion_length", "grad_norm", "tokens_per_second"];
const NO_PLOT = /^(update|tokens|seconds|seconds_left|mean_loss|loss)$|_(low|high)$/;
const AXES = ["update", "tokens", "seconds"];

const view = { x: "update", log: false, smoothing: 0, chosen: null, colors: {}, ...read(KEY, {}) };
const known = new Map(); // name -> what joined() returns, with the size it had
const plots = new Map(); // field -> Plot
let runs = [];
let timer = 0;
let isOpen = false;

const remember = () => write(KEY, view);
const shown = () => runs.filter((run) => view.chosen?.includes(run.name) && known.has(run.name));

/** A run keeps its colour while it is shown; a new one gets the first that is free. */
function colorOf(name) {
  if (!(name in view.colors)) {
    const taken = new Set(view.chosen.filter((other) => other in view.colors).map((other) => view.colors[other]));
    const free = Array.from({ length: COLORS }, (_, i) => i).find((color) => !taken.has(color));
    view.colors[name] = free ?? view.chosen.indexOf(name) % COLORS;
  }
  return view.colors[name];
}

// --- following the server

async function look() {
  clearTimeout(timer);
  if (!isOpen || document.hidden) return;
  try {
    const age = (run) => Math.max(run.age, LIVE); // those that run keep their places
    const found = (await api.runs()).sort((a, b) => age(a) - age(b) || a.name.localeCompare(b.name));
    const before = JSON.stringify([runs.map(({ name, size }) => [name, size]), runs.map(state)]);
    runs = found;
    view.chosen ??= found.length ? found.slice(0, FIRST).map((run) => run.name) : null;
    const changed = await readChosen();
    byId("curves-error").hidden = true;
    if (changed || before !== JSON.stringify([runs.map(({ name, size }) => [name, size]), runs.map(state)])) draw();
  } catch (error) {
    if (error.status === 401 && !(await askForKey(api.hasKey()))) isOpen = false;
    if (byId("curves-error").textContent !== error.message) byId("curves-error").textContent = error.message;
    byId("curves-error").hidden = error.status === 401;
  }
  clearTimeout(timer);
  timer = setTimeout(look, EVERY);
}

/** Read what is new of the chosen runs; whether there was anything. */
async function readChosen() {
  const due = runs.filter((run) => view.chosen?.includes(run.name) && known.get(run.name)?.size !== run.size);
  const answers = await Promise.all(due.map((run) => api.run(run.name, known.get(run.name)?.cursor ?? "")));
  answers.forEach((answer, i) => {
    const { name, size } = due[i];
    known.set(name, { ...joined(known.get(name), answer), size });
  });
  return due.length > 0;
}

function state(run) {
  const left = known.get(run.name)?.columns.seconds_left?.at(-1);
  if (run.age < LIVE && left !== 0) return "running";
  return left === undefined || left === 0 ? "finished" : "stoppedRun";
}

// --- drawing

function draw() {
  drawRuns();
  const lines = shown();
  const empty = byId("curves-empty");
  empty.hidden = lines.length > 0;
  const nothing = [h("strong", {}, t("noRuns")), h("span", {}, t("noRunsMore"))];
  empty.replaceChildren(...(runs.length ? [t("noneChosen")] : nothing));
  const fields = new Set(lines.flatMap((run) => Object.keys(known.get(run.name).columns)));
  const more = [...fields].filter((field) => !MAIN.includes(field) && !NO_PLOT.test(field)).sort();
  const main = MAIN.filter((field) => lines.some((run) => column(run, field)));
  const named = (run) => h("span", { class: `c${colorOf(run.name)}` }, h("i", { class: "swatch" }), run.name);
  byId("legend").replaceChildren(...lines.map(named));
  place(byId("plots"), main);
  place(byId("more-plots"), more);
  byId("more").hidden = !more.length;
  byId("live").hidden = !lines.some((run) => state(run) === "running");
  drawTable(lines, main);
}

const title = (field) => (knows(field) ? t(field) : field.replaceAll("_", " "));

function place(element, fields) {
  const end = Math.max(...shown().map((run) => known.get(run.name).columns[view.x]?.at(-1) ?? 0), 1e-9);
  for (const field of fields) {
    if (!plots.has(field)) plots.set(field, new Plot(title(field), point));
    const plot = plots.get(field);
    if (plot.element.parentNode !== element) element.append(plot.element);
    const lines = shown().filter((run) => column(run, field)).map((run) => line(run, field));
    plot.draw(lines, { x: view.x, end, log: view.log && field !== "expert_load" });
  }
  const wanted = fields.map((field) => plots.get(field).element);
  for (const child of [...element.children]) if (!wanted.includes(child)) child.remove();
  element.append(...wanted.filter((child, i) => element.children[i] !== child));
}

function column(run, field) {
  const { columns } = known.get(run.name);
  return columns[(SOURCES[field] ?? [field]).find((name) => columns[name])];
}

/** A curve: the points that have both values. */
function line(run, field) {
  const { columns } = known.get(run.name);
  const name = (SOURCES[field] ?? [field]).find((source) => columns[source]);
  const there = columns[name].map((_, i) => i).filter((i) => columns[name][i] !== null && columns[view.x]?.[i] != null);
  const pick = (values) => there.map((i) => values[i]);
  const base = { name: run.name, color: colorOf(run.name), x: pick(columns[view.x] ?? []) };
  if (field === "expert_load") {
    const loads = pick(columns[name]);
    const experts = Math.max(...loads.map((load) => load.length), 0);
    return { ...base, y: [], experts: Array.from({ length: experts }, (_, e) => loads.map((load) => load[e] ?? null)) };
  }
  const y = pick(columns[name]);
  if (view.smoothing && SMOOTHED.includes(field)) return { ...base, y: smooth(y, view.smoothing), raw: y };
  const spread = { low: columns[`${name}_low`], high: columns[`${name}_high`] };
  return spread.low && spread.high ? { ...base, y, low: pick(spread.low), high: pick(spread.high) } : { ...base, y };
}

function point(at, source) {
  for (const plot of plots.values()) plot.point(at, plot === source);
}

function drawRuns() {
  const filter = byId("runs-filter");
  filter.hidden = runs.length < MANY;
  const wanted = filter.hidden ? "" : filter.value.trim().toLowerCase();
  const focused = document.activeElement?.dataset?.run;
  const rows = runs.filter((run) => run.name.toLowerCase().includes(wanted)).map(runRow);
  byId("runs").replaceChildren(...(rows.length ? rows : [h("p", { class: "side-title" }, t("noRuns"))]));
  if (focused) [...byId("runs").querySelectorAll("input")].find((input) => input.dataset.run === focused)?.focus();
}

function runRow(run) {
  const on = Boolean(view.chosen?.includes(run.name));
  const onchange = () => choose(run.name, input.checked);
  const input = h("input", { type: "checkbox", checked: on, "data-run": run.name, onchange });
  const now = state(run);
  const last = (name) => known.get(run.name)?.columns[name]?.at(-1);
  const facts = [known.has(run.name) || now === "running" ? t(now) : ""];
  if (now === "running" && last("seconds_left")) facts.push(t("left", { time: duration(last("seconds_left")) }));
  else if (last("update")) facts.push(t("updates", { n: last("update") }));
  const below = h("span", { class: `state ${now}` }, facts.filter(Boolean).join(" · "));
  const text = h("span", {}, h("span", { class: "name" }, run.name), below);
  return h("label", { class: on ? `run c${colorOf(run.name)}` : "run" }, input, text);
}

function choose(name, on) {
  const others = (view.chosen ?? []).filter((other) => other !== name);
  view.chosen = on ? [...others, name] : others;
  delete view.colors[name];
  remember();
  look();
  draw();
}

function drawTable(lines, fields) {
  const place = byId("latest-values");
  const numbers = fields.filter((field) => field !== "expert_load");
  const head = [t("run"), t("update"), ...numbers.map(title)].map((text) => h("th", { scope: "col" }, text));
  const last = (run, field) => column(run, field)?.findLast((value) => value !== null);
  const rows = lines.map((run) => {
    const name = h("td", { class: `c${colorOf(run.name)}` }, h("span", { class: "swatch" }), run.name);
    const values = [String(last(run, "update") ?? "–"), ...numbers.map((field) => short(last(run, field), 4))];
    return h("tr", {}, name, ...values.map((value) => h("td", {}, value)));
  });
  const notes = lines.flatMap((run) => {
    const { damaged, stride } = known.get(run.name);
    const said = [damaged && t("damaged", { n: damaged }), stride > 1 && t("thinned", { n: stride })].filter(Boolean);
    return said.map((text) => h("p", { class: "muted" }, `${run.name}: ${text}`));
  });
  place.hidden = !lines.length;
  place.replaceChildren(h("h2", {}, t("table")), table(h("tr", {}, ...head), rows), ...notes);
}

// --- the bar of choices

function drawAxes() {
  const choice = (x) => {
    const input = h("input", { type: "radio", name: "x-axis", value: x, checked: view.x === x, onchange: () => set("x", x) });
    return h("label", {}, input, t(x));
  };
  byId("x-axis").replaceChildren(...AXES.map(choice));
}

function set(name, value) {
  view[name] = value;
  remember();
  draw();
}

/** Start the second tab; it works while it is open. */
export function startCurves() {
  byId("log-scale").checked = view.log;
  byId("log-scale").addEventListener("change", (event) => set("log", event.target.checked));
  const showSmoothing = () => (byId("smoothing-value").textContent = view.smoothing);
  byId("smoothing").value = view.smoothing;
  byId("smoothing").addEventListener("input", (event) => {
    set("smoothing", Number(event.target.value));
    showSmoothing();
  });
  byId("runs-filter").addEventListener("input", drawRuns);
  document.addEventListener("tab", (event) => {
    isOpen = event.detail === "training";
    if (!isOpen) return clearTimeout(timer);
    draw();
    look();
  });
  document.addEventListener("visibilitychange", look);
  document.addEventListener("language", () => {
    for (const plot of plots.values()) plot.element.remove();
    plots.clear(); // their titles
    drawAxes();
    if (isOpen) draw();
  });
  drawAxes();
  showSmoothing();
}
