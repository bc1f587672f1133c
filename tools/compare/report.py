"""The result of a comparison: result.json, a table, curves, and a line in the log of all comparisons."""

import json
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from common.errors import say
from common.files import atomic_write, write_json
from scripts.text_table import text_table
from tools.compare.code import copied_files, differing_files
from tools.compare.curves import draw_spread
from tools.compare.effect import Effect, effect, read_curve
from tools.compare.paired import Difference, compare_all, spread_of
from tools.compare.runs import figure, metrics_of
from tools.compare.variant import Variant, letter_of

SMALL = 0.02  # differences below this share of the figure show how much small differences spread


def write_report(
    folder: Path, variants: list[Variant], pairs: list[list[Any]], about: dict[str, Any]
) -> None:
    """Write the files of a finished comparison and a line in log.md beside its folder. Print the table and
    the sentences.

    result.json is a function of settings, code and data, so it is the same however often the comparison was
    killed. Times are in table.txt and in the figures.json of each run.

    about: `metric`, `mode` (min or max), `unit` (updates or time, of which all runs have as many), and
    `looks`, the numbers of pairs at which the result was seen before.
    """
    metric, letters = about["metric"], [letter_of(i) for i in range(len(variants))]
    figures = [[figure(run, metric) for run in pair] for pair in pairs]
    level = abs(mean(pair[0] for pair in figures)) or 1.0
    differences = [[pair[i] - pair[0] for pair in figures] for i in range(1, len(variants))]
    paths = [
        [metrics_of(folder / "runs" / f"{pair + 1}_{letter}") for letter in letters]
        for pair in range(len(pairs))
    ]
    curves = [[read_curve(path, metric) for path in of_pair] for of_pair in paths]
    results = {}
    for i, result in enumerate(compare_all(differences)):
        sentence = describe(result, differences[i], level, about)
        compute = effect([(of_pair[0], of_pair[i + 1]) for of_pair in curves], about["mode"], result.level)
        if compute and result.is_significant:
            sentence += f"; {describe_effect(compute, about)}"
        values = result._asdict() | {"differences": differences[i], "sentence": sentence}
        values["effect"] = compute and compute._asdict()
        results[letters[i + 1]] = {"variant": variants[i + 1].name} | values
    code, of_last = variants[0].code, variants[-1].code
    edited = differing_files(code, of_last, copied_files(code))
    settings = json.loads((folder / "settings.json").read_text())
    content = {"settings": settings} | about | {"pairs": len(pairs), "edited": edited, "results": results}
    # large differences spread more, so they do not show how small a difference can be found
    small = [values for values in differences if abs(mean(values)) < SMALL * level]
    content["spread"] = median(map(spread_of, small)) / level if small else 0.0
    content["runs"] = {letter: [pair[i]["figures"] for pair in pairs] for i, letter in enumerate(letters)}
    write_json(folder / "result.json", content)

    metrics_files = {
        f"{letter} {variant.name}": list(of_variant)
        for letter, variant, of_variant in zip(letters, variants, zip(*paths, strict=True), strict=True)
    }
    draw_spread(metrics_files, metric).savefig(folder / "curves.png", dpi=150)

    sentences = [f'{letter} "{each["variant"]}": {each["sentence"]}' for letter, each in results.items()]
    if edited:
        sentences.append(f"edited: {', '.join(edited)}")
    text = text_table(table(variants, pairs, metric)) + "\n\n" + text_table(pair_table(letters, figures))
    text += "\n\n" + "\n".join(sentences) + "\n"
    atomic_write(folder / "table.txt", lambda file: file.write(text.encode()))
    say(text.rstrip())
    log = folder.parent / "log.md"
    line = f"**{folder.name}**, {len(pairs)} pairs: {'; '.join(sentences)}\n"
    if not log.exists() or line not in log.read_text(encoding="utf-8"):
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"- {time.strftime('%Y-%m-%d %H:%M')} {line}")
    say(f"wrote {folder}/result.json, table.txt, curves.png, and a line in {log}")


def describe(result: Difference, differences: list[float], level: float, about: dict[str, Any]) -> str:
    """The result in a sentence. level: the figure of which differences are given as percentages."""
    if not any(differences):
        return f"nothing changed: {about['metric']} is bitwise identical in all pairs"
    sign = 1 if about["mode"] == "max" else -1
    wins = sum(sign * value > 0 for value in differences)
    low, high = 100 * result.low / level, 100 * result.high / level
    text = f"{about['metric']} {100 * result.mean / level:+.3g} %, {100 * result.level:.3g} % interval "
    text += f"[{low:+.3g}, {high:+.3g}], better in {wins} of {len(differences)} pairs"
    if result.step:
        step = 100 * result.step / level
        text += f"; equal differences: the figure has steps of {step:.2g} %, which widen the interval"
    if about["looks"]:
        seen = ", ".join(map(str, about["looks"]))
        text += f"; the result was already seen with {seen} pairs, so the interval is too narrow"
    if result.is_significant:
        return f"{'better' if sign * result.mean > 0 else 'worse'}: {text}"
    return f"no difference above {max(-low, high):.2g} % can be seen: {text}"


def describe_effect(compute: Effect, about: dict[str, Any]) -> str:
    """The effect in a part of a sentence."""
    text = f"for the same {about['metric']} it needs {compute.ratio:.3g} of A's {about['unit']}"
    return f"{text} [{compute.low:.3g}, {compute.high:.3g}]"


def table(variants: list[Variant], pairs: list[list[Any]], metric: str) -> list[list[str]]:
    """A row for each variant with the means over its runs. Seconds are those of training, without
    evaluations."""
    rows = [["variant", metric, "eval_bpb", "tokens", "updates", "s/update", "CPU s/update", "memory MB"]]
    for i, variant in enumerate(variants):
        figures, times = [pair[i]["figures"] for pair in pairs], [pair[i]["times"] for pair in pairs]
        columns = {
            metric: [of_run[metric] for of_run in figures],
            "eval_bpb": [of_run["eval_bpb"] for of_run in figures if of_run.get("eval_bpb")],
            "tokens": [of_run["tokens"] for of_run in figures],
            "updates": [of_run["updates"] for of_run in figures],
            "s/update": [
                time["training_seconds"] / of_run["updates"]
                for time, of_run in zip(times, figures, strict=True)
            ],
            "CPU s/update": [time["cpu_per_update"] for time in times if "cpu_per_update" in time],
            "memory MB": [time["memory_mb"] for time in times],
        }
        means = [mean(columns[name]) if columns[name] else None for name in rows[0][1:]]
        cells = ["-" if value is None else short(value) for value in means]
        rows.append([f"{letter_of(i)} {variant.name}", *cells])
    return rows


def pair_table(letters: list[str], figures: list[list[float]]) -> list[list[str]]:
    """A row for each pair with the figure of each variant and the differences from the first variant."""
    rows = [["pair", *letters, *(f"{letter} - A" for letter in letters[1:])]]
    for number, pair in enumerate(figures, 1):
        differences = [f"{value - pair[0]:+.4f}" for value in pair[1:]]
        rows.append([str(number), *(f"{value:.4f}" for value in pair), *differences])
    return rows


def short(value: float) -> str:
    """A number as text, for the table."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
