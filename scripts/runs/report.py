"""The page that `plot_metrics.py --html` writes, to send to somebody: what was trained in a sentence, one
large curve, what the model wrote from first to last, the verdict, the plan against what came; then the table,
and folded away the other curves and the settings."""

import io
import json
from pathlib import Path
from typing import Any

from scripts.runs.run import FORECAST, Run
from trainer.report.metrics import duration

PAGE = Path(__file__).parent / "page.html"
WORDS = {
    "en": {
        "title": "A model of {parameters} parameters, trained on {tokens} tokens in {time}",
        "several": "{count} runs, {time} in all",
        "samples": "What the model writes, by update",
        "results": "Results",
        "curves": "more curves",
        "environment": "environment",
        "settings": "settings",
        "others": "starts, data and code",
        "unknown": "not known",
        "update": "update",
        "planned": "planned {planned}, took {took}",
        "expected": "held-out loss {low:.2f} to {high:.2f} expected, {came:.2f} came",
    },
    "zh": {
        "title": "一个 {parameters} 参数的模型，用 {time} 训练了 {tokens} 个 token",
        "several": "{count} 次训练，共 {time}",
        "samples": "模型写出的内容（按更新次数）",
        "results": "结果",
        "curves": "更多曲线",
        "environment": "环境",
        "settings": "设置",
        "others": "启动记录、数据与代码",
        "unknown": "未知",
        "update": "更新",
        "planned": "计划 {planned}，实际 {took}",
        "expected": "预计验证损失 {low:.2f} 到 {high:.2f}，实际 {came:.2f}",
    },
}


def amount(number: float) -> str:
    """A number of parameters or tokens as text for people."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def title(runs: list[Run], lang: str) -> str:
    """What was trained, in a sentence. Runs of one size count as the stages of one model."""
    words = WORDS[lang]
    time = duration(sum(run.figures["seconds"] for run in runs))
    sizes = {(run.about or {}).get("parameters", 0) for run in runs}
    if len(sizes) > 1 or not all(isinstance(size, int) and size > 0 for size in sizes):
        return words["several"].format(count=len(runs), time=time)
    tokens = amount(sum(run.figures["tokens"] for run in runs))
    return words["title"].format(parameters=amount(sizes.pop()), tokens=tokens, time=time)


def outcome(metrics: Path, run: Run, lang: str = "en") -> str | None:
    """A run beside what the plan in its folder (scripts/plan.py) had expected; None without one."""
    try:
        plans = json.loads((metrics.parent / FORECAST).read_bytes())
        plan = plans[metrics.name.removesuffix("_metrics.jsonl")]
        words = WORDS[lang]
        seconds = duration(float(plan["seconds"]))
        text = words["planned"].format(planned=seconds, took=duration(run.figures["seconds"]))
        if plan["eval_loss"] and "eval_loss" in run.figures:
            low, _, high = map(float, plan["eval_loss"])
            came = run.figures["eval_loss"]
            text += "; " + words["expected"].format(low=low, high=high, came=came)
        return text
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def svg(figure: Any) -> str:
    """A matplotlib figure as an SVG element whose text stays text."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


def page(
    runs: dict[Path, Run], rows: list[list[str]], colors: list[str], curve: Any, others: Any, lang: str
) -> str:
    """The page. rows: the table with its head. curve: the figure of the loss or reward. others: the figure of
    everything else, or None."""
    from jinja2 import Template
    from markupsafe import Markup

    lines = []
    for (path, run), cells in zip(runs.items(), rows[1:], strict=True):
        said = (run.about or {}).get("last_lines") or []
        lines += [(cells[0], str(line)) for line in said] if isinstance(said, list) else []
        if came := outcome(path, run, lang):
            lines.append((cells[0], came))
    every = list(runs.values())
    last = max(every, key=lambda run: bool(run.samples or run.rollout))
    template = Template(
        PAGE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return template.render(
        lang=lang,
        words=WORDS[lang],
        title=title(every, lang),
        lines=lines,
        shown=last.samples or last.rollout,
        head=rows[0],
        runs=[*zip(every, rows[1:], colors, strict=True)],
        curve=Markup(svg(curve)),
        other_curves=Markup(svg(others)) if others is not None else "",
        dumps=json.dumps,
    )
