"""Write the tables of docs/flags.md and docs/zh/flags.md anew, after a setting, its default or its help has
changed.

    python scripts/write_flag_pages.py

Flags, values, defaults and English meanings are those of the code; docs/zh/flags.yaml holds the Chinese
words. The text around the tables stays as it is in the pages. A test fails while a page is not what this
script writes.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
import yaml

from common.errors import UserError
from common.settings import METAVARS, ROOT, Setting, settings_of
from llm.training.core.config import SETTINGS, engine_parser
from scripts import benchmark
from trainer import (
    train_agent,
    train_distillation,
    train_dpo,
    train_full_sft,
    train_grpo,
    train_lora,
    train_ppo,
    train_pretrain,
)

# stages that learn from data
LEARNED = (train_pretrain, train_full_sft, train_lora, train_dpo, train_distillation)
STAGES = [settings_of(script.Args) for script in LEARNED]
OWN = {name: each for stage in STAGES for name, each in stage.items() if name not in STAGES[0]}
FLAGS = {**STAGES[0], **OWN}
# Of reinforcement learning in a table of their own: some have the names of others, some another default.
REWARDED = [settings_of(script.Args) for script in (train_grpo, train_agent, train_ppo)]
REWARDED_FLAGS = {
    name: each
    for stage in REWARDED
    for name, each in stage.items()
    if name not in STAGES[0] or each.default != STAGES[0][name].default
}
REWARDED_OWN = REWARDED_FLAGS.keys() - STAGES[0].keys()
TOOLS = ["scripts.chat", "scripts.evaluate", "scripts.convert_model", "scripts.serve_openai_api"]
TOOLS += ["scripts.train_tokenizer", "dataset.show_samples", "scripts.plan", "scripts.plot_metrics"]
TOOLS += ["scripts.verify_resume"]
OPTIONS = {a.dest: a.help or "" for a in engine_parser()._actions if a.dest not in ("help", *SETTINGS)}
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}  # the help tells of a multiple_of
PAGES = {"docs/flags.md": None, "docs/zh/flags.md": "docs/zh/flags.yaml"}  # with the file of their words


def value(setting: Setting) -> str:
    """What a setting takes: its choices, or its type and limits."""
    if setting.choices or setting.kind is bool:
        return ", ".join(f"`{choice}`" for choice in setting.choices or (0, 1))
    limits = [f"{LIMITS[name]} {limit}" for name, limit in setting.limits.items() if name in LIMITS]
    return f"{METAVARS.get(setting.kind, 'TEXT')} {', '.join(limits)}".rstrip() + ", `auto`" * setting.auto


def default(setting: Setting | None) -> str:
    """The default of a setting, a path as seen from the repository; empty where a stage has no such
    setting."""
    if setting is None:
        return ""
    text = str(int(setting.default) if isinstance(setting.default, bool) else setting.default)
    if text.startswith(f"{ROOT}/"):
        text = str(Path(text).relative_to(ROOT)) + "/" * (not Path(text).suffix)
    return "-" if text in ("None", "") else text.replace("e-0", "e-")


def tool_flags() -> Iterator[tuple[str, str, str, str, str]]:
    """Tool, flag, value, default and help of each flag of the tools; of the benchmark those that no stage
    has."""
    for tool in map(import_module, TOOLS):
        with (
            patch.object(Parser, "parse_args", autospec=True, side_effect=SystemExit) as parse,
            suppress(SystemExit),
        ):
            tool.main()
        for action in parse.call_args.args[0]._actions[1:]:  # without --help
            metavar, stated = str(action.metavar), action.default
            kind = (
                metavar if metavar in METAVARS.values() else METAVARS.get(cast("type", action.type), "TEXT")
            )
            choices = action.choices or (metavar[1:-1].split(",") if metavar[0] == "{" else ())
            stated = " ".join(stated) if isinstance(stated, list) else stated
            told = f"{action.help} (default: {'-' if stated in (None, '') else stated})".replace(
                f"{ROOT}/", ""
            )
            # the help's own comes first
            meaning, stated = re.findall(r"(.*?) \(default: (.*?)\)(?= |$)", told)[0]
            taken = ", ".join(f"`{choice}`" for choice in choices) or kind
            yield tool.__name__.rpartition(".")[2], action.dest, taken, stated, meaning
    for name, each in settings_of(benchmark.BenchmarkArgs).items():
        if name not in FLAGS:
            yield "benchmark", name, value(each), f"{default(each)} {each.unit}".strip(), each.help


def tool_table(words: dict[str, Any]) -> str:
    """The table of the tools' flags; one row for tools whose flag of a name is the same. Raises UserError if
    a flag has no meaning, or there is one of no flag."""
    rows: dict[tuple[str, ...], list[str]] = {}
    texts, used = words["tools"], set()
    for tool, name, taken, stated, told in tool_flags():
        key = f"{tool}.{name}" if f"{tool}.{name}" in texts else name
        is_setting = name in FLAGS and told == FLAGS[name].help
        used |= set() if is_setting else {key}
        meaning = words["meanings"][name] if is_setting else texts.get(key, "")
        flag = name if name == "metrics" else f"--{name}"
        rows.setdefault((f"`{flag}`", taken, words["defaults"].get(stated, stated), meaning), []).append(
            f"`{tool}`"
        )
    if wrong := sorted(used ^ texts.keys()):
        raise UserError(f"docs/zh/flags.yaml: tools, missing or of no flag: {', '.join(wrong)}")
    return table(
        words["tool columns"], [[flag, ", ".join(tools), *rest] for (flag, *rest), tools in rows.items()]
    )


def table(columns: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, ["---"] * len(columns), *rows))


def tables(words: dict[str, Any]) -> dict[str, str]:
    """The tables by their place in the page. `words`: columns, sections, units and meanings. Raises UserError
    if a setting has no meaning, or there is one of no setting."""
    meanings, units = words["meanings"], {"": "", **words["units"]}
    if wrong := sorted(meanings.keys() ^ {*FLAGS, *SETTINGS, *OPTIONS}):
        raise UserError(
            f"docs/zh/flags.yaml: meanings that are missing, or of no setting: {', '.join(wrong)}"
        )
    if wrong := sorted(words["reinforcement"].keys() ^ REWARDED_OWN):
        raise UserError(f"docs/zh/flags.yaml: reinforcement, missing or of no setting: {', '.join(wrong)}")
    stages = []
    for section in dict.fromkeys(each.section for each in FLAGS.values()):
        rows = []
        for name, each in [(name, each) for name, each in FLAGS.items() if each.section == section]:
            defaults = [default(stage.get(name)) for stage in STAGES]
            rows.append([f"`--{name}`", value(each), *defaults, units[each.unit], meanings[name]])
        stages.append(f"### {words['sections'][section]}\n\n" + table(words["stage columns"], rows))
    own = [[f"`--{name}`", "", "", "-", "", meanings[name]] for name in OPTIONS]
    own += [
        [f"`--{name}`", f"`{each.section}`", value(each), default(each), units[each.unit], meanings[name]]
        for name, each in SETTINGS.items()
        # weights: the task's
        if name not in FLAGS or (each.default != FLAGS[name].default and name != "save_weight")
    ]
    rewarded = []
    for name, each in REWARDED_FLAGS.items():
        defaults = [default(stage.get(name)) for stage in REWARDED]
        meaning = words["reinforcement"].get(name) or meanings[name]
        rewarded.append([f"`--{name}`", value(each), *defaults, units[each.unit], meaning])
    return {
        "stages": "\n".join(stages),
        "reinforcement": table(words["reinforcement columns"], rewarded),
        "engine": table(words["engine columns"], own),
        "tools": tool_table(words),
    }


def english() -> dict[str, Any]:
    """The words of the English page: those of the settings."""
    settings = {**FLAGS, **SETTINGS}
    rewarded = {name: REWARDED_FLAGS[name].help for name in REWARDED_OWN}
    own = [each for each in tool_flags() if each[1] not in FLAGS or each[-1] != FLAGS[each[1]].help]
    told = {f"{tool}.{name}": text for tool, name, *_, text in own}
    helps, rewarded, told = (
        {name: re.sub(r"--\w+( \d)?|<\w+>\w*", r"`\g<0>`", text) for name, text in texts.items()}
        for texts in ({name: each.help for name, each in settings.items()} | OPTIONS, rewarded, told)
    )
    return {
        "stage columns": [
            "flag",
            "value",
            "pretrain",
            "SFT",
            "LoRA",
            "DPO",
            "distillation",
            "unit",
            "meaning",
        ],
        "reinforcement columns": ["flag", "value", "GRPO", "agent", "PPO", "unit", "meaning"],
        "engine columns": ["flag", "section", "value", "default", "unit", "meaning"],
        "tool columns": ["flag", "tool", "value", "default", "meaning"],
        "sections": {each.section: each.section.capitalize() for each in settings.values()},
        "units": {each.unit: each.unit for each in (*settings.values(), *REWARDED_FLAGS.values())},
        "meanings": helps,
        "reinforcement": rewarded,
        "tools": told,
        "defaults": {},
    }


def rewritten(path: str) -> str:
    """A page with its tables as they must be, between the comments that mark their places."""
    page, source = (ROOT / path).read_text(encoding="utf-8"), PAGES[path]
    words = yaml.safe_load((ROOT / source).read_text(encoding="utf-8")) if source else english()
    for place, text in tables(words).items():
        begin, end = (
            f"<!-- {place}: written by scripts/write_flag_pages.py -->\n",
            f"<!-- end of {place} -->\n",
        )
        before, marked, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not marked or not closed:
            raise UserError(f"{path} lacks the line {begin.strip()} or {end.strip()}; put it back")
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def main() -> None:
    """Write both pages."""
    Parser(description=(__doc__ or "").split("\n", 1)[0]).parse_args()
    for path, text in {path: rewritten(path) for path in PAGES}.items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    with one_line_errors():
        main()
