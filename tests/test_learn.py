"""docs/learn: the excerpts are the source's, the snippets run where they are pasted, the notebooks are the
pages."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.settings import ROOT, DataConfig, ModelConfig
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindForCausalLM
from scripts.demo.corpus import write_files
from scripts.demo.sums import make_sums
from scripts.demo.tour import make_tour
from scripts.demo.world import make_corpus
from tools import learn
from trainer.weights.config import model_config
from trainer.weights.files import save_weights

CHAPTERS = [path.name for path in learn.chapters()]
PAGES = [path for language in learn.LANGUAGES for path in learn.chapters(language)]
# lines that do not depend on the weights, beside those of the chapters EXACT
SAME = re.compile(r"as the model's own|\([029], [07]\)|advantages|PPO|0 weights differ| 0: loss 0.693")
EXACT = ("01_tokens.md", "06_sft.md")
# models and runs that a snippet makes itself are smaller here
SMALLER = {
    r"hidden_size=\d+": "hidden_size=32",
    r"\(32, 64, 128, 256\)": "(32, 32, 32, 32)",
    r"lr=rate\), 61\)": "lr=rate), 4)",
    r"range\(60\)": "range(2)",
    r"range\(64\)": "range(16)",
    r"range\(41\)": "range(0, 41, 10)",
    r"range\(240\)": "range(59, 240, 60)",
    r"\[::20\]": "",
    r"240\)\)\.view\(-1, 20\)": "12)).view(-1, 1)",
    r"for epoch in range\(20\)": "for epoch in range(1)",
    r"16 \* step : 16 \* step \+ 16": "step : step + 1",
}
# files, and how many of their records are enough
DATA = {"pretrain": 256, "pretrain_eval": 16, "sft": 64, "persona": 48, "terse": 48, "quiz": 12}
DATA |= {"sums/sft": 192, "sums/rl": None}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder that looks like the repository's after the quickstart, with tiny models of random weights."""
    folder, tokenizer = tmp_path_factory.mktemp("learn"), load_tokenizer(ROOT / "model")
    (folder / "model").symlink_to(ROOT / "model")
    corpus = make_corpus(0) | make_tour(0) | make_sums(0)
    files = {f"{name}.jsonl": corpus[f"{name}.jsonl"][:most] for name, most in DATA.items()}
    write_files(folder / "dataset/demo", files)
    torch.manual_seed(0)
    shape = ModelConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    model = MiniMindForCausalLM(model_config(tokenizer, shape))
    for name in ("pretrain", "full_sft", "sft_only"):
        save_weights(model, folder / f"out/demo/{name}_256.pth")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataConfig.model_fields["cache_dir"], "default", str(folder / "cache"))
        patch.chdir(folder)
        yield folder


# --- excerpts


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_excerpts_are_the_source(path):
    page = path.read_text(encoding="utf-8")
    assert learn.EXCERPT.search(page)
    assert learn.with_excerpts(page) == page, "python -m tools.learn"
    assert len(page.splitlines()) <= 145  # with an experiment


# --- snippets


def form(output: str) -> list[str]:
    """The lines of an output without its numbers and what the model writes."""
    lines = [re.sub(r"'.*'", "TEXT", line) for line in output.splitlines()]
    return [" ".join(re.sub(r"-?[\d,]*\.?\d+(e[+-]?\d+)?", " # ", line).split()) for line in lines]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_snippets_print_what_is_shown(chapter, quickstart):
    """An answer of the model is compared by its number."""
    page = (ROOT / learn.LANGUAGES[0] / chapter).read_text(encoding="utf-8")
    texts = learn.snippets(page)
    assert texts and max(len([line for line in text.splitlines() if line]) for text in texts) <= 20
    for pattern, smaller in SMALLER.items():
        texts = [re.sub(pattern, smaller, text) for text in texts]
    printed = learn.run_snippets(texts)
    shown = [match["output"] or "" for match in learn.SNIPPET.finditer(page)]
    if chapter in EXACT:
        assert printed == shown
    assert form(printed[0]) == form(shown[0])
    assert [len(form(output)) for output in printed] == [len(form(output)) for output in shown]
    lines = zip("".join(printed).splitlines(), "".join(shown).splitlines(), strict=True)
    for line, as_shown in lines:
        if SAME.match(as_shown):
            length = SAME.match(as_shown).end() if "loss" in as_shown else None
            assert line[:length] == as_shown[:length]


# --- notebooks


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_notebook_is_the_page(path):
    page = path.read_text(encoding="utf-8")
    text = learn.notebook(page)
    sources = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert sources[0] + "\n" == learn.SETUP
    # the snippets are what the test above runs; the other cells show pictures and start commands
    others = [source for source in sources[1:] if source.startswith(("!python", "from IPython"))]
    assert [source for source in sources[1:] if source not in others] == [
        snippet.rstrip() for snippet in learn.snippets(page)
    ]
    pictures = [re.search(r'Image\("(.*)"\)', source) for source in others]
    assert all((ROOT / picture[1]).is_file() for picture in pictures if picture)
    markdown = "".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if "outputs" not in cell)
    notebooks = {learn.notebook_path(page) for page in PAGES}
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", markdown):
        there = Path(os.path.normpath(learn.notebook_path(path).parent / target))
        assert there in notebooks or there.exists(), target


def test_one_command_makes_all_notebooks(tmp_path, monkeypatch):
    makers = dict.fromkeys(PAGES, learn.notebook)
    makers |= dict.fromkeys([ROOT / name for name in learn.MOVING], learn.moving_notebook)
    for path in makers:
        place = tmp_path / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    monkeypatch.setattr(learn, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["learn.py", "--notebooks"])
    learn.main()
    for path, maker in makers.items():
        written = learn.notebook_path(tmp_path / path.relative_to(ROOT)).read_text(encoding="utf-8")
        assert written == maker(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", learn.MOVING)
def test_the_notebook_of_a_run_that_moves_has_four_cells(path):
    """All of its page's snippets, after the one that clones."""
    page = (ROOT / path).read_text(encoding="utf-8")
    cells = json.loads(learn.moving_notebook(page))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sources == [learn.CLONE.rstrip(), *(snippet.rstrip() for snippet in learn.snippets(page))]
    assert len(sources) == 4 and len(cells) == 8 and cells[0]["source"] == [page.split("\n")[0]]
    for source in sources:
        compile(source, path, "exec")


def test_the_cells_of_a_run_that_moves_plan_once_and_go_on(tmp_path, monkeypatch, capsys):
    """In the folder that stays; what they start parses."""
    started = []

    def run(words: list[str], check: bool) -> None:
        assert check and words[0] == sys.executable
        started.append(words[1:])
        if words[2] == "pack":
            Path(words[4]).write_bytes(b"pack")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        names: dict = {}
        for snippet in learn.snippets((ROOT / learn.MOVING[0]).read_text(encoding="utf-8")):
            exec(snippet, names)
    pack = str(tmp_path / "out/packs/run.mmt")
    assert [words[:2] for words in started] == [
        ["scripts/plan.py", "--pretrain_data"],
        ["scripts/carry.py", "pack"],
        ["scripts/carry.py", "go"],
        ["scripts/carry.py", "go"],
    ]
    assert started[1][2:] == ["out/plan", pack, "--with_data"]
    assert started[-1][2:] == [pack, "--to", "out/run", "--stop_after", "11h"]
    assert f"{pack}: 0.0 MB" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["in a clone", "on Colab"])
def test_the_first_cell_of_a_notebook_brings_what_is_missing(where, tmp_path, monkeypatch):
    clone = tmp_path / ("clone" if where == "in a clone" else "minimind-trainer")
    folder = clone / "docs/learn/notebooks" if where == "in a clone" else tmp_path
    started = []

    def run(words: list[str], check: bool = False) -> subprocess.CompletedProcess:
        started.append(" ".join(words))
        for name in ("trainer/loop.py", "docs/learn/notebooks/01_tokens.ipynb", "requirements.txt"):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).touch()
        return subprocess.CompletedProcess(words, 0)

    if where == "in a clone":
        run(["git", "clone"])
        (clone / "out/demo").mkdir(parents=True)
        (clone / "out/demo/quiz_second.json").touch()
        started.clear()
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("VIRTUAL_ENV", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(folder)
    exec(learn.SETUP, {"input": lambda question: " https://a.example/b "})
    from_colab = ["git clone -- https://a.example/b minimind-trainer", "bash scripts/quickstart.sh"]
    assert started == ([] if where == "in a clone" else from_colab)
    assert Path.cwd() == clone and sys.path[0] == str(clone)


@pytest.mark.parametrize("address", ["", "no/such/folder"])
def test_the_first_cell_of_a_notebook_names_an_address_that_is_wrong(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"could not clone '{address}'" if address else "nothing was cloned"):
        exec(learn.SETUP, {"input": lambda question: address})
    assert not any(tmp_path.iterdir())
