"""The page that `plot_metrics.py --html` writes, to send to somebody: what was trained in a sentence, one
large curve, what the model wrote from first to last, the verdict, the plan against what came; then the table,
and folded away the other curves and the settings. Its words are in words.py."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from scripts.runs.figures import draw_large, run_colors, svg
from scripts.runs.run import ENDING, FORECAST, Run
from scripts.runs.words import WORDS, amount, long_time
from trainer.report.metrics import duration
from trainer.report.warnings import findings

PAGE = Path(__file__).parent / "page.html"
PROMPTS, MANY_RUNS = 3, 3  # prompts beside the curve; runs of which each is a row of the table
DEFAULT_FACTS = {"monitor": "eval_loss", "mode": "min", "guessing": None, "best_weights": "_best"}


class Outcome(NamedTuple):
    """A figure as it was planned and as it came."""

    name: str  # a key of the words
    planned: str
    came: str


def are_stages(runs: list[Run]) -> bool:
    """Whether the runs are stages of one model, one after the other, and not runs to compare."""
    sizes = {(run.about or {}).get("parameters") for run in runs}
    return len(sizes) == 1 and len({run.settings.get("stage") for run in runs}) == len(runs)


def started(run: Run) -> str:
    """When a run was started first, as sortable text."""
    try:
        return str((run.about or {})["starts"][0]["time"])
    except (LookupError, TypeError):
        return ""


def bytes_read(run: Run) -> float:
    """About how much text a run has read; NaN where its evaluations do not tell how long its tokens are."""
    last = next((record for record in reversed(run.records) if record.get("eval_bpb")), None)
    if last is None or not last.get("eval_loss"):
        return math.nan
    return run.figures["tokens"] * last["eval_loss"] / math.log(2) / last["eval_bpb"]


def title(runs: list[Run], lang: str) -> str:
    """What was trained, in a sentence."""
    words = WORDS[lang]
    time = long_time(sum(run.figures["seconds"] for run in runs), lang)
    size = (runs[0].about or {}).get("parameters")
    model = words["a model"]
    if isinstance(size, (int, float)):
        model = words["a model of"].format(parameters=amount(size, lang))
    if not are_stages(runs):
        return words["compared"].format(count=len(runs), time=time)
    if any("reward" in run.figures for run in runs):
        updates = sum(run.figures["update"] for run in runs)
        return words["practised"].format(model=model, updates=f"{updates:,.0f}", time=time)
    text = sum(bytes_read(run) for run in runs)
    if math.isnan(text):
        tokens = amount(sum(run.figures["tokens"] for run in runs), lang)
        return words["read tokens"].format(model=model, tokens=tokens, time=time)
    size_of_text = f"{text / 1e9:.2g} GB" if text >= 1e9 else f"{text / 1e6:.2g} MB"
    return words["read"].format(model=model, text=size_of_text, time=time)


def verdict(run: Run, lang: str) -> list[str]:
    """What came of a run, in the sentences of its last line; of a language model also how sure it is."""
    facts = DEFAULT_FACTS | run_facts(run)
    found = findings(run.records, facts)
    sentences = [WORDS[lang][key].format(**values) for key, values in found]
    loss = run.figures.get("eval_loss", math.inf)
    if facts["guessing"] is not None and loss < 20:
        count = math.exp(loss)
        text = f"{count:,.1f}" if count < 10 else f"{count:,.0f}"
        sentences.append(WORDS[lang]["choices"].format(count=text))
    return sentences


def run_facts(run: Run) -> dict[str, Any]:
    """What a run says of itself beside its records; empty if it does not, or the file is damaged."""
    facts = (run.about or {}).get("facts")
    return facts if isinstance(facts, dict) else {}


def outcomes(run: Run) -> list[Outcome]:
    """A run beside what the plan in its folder (scripts/plan.py) had expected; empty without one."""
    try:
        plan = json.loads((run.path.parent / FORECAST).read_bytes())
        plan = plan[run.path.name.removesuffix(ENDING)]
        figures = run.figures
        compared = [
            Outcome("time", duration(float(plan["seconds"])), duration(figures["seconds"])),
            Outcome("tokens", f"{float(plan['tokens']):,.0f}", f"{figures['tokens']:,.0f}"),
        ]
        if plan["eval_loss"] and "eval_loss" in figures:
            low, _, high = map(float, plan["eval_loss"])
            compared.append(Outcome("eval_loss", f"{low:.2f} – {high:.2f}", f"{figures['eval_loss']:.2f}"))
        return compared
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def outcome(run: Run) -> str | None:
    """The same as a line for the console; None without a plan."""
    words, parts = WORDS["en"], []
    for figure in outcomes(run):
        parts.append(f"{words[figure.name]} {figure.came} (planned {figure.planned})")
    return ", ".join(parts) or None


def first_and_last(samples: dict[str, list[tuple[int, str]]]) -> dict[str, list[tuple[int, str]]]:
    """Of the first prompts the first answer and the last one."""
    chosen = list(samples.items())[:PROMPTS]
    return {prompt: answers[:1] + answers[1:][-1:] for prompt, answers in chosen}


def short_path(cell: str) -> str:
    """A cell of the table; of paths the last part."""
    return ",".join(Path(part).name or part for part in cell.split(",")) if "/" in cell else cell


def page(runs: list[Run], rows: list[list[str]], field: str, x: str, others: Any, lang: str) -> str:
    """The page. rows: the table with its head. field: what the large curve shows. others: the figure of
    everything else."""
    from jinja2 import Template
    from markupsafe import Markup

    words, colors = WORDS[lang], run_colors(len(runs))
    labels = [words[x], words.get(f"{field} axis", field)]
    curve = draw_large(runs, x, field, labels, in_a_row=are_stages(runs))
    # of stages the last one, of runs to compare the best, which is the first
    by_interest = runs[::-1] if are_stages(runs) else runs
    with_samples = [run for run in by_interest if run.samples or run.rollout] or by_interest
    run_with_samples = with_samples[0]
    shown = run_with_samples.samples or run_with_samples.rollout
    table = [[words.get(cell, cell) for cell in rows[0]]]
    table += [[row[0], *map(short_path, row[1:])] for row in rows[1:]]
    template = Template(
        PAGE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return template.render(
        lang=lang,
        words=words,
        title=title(runs, lang),
        shown=first_and_last(shown),
        samples_of_run=run_with_samples,
        table=table if len(runs) > MANY_RUNS else list(zip(*table, strict=True)),
        is_turned=len(runs) <= MANY_RUNS,
        names=[row[0] for row in rows[1:]],
        runs=list(zip(runs, rows[1:], colors, strict=True)),
        verdicts=[verdict(run, lang) for run in runs],
        outcomes=[outcomes(run) for run in runs],
        curve=Markup(svg(curve)) if curve else "",
        has_held_out=any(f"eval_{field}" in record for run in runs for record in run.records),
        other_curves=Markup(svg(others)),
        dumps=json.dumps,
    )
