"""Log-likelihoods of flat batches against a padded forward pass, the trainer's own evaluation, and a plain
loop."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from common.errors import UserError
from dataset.lm_dataset import PretrainDataset, SFTDataset, collate_flat
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.evaluation.likelihood import batches, choice_tokens, held_out, multiple_choice, read_choices
from scripts.evaluation.scores import estimate
from tests.conftest import ROOT, write_jsonl
from trainer.devices.device import mixed_precision
from trainer.loop import evaluate
from trainer.objectives.next_token import flat_size, held_out_loss

TOKENIZER = load_tokenizer(ROOT / "model")
QUESTIONS = [
    {
        "question": "The sky is",
        "choices": ["blue", "a very long green", "red"],
        "answer": 0,
        "language": "en",
    },
    {"question": "天空是 ", "choices": ["蓝色的", "red"], "answer": 1, "language": "zh"},
    {"question": "One", "choices": ["two three four", "x", "山"], "answer": 2},
]


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def model(request):
    torch.manual_seed(0)
    config = MiniMindConfig(
        hidden_size=32, num_hidden_layers=2, use_moe=request.param, max_position_embeddings=64
    )
    return MiniMindForCausalLM(config).eval()


@pytest.mark.parametrize(("kind", "name"), [(PretrainDataset, "pretrain_eval"), (SFTDataset, "sft_eval")])
def test_held_out_loss_is_the_trainers(kind, name, model, corpus):
    dataset = kind(str(corpus[name]), TOKENIZER, 24, cache_dir=corpus["cache"])
    loader = DataLoader(dataset, 4, collate_fn=collate_flat)
    autocast, _ = mixed_precision("float32", torch.device("cpu"))
    state = SimpleNamespace(
        model=model, stop=SimpleNamespace(signal=0), autocast=autocast, device=torch.device("cpu"),
        size=lambda batch: flat_size(batch, model.config), eval_fn=held_out_loss, args=None,
        losses=torch.zeros(2, dtype=torch.float64),
    )  # fmt: skip
    expected = evaluate(state, loader)
    model.eval()
    for max_tokens in (1, 100, 10_000):
        items = held_out(model, dataset, max_tokens)
        found = [
            estimate(np.array([item.scores[metric] for item in items]))
            for metric in ("loss", "bits per byte")
        ]
        assert [each.value for each in found] == pytest.approx(
            [expected["eval_loss"], expected["eval_bpb"]], rel=1e-6
        )
        assert all(each.low < each.value < each.high for each in found)
    lines = {item.key for item in items}
    assert len(lines) == len(items) <= len(dataset)  # one for each record, however it was split
    assert lines <= {f"{corpus[name]}:{line}" for line in range(1, 20)}


def by_padded_loop(model, question: str, choice: str) -> float:
    """The choice's log-likelihood, one at a time through the padded form."""
    whole = TOKENIZER(f"{question} {choice}", return_tensors="pt")["input_ids"]
    context = len(TOKENIZER(question.rstrip())["input_ids"])
    with torch.no_grad():
        scores = model(whole).logits[0, :-1].log_softmax(-1)
    chosen = scores.gather(1, whole[0, 1:, None])[:, 0]
    return float(chosen[context - 1 :].sum())


def test_multiple_choice_is_that_of_a_plain_loop(model, tmp_path):
    questions = read_choices(write_jsonl(tmp_path / "q.jsonl", QUESTIONS))
    for max_tokens in (1, 10_000):
        items = multiple_choice(model, TOKENIZER, questions, max_tokens)
        for item, question in zip(items, QUESTIONS, strict=True):
            choices = question["choices"]
            found = np.array([by_padded_loop(model, question["question"], choice) for choice in choices])
            sizes = {"acc": [1] * len(choices), "acc_norm": [len(c) for c in choices]}
            sizes["acc_bytes"] = [len(c.encode()) for c in choices]
            right = {
                name: float(np.argmax(found / np.array(size)) == question["answer"])
                for name, size in sizes.items()
            }
            assert item.scores == {name: (value, 1.0) for name, value in right.items()}
            assert item.answer == choices[int(np.argmax(found))] and item.group == question.get(
                "language", ""
            )


def test_blanks_at_the_end_of_a_question_belong_to_the_choice():
    tokens, first = choice_tokens(TOKENIZER, "天空是 ", "蓝")
    assert TOKENIZER.decode(tokens[:first]) == "天空是" and TOKENIZER.decode(tokens[first:]) == "  蓝"


def test_a_question_longer_than_the_context_is_named(model, tmp_path):
    long = write_jsonl(tmp_path / "q.jsonl", [QUESTIONS[0], {**QUESTIONS[0], "question": "so " * 100}])
    with pytest.raises(UserError, match=r"q\.jsonl:2 is longer than the model's context of 64 tokens"):
        multiple_choice(model, TOKENIZER, read_choices(long), 100)


def test_batches_hold_every_sample_once():
    lengths = [5, 300, 7, 7, 90, 1]
    found = [list(batch) for batch in batches(lengths, 100)]
    assert sorted(sum(found, [])) == list(range(6))
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= 100 for batch in found)
    assert found[0] == [1] and list(batches([], 100)) == []


GOOD = QUESTIONS[0]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "null", '{"question": "x"}', *map(json.dumps, [
        GOOD | {"answer": 3}, GOOD | {"answer": -1}, GOOD | {"answer": "0"}, GOOD | {"answer": True},
        GOOD | {"choices": ["one"]}, GOOD | {"choices": ["one", ""]}, GOOD | {"choices": "two"},
        GOOD | {"question": " "},
    ])],
)  # fmt: skip
def test_a_line_that_is_no_question_is_named(line, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(UserError, match=r"q\.jsonl:3 is not a question"):
        read_choices(path)


def test_a_file_without_questions_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, told in (("none.jsonl", "does not exist"), ("empty.jsonl", "holds no record")):
        with pytest.raises(UserError, match=told):
            read_choices(tmp_path / name)
