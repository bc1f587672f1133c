"""The manual: links lead somewhere, commands parse, the cheap ones run, both languages have the same ones."""

import argparse
import contextlib
import functools
import io
import itertools
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.distributed.run import get_args_parser
from transformers import AutoModelForCausalLM

from common.errors import UserError
from dataset.records import parse
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.choice import read_questions
from scripts.convert_model import convert
from tests.conftest import ROOT, write_jsonl
from tests.stage_process import run
from trainer.weights.files import half_weights

LEARN = sorted(path.name for path in (ROOT / "docs/learn").glob("*.md"))
PAIRS = [("README.md", "README_zh.md"), ("CONTRIBUTING.md", "CONTRIBUTING_zh.md")]  # English, Chinese
PAIRS += [(f"docs/{path.name}", f"docs/zh/{path.name}") for path in sorted((ROOT / "docs").glob("*.md"))]
PAIRS += [(f"docs/learn/{name}", f"docs/zh/learn/{name}") for name in LEARN]
MANUAL = [page for pair in PAIRS for page in pair]
PAGES = [*MANUAL, "CHANGELOG.md", "AGENTS.md", "SECURITY.md", "model/README.md"]
PAGES += sorted(f"docs/dev/{path.name}" for path in (ROOT / "docs/dev").glob("*.md"))
BLOCK = re.compile(r"^```.*?^```$", flags=re.M | re.S)
MADE = re.compile(
    r"^(out|checkpoints|swanlog|dataset/(cache|demo)|docs/(zh/)?learn/notebooks)/"
)  # by commands
# what --data_path names by default
USERS_OWN = {"dataset/pretrain_t2t_mini.jsonl", "dataset/sft_t2t_mini.jsonl"}
FOLDERS = r"\.ci|\.github|common|dataset|docs|llm|model|scripts|tests|tools|trainer"
ENDINGS = "py|sh|md|json|jinja|yaml|yml|png"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fenced(page: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), flags=re.M | re.S)


def slugs(path: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", path.read_text(encoding="utf-8")), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_exist(page):
    text = read(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in slugs(path), f"{page} links to {target}"
    for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]*\.(?:{ENDINGS}))`", text):
        assert MADE.match(name) or name in USERS_OWN or (ROOT / name).exists(), f"{page} names {name}"


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_both_languages_have_the_same_sections_commands_and_outputs(english, chinese):
    headings = [re.findall(r"^#+(?= )", BLOCK.sub("", read(page)), flags=re.M) for page in (english, chinese)]
    assert headings[0] == headings[1]
    for language in ("bash", "python", "json", "text", "yaml"):
        ours, theirs = fenced(english, language), fenced(chinese, language)
        assert [*map(without_comments, ours)] == [*map(without_comments, theirs)]


def without_comments(block: str) -> str:
    return "\n".join(re.sub(r"\s+# .*$", "", line) for line in block.splitlines())


def test_the_files_of_the_evening_are_there_and_their_lines_true_within_a_tenth():
    page = read("docs/dev/ARCHITECTURE.md").partition("## The evening\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", page, flags=re.M)
    [(files, lines)] = re.findall(r"^\| (\d+) files \| ([\d,]+) \|", page, flags=re.M)
    assert len(rows) == int(files)
    assert sum(len(read(path).splitlines()) for path, _ in rows) == pytest.approx(
        int(lines.replace(",", "")), rel=0.1
    )
    assert f"[{files} files of {lines} lines](" in read("README.md")
    assert f"[{files} 个文件，{lines} 行](" in read("README_zh.md")


# --- commands --------------------------------------------------------------------------------------


@functools.cache
def parser_of(script: str) -> argparse.ArgumentParser:
    """The parser of a script, which is run with --help in this process."""
    seen = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(argparse.ArgumentParser, "print_help", lambda parser, file=None: seen.append(parser))
        patch.setattr(sys, "argv", [str(ROOT / script), "--help"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not end.value.code
    return seen[0]


def commands(text: str) -> list[tuple[Path, dict[str, str], list[str]]]:
    """Commands of a shell block as (folder it runs in, variables set in front, words)."""
    found, folder = [], ROOT
    for line in text.replace("\\\n", " ").splitlines():
        quoted = shlex.join(shlex.split(line, comments=True))
        for part in re.split(r" '(?:&&|\|\||\||;)' ", quoted):
            words, variables = shlex.split(part), {}
            while words and re.match(r"^[A-Z_]+=", words[0]):
                name, _, variables[name] = words.pop(0).partition("=")
            if words[:1] == ["cd"] and not words[1].startswith("$"):
                folder = (folder / words[1]).resolve()
            elif words:
                found.append((folder, variables, words[1:] if words[0] == "srun" else words))
    return found


def python_words(words: list[str]) -> list[str]:
    """The script or module of a python or torchrun command as a path, and its arguments."""
    rest = words[1:]
    if words[0] == "torchrun":
        args = get_args_parser().parse_args(words[1:])
        rest = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
    if rest[0] == "-m":
        rest = [rest[1].replace(".", "/") + ".py", *rest[2:]]
    return rest


def check_python(folder: Path, words: list[str], page: str) -> None:
    script, *given = python_words(words)
    if script in ("venv.py", "pytest.py", "pip.py"):
        return
    path = ROOT / script if "-m" in words else folder / script
    script = str(path.resolve().relative_to(ROOT))
    parts = [(script, given)]
    if "--" in given:  # what follows goes to the stage script
        at = given.index("--")
        parts = [(script, given[:at]), ("trainer/train_full_sft.py", given[at + 1 :])]
    if script == "scripts/benchmark.py":  # so do all flags that are not its own
        parts = [("trainer/train_full_sft.py", parser_of(script).parse_known_args(given)[1])]
    for started, arguments in parts:
        try:
            parser_of(started).parse_args(arguments)
        except UserError as error:
            unknown = re.fullmatch(r"--(\w+) is unknown; see --help", str(error))
            if unknown and re.search(rf"^    {unknown[1]}: ", read(page), flags=re.M):
                continue  # a flag of the task on the page, which its own test starts
            assert f"error: {error}\n" in read(page), f"{page}: {shlex.join(words)}: {error}"


def check_bash(folder: Path, variables: dict[str, str], words: list[str], page: str) -> None:
    if MADE.match(words[1]):  # scripts/plan.py writes it
        return
    script = (folder / words[1]).read_text(encoding="utf-8")
    for name in variables:
        assert re.search(rf"\b{name}\b", script), f"{page}: {words[1]} does not read {name}"
    if '"$@"' not in script:
        for flag in [word for word in words[2:] if word.startswith("-")]:
            assert flag in script, f"{page}: {words[1]} knows no {flag}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page):
    for block in fenced(page, "bash"):
        for folder, variables, words in commands(block):
            if words[0] in ("python", "torchrun"):
                check_python(folder, words, page)
            elif words[0] == "bash":
                check_bash(folder, variables, words, page)


@pytest.mark.parametrize("page", MANUAL)
def test_no_two_runs_of_a_page_have_one_name(page):
    """The second would set the files of the first aside."""
    runs: dict[tuple[str, str], str] = {}
    for block in fenced(page, "bash"):
        for _, _, words in commands(block):
            given = dict(itertools.pairwise(words))
            name = given.get("--save_weight") or given.get("--lora_name")
            if name and words[0] in ("python", "torchrun"):
                command = shlex.join(words)
                assert runs.setdefault((given.get("--save_dir", ""), name), command) == command


def test_each_measurement_says_when_and_of_which_commit():
    entries = read("docs/dev/LOG.md").split("\n## ")[1:]
    assert len(entries) > 20
    for entry in entries:
        heading, _, about = entry.splitlines()[:3]
        assert re.fullmatch(r"\*\d{4}-\d\d-\d\d, commit [0-9a-f]{7,40}\*", about), heading


CHEAP = {  # scripts that take a second or two, with what keeps their files out of the repository
    "dataset/show_samples.py": ["--cache_dir", "cache"],
    "scripts/plot_metrics.py": [],
    "scripts/train_tokenizer.py": [],
}


def cheap_commands() -> list[str]:
    found = set()
    for page in MANUAL:
        for block in fenced(page, "bash"):
            for _, _, words in commands(block):
                if words[0] == "python" and python_words(words)[0] in CHEAP:
                    found.add(shlex.join(python_words(words)))
    return sorted(found)


@pytest.mark.parametrize("command", cheap_commands())
def test_the_cheap_commands_run_on_the_files_that_they_name(command, tmp_path, monkeypatch):
    texts = [json.dumps({"text": f"{i} ships lie in the harbour of Reedmarsh."}) for i in range(40)]
    answer = {"role": "assistant", "content": "Good morning."}
    chats = [json.dumps({"messages": [{"role": "user", "content": f"text {i}"}, answer]}) for i in range(90)]
    record = {"update": 1, "tokens": 9, "seconds": 1.0, "loss": 2.0, "reward": 0.5}
    files = {"data/pretrain.jsonl": texts, "data/sft.jsonl": chats}
    for name in ["full_sft_512", "full_sft_768"]:
        files[f"out/{name}_metrics.jsonl"] = [json.dumps(record)]
    for name, lines in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (tmp_path / "data/pretrain").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "data/pretrain/a.parquet")
    monkeypatch.chdir(tmp_path)
    script, *argv = shlex.split(command)
    run(script[:-3].replace("/", "."), argv + CHEAP[script])


def test_the_mistake_of_the_page_of_troubles_ends_as_shown():
    (shown,) = [block for block in fenced("docs/trouble.md", "text") if block.startswith("error: ")]
    (command,) = [block for block in fenced("docs/trouble.md", "bash") if "--learning_rate -1" in block]
    _, script, *argv = shlex.split(command)
    assert run(str(ROOT / script), argv, status=2).err == shown


# --- examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["docs/data.md", "docs/quickstart.md", "docs/using.md"])
def test_the_example_records_are_accepted(page, tmp_path):
    for block in fenced(page, "json"):
        for record in map(json.loads, block.splitlines()):
            if "text" in record:
                assert parse(record, "pretrain").document
            elif "choices" in record:
                assert read_questions(str(write_jsonl(tmp_path / "questions.jsonl", [record])))
            else:
                (chat,) = parse(record, "sft").chats
                assert chat.messages[-1]["role"] == "assistant"


@pytest.mark.parametrize("use_moe", [False, True])
def test_the_snippet_for_stock_transformers_runs(use_moe, tmp_path, monkeypatch, capsys):
    """With a tiny random model in the place of the trained one; the converted folder then gives its own
    logits."""
    (snippet,) = [block for block in fenced("docs/using.md", "python") if "Qwen3" in block]
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=2, use_moe=use_moe)).eval()
    model.load_state_dict(half_weights(model))
    monkeypatch.chdir(tmp_path)
    convert(model, load_tokenizer(ROOT / "model"), "hf", Path("out/full_sft_512_hf"))
    exec(compile(snippet, "docs/using.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out  # an untrained model may well say nothing but blanks
    stock = AutoModelForCausalLM.from_pretrained("out/full_sft_512_hf").eval()
    assert type(stock).__name__ == ("Qwen3MoeForCausalLM" if use_moe else "Qwen3ForCausalLM")
    tokens = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        assert (stock.float()(tokens).logits - model(tokens).logits).abs().max() <= 1e-4
