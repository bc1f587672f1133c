// The training curves: the list of runs, which of them are shown, and how. They are updated while the tab is open.
import * as api from "./api.js";
import { byId, h } from "./dom.js";
import { read, write } from "./store.js";
import { duration, knows, t } from "./text.js";

const { uPlot } = globalThis;
const KEY = "minimind.curves";
const EVERY = 2000; // milliseconds between two looks at the folder
const FIRST = 3; // runs shown at the first visit
const HEIGHT = 220;
const AXES = ["update", "tokens", "seconds"];
const MAIN = ["loss", "eval_loss", "reward", "eval_reward", "kl", "learning_rate", "grad_norm", "tokens_per_second"];
const NO_PLOT = /^(update|tokens|seconds|seconds_left|mean_loss)$/;
const RUNNING = 90; // if there is no lock, a run counts as running for this many seconds after its last record
const RESULTS = ["loss", "eval_loss", "best_eval_loss", "best_update", "reward", "eval_reward"]; // of the table of runs
// distinguishable on a light and on a dark background
const COLORS = ["#4f78e6", "#e0702f", "#27a07a", "#c256ac", "#b08a1e", "#2798b5", "#de4f65", "#8a6fe0"];

const view = { x: "update", log: false, smoothing: 0, chosen: null, isOfCard: false, ...read(KEY, {}) };
const known = new Map(); // name -> the data of a run, with the size of its file at that time
const failed = new Map(); // name -> why a run cannot be read, with the size of its file at that time
let trains = false; // whether the server does
let runs = null; // null: the server has not said yet
let plots = [];
let timer = 0;
let isOpen = false;

const shown = () => (runs ?? []).filter((run) => view.chosen?.includes(run.name) && known.has(run.name));
const colorOf = (name) => COLORS[view.chosen.indexOf(name) % COLORS.length];
/** The own value of an object under a name from a run, which may be a name such as "constructor". */
const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);
const title = (field) => (knows(field) ? t(field) : field.replaceAll("_", " "));

function swatch(name) {
  const mark = h("i", { class: "swatch" });
  mark.style.background = colorOf(name);
  return mark;
}

/** A value with few digits. */
function short(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(Math.abs(value) < 1e4 ? 4 : 6)));
}

// --- following the server

async function look() {
  clearTimeout(timer);
  if (!isOpen || document.hidden) return;
  try {
    const states = () => JSON.stringify(runs?.map((run) => [run.name, run.size, isAlive(run)]));
    const before = states();
    ({ runs, train: trains } = await api.runs());
    view.chosen ??= runs.length ? runs.slice(0, FIRST).map((run) => run.name) : null;
    const isRead = ({ name, size }) => known.get(name)?.size === size || failed.get(name)?.size === size;
    const due = runs.filter((run) => view.chosen?.includes(run.name) && !isRead(run));
    for (const run of due) await load(run);
    if (due.length || before !== states()) draw();
    byId("curves-error").hidden = true;
  } catch (error) {
    byId("curves-error").textContent = error.message;
    byId("curves-error").hidden = false;
  }
  clearTimeout(timer);
  timer = setTimeout(look, EVERY);
}

/** Read a run. If it cannot be read, the list says so. */
async function load({ name, size }) {
  try {
    known.set(name, { ...(await api.run(name)), size });
    failed.delete(name);
  } catch (error) {
    if (!error.status) throw error; // no server
    known.delete(name);
    failed.set(name, { message: error.message, size });
  }
}

// --- drawing

function draw() {
  drawRuns();
  const fields = new Set(shown().flatMap((run) => Object.keys(known.get(run.name).columns)));
  const more = [...fields].filter((field) => !MAIN.includes(field) && !NO_PLOT.test(field)).sort();
  plots.forEach((plot) => plot.destroy());
  plots = [];
  drawPlots(byId("plots"), MAIN.filter((field) => fields.has(field)));
  byId("more").hidden = !more.length;
  drawPlots(byId("more-plots"), byId("more").open ? more : []);
  drawTable();
  drawSamples();
  byId("curves-bar").hidden = !shown().length;
  byId("curves-empty").hidden = shown().length > 0 || !runs || (trains && (!runs.length || view.isOfCard));
  byId("curves-empty").textContent = runs?.length ? t("noneChosen") : `${t("noRuns")} ${t("trainOff")}`;
}

function drawRuns() {
  const focused = document.activeElement?.dataset.run;
  byId("runs").replaceChildren(...(runs ?? []).map(runRow));
  if (focused) [...byId("runs").querySelectorAll("input")].find((input) => input.dataset.run === focused)?.focus();
}

function runRow(run) {
  const onchange = (event) => choose(run.name, event.target.checked);
  const isChosen = view.chosen?.includes(run.name);
  const input = h("input", { type: "checkbox", checked: isChosen, "data-run": run.name, onchange });
  const text = h("span", { class: "name" }, run.name, stateLine(run), troubleLine(run));
  return h("label", { class: "run" }, input, isChosen && swatch(run.name), text);
}

const isAlive = (run) => run.alive ?? run.age < RUNNING;

/** The state of a run: still running and how long, or how far it came. Empty for a finished run that was not read. */
function stateLine(run) {
  const columns = known.get(run.name)?.columns;
  const left = columns?.seconds_left?.at(-1);
  const isRunning = isAlive(run) && left !== 0;
  if (!columns && !isRunning) return null;
  const state = isRunning ? "running" : left ? "endedEarly" : "finished";
  const facts = [t(state)];
  if (isRunning && left) facts.push(t("left", { time: duration(left) }));
  else if (columns) facts.push(t("updates", { n: columns.update.at(-1) }));
  return h("small", { class: state }, facts.join(" · "));
}

function troubleLine(run) {
  const { diverged, skipped: count } = known.get(run.name) ?? {};
  const facts = [diverged && t("diverged"), count && t("skipped", { n: count }), failed.get(run.name)?.message].filter(Boolean);
  return facts.length ? h("small", { class: "trouble" }, facts.join(" · ")) : null;
}

function choose(name, on) {
  view.isOfCard = false;
  view.chosen = [...(view.chosen ?? []).filter((other) => other !== name), ...(on ? [name] : [])];
  write(KEY, view);
  draw();
  look();
}

function drawPlots(place, fields) {
  place.replaceChildren();
  for (const field of fields) {
    const element = h("section", { class: "plot" }, h("h2", {}, title(field)));
    place.append(element);
    plots.push(drawPlot(element, field));
  }
}

/** One picture: the curve of each run that has the field, over the chosen axis. */
function drawPlot(element, field) {
  const about = shown().map((run) => known.get(run.name)).filter(({ columns }) => own(columns, field));
  const curves = about.map(({ columns }) => [columns[view.x], smooth(columns[columnOf(columns, field)])]);
  const value = (_, number) => short(number);
  const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick)));
  const stroke = getComputedStyle(element).color;
  const axis = { stroke, values, grid: { stroke: "#8883", width: 1 }, ticks: { show: false } };
  const line = { width: 1.75, spanGaps: true, value };
  const options = {
    width: element.clientWidth - 24,
    height: HEIGHT,
    scales: { x: { time: false }, y: { distr: view.log ? 3 : 1 } },
    axes: [axis, { ...axis, size: 60 }],
    series: [{ label: t(view.x), value }, ...about.map(({ name }) => ({ ...line, label: name, stroke: colorOf(name) }))],
    cursor: { sync: { key: "runs" } },
  };
  return new uPlot(options, uPlot.join(curves), element);
}

/** The mean over the log interval is used as the loss if there is one. */
const columnOf = (columns, field) => (field === "loss" && columns.mean_loss ? "mean_loss" : field);

/** Exponential moving average with bias correction. Gaps (null) stay gaps. On a log scale, values up to 0 are gaps. */
function smooth(values) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null || (view.log && value <= 0)) return null;
    sum = view.smoothing * sum + (1 - view.smoothing) * value;
    norm = view.smoothing * norm + (1 - view.smoothing);
    return sum / norm;
  });
}

/**
 * The table of results, and of the settings that differ between the runs; then their warnings. It is folded if the card
 * of a training chose the runs, and unfolded if the user did, to compare them.
 */
function drawTable() {
  const about = shown().map((run) => known.get(run.name));
  const results = RESULTS.filter((name) => about.some(({ figures }) => name in figures));
  const names = new Set(about.flatMap(({ settings }) => Object.keys(settings)));
  const differing = [...names].filter((name) => new Set(about.map(({ settings }) => own(settings, name))).size > 1);
  const head = [t("run"), ...results.map(title), ...differing].map((text) => h("th", {}, text));
  const row = ({ name, figures, settings }) => {
    const cells = [...results.map((each) => short(figures[each])), ...differing.map((each) => own(settings, each) ?? "–")];
    return h("tr", {}, h("td", {}, swatch(name), name), ...cells.map((text) => h("td", { title: text }, text)));
  };
  const table = h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...about.map(row)));
  const notes = about.flatMap(({ name, warnings }) => warnings.map(([update, text]) => `${name}, ${t("update")} ${update}: ${text}`));
  const open = byId("table").querySelector("details")?.open ?? !view.isOfCard; // as the user left it
  const content = [h("div", { class: "table" }, table), ...notes.map((text) => h("p", { class: "muted" }, text))];
  byId("table").replaceChildren(h("details", { open }, h("summary", {}, t("inFigures")), ...content));
  byId("table").hidden = !about.length;
}

/** The answers of the runs to their sample prompts, and how they changed. */
function drawSamples() {
  const about = shown().map((run) => known.get(run.name)).filter(({ samples }) => samples.length);
  const answer = ([update, text]) => h("p", {}, h("span", { class: "muted" }, `${t("update")} ${update}: `), text);
  const prompts = ({ samples }) => samples.flatMap(([prompt, answers]) => [h("h3", {}, prompt), ...answers.map(answer)]);
  byId("samples").hidden = !about.length;
  byId("sample-texts").replaceChildren(...about.flatMap((run) => [h("h2", {}, swatch(run.name), run.name), ...prompts(run)]));
}

// --- the bar of choices

function set(name, value) {
  view[name] = value;
  write(KEY, view);
  draw();
}

/** Start the second tab; it works while it is open. */
export function startCurves() {
  const drawAxes = () => byId("x-axis").replaceChildren(...AXES.map((x) => h("option", { value: x, selected: x === view.x }, t(x))));
  drawAxes();
  byId("log-scale").checked = view.log;
  byId("smoothing").value = view.smoothing;
  byId("x-axis").addEventListener("change", (event) => set("x", event.target.value));
  byId("log-scale").addEventListener("change", (event) => set("log", event.target.checked));
  byId("smoothing").addEventListener("input", (event) => set("smoothing", Number(event.target.value)));
  byId("more").addEventListener("toggle", draw);
  window.addEventListener("resize", () => isOpen && draw());
  document.addEventListener("visibilitychange", look);
  document.addEventListener("theme", () => isOpen && draw());
  document.addEventListener("show-runs", ({ detail }) => {
    [view.chosen, view.isOfCard] = [detail, true];
    byId("table").replaceChildren();
    write(KEY, view);
    if (!isOpen) return;
    draw();
    look();
  });
  document.addEventListener("language", () => (drawAxes(), isOpen && draw()));
  document.addEventListener("tab", (event) => {
    isOpen = event.detail === "training";
    if (isOpen) draw();
    look();
  });
}
