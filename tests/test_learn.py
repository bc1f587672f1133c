"""docs/learn: the excerpts are the source's, the snippets run where they are pasted, the pictures are drawn."""

import re
from inspect import signature

import pytest
import torch

from common.errors import UserError
from common.settings import ROOT, DataConfig, ModelConfig
from dataset.lm_dataset import DPODataset, PretrainDataset, SFTDataset
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindForCausalLM
from scripts.demo.corpus import write_files
from scripts.demo.tour import make_tour
from scripts.demo.world import make_corpus
from tools import learn, learn_figures
from trainer.objectives.next_token import model_config
from trainer.weights.files import save_weights

CHAPTERS = [path.name for path in learn.chapters()]
PAGES = [path for language in learn.LANGUAGES for path in learn.chapters(language)]
# lines that do not depend on the weights, beside those of the chapters EXACT
SAME = re.compile(r"samples begin|padded|PPO|0 weights differ| 0: loss 0.693|\d+ tokens in the vocabulary")
EXACT = ("01_tokens.md", "05_sft.md")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder that looks like the repository's after the quickstart, with tiny models of random weights."""
    folder, tokenizer = tmp_path_factory.mktemp("learn"), load_tokenizer(ROOT / "model")
    (folder / "model").symlink_to(ROOT / "model")
    corpus = make_corpus(0) | make_tour(0)
    names = ("pretrain.jsonl", "sft.jsonl", "persona.jsonl", "terse.jsonl")
    write_files(folder / "dataset/demo", {name: corpus[name] for name in names})
    torch.manual_seed(0)
    model = MiniMindForCausalLM(model_config(tokenizer, ModelConfig(hidden_size=32, num_hidden_layers=3)))
    for name in ("pretrain", "full_sft"):
        save_weights(model, folder / f"out/demo/{name}_256.pth")
    record = '{"update": 100, "mean_loss": 2.0}\n{"update": 200, "mean_loss": 1.0, "eval_loss": 1.1}\n'
    (folder / "out/demo/pretrain_256_metrics.jsonl").write_text(record, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataConfig, "cache_dir", str(folder / "cache"))
        patch.chdir(folder)
        for kind, data in (
            (PretrainDataset, "pretrain"),
            (SFTDataset, "sft"),
            (SFTDataset, "persona"),
            (DPODataset, "terse"),
        ):
            kind(f"dataset/demo/{data}.jsonl", tokenizer, 128)  # its report is printed once
        yield folder


# --- excerpts


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_excerpts_are_the_source(path):
    page = path.read_text(encoding="utf-8")
    assert learn.EXCERPT.search(page)
    assert learn.with_excerpts(page) == page, "python -m tools.learn"


def test_an_excerpt_is_a_part_of_a_function_or_the_whole():
    whole = learn.excerpt("model/model_minimind.py FeedForward.forward")
    assert (
        whole.startswith("def forward(self, x: Tensor) -> Tensor:\n    ")
        and "silu_product(gate, up)" in whole
    )
    part = learn.excerpt("model/model_minimind.py FeedForward.forward | return")
    assert part.splitlines()[1:] == ["    ...", "    return self.down_proj(fused.silu_product(gate, up))"]
    parts = learn.excerpt(
        "trainer/trainer_utils.py setup_seed | random.seed | random.seed | torch.manual | torch.manual"
    )
    names = ["...", "random.seed(seed)", "...", "torch.manual_seed(seed)", "..."]
    assert parts.splitlines()[1:] == [f"    {name}" for name in names]


@pytest.mark.parametrize("what", ["model/linear.py no_such", "model/linear.py is_plain | no such line"])
def test_an_excerpt_that_is_not_there_is_an_error(what):
    with pytest.raises(UserError, match="no"):
        learn.excerpt(what)


# --- snippets


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_languages_have_the_same_excerpts_snippets_and_outputs(chapter):
    english, chinese = ((ROOT / folder / chapter).read_text(encoding="utf-8") for folder in learn.LANGUAGES)
    assert learn.EXCERPT.findall(english) == learn.EXCERPT.findall(chinese)
    assert learn.snippets(english) == learn.snippets(chinese)
    assert learn.outputs(english) == learn.outputs(chinese)


def form(output: str) -> list[str]:
    """The lines of an output without its numbers and what the model writes."""
    lines = [re.sub(r"'.*'", "TEXT", line) for line in output.splitlines()]
    return [" ".join(re.sub(r"-?[\d,]*\.?\d+(e-\d+)?", " # ", line).split()) for line in lines]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_snippets_print_what_is_shown(chapter, quickstart):
    """Models that a snippet makes itself are smaller here. An answer of the model is compared by its number."""
    page = (ROOT / learn.LANGUAGES[0] / chapter).read_text(encoding="utf-8")
    texts = learn.snippets(page)
    assert texts and max(len([line for line in text.splitlines() if line]) for text in texts) <= 15
    smaller = [re.sub(r"hidden_size=\d+", "hidden_size=32", text) for text in texts]
    printed, shown = learn.run_snippets(smaller), learn.outputs(page)
    if chapter in EXACT:
        assert printed == shown
    assert form(printed[0]) == form(shown[0])
    assert [len(form(output)) for output in printed] == [len(form(output)) for output in shown]
    lines = zip("".join(printed).splitlines(), "".join(shown).splitlines(), strict=True)
    for line, as_shown in lines:
        if SAME.match(as_shown):
            length = SAME.match(as_shown).end() if "loss" in as_shown else None
            assert line[:length] == as_shown[:length]


def test_a_snippet_ends_with_enter():
    assert learn.run_snippets(["for i in range(2):\n    print(i)\n", "i\n"]) == ["0\n1\n", "1\n"]
    with pytest.raises(UserError, match="middle of a statement"):
        learn.run_snippets(["print(\n"])


def test_a_block_needs_an_empty_line_before_what_follows():
    with pytest.raises(SyntaxError):
        learn.run_snippets(["for i in range(2):\n    print(i)\nprint(i)\n"])


def test_an_error_in_a_snippet_is_raised():
    with pytest.raises(ZeroDivisionError):
        learn.run_snippets(["1 / 0\n"])


# --- pictures


@pytest.mark.parametrize("name", learn_figures.FIGURES)
def test_a_picture_is_drawn(name, quickstart, tmp_path):
    draw = learn_figures.FIGURES[name]
    few = {"updates": 4} if "updates" in signature(draw).parameters else {}
    draw(**few).savefig(tmp_path / "figure.png", dpi=50)
    assert (tmp_path / "figure.png").stat().st_size > 2000
    assert f"(../images/learn/{name}.png)" in (ROOT / f"docs/learn/{name}.md").read_text(encoding="utf-8")


def test_every_picture_has_its_function():
    assert sorted(path.stem for path in (ROOT / "docs/images/learn").iterdir()) == sorted(
        learn_figures.FIGURES
    )
