// The training curves: which runs there are, which are shown, and how; they follow the files while the tab is open.
import * as api from "./api.js";
import { byId, h, paint, table } from "./dom.js";
import { Plot } from "./plot.js";
import { duration, short, smooth } from "./series.js";
import { askForKey } from "./settings.js";
import { read, write } from "./store.js";
import { knows, t } from "./text.js";

const KEY = "minimind.curves";
const EVERY = 2000; // milliseconds between two looks at the folder
const LIVE = 90; // seconds since the last record, for a run that counts as running
const MANY = 10; // runs from which on the list has a filter
const FIRST = 3; // runs shown at the first visit
const LEARNING = ["reward", "kl", "entropy", "completion_length"]; // from rewards
const MAIN = ["loss", ...LEARNING, "learning_rate", "grad_norm", "tokens_per_second", "expert_load"];
const HELD_OUT = { loss: "eval_loss", reward: "eval_reward" }; // drawn dashed in the same picture
const RESULTS = ["loss", "eval_loss", "best_eval_loss", "best_update", "reward", "eval_reward"]; // of the table of runs
const LOSSES = ["mean_loss", "loss"]; // the first of them that a run has is its loss
const SMOOTHED = ["loss", "reward", "kl", "entropy", "completion_length", "grad_norm", "tokens_per_second"];
const NO_PLOT = /^(update|tokens|seconds|seconds_left|mean_loss|loss|eval_loss|eval_reward|skipped|not_finite)$|_(low|high)$/;
const AXES = ["update", "tokens", "seconds"];

const FEW = 16; // runs of which each is shown in full
const POINTS = 512; // of a curve then, else a quarter
const READERS = 3; // requests for curves at a time; others of the page need connections too
const DRAW_EVERY = 600; // milliseconds at least, while curves arrive; drawing takes a quarter of the time at most

const view = { x: "update", log: false, smoothing: 0, chosen: null, ...read(KEY, {}) };
const colors = new Map(Array.isArray(view.colors) ? view.colors : []); // name -> colour; a run may have any name
const known = new Map(); // name -> what the server says, columns as a Map, with the size and points it had
const plots = new Map(); // field -> Plot
let runs = null; // not known yet
let timer = 0;
let drawing = 0;
let pause = DRAW_EVERY;
let isOpen = false;

const remember = () => write(KEY, { ...view, colors: [...colors] });
const chosen = () => (runs ?? []).filter((run) => view.chosen?.includes(run.name));
const shown = () => chosen().filter((run) => known.has(run.name));
const values = (run, name) => known.get(run.name)?.columns.get(name);
const last = (run, name) => values(run, name)?.findLast((value) => value !== null);

/** A run keeps its colour while it is shown; a new one gets the first that is free. */
function colorOf(name) {
  if (!colors.has(name)) {
    const taken = new Set(view.chosen.map((other) => colors.get(other)));
    let color = 0;
    while (taken.has(color)) color++;
    colors.set(name, color);
  }
  return colors.get(name);
}

// --- following the server

async function look() {
  clearTimeout(timer);
  if (!isOpen || document.hidden) return;
  try {
    const listed = await api.runs(); // the last written first
    const live = listed.filter((run) => run.age < LIVE).sort((a, b) => a.name.localeCompare(b.name)); // keep their places
    listed.splice(0, live.length, ...live);
    const states = () => JSON.stringify([runs?.length ?? -1, (runs ?? []).map((run) => [run.name, run.size, state(run)])]);
    const before = states();
    runs = listed;
    view.chosen ??= listed.length ? listed.slice(0, FIRST).map((run) => run.name) : null;
    if (before !== states()) draw();
    await readChosen();
    byId("curves-error").hidden = true;
  } catch (error) {
    if (error.status === 401 && !(await askForKey(api.hasKey()))) isOpen = false;
    if (byId("curves-error").textContent !== error.message) byId("curves-error").textContent = error.message;
    byId("curves-error").hidden = error.status === 401;
  }
  clearTimeout(timer);
  timer = setTimeout(look, EVERY);
}

/** Read what is new of the chosen runs, and draw while it comes. */
async function readChosen() {
  const points = chosen().length > FEW ? POINTS / 4 : POINTS;
  const isKnown = (run) => known.get(run.name)?.size === run.size && known.get(run.name).points === points;
  const due = chosen().filter((run) => !isKnown(run));
  const reader = async () => {
    for (let run = due.shift(); run; run = due.shift()) {
      const answer = await api.run(run.name, points);
      const columns = new Map(Object.entries(answer.columns)); // a metric may have any name
      known.set(run.name, { ...answer, columns, size: run.size, points });
      drawing ||= setTimeout(draw, known.size > 1 ? pause : 0);
    }
  };
  await Promise.all(Array.from({ length: READERS }, reader));
  if (drawing) draw();
}

function state(run) {
  const left = values(run, "seconds_left")?.at(-1);
  if (run.age < LIVE && left !== 0) return "running";
  return left === undefined || left === 0 ? "finished" : "stoppedRun";
}

// --- drawing

function draw() {
  const start = performance.now();
  clearTimeout(drawing);
  drawing = 0;
  drawRuns();
  const lines = shown();
  const empty = byId("curves-empty");
  empty.hidden = lines.length > 0;
  const nothing = [h("strong", {}, t("noRuns")), h("span", {}, t("noRunsMore"))];
  const waiting = runs === null || chosen().length > 0;
  empty.replaceChildren(...(waiting ? [t("readingRuns")] : runs.length ? [t("noneChosen")] : nothing));
  const fields = new Set(lines.flatMap((run) => [...known.get(run.name).columns.keys()]));
  const more = [...fields].filter((field) => !MAIN.includes(field) && !NO_PLOT.test(field)).sort();
  const main = MAIN.filter((field) => lines.some((run) => column(run, field)));
  const named = (run) => paint(h("span", {}, h("i", { class: "swatch" }), run.name), colorOf(run.name));
  byId("legend").replaceChildren(...lines.map(named));
  place(byId("plots"), main);
  if (byId("more").open) place(byId("more-plots"), more);
  byId("more").hidden = !more.length;
  byId("live").hidden = !lines.some((run) => state(run) === "running");
  drawTable(lines);
  drawSamples(lines);
  pause = Math.max(DRAW_EVERY, 3 * (performance.now() - start));
}

const title = (field) => (knows(field) ? t(field) : field.replaceAll("_", " "));

function place(element, fields) {
  const end = Math.max(...shown().map((run) => last(run, view.x) ?? 0), 1e-9);
  for (const field of fields) {
    if (!plots.has(field)) plots.set(field, new Plot(title(field), point));
    const plot = plots.get(field);
    if (plot.element.parentNode !== element) element.append(plot.element);
    const both = (run) => [field, heldOut(run, field)].filter((name) => column(run, name));
    const lines = shown().flatMap((run) => both(run).map((name) => line(run, name)));
    plot.draw(lines, { x: view.x, end, log: view.log && field !== "expert_load" });
  }
  const wanted = fields.map((field) => plots.get(field).element);
  for (const child of [...element.children]) if (!wanted.includes(child)) child.remove();
  element.append(...wanted.filter((child, i) => element.children[i] !== child));
}

const source = (run, field) => (field === "loss" ? LOSSES.find((name) => values(run, name)) : field);
const column = (run, field) => values(run, source(run, field));

/** What was measured on held-out data; after learning from rewards the held-out loss is minus the reward, and no loss. */
const heldOut = (run, field) => (field === "loss" && column(run, "eval_reward") ? null : HELD_OUT[field]);

/** A curve: the points that have both values. */
function line(run, field) {
  const name = source(run, field);
  const [xs, ys] = [values(run, view.x) ?? [], values(run, name)];
  const there = ys.map((_, i) => i).filter((i) => ys[i] !== null && xs[i] != null);
  const pick = (values) => there.map((i) => values[i]);
  const base = { name: run.name, color: colorOf(run.name), x: pick(xs) };
  if (field === "expert_load") {
    const loads = pick(ys);
    const experts = Math.max(...loads.map((load) => load.length), 0);
    return { ...base, y: [], experts: Array.from({ length: experts }, (_, e) => loads.map((load) => load[e] ?? null)) };
  }
  if (field === "loss") base.bad = xs.filter((x, i) => x !== null && isBad(run, i));
  const y = pick(ys);
  if (field.startsWith("eval_")) return { ...base, name: `${run.name}, ${t("heldOut")}`, y, heldOut: true };
  if (view.smoothing && SMOOTHED.includes(field)) return { ...base, y: smooth(y, view.smoothing), raw: y };
  const [low, high] = [values(run, `${name}_low`), values(run, `${name}_high`)];
  return low && high && shown().length <= FEW ? { ...base, y, low: pick(low), high: pick(high) } : { ...base, y };
}

/** Whether a point has updates that were skipped, or a loss that is no finite number. */
const isBad = (run, i) => Boolean(values(run, "skipped")?.[i] || values(run, "not_finite")?.[i]);

/** What went wrong in a run, as a text; empty if nothing did. */
function trouble(run) {
  const total = (name) => (values(run, name) ?? []).reduce((sum, value) => sum + (value ?? 0), 0);
  const [skipped, lost] = [total("skipped"), total("not_finite")];
  const counts = skipped ? t("skipped", { n: skipped }) : lost && t("notFinite", { n: lost });
  return [values(run, "not_finite")?.at(-1) && t("diverged"), counts].filter(Boolean).join(" · ");
}

function point(at, source) {
  for (const plot of plots.values()) plot.point(at, plot === source);
}

function drawRuns() {
  const filter = byId("runs-filter");
  filter.hidden = (runs ?? []).length < MANY;
  const wanted = filter.hidden ? "" : filter.value.trim().toLowerCase();
  const focused = document.activeElement?.dataset?.run;
  const rows = (runs ?? []).filter((run) => run.name.toLowerCase().includes(wanted)).map(runRow);
  const nothing = t(runs === null ? "readingRuns" : "noRuns");
  byId("runs").replaceChildren(...(rows.length ? rows : [h("p", { class: "side-title" }, nothing)]));
  if (focused) [...byId("runs").querySelectorAll("input")].find((input) => input.dataset.run === focused)?.focus();
}

function runRow(run) {
  const on = Boolean(view.chosen?.includes(run.name));
  const onchange = () => choose(run.name, input.checked);
  const input = h("input", { type: "checkbox", checked: on, "data-run": run.name, onchange });
  const now = state(run);
  const facts = [known.has(run.name) || now === "running" ? t(now) : ""];
  const [left, update] = [last(run, "seconds_left"), last(run, "update")];
  if (now === "running" && left) facts.push(t("left", { time: duration(left) }));
  else if (update) facts.push(t("updates", { n: update }));
  const below = h("span", { class: `state ${now}` }, facts.filter(Boolean).join(" · "));
  const bad = trouble(run);
  const wrong = bad && h("span", { class: "trouble" }, bad);
  const text = h("span", {}, h("span", { class: "name" }, run.name), below, wrong || null);
  const row = h("label", { class: "run" }, input, text);
  return on ? paint(row, colorOf(run.name)) : row;
}

function choose(name, on) {
  const others = (view.chosen ?? []).filter((other) => other !== name);
  view.chosen = on ? [...others, name] : others;
  colors.delete(name);
  remember();
  draw();
  look();
}

/**
 * The columns of the table of runs: {title, cells}. First what the runs came to, then the settings that are not the same
 * in all of them. Figures that are the same for all, and paths, which are long, stand behind the others.
 */
function columnsOf(list) {
  const about = list.map((run) => known.get(run.name));
  const hasFigure = (name) => about.some((each) => name in each.figures);
  const ofFigure = (name) => ({ title: title(name), cells: list.map((run) => figure(run, name)) });
  const settings = about.map((each) => new Map(Object.entries(each.settings)));
  const stored = settings.filter((each) => each.size);
  const names = [...new Set(stored.flatMap((each) => [...each.keys()]))];
  const differs = (name) => new Set(stored.map((each) => each.get(name))).size > 1;
  const ofSetting = (name) => ({ title: name, cells: settings.map((each) => each.get(name) ?? "–") });
  const results = RESULTS.filter(hasFigure).map(ofFigure);
  const others = [...AXES.filter(hasFigure).map(ofFigure), ...names.filter(differs).map(ofSetting)];
  const isLast = ({ cells }) => new Set(cells).size === 1 || cells.some((cell) => /[/\\]/.test(cell));
  return [...results, ...others.filter((column) => !isLast(column)), ...others.filter(isLast)];
}

/** The runs, the best first. */
function drawTable(lines) {
  const place = byId("latest-values");
  const about = (run) => known.get(run.name);
  const best = (run) => about(run).figures.best_eval_loss ?? Infinity;
  const sorted = [...lines].sort((a, b) => best(a) - best(b) || 0); // NaN: both have none
  const columns = columnsOf(sorted);
  const head = [t("run"), ...columns.map((column) => column.title)].map((text) => h("th", { scope: "col" }, text));
  const rows = sorted.map((run, i) => {
    const name = paint(h("td", {}, h("span", { class: "swatch" }), run.name), colorOf(run.name));
    return h("tr", {}, name, ...columns.map(({ cells }) => h("td", { title: cells[i] }, cells[i])));
  });
  const notes = lines.flatMap((run) => {
    const { damaged, stride, warnings } = about(run);
    const thinned = stride > 1 && t("thinned", { n: stride });
    const warned = warnings.map(([update, text]) => `${t("atUpdate", { n: update })}: ${text}`);
    const remarks = [trouble(run), ...warned, damaged && t("damaged", { n: damaged }), thinned].filter(Boolean);
    return remarks.map((text) => h("p", { class: "muted" }, `${run.name}: ${text}`));
  });
  place.hidden = !lines.length;
  place.replaceChildren(h("h2", {}, t("table")), table(h("tr", {}, ...head), rows), ...notes);
}

function figure(run, name) {
  const value = known.get(run.name).figures[name];
  if (name.endsWith("update")) return String(value ?? "–");
  return name === "seconds" && value !== undefined ? duration(value) : short(value, 4);
}

/** What the runs answered to their sample prompts, and how that changed. */
function drawSamples(lines) {
  const sampled = lines.filter((run) => known.get(run.name).samples.length);
  const answer = ([update, text]) => h("p", {}, h("span", { class: "muted" }, `${t("atUpdate", { n: update })}: `), text);
  const texts = sampled.flatMap((run) => [
    paint(h("h2", {}, h("span", { class: "swatch" }), run.name), colorOf(run.name)),
    ...known.get(run.name).samples.flatMap(([prompt, answers]) => [h("h3", {}, prompt), ...answers.map(answer)]),
  ]);
  byId("samples").hidden = !texts.length;
  byId("sample-texts").replaceChildren(...texts);
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
  byId("more").addEventListener("toggle", draw);
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
