"""Samples: the answers are greedy, the prompts those that were asked for, and training does not notice."""

import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dataset.lm_dataset import DPODataset, PretrainDataset, SFTDataset
from dataset.rollout_prompts import PromptDataset
from dataset.token_cache import load_tokenizer
from model.generation import generate
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.prompts import prompt_tokens
from model.sampling import DEFAULTS
from tests.conftest import write_jsonl
from tests.stage_process import Faults, run
from tests.trainer.rollout_runs import rollout_flags, write_prompts
from tests.trainer.stage_flags import assert_same_run, flags
from trainer.callbacks import samples
from trainer.callbacks.experts import token_counters
from trainer.report.metrics import read_metrics


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("model")


SYSTEM = {"role": "system", "content": "be brief"}
QUESTION = {"role": "user", "content": "how many\nfoxes?"}
ANSWER, OTHER = ({"role": "assistant", "content": text} for text in ("two foxes", "three"))
HELD_OUT = {  # dataset, record, messages before its first answer
    "sft": (SFTDataset, {"conversations": [SYSTEM, QUESTION, ANSWER, QUESTION, ANSWER]}, [SYSTEM, QUESTION]),
    "dpo": (DPODataset, {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, OTHER]}, [QUESTION]),
    "rl": (PromptDataset, {"prompt": QUESTION["content"], "answer": "2"}, [QUESTION]),
}


@pytest.mark.parametrize("kind", HELD_OUT)
def test_a_held_out_conversation_is_cut_before_its_first_answer(tmp_path, tokenizer, kind):
    """Tokens: what the chat template writes; text: the last message, without its role."""
    dataset, record, messages = HELD_OUT[kind]
    path = write_jsonl(tmp_path / "data.jsonl", [record] * 2)
    prompts = samples.held_out_prompts(tokenizer, dataset(str(path), tokenizer, 64, cache_dir=str(tmp_path)))
    expected = prompt_tokens(tokenizer, messages, enable_thinking=False)
    assert prompts == [("how many\nfoxes?", expected)] * 2


def test_a_held_out_document_is_cut_after_its_first_words(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": " ".join(["the red fox"] * 15)}])
    held_out = PretrainDataset(str(path), tokenizer, 64, cache_dir=str(tmp_path))
    (text, tokens), *_ = samples.held_out_prompts(tokenizer, held_out)
    assert "the red fox the red fox".startswith(text[:12])
    assert samples.OPENING_TOKENS - 5 < len(tokens) <= samples.OPENING_TOKENS
    assert tokens == held_out[0][0]["input_ids"][: len(tokens)].tolist()


@pytest.mark.parametrize(
    "document",
    [
        "an incomprehensibly long word, " * 9,
        "山水之间有一条河，河边住着一位老人。" * 9,
        "слова " * 20,
        "🦊" * 40,
    ],
)
def test_no_opening_ends_within_a_word(tokenizer, document):
    tokens = tokenizer(document, add_special_tokens=False)["input_ids"]
    for start in range(6):
        part = tokens[start:]
        while tokenizer.decode(part).startswith("\ufffd"):
            part = part[1:]
        cut, whole = tokenizer.decode(samples.opening(tokenizer, part)), tokenizer.decode(part)
        assert whole.startswith(cut) and len(cut) > 0
        assert not re.match(r"[^\W\u2e80-\uffff]{2}", whole[len(cut) - 1 : len(cut) + 1])


def trained_state(config) -> SimpleNamespace:
    torch.manual_seed(2)
    model = MiniMindForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(30)  # answers that are not one token again and again
    return SimpleNamespace(model=model.train(), device=torch.device("cpu"), autocast=nullcontext())


@pytest.mark.parametrize("moe", [False, True])
def test_answers_are_those_of_a_plain_loop_and_nothing_is_left_behind(tokenizer, moe):
    config = MiniMindConfig(
        hidden_size=32, num_hidden_layers=2, use_moe=moe, dropout=0.5, vocab_size=len(tokenizer)
    )
    state = trained_state(config)
    lines = ["the fox", "山水 is a long prompt of several words", "x"]
    prompts = [(line, prompt_tokens(tokenizer, [{"role": "user", "content": line}])) for line in lines]
    random = torch.get_rng_state()
    found = samples.Samples(prompts, tokenizer).write_answers(state)
    assert state.model.training and all(module.training for module in state.model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(int(counter.sum()) == 0 for counter in token_counters(state.model))
    assert all(
        not parameter.is_inference() and parameter.grad is None for parameter in state.model.parameters()
    )
    state.model.eval()
    ends = [tokenizer.eos_token_id]
    for (_, tokens), (answer, sampled) in zip(prompts, found, strict=True):
        written: list[int] = []
        while len(written) < samples.MAX_NEW_TOKENS and tokenizer.eos_token_id not in written:
            with torch.no_grad():
                written.append(int(state.model(torch.tensor([tokens + written])).logits[0, -1].argmax()))
        assert answer == written
        assert [sampled] == [
            group[0].tokens for group in generate(state.model, [tokens], [[DEFAULTS]], 48, ends)
        ]


def test_a_character_that_the_limit_cuts_is_left_out(tokenizer):
    tokens = tokenizer.encode("The wind 𠮷", add_special_tokens=False)
    while not tokenizer.decode(tokens).endswith("\ufffd"):
        tokens.pop()
    callback = object.__new__(samples.Samples)
    callback.tokenizer, callback.prompts, callback.answers = tokenizer, [("Once", [1])], [(tokens, tokens)]
    record = {"eval_loss": 1.0}
    callback.on_log(None, record)
    assert record["samples"] == [{"prompt": "Once", "answer": "The wind ", "sampled": "The wind "}]


def test_trigrams_are_counted_within_an_answer():
    """A loop has as many as it is long; of a few, nothing is said."""
    loop, plain = [5, 6, 7] * 16, list(range(48))
    assert samples.distinct_trigrams([loop]) == 3 / 46
    assert samples.distinct_trigrams([plain, plain]) == 1.0
    assert samples.distinct_trigrams([plain, loop]) == (46 + 3) / 92
    assert samples.distinct_trigrams([list(range(8)), [], [1, 2]]) is None


def texts(folder, name="pretrain_32") -> list[list[dict] | None]:
    return [record.get("samples") for record in read_metrics(folder / f"out/{name}_metrics.jsonl")]


def test_a_run_with_samples_is_the_run_without_also_when_it_is_killed(corpus, tmp_path):
    """With dropout, on a mixture of experts: the same bits; after a kill in an evaluation the same
    samples."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\ufeffthe red fox\n\n山水\n", "utf-8")
    settings = {"epochs": 1, "eval_interval": 4, "dropout": 0.1, "use_moe": 1, "sample_prompts": prompts}
    run("pretrain", flags(corpus, tmp_path / "none", "pretrain", **settings | {"sample_prompts": "none"}))
    done = run("pretrain", flags(corpus, tmp_path / "with", "pretrain", **settings))
    assert_same_run(tmp_path / "none", tmp_path / "with", "pretrain_32_moe")
    found = texts(tmp_path / "with", "pretrain_32_moe")
    assert texts(tmp_path / "none", "pretrain_32_moe") == [None] * len(found)
    evaluated = [sample for sample in found if sample]
    assert len(evaluated) == 2 and [each["prompt"] for each in evaluated[0]] == ["the red fox", "山水"]
    assert "\n  'the red fox' -> " in done.out
    argv = flags(corpus, tmp_path / "killed", "pretrain", **settings)
    run("pretrain", argv, Faults(eval_signal=9), status=-9)
    run("pretrain", [*argv, "--from_resume", "1"])
    assert_same_run(tmp_path / "none", tmp_path / "killed", "pretrain_32_moe")
    assert texts(tmp_path / "killed", "pretrain_32_moe") == found


def test_ranks_and_shards(corpus, tmp_path):
    """Two ranks write what one writes, up to rounding the same weights; sharded weights write nothing, with a
    line."""
    settings = {"epochs": 1, "sample_prompts": "auto"}
    run("pretrain", flags(corpus, tmp_path / "two", "pretrain", **settings), ranks=2)
    assert sum(len(sample) for sample in texts(tmp_path / "two") if sample) == 3  # one evaluation
    settings |= {"parallel": "fsdp", "optimizer": "adamw"}
    done = run("pretrain", flags(corpus, tmp_path / "fsdp", "pretrain", **settings), ranks=2)
    assert "--sample_prompts: none are answered with --parallel fsdp" in done.out
    assert not any(texts(tmp_path / "fsdp"))


def test_a_stage_with_rewards_shows_rollouts_and_held_out_prompts(tmp_path):
    settings = {"num_generations": 2, "sample_prompts": "auto"}
    run("grpo", rollout_flags(write_prompts(tmp_path), tmp_path, **settings))
    *_, last = [sample for sample in texts(tmp_path, "grpo_32") if sample]
    assert [("reward" in each) for each in last] == [True, True, False, False, False]
    assert [each["prompt"] for each in last[2:]] == ["river!", "stone!", "fox!"]
    assert math.isfinite(last[0]["reward"])


@pytest.mark.parametrize(
    ("content", "held_out", "line"),
    [
        (b"\xe9t\xe9\n", True, "'utf-8' codec can't decode byte 0xe9"),
        (b"hello\n", False, "needs held-out data, because it is used at each evaluation"),
    ],
)
def test_a_mistake_is_one_line(corpus, tmp_path, content, held_out, line):
    (tmp_path / "prompts.txt").write_bytes(content)
    settings = {"sample_prompts": tmp_path / "prompts.txt"}
    if not held_out:
        settings["eval_data_path"] = "none"
    (error,) = run("pretrain", flags(corpus, tmp_path, "pretrain", **settings), status=2).error_lines
    assert error.startswith("error: --sample_prompts ") and line in error
