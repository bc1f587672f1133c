"""The manual stays true: folder tree, flag tables, commands, snippets, links and help texts against the code
itself."""

import argparse
import ast
import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser
from transformers import AutoModelForCausalLM

from common.config_sources import parse_args
from common.errors import UserError
from common.settings import Setting, aliases_of, settings_of
from dataset.formats import to_chat, to_text
from dataset.token_cache import load_tokenizer
from llm.training.core.callbacks import HOOKS
from llm.training.core.config import SETTINGS, Config
from llm.training.tasks.base_task import TrainingTask
from llm.training.train import AVAILABLE_TASKS
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.benchmark import BenchmarkArgs
from scripts.convert_model import convert
from tests.conftest import ROOT
from tests.stage_process import run
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
from trainer.run.state import Hooks, TrainState
from trainer.weights.files import half_state_dict

FRONT = ("README.md", "README_zh.md")
ENGLISH_ONLY = {f"dev/{name}.md" for name in ("ARCHITECTURE", "DATA_TRIED", "DESCRIBED", "LOG")}
SUBJECTS = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
PAIRS = [FRONT, ("CONTRIBUTING.md", "CONTRIBUTING_zh.md")]  # a page in English, in Chinese
PAIRS += [(f"docs/{name}", f"docs/zh/{name}") for name in SUBJECTS]
MANUALS = [*zip(*PAIRS, strict=True)]  # all pages in English, all in Chinese
DOCS = (*MANUALS[0], *MANUALS[1], *sorted(f"docs/{name}" for name in ENGLISH_ONLY))
DOCS += ("CHANGELOG.md", "model/README.md")
SECTIONS = {  # headings that the tests below look for: page, English, Chinese
    "flags": ("flags.md", "The stage scripts", "阶段脚本"),
    "engine flags": ("flags.md", "The engine", "引擎"),
    "rewarded flags": ("flags.md", "Reinforcement learning", "强化学习"),
    "tool flags": ("flags.md", "The tools", "工具"),
    "time": ("files.md", "Time and memory", "时间与内存"),
    "metrics": ("files.md", "Metrics", "指标"),
}
LANGUAGES = ("docs", "docs/zh")
MADE = {"out/", "checkpoints/"}  # by the runs
# whose files are looked for by name
FOLDERS = r"\.ci|\.github|common|dataset|docs|llm|model|scripts|tests|trainer"
ENDINGS = "py|sh|md|json|jinja|yaml|yml|png"
GENERATED = re.compile(r"^(out|checkpoints|swanlog|dataset/(cache|demo))/")
# what --data_path names by default
USERS_OWN = {"dataset/pretrain_t2t_mini.jsonl", "dataset/sft_t2t_mini.jsonl"}
# Scripts with a command line of their own: path -> module to run with -m, if it must be started that way.
SCRIPTS = {
    "trainer/train_pretrain.py": None,
    "trainer/train_full_sft.py": None,
    "trainer/train_lora.py": None,
    "trainer/train_dpo.py": None,
    "trainer/train_distillation.py": None,
    "trainer/train_grpo.py": None,
    "trainer/train_agent.py": None,
    "trainer/train_ppo.py": None,
    "scripts/chat.py": None,
    "scripts/benchmark.py": None,
    "scripts/convert_model.py": None,
    "scripts/demo_report.py": None,
    "scripts/evaluate.py": None,
    "scripts/plan.py": None,
    "scripts/plot_metrics.py": None,
    "scripts/serve_openai_api.py": None,
    "tests/scripts/serve/hostile.py": None,
    "tools/bench/decoding.py": None,
    "scripts/train_tokenizer.py": None,
    "scripts/verify_resume.py": None,
    "scripts/write_flag_pages.py": None,
    "dataset/show_samples.py": "dataset.show_samples",
    "dataset/demo_corpus.py": "dataset.demo_corpus",
    "llm/training/train.py": "llm.training.train",
}
ENGINE = "llm/training/train.py"
STAGES = tuple(
    script.Args for script in (train_pretrain, train_full_sft, train_lora, train_dpo, train_distillation)
)
# Scripts whose flags are settings: their values are converted and checked when the whole line has been read.
ARGS: dict[str, type] = {f"trainer/{args.__module__.split('.')[1]}.py": args for args in STAGES}
REWARDED = {
    f"trainer/train_{name}.py": script.Args for name, script in (("grpo", train_grpo), ("agent", train_agent))
}
REWARDED |= {"trainer/train_ppo.py": train_ppo.Args}
ARGS |= REWARDED | {"scripts/benchmark.py": BenchmarkArgs}


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def section(folder: str, name: str) -> str:
    """The text below one heading of a page of `docs` or `docs/zh`, up to the next heading of its level or
    above."""
    page, *headings = SECTIONS[name]
    heading, path = headings[folder == "docs/zh"], f"{folder}/{page}"
    text = re.sub(r"```.*?```", lambda block: block[0].replace("\n#", "\n\0"), read(path), flags=re.S)
    found = re.search(rf"^(#+) {re.escape(heading)}$\n", text, flags=re.M)
    assert found, f"{path} has no heading '{heading}'"
    below = re.split(rf"^#{{1,{len(found[1])}}} ", text[found.end() :], maxsplit=1, flags=re.M)[0]
    return below.replace("\n\0", "\n#")


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows in a text, without the header and ruler lines."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    rulers = {i for i, cells in enumerate(lines) if set("".join(cells)) <= {"-", ":"}}
    return [cells for i, cells in enumerate(lines) if i not in rulers and i + 1 not in rulers]


def fenced(path: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(path), flags=re.M | re.S)


# --- files
# ---------------------------------------------------------------------------------------------------------


def tracked_files() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of files to compare with")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def folder_tree(page: str) -> dict[str, str]:
    """Folders and files of the tree on a front page, with what is said of them."""
    (block,) = [block for block in fenced(page, "text") if "trainer/" in block]
    tree, parent = {}, ""
    for line in block.splitlines():
        name, said = re.fullmatch(r" *(\S+) +(.*)", line).groups()
        path = parent + name if line[0] == " " else name
        parent = parent if line[0] == " " else name
        tree[path] = said
    return tree


@pytest.mark.parametrize("page", FRONT)
def test_the_folder_tree_is_the_repository(page):
    tree = folder_tree(page)
    missing = [name for name in tree if not (ROOT / name).exists() and name not in MADE]
    assert not missing, f"{page} lists what is not there: {missing}"
    for folder, said in tree.items():
        gone = [
            name for name in re.findall(r"[\w./]+\.(?:py|sh)", said) if not (ROOT / folder / name).is_file()
        ]
        assert not gone, f"{page} names {gone} in {folder}"
    folders = {
        name.split("/")[0] + "/" for name in tracked_files() if "/" in name and not name.startswith(".")
    }
    listed = {name.split("/")[0] + "/" for name in tree}
    assert folders <= listed, f"{page} leaves out {folders - listed}"


def test_front_pages_are_short_and_every_page_is_there_in_both_languages():
    assert [page for page in FRONT if len(read(page).splitlines()) > 200] == []
    assert {path.name for path in (ROOT / "docs/zh").glob("*.md")} == set(SUBJECTS)
    for page, folder in zip(FRONT, LANGUAGES, strict=True):
        left_out = [name for name in SUBJECTS if f"]({folder}/{name})" not in read(page)]
        left_out += [name for name in ENGLISH_ONLY if f"](docs/{name})" not in read(page)]
        assert not left_out, f"{page} does not lead to {left_out}"


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_a_page_has_the_same_form_in_both_languages(english, chinese):
    forms = []
    for page, other in ((english, chinese), (chinese, english)):
        link = f"]({os.path.relpath(other, Path(page).parent)})"
        assert link in read(page).split("\n")[2], f"{page} does not begin with a link to {other}"
        text = re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S)
        forms.append(
            (re.findall(r"^#+(?= )", text, flags=re.M), len(rows(text)), len(re.findall(r"!\[", text)))
        )
        long = [line for line in text.splitlines() if len(line) > 160 and line[0] != "|"]
        assert not long, f"{page} has lines that are too long: {long}"
    assert forms[0] == forms[1]


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_a_page_has_the_same_figures_in_both_languages(english, chinese):
    """Where a sentence is missing, its figure often is."""
    texts = [
        re.sub(r"^```.*?^```$|`[^`\n]+`|\]\([^)]*\)", " ", read(page), flags=re.M | re.S)
        for page in (english, chinese)
    ]
    figures = [set(re.findall(r"\d[\d,.]*\d", text)) for text in texts]
    assert figures[0] == figures[1]


def test_the_chinese_pages_use_the_words_of_the_glossary():
    avoided = [word for row in rows(read("CONTRIBUTING_zh.md")) for word in row[2].split("、") if word]
    assert len(avoided) >= 12
    for page in (*MANUALS[1], "docs/zh/flags.yaml"):
        found = [word for word in avoided if word in read(page)] if page != "CONTRIBUTING_zh.md" else []
        assert not found, f"{page} says {found}; the table of CONTRIBUTING_zh.md has the words to use"


def test_every_entry_of_the_log_has_a_date_and_a_commit():
    entries = re.split(r"^## ", read("docs/dev/LOG.md"), flags=re.M)[1:]
    dated = re.compile(r".*\n\n\*\d{4}-\d\d-\d\d, commit [0-9a-f]{7}\*\n")
    undated = [entry.splitlines()[0] for entry in entries if not dated.match(entry)]
    assert len(entries) >= 20 and not undated


def test_the_workflow_runs_the_tests_command():
    steps = yaml.safe_load(read(".github/workflows/test.yml"))["jobs"]["test"]["steps"]
    assert "bash scripts/test.sh" in [step.get("run") for step in steps]


def slugs(path: str) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", read(path), flags=re.M | re.S)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, flags=re.M)}


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", DOCS)
def test_links_and_paths_in_the_text_exist(page):
    text = read(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in slugs(str(path.resolve().relative_to(ROOT))), (
            f"{page} links to {target}"
        )
    # there: `old` is `new`
    present = re.sub(r"`[^`]+` is (?=`)", "", text) if page == "CHANGELOG.md" else text
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*\.(?:{ENDINGS}))`", present)
    gone = [name for name in named if not GENERATED.match(name) and not (ROOT / name).exists()]
    gone = [name for name in gone if name not in USERS_OWN]
    assert not gone, f"{page} names {gone}"


# --- flags
# ---------------------------------------------------------------------------------------------------------


def written_default(cell: str, setting: Setting) -> object:
    """A default as the table writes it, in the type of the setting."""
    if cell == "-":
        return "" if setting.kind is str else None
    if setting.kind in (bool, int, float):
        return {bool: int, int: int, float: float}[setting.kind](cell)
    return str(ROOT / cell) if "/" in cell else cell


def check_row(where: str, cells: list[str], setting: Setting) -> None:
    """What stands beside the defaults: the values, the unit and a meaning."""
    values, unit, meaning = cells
    if choices := setting.choices or ("01" if setting.kind is bool else ""):
        assert values == ", ".join(f"`{choice}`" for choice in choices), where
    else:
        assert values.endswith(", `auto`") == setting.auto, where
        kind, *limits = values.removesuffix(", `auto`").replace(",", "").split()
        assert kind == {int: "INT", float: "FLOAT"}.get(setting.kind, "TEXT"), where
        names = {"≥": "ge", ">": "gt", "≤": "le", "<": "lt"}
        told = {names[sign]: json.loads(limit) for sign, limit in zip(limits[::2], limits[1::2], strict=True)}
        assert told == {name: limit for name, limit in setting.limits.items() if name != "multiple_of"}, where
    assert bool(unit) == bool(setting.unit) and meaning, where


@pytest.mark.parametrize("folder", LANGUAGES)
def test_the_flag_table_is_that_of_the_stages(folder):
    table = {row[0].strip("`-"): row[1:] for row in rows(section(folder, "flags"))}
    for column, args in enumerate(STAGES):
        parser = parser_of(f"trainer/{args.__module__.split('.')[1]}.py")[0]
        others = {"help", "config", "print_config", *aliases_of(args)}  # the engine's table has them
        flags = {action.option_strings[-1] for action in parser._actions if action.dest not in others}
        told = {f"--{name}" for name, row in table.items() if row[1 + column]}
        assert told == flags
        for name, setting in settings_of(args).items():
            values, *defaults, unit, meaning = table[name]
            assert written_default(defaults[column], setting) == setting.default, f"{folder}: {name}"
            check_row(f"{folder}: {name}", [values, unit, meaning], setting)
            assert folder != "docs" or meaning.replace("`", "") == setting.help


@pytest.mark.parametrize("folder", LANGUAGES)
def test_the_flag_table_of_reinforcement_learning_is_its_settings(folder):
    table = {row[0].strip("`-"): row[1:] for row in rows(section(folder, "rewarded flags"))}
    texts = yaml.safe_load(read("docs/zh/flags.yaml"))["reinforcement"]
    pretrain = settings_of(STAGES[0])
    for column, args in enumerate(REWARDED.values()):
        own = {
            name: each for name, each in settings_of(args).items() if name in table or name not in pretrain
        }
        assert {name for name, row in table.items() if row[1 + column]} == own.keys()
        unlisted = settings_of(args).keys() - own.keys()
        assert [name for name in unlisted if settings_of(args)[name].default != pretrain[name].default] == []
        for name, setting in own.items():
            values, *defaults, unit, meaning = table[name]
            assert written_default(defaults[column], setting) == setting.default, f"{folder}: {name}"
            check_row(f"{folder}: {name}", [values, unit, meaning], setting)
            english = folder == "docs"
            assert (
                meaning.replace("`", "") == setting.help
                if english
                else name in pretrain or meaning == texts[name]
            )


@pytest.mark.parametrize("folder", LANGUAGES)
def test_the_tools_flag_table_is_that_of_their_parsers(folder):
    table = [[cell.replace("`", "") for cell in row] for row in rows(section(folder, "tool flags"))]
    tools = {tool for row in table for tool in row[1].split(", ")}
    assert len(tools) == 10
    for tool in tools:
        script = f"dataset/{tool}.py" if tool == "show_samples" else f"scripts/{tool}.py"
        listed = {
            name: (default, meaning)
            for name, named, _, default, meaning in table
            if tool in named.split(", ")
        }
        actions = {
            "--" * bool(each.option_strings) + each.dest: each for each in parser_of(script)[0]._actions
        }
        if tool == "benchmark":
            assert listed.keys() == {
                f"--{name}" for name in settings_of(BenchmarkArgs).keys() - settings_of(STAGES[0])
            }
            continue
        assert listed.keys() == actions.keys() - {"--help"}
        for name, (default, meaning) in listed.items():
            action = actions[name]
            assert not isinstance(action.default, int | float) or default == str(action.default), (
                f"{tool} {name}"
            )
            assert bool(re.search("[一-鿿]", meaning)) == (folder != "docs"), f"{tool} {name}"


@pytest.mark.parametrize("folder", LANGUAGES)
def test_the_engines_flag_table_is_its_settings(folder):
    """Its own ones, and those that have another default where neither task nor user gives one."""
    table = {row[0].strip("`-"): row[1:] for row in rows(section(folder, "engine flags"))}
    pretrain = settings_of(STAGES[0])
    again = {name for name, setting in pretrain.items() if SETTINGS[name].default != setting.default} - {
        "save_weight"
    }
    options = ["config", "print_config", "top_k", "set"]
    assert list(table)[: len(options)] == options
    assert list(table)[len(options) :] == [name for name in SETTINGS if name not in pretrain or name in again]
    for name, (in_section, values, default, unit, meaning) in list(table.items())[len(options) :]:
        setting = SETTINGS[name]
        assert in_section == f"`{setting.section}`"
        assert written_default(default, setting) == setting.default, f"{folder}: {name}"
        check_row(f"{folder}: {name}", [values, unit, meaning], setting)
        assert folder != "docs" or meaning.replace("`", "") == setting.help
    assert all(table[name][-1] for name in options)


def test_the_chinese_help_texts_are_complete_and_those_of_the_tables():
    texts = yaml.safe_load(read("docs/zh/flags.yaml"))["meanings"]
    scripts = [script for script in (*ARGS, ENGINE) if script.startswith(("trainer/", "llm/"))]
    parsers = [parser_of(script)[0] for script in scripts if script not in REWARDED]
    flags = {action.option_strings[-1] for parser in parsers for action in parser._actions} - {"--help"}
    others = {f"--{alias}" for args in STAGES for alias in aliases_of(args)} - {"--top_k"}
    assert {f"--{name}" for name in texts} == flags - others
    assert all(re.search("[一-鿿]", text) and "\n" not in text for text in texts.values())
    for name in ("flags", "engine flags"):
        for row in rows(section("docs/zh", name)):
            assert row[-1] == texts[row[0].strip("`-")], row[0]


@functools.cache
def parser_of(script: str) -> tuple[argparse.ArgumentParser, str]:
    """Run a script with --help, as `python` would, in this process; returns its parser and what it printed.

    It must exit with 0.
    """
    seen = []
    original = argparse.ArgumentParser.print_help

    def print_help(parser, file=None):
        seen.append(parser)
        original(parser, file)

    stdout = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stdout):
        patch.setattr(argparse.ArgumentParser, "print_help", print_help)
        patch.setattr(sys, "argv", [str(ROOT / script), "--help"])
        patch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as left:
            if module := SCRIPTS[script]:
                # runpy warns of a module that is imported already
                patch.delitem(sys.modules, module, raising=False)
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not left.value.code, f"{script} --help exits with {left.value.code}"
    return seen[0], stdout.getvalue()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_tells_the_meaning_and_default_of_every_flag(script):
    parser, text = parser_of(script)
    flat = " ".join(text.split())
    for action in parser._actions:
        if action.dest == "help":
            continue
        name, told = (action.option_strings or [action.dest])[-1], action.help or ""
        assert name in flat and told.strip(), f"{script} {name} says nothing of its meaning"
        default = parser.get_default(action.dest)
        if default is argparse.SUPPRESS:  # the settings' own default is told instead
            rows = settings_of(ARGS[script]) if script in ARGS else SETTINGS
            default = rows[action.dest].default if action.dest in rows else None  # another name of a setting
        if default not in (None, "") and not action.required:
            by_formatter = isinstance(parser._get_formatter(), argparse.ArgumentDefaultsHelpFormatter)
            assert by_formatter or "default" in told, f"{script} {name} does not tell its default"


# --- commands
# ------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[tuple[Path, dict[str, str], list[str]]]:
    """Commands of a shell block as (folder it runs in, variables set in front, words)."""
    found, folder = [], ROOT
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for part in split_at(words, {"&&", "||", "|", ";"}):
            variables = {}
            while part and re.match(r"^[A-Z_]+=", part[0]):
                name, _, variables[name] = part.pop(0).partition("=")
            if part[:1] == ["srun"]:
                part = part[1:]
            if part[:1] == ["cd"] and not part[1].startswith("$"):
                folder = (folder / part[1]).resolve()
            elif part:
                found.append((folder, variables, part))
    return found


def split_at(words: list[str], separators: set[str]) -> list[list[str]]:
    parts = [[]]
    for word in words:
        if word in separators:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def python_words(words: list[str]) -> list[str]:
    """Script (or -m module) and its arguments of a python or torchrun command; torchrun's own flags are
    checked."""
    if words[0] == "python":
        return words[1:]
    args = get_args_parser().parse_args(words[1:])
    return (["-m"] if args.module else []) + [args.training_script, *args.training_script_args]


def check_engine(folder: Path, variables: dict, given: list[str], where: str) -> None:
    """A command of the engine: its settings, those of a YAML file and of the environment."""

    def find_task(name: str) -> type:
        if ":" in name:  # a task of the page itself
            assert f"class {name.partition(':')[2]}(TrainingTask)" in read(where), (
                f"{where} does not show {name}"
            )
            return TrainingTask
        assert name in AVAILABLE_TASKS, f"{where}: there is no task {name}"
        return AVAILABLE_TASKS[name]

    given = [word for word in given if word != "--print_config"]
    with contextlib.chdir(folder):
        Config.from_args_and_env(given, variables, find_task).validate()


def check_python(folder: Path, variables: dict, words: list[str], where: str) -> None:
    rest = python_words(words)
    if rest[0] == "-m":
        script, arguments = rest[1].replace(".", "/") + ".py", rest[2:]
    else:
        script, arguments = str((folder / rest[0]).resolve().relative_to(ROOT)), rest[1:]
    if rest[:2] in (["-m", "venv"], ["-m", "pytest"], ["-m", "pip"]):
        return
    assert (ROOT / script).is_file(), f"{where}: there is no {script}"
    parts = [(script, arguments)]
    if "--" in arguments:  # what follows goes to the stage script
        at = arguments.index("--")
        parts = [(script, arguments[:at]), ("trainer/train_full_sft.py", arguments[at + 1 :])]
    for started, given in parts:
        try:
            if started == ENGINE:
                check_engine(folder, variables, given, where)
            elif started in ARGS:
                parse_args(ARGS[started], None, given)
            else:
                parser_of(started)[0].parse_args(given)
        except UserError as error:
            if f"error: {error}\n" not in read(where):  # the page shows that mistake
                pytest.fail(f"{where}: {' '.join(words)}\n{error}")


def check_bash(folder: Path, variables: dict, words: list[str], where: str) -> None:
    path = folder / words[1]
    if GENERATED.match(words[1]):  # scripts/plan.py writes it; tests/scripts/test_plan.py checks what
        return
    assert path.is_file(), f"{where}: there is no {words[1]}"
    script = path.read_text(encoding="utf-8")
    for name in variables:
        assert re.search(rf"\b{name}\b", script), f"{where}: {words[1]} does not read {name}"
    if '"$@"' not in script or "getopt" in script or "case" in script:
        for flag in [word for word in words[2:] if word.startswith("-")]:
            assert flag in script, f"{where}: {words[1]} knows no {flag}"


def check_commands(text: str, where: str) -> int:
    checked = 0
    for folder, variables, words in commands(text):
        if words[0] in ("python", "torchrun"):
            check_python(folder, variables, words, where)
        elif words[0] == "bash":
            check_bash(folder, variables, words, where)
        else:
            continue
        checked += 1
    return checked


@pytest.mark.parametrize("page", DOCS)
def test_commands_in_the_text_parse(page):
    for block in fenced(page, "bash"):
        check_commands(block, page)


def test_the_manual_holds_commands_and_they_were_found():
    for pages in MANUALS:
        assert sum(check_commands(block, page) for page in pages for block in fenced(page, "bash")) >= 45


CHEAP = {  # commands that take a second or two, with what keeps their files out of the repository
    "dataset.show_samples": ["--cache_dir", "cache"],
    "scripts/plot_metrics.py": [],
    "scripts/train_tokenizer.py": [],
}


def cheap_commands() -> list[str]:
    blocks = [block for page in MANUALS[0] for block in fenced(page, "bash")]
    words = [words for block in blocks for _, _, words in commands(block) if words[0] == "python"]
    return sorted({shlex.join(each) for each in words if CHEAP.keys() & set(python_words(each)[:2])})


@pytest.mark.parametrize("command", cheap_commands())
def test_the_cheap_commands_run_on_the_files_that_they_name(command, tmp_path, monkeypatch):
    texts = [json.dumps({"text": f"{i} ships lie in the harbour of Reedmarsh."}) for i in range(40)]
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning."}]
    record = {"update": 1, "tokens": 9, "seconds": 1.0, "loss": 2.0, "reward": 0.5}
    runs = [
        "demo/pretrain_256",
        "pretrain_512",
        "full_sft_512",
        "full_sft_768",
        "sums_grpo_256",
        "rates/rate_1e-3_64",
    ]
    files = {"data/pretrain.jsonl": texts, "data/sft.jsonl": [json.dumps({"messages": turns})] * 40}
    files |= {f"out/{name}_metrics.jsonl": [json.dumps(record)] for name in runs}
    for name, lines in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (tmp_path / "data/pretrain").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "data/pretrain/a.parquet")
    monkeypatch.chdir(tmp_path)
    rest = python_words(shlex.split(command))
    script = rest[1] if rest[0] == "-m" else rest[0]
    run(script if rest[0] == "-m" else str(ROOT / script), rest[1 + (rest[0] == "-m") :] + CHEAP[script])


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_both_languages_give_the_same_commands_and_snippets(english, chinese):
    for language in ("bash", "python", "json", "text"):
        blocks = [
            [without_comments(block) for block in fenced(page, language)] for page in (english, chinese)
        ]
        # not the folder tree
        blocks = [[block for block in found if "trainer/  " not in block] for found in blocks]
        assert blocks[0] == blocks[1]


def without_comments(block: str) -> str:
    return "\n".join(re.sub(r"\s+# .*$", "", line) for line in block.splitlines())


@pytest.mark.parametrize("script", SCRIPTS)
def test_launch_lines_at_the_head_of_scripts_name_real_scripts_and_flags(script):
    head = ast.get_docstring(ast.parse(read(script))).replace("\\\n", " ")
    lines = re.findall(r"^ *(?:[A-Z_]+=\S+ +)*(?:python|torchrun) .*", head, flags=re.M)
    assert lines, f"{script} does not say how it is started"
    for line in lines:
        named = re.search(r"-m ([a-z][\w.]+)|([\w/]+\.py)", line)
        started = named[1].replace(".", "/") + ".py" if named[1] else named[2]
        # stage scripts show lines for `cd trainer`
        started = started if "/" in started else f"trainer/{started}"
        known = {option for action in parser_of(started)[0]._actions for option in action.option_strings}
        own = line[named.end() :].partition(" -- ")[0]  # what follows goes to the stage script
        unknown = set(re.findall(r" (--[a-z]\w*)", own)) - known
        assert not unknown, f"{script} tells of {unknown}, which {started} does not know"


# --- examples, figures, snippet
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["docs/data.md", "README.md"])
def test_the_example_records_are_accepted(page):
    records = [json.loads(line) for block in fenced(page, "json") for line in block.splitlines()]
    kinds = {key for record in records for key in record}
    assert (
        {"text", "conversations", "messages", "instruction"} if page != "README.md" else {"text"}
    ) <= kinds
    for record in records:
        assert to_text(record) if "text" in record else to_chat(record).messages[-1]["role"] == "assistant"


def test_the_mistake_on_the_front_page_is_told_as_it_says():
    (shown,) = [block for block in fenced("README.md", "text") if block.startswith("error: ")]
    (command,) = [block for block in fenced("README.md", "bash") if "--learning_rate -1" in block]
    _, script, *argv = shlex.split(command)
    assert run(str(ROOT / script), argv, status=2).err == shown


@pytest.mark.parametrize("folder", LANGUAGES)
def test_the_metrics_fields_are_those_of_the_loop(folder):
    code = read("trainer/loop.py") + "".join(
        read(f"trainer/{name}.py")
        for name in ("report/speed", "run/hooks", "report/experts", "run/skipped_updates", "report/warnings")
    )
    fields = [name for row in rows(section(folder, "metrics")) for name in re.findall(r"`(\w+)`", row[0])]
    assert len(fields) >= 15 and not [name for name in fields if f'"{name}"' not in code]


@pytest.mark.parametrize("folder", LANGUAGES)
def test_the_parameter_counts_are_those_of_the_model(folder):
    shapes = [row for row in rows(section(folder, "time")) if row[0].isdigit()]
    assert len(shapes) >= 4
    for hidden, layers, kind, parameters, active in shapes:
        shape = {"hidden_size": int(hidden), "num_hidden_layers": int(layers), "use_moe": kind == "MoE"}
        config = MiniMindConfig(**shape)
        with torch.device("meta"):
            model = MiniMindForCausalLM(config)
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        idle = 1 - config.num_experts_per_tok / config.num_experts if config.use_moe else 0
        unused = idle * sum(size for name, size in sizes.items() if ".experts." in name)
        assert parameters == f"{sum(sizes.values()) / 1e6:.2f} M"
        assert active == f"{(sum(sizes.values()) - unused) / 1e6:.2f} M"


@pytest.mark.parametrize("use_moe", [False, True])
def test_the_snippet_for_stock_transformers_runs(use_moe, tmp_path, monkeypatch, capsys):
    """With a tiny random model in the place of the trained one; the converted folder then gives its own
    logits."""
    (snippet,) = [block for block in fenced("docs/using_weights.md", "python") if "Qwen3" in block]
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=2, use_moe=use_moe)).eval()
    model.load_state_dict(half_state_dict(model))
    monkeypatch.chdir(tmp_path)
    convert(model, load_tokenizer(ROOT / "model"), "hf", Path("out/full_sft_512_hf"), torch.float16)
    exec(compile(snippet, "docs/using_weights.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out  # an untrained model may well say nothing but blanks
    stock = AutoModelForCausalLM.from_pretrained("out/full_sft_512_hf").eval()
    assert type(stock).__name__ == ("Qwen3MoeForCausalLM" if use_moe else "Qwen3ForCausalLM")
    tokens = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        assert (stock.float()(tokens).logits - model(tokens).logits).abs().max() <= 1e-4


# --- figures
# -------------------------------------------------------------------------------------------------------

NUMBER = r"(?<![\w.,/#+-])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e-?\d+)?(?![\w-]|[.,]\d)"
UNIT = r" ?(?:%|times\b|tokens/s|GFLOP/s|seconds?\b|s\b|ms\b|minutes?\b|min\b|hours?\b|GB\b|MB\b|of \d+\b)"
# a number with a unit, or a decimal
FIGURE = rf"{NUMBER}(?=(?:(?: to| and| or) {NUMBER})?{UNIT})|(?=\d+\.\d+){NUMBER}"
VERSION = r"\b(?:TRL|transformers|version|torch|Python|PEFT) [\d.]+"
UNMEASURED = {  # figures that are no measurements
    "docs/after_sft.md": "0.6931",  # ln 2
    "docs/data.md": "30",  # the share of an example
    # what the pages of the data sets say
    "docs/datasets.md": "1.2 10 2 28 1 12 1.6 53 30 600 208 52 61 20 3.0 4.0",
    # arithmetic
    "docs/distributed.md": "16 2 0.25 0.016 4 0.5 14 12 96 1,500 26 8 0.16 0.02 2.8 0.28 50 5 60 30",
    "docs/evaluating.md": "95",  # confidence level
    "docs/from_minimind.md": "8.76 0.9 5.0 0.1 0.2 0.02 0.85 0.95 0.7",  # ln 6,400, and defaults
    "docs/gpu.md": "15 6 0.01 0.1 1 4",  # an expectation, called one, and tolerances
    "docs/recipes.md": "4.3 8.76 6.9",  # size of a file, ln 6,400, a threshold of advice
    "docs/resume.md": "30",  # torchrun's limit
    "docs/serving.md": "30 2 3 0.7 0.9 2.1",  # limits, defaults, arithmetic that is shown
    "docs/training.md": "30",  # limit
    "docs/troubleshooting.md": "10 30",  # thresholds of advice
    "docs/using_weights.md": "0.7 0.9 0.001",  # defaults, limit
}


def paragraphs(page: str) -> list[str]:
    """Paragraphs, list items and table rows, without code and version numbers."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", read(page), flags=re.M | re.S)
    return re.split(r"\n\s*\n|\n(?=- |\|)", re.sub(VERSION, "", text))


def linked_sections(page: str, text: str) -> list[str]:
    """The sections of the log and of the benchmarks that a text links to."""
    found = []
    for name, anchor in re.findall(r"\]\(([^)#]*(?:LOG|BENCHMARKS)\.md)#([^)]+)\)", text):
        path = str(((ROOT / page).parent / name).resolve().relative_to(ROOT))
        sections = re.split(r"^## ", read(path), flags=re.M)[1:]
        found += [each for each in sections if slug(each.splitlines()[0]) == anchor]
    return found


def holds(section: str, figure: str) -> bool:
    """Whether a section has a number that the figure is, or is rounded from."""
    places = len(figure.partition(".")[2]) if "e" not in figure else 12
    values = [float(text.replace(",", "")) for text in re.findall(NUMBER, section)]
    return any(
        abs(value - float(figure.replace(",", ""))) <= 0.5 * 10**-places * (1 + 1e-9) for value in values
    )


@pytest.mark.parametrize(
    "page", [name for name in MANUALS[0] if Path(name).stem not in ("BENCHMARKS", "flags", "CONTRIBUTING")]
)
def test_a_figure_stands_in_the_section_that_its_paragraph_links_to(page):
    """And that section has the command or script that gave it. The Chinese page has the same figures."""
    chinese = re.findall(NUMBER, re.sub("[一-鿿]", " ", "\n".join(paragraphs(dict(PAIRS)[page]))))
    for text in paragraphs(page):
        sections = linked_sections(page, text)
        for figure in re.findall(FIGURE, text):
            assert figure in chinese, f"the Chinese {page} lacks {figure}"
            if figure in UNMEASURED.get(page, "").split() or re.search(rf"{re.escape(figure)} M\b", text):
                continue  # parameter counts have a test of their own
            having = [each for each in sections if holds(each, figure)]
            where = f"{page}: {figure} in '{text.strip()[:60]}'"
            assert having, f"{where}: link to the section of LOG.md or BENCHMARKS.md that has it"
            command = re.compile(r"`[^`]*(?:--\w|\.py|\.sh|python -m)|^```bash", flags=re.M)
            assert any(map(command.search, having)), f"{where}: the section has no command"


# --- imports
# -------------------------------------------------------------------------------------------------------

MAY_IMPORT = {
    "common": set(),
    "model": {"common"},
    "dataset": {"model", "common"},
    "trainer": {"dataset", "model", "common"},
    "llm": {"trainer", "dataset", "model", "common"},
    "scripts": {"trainer", "dataset", "model", "common", "llm"},
}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_one_way(package):
    others = {*MAY_IMPORT, "tests"} - MAY_IMPORT[package] - {package}
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = [
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        ]
        modules += [
            node.module or ""
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and not node.level
        ]
        wrong = [module for module in modules if module.split(".")[0] in others]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


# --- the engine
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", LANGUAGES)
def test_the_engines_chapter_is_the_engine(folder):
    text = read(f"{folder}/engine.md")
    named = set(re.findall(r"`--(\w+)", text)) - {"config", "help", "print_config", "set"}
    assert len(named) >= 12 and not named - set(SETTINGS)
    first = {row[0].strip("`"): row for row in rows(text)}
    assert set(AVAILABLE_TASKS) <= set(first)
    shown = {name for task in AVAILABLE_TASKS for name in re.findall(r"`(\w+\.yaml)`", first[task][2])}
    assert shown == {path.name for path in (ROOT / "llm/training/configs").iterdir()}
    shipped = {
        row[0].split("(")[0].strip("`") for row in rows(read("docs/CALLBACKS.md")) if row[0][1].isupper()
    }
    assert shipped == {name for name in first if name[:1].isupper()} and len(shipped) == 4


def test_the_contract_on_the_page_is_that_of_the_code():
    text = read("docs/dev/ARCHITECTURE.md")
    tables = [
        rows(re.split(r"^###? ", part, maxsplit=1, flags=re.M)[0])
        for part in re.split(r"^### ", text, flags=re.M)
    ]
    by_heading = dict(zip(re.findall(r"^### (.*)$", text, flags=re.M), tables[1:], strict=True))
    methods = [name for row in by_heading["Hooks"] for name in re.findall(r"`(\w+)\(", row[0])]
    assert sorted(methods) == sorted(
        name for name, found in vars(Hooks).items() if callable(found) and name[0] != "_"
    )
    called = [name for row in by_heading["Hooks"] for name in re.findall(r"`(on_\w+)`", row[2])]
    assert set(called) <= set(HOOKS) and len(called) == 6
    fields = [name for row in by_heading["TrainState"] for name in re.findall(r"`(\w+)[`(]", row[0])]
    assert len(fields) >= 15 and set(fields) <= {field.name for field in dataclasses.fields(TrainState)}
