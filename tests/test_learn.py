"""docs/learn: the excerpts are the source's, the snippets run where they are pasted, the pictures are drawn."""

import re
from inspect import signature

import pytest
import torch

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
        patch.setattr(DataConfig.model_fields["cache_dir"], "default", str(folder / "cache"))
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


# --- snippets


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


# --- pictures


@pytest.mark.parametrize("name", learn_figures.FIGURES)
def test_a_picture_is_drawn(name, quickstart, tmp_path):
    draw = learn_figures.FIGURES[name]
    few = {"updates": 4} if "updates" in signature(draw).parameters else {}
    draw(**few).savefig(tmp_path / "figure.png", dpi=50)
    assert (tmp_path / "figure.png").stat().st_size > 2000
    assert f"(../images/learn/{name}.png)" in (ROOT / f"docs/learn/{name}.md").read_text(encoding="utf-8")
