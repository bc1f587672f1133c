// The card of a model that is taught from corrections: while it runs, its result with the buttons that keep or discard it,
// and the version that was kept.
import * as api from "./api.js";
import { announce, button, h, line, notice } from "./dom.js";
import { chooseModel } from "./settings.js";
import { clock, currentLanguage, duration, t } from "./text.js";

const joined = (...sentences) => sentences.filter(Boolean).join(currentLanguage() === "zh" ? "" : " ");

/** While it runs. `card`: functions of train.js. */
export function teachingView(job, card) {
  const title = h("h3", {});
  const follow = card.followProgress();
  const update = (now) => {
    const { update, updates, seconds_left: left = 0 } = now;
    const begun = update < updates ? "training" : "comparing";
    const phase = update !== undefined ? begun : now.is_prepared ? "starting" : "asking";
    title.textContent = t(phase === "starting" ? "teach_training" : `teach_${phase}`, { n: now.corrections });
    const progress = { u: update, v: updates, left: duration(left), clock: clock(left) };
    const text = { training: t("teachProgress", progress), starting: t("starting") }[phase] ?? t(`teachHelp_${phase}`);
    follow.update(update === undefined ? 0 : card.percentOf(now), text);
  };
  const stop = h("div", { class: "buttons" }, job.is_own && card.stopButton(job, t("stopAndSave")));
  return { elements: [title, ...follow.elements, line(t("canClose"), "muted"), stop, card.logDetails(job)], update };
}

/** The result, on which the user decides. */
export function resultView(job, card) {
  const decide = (doing) => async (event) => {
    event.target.disabled = true;
    if (!(await card.act(doing(job.name), card.say))) event.target.disabled = false;
    else if (doing === api.keepTaught) chooseModel(job.name);
    else [notice, announce].forEach((tell) => tell(t("teachDiscarded")));
  };
  const buttons = [button(t("teachKeep"), "primary", decide(api.keepTaught)), button(t("teachDiscard"), "quiet", decide(api.discardTaught))];
  const elements = [line(numbers(job), "result"), ...answers(job), line(t("teachDecide", { name: job.name })), h("div", { class: "buttons" }, ...buttons), card.logDetails(job)];
  return { elements, update() {} };
}

/** The version that was kept. */
export function keptView(job, card) {
  const buttons = h("div", { class: "buttons" }, ...card.waysToUse(job.name, "primary"));
  const lost = answers(job);
  const fold = lost.length > 0 && h("details", {}, h("summary", {}, t("teachShowLost")), ...lost);
  const elements = [line(numbers(job), "result"), line(t("teachKept", { name: job.name, model: job.model })), buttons, fold, card.manageRow(job)];
  return { elements: elements.filter(Boolean), update() {} };
}

/** How many corrections are learned, and how many old answers are kept. */
function numbers({ result: { learned, old } }) {
  const [right, asked] = learned;
  const kept = old[1] ? t("teachOld", { right: old[0], asked: old[1] }) : t("teachNoOld");
  return joined(t("teachLearned", { right, asked }), kept);
}

/** The corrections that were not learned, and the old answers that were lost: old beside new. */
function answers({ result: { learned, old, missed, lost } }) {
  const side = (label, text) => h("div", {}, h("small", {}, label), h("p", {}, text || t("teachNothing")));
  const row = (first, other) => (each) => h("li", {}, h("strong", {}, each.question), h("div", { class: "pair" }, side(first(each), each[other]), side(t("teachNow"), each.now)));
  const before = ({ was_right: right }) => t(right ? "teachBefore" : "teachBeforeWrong");
  const list = (heading, rows, count, view) => {
    if (!rows.length) return [];
    const more = count > rows.length && line(t("teachMoreRows", { n: count - rows.length }), "muted");
    return [h("h3", {}, t(heading)), h("ul", { class: "answers" }, ...rows.map(view)), more].filter(Boolean);
  };
  const notLearned = list("teachMissed", missed, learned[1] - learned[0], row(() => t("teachShould"), "should"));
  return [...notLearned, ...list("teachLost", lost, old[1] - old[0], row(before, "before"))];
}
