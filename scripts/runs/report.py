"""The page that `plot_metrics.py --html` writes, to send to somebody: what was trained, the curve, and of
each run the verdict of its last line, its warnings, the plan against what came and what the model wrote."""

import json
from pathlib import Path
from typing import Any

from scripts.runs.figures import svg
from scripts.runs.run import AXES, ENDING, FORECAST, Run
from scripts.runs.words import WORDS
from trainer.report.metrics import duration
from trainer.report.warnings import findings

TEMPLATE = Path(__file__).parent / "page.html"
PROMPTS, MANY_RUNS = 3, 3  # prompts of a run that are shown; runs of which each is a row of the table
DEFAULT_FACTS = {"monitor": "eval_loss", "mode": "min", "guessing": None, "best_weights": "_best"}


def are_stages(runs: list[Run]) -> bool:
    """Whether the runs are stages of one model, one after the other, and not runs to compare."""
    stages = {run.settings.get("stage") for run in runs}
    sizes = {run.about.get("parameters") for run in runs}
    return len(stages) == len(runs) and len(sizes) == 1 and isinstance(sizes.pop(), int)


def started(run: Run) -> str:
    """When a run was started first, as sortable text."""
    try:
        return str(run.about["starts"][0]["time"])
    except (LookupError, TypeError):
        return ""


def title(runs: list[Run], lang: str) -> str:
    """What was trained, in a sentence."""
    words = WORDS[lang]
    total = {name: sum(run.figures[name] for run in runs) for name in AXES}
    time = duration(total["seconds"])
    if not are_stages(runs):
        return words["compared"].format(count=len(runs), time=time)
    size = f"{runs[0].about['parameters'] / 1e6:.2f}"
    tokens, updates = f"{total['tokens']:,.0f}", f"{total['update']:,.0f}"
    return words["stages"].format(parameters=size, tokens=tokens, updates=updates, time=time)


def verdict(run: Run, lang: str) -> str:
    """The sentences of the run's last line, from its records."""
    facts = run.about.get("facts")
    found = findings(run.records, DEFAULT_FACTS | (facts if isinstance(facts, dict) else {}))
    sentences = [WORDS[lang][key].format(**values) for key, values in found]
    return ("; " if lang == "en" else "；").join(sentences)


def outcomes(run: Run) -> dict[str, tuple[str, str]]:
    """A key of the words -> what the plan in the run's folder (scripts/plan.py) expected, and what came;
    empty without a plan. Both times are those of updates and evaluations, as `seconds` of a record."""
    try:
        plan = json.loads((run.path.parent / FORECAST).read_bytes())
        plan = plan[run.path.name.removesuffix(ENDING)]
        return {
            "time": (duration(float(plan["seconds"])), duration(run.figures["seconds"])),
            "tokens": (f"{float(plan['tokens']):,.0f}", f"{run.figures['tokens']:,.0f}"),
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def first_and_last(run: Run) -> dict[str, list[tuple[int, str]]]:
    """Of the first prompts the first answer and the last one."""
    chosen = list((run.samples or run.rollout).items())[:PROMPTS]
    return {prompt: answers[:1] + answers[1:][-1:] for prompt, answers in chosen}


def page(runs: list[Run], rows: list[list[str]], figure: Any, others: Any, lang: str) -> str:
    """The page. rows: the table with its head. figure, others: the curve, and everything else that is
    drawn."""
    from jinja2 import Template
    from markupsafe import Markup

    sections = []
    for run, row in zip(runs, rows[1:], strict=True):
        about = dict(run.about)
        about.pop("facts", None)
        section = {
            "name": row[0],
            "verdict": verdict(run, lang),
            "warnings": run.warnings,
            "outcomes": outcomes(run),
            "samples": first_and_last(run),
            "settings": run.settings,
            "environment": about.pop("environment", None),
            "others": about,
        }
        sections.append(section)
    template = Template(
        TEMPLATE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return template.render(
        lang=lang,
        words=WORDS[lang],
        title=title(runs, lang),
        curve=Markup(svg(figure)),
        other_curves=Markup(svg(others)),
        sections=sections,
        table=rows if len(runs) > MANY_RUNS else list(zip(*rows, strict=True)),
        dumps=json.dumps,
    )
