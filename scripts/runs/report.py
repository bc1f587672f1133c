"""The HTML page of `plot_metrics.py --html`: what was trained, the curve, and for each run its verdict,
warnings, planned and actual time, and samples."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from common.files import read_object
from scripts.runs.figures import svg
from scripts.runs.run import PLAN_FILE, Run, is_finite_number
from scripts.runs.words import UNITS, WORDS, amount
from trainer.report.metrics import duration
from trainer.report.warnings import verdict_sentences
from trainer.weights.paths import METRICS_SUFFIX

TEMPLATE = Path(__file__).parent / "page.html"
MAX_PROMPTS = 3  # shown per run
BAD_FINDINGS = ("no loss", "diverged", "nothing learned", "repeats")  # findings that the headline names


def are_stages(runs: list[Run]) -> bool:
    """Whether the runs are successive stages of one model, and not runs to compare."""
    stages = {run.settings.get("stage") for run in runs}
    sizes = {run.about.get("parameters") for run in runs}
    return len(stages) == len(runs) and len(sizes) == 1 and None not in sizes


def title(runs: list[Run], lang: str) -> str:
    """A sentence about what was trained, and about problems of the last run."""
    words = WORDS[lang]
    time = duration(sum(run.figures["seconds"] for run in runs), UNITS[lang])
    if not are_stages(runs):
        return words["compared"].format(count=len(runs), time=time)
    parts = [words["model"].format(parameters=amount(runs[0].about["parameters"], lang), time=time)]
    for run in runs:
        tokens = run.figures["tokens"]
        replayed = run.settings.get("replay_data_path")
        paths = ",".join(filter(None, [run.settings.get("data_path", ""), replayed])).split(",")
        data = ", ".join(Path(path).name for path in paths)
        text = words["read"].format(name=run.settings["save_weight"], tokens=f"{tokens:,.0f}", data=data)
        data_tokens = run.about.get("facts", {}).get("data_tokens")
        if data_tokens and not replayed:  # replayed data are read less often than the others
            text += words["passes"].format(passes=f"{tokens / data_tokens:.2g}")
        parts.append(text)
    return words["; "].join(parts + sentences(runs[-1], lang, BAD_FINDINGS))


def sentences(run: Run, lang: str, keys: tuple[str, ...] | None = None) -> list[str]:
    """The sentences of the verdict, all or those with these keys; empty if the run's settings file lacks the
    facts that they need."""
    if "facts" not in run.about:
        return []
    found = verdict_sentences(run.records, run.about["facts"])
    return [WORDS[lang][key].format(**values) for key, values in found if keys is None or key in keys]


def planned_seconds(run: Run) -> float | None:
    """The seconds that the plan in the run's folder (scripts/plan.py) expected. Like `seconds` in a record,
    they cover updates and evaluations. None without a plan."""
    seconds = read_object(run.path.parent / PLAN_FILE).get(run.path.name.removesuffix(METRICS_SUFFIX))
    return seconds if is_finite_number(seconds) else None


def compare_with_plan(run: Run, lang: str) -> str | None:
    """A line with planned and actual time; None without a plan."""
    planned = planned_seconds(run)
    if planned is None:
        return None
    planned, came = (duration(seconds, UNITS[lang]) for seconds in (planned, run.figures["seconds"]))
    return WORDS[lang]["plan"].format(planned=planned, came=came)


def unsure(run: Run, lang: str) -> str | None:
    """The held-out loss in words, as the number of equally likely tokens with this cross entropy (the
    perplexity, at most the vocabulary). None if it was not measured before the first update, and for other
    kinds of loss."""
    first, now = run.values.get("initial_eval_loss", [math.nan])[0], run.figures.get("eval_loss")
    words, facts = WORDS[lang], run.about.get("facts", {})
    guessing = facts.get("guessing")
    if math.isnan(first) or now is None or guessing is None:
        return None
    where = words["training text" if facts.get("held_out_is_training") else "held-out text"]
    everything = words["all"].format(count=number_of(guessing))
    if now >= guessing:
        return words["guesses"].format(where=where, count=number_of(guessing))
    before = everything if first >= guessing else words["some"].format(count=number_of(first))
    return words["unsure"].format(where=where, now=number_of(now), first=before)


def number_of(loss: float) -> str:
    """The number of equally likely tokens with this cross entropy, below ten with one decimal."""
    number = math.exp(loss)
    return f"{number:.1f}".removesuffix(".0") if number < 9.95 else f"{round(number):,}"


def first_and_last(answers: list[tuple[int, str]], last: int, words: dict[str, str]) -> list[tuple[str, str]]:
    """The first and the last answer to a prompt, with the updates at which they were written. last: the
    update of the last answer, which may be unchanged for a long time."""
    (first, text), *others = answers
    if not others and last > first:
        return [(words["unchanged"].format(first=first, last=last), text)]
    shown = [(first, text), *((last, text) for _, text in others[-1:])]
    return [(words["update at"].format(update=update), text) for update, text in shown]


def page(runs: dict[str, Run], table: list[list[str]], figure: Any, others: Any, lang: str) -> str:
    """The HTML page. figure: the main curve. others: all other curves."""
    from jinja2 import Template
    from markupsafe import Markup

    sections = []
    for name, run in runs.items():
        about = {key: value for key, value in run.about.items() if key != "facts"}
        section: dict[str, Any] = {"name": name, "verdict": WORDS[lang]["; "].join(sentences(run, lang))}
        section |= {"warnings": run.warnings, "outcome": compare_with_plan(run, lang)}
        section["unsure"] = unsure(run, lang)
        prompts = list((run.samples or run.rollout).items())[:MAX_PROMPTS]
        shown = {
            prompt: first_and_last(answers, run.answered_at[prompt], WORDS[lang])
            for prompt, answers in prompts
        }
        section |= {"samples": shown, "sampled": run.sampled}
        section |= {"wrong_answers": run.wrong_answers}
        sections.append(section | {"settings": run.settings, "others": about})
    text = TEMPLATE.read_text(encoding="utf-8")
    return Template(text, autoescape=True, trim_blocks=True, lstrip_blocks=True).render(
        lang=lang,
        words=WORDS[lang],
        title=title(list(runs.values()), lang),
        curve=Markup(svg(figure)),
        other_curves=Markup(svg(others)),
        sections=sections,
        table=table,
        dumps=partial(json.dumps, ensure_ascii=False),
    )
