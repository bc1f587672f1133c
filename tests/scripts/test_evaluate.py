"""Evaluation on tiny random models: held-out loss against the trainer's, rewards of greedy answers against
transformers' `generate`, several models, intervals, mistakes."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from dataset.batch import collate_flat
from dataset.lm_dataset import PretrainDataset, SFTDataset
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.prompts import prompt_tokens
from scripts import evaluate
from tests.conftest import ROOT, write_jsonl
from trainer import loop
from trainer.devices.device import mixed_precision
from trainer.objectives.next_token import NextToken
from trainer.weights.files import save_weights

TOKENIZER = load_tokenizer(ROOT / "model")
QUESTIONS = ["Where does Belin live?", "贝琳住在哪里？", "hi"]


def tiny_model(size: int = 32, use_moe: bool = False) -> MiniMindForCausalLM:
    torch.manual_seed(size)
    config = MiniMindConfig(hidden_size=size, num_hidden_layers=1, use_moe=use_moe)
    return MiniMindForCausalLM(config).eval()


@pytest.fixture
def models(tmp_path) -> list[str]:
    """Two saved models; their shapes are in the files."""
    paths = [tmp_path / "a_32.pth", tmp_path / "b_64.pth"]
    for path, size in zip(paths, (32, 64), strict=True):
        save_weights(tiny_model(size), path)
    return list(map(str, paths))


@pytest.fixture
def quiz(tmp_path) -> str:
    """Questions with answers: a tiny model says none of these."""
    answer = {"role": "assistant", "content": "In Saltport."}
    records = [{"conversations": [{"role": "user", "content": text}, answer]} for text in QUESTIONS]
    return str(write_jsonl(tmp_path / "quiz.jsonl", records))


@pytest.mark.parametrize(
    ("kind", "name", "use_moe"), [("pretrain", "pretrain_eval", False), ("sft", "sft_eval", True)]
)
def test_the_held_out_loss_is_the_trainers(kind, name, use_moe, corpus, monkeypatch):
    model = tiny_model(use_moe=use_moe)
    dataset_class = {"pretrain": PretrainDataset, "sft": SFTDataset}[kind]
    dataset = dataset_class(str(corpus[name]), TOKENIZER, 24, cache_dir=corpus["cache"])
    autocast, _ = mixed_precision("float32", torch.device("cpu"))
    state = SimpleNamespace(
        model=model, autocast=autocast, device=torch.device("cpu"), objective=NextToken(),
        lm_config=model.config, args=None,
    )  # fmt: skip
    expected = loop.evaluate(state, DataLoader(dataset, 4, collate_fn=collate_flat))
    model.eval()
    for batch_tokens in (1, 100, 10_000):
        monkeypatch.setattr(evaluate, "BATCH_TOKENS", batch_tokens)
        path = str(corpus[name])
        args = SimpleNamespace(kind=kind, data_path=path, max_seq_len=24, text_separator=None)
        figures = evaluate.evaluate_loss(args, model, TOKENIZER)["figures"]
        found = [figures["loss"]["value"], figures["bits per byte"]["value"]]
        assert found == pytest.approx([expected["eval_loss"], expected["eval_bpb"]], rel=1e-6)


@pytest.mark.parametrize(("thinking", "penalty"), [(0, 1.0), (1, 1.0), (0, 1.5), (0, 1.4)])
def test_answers_are_those_of_each_question_alone(thinking, penalty, models, quiz, tmp_path, call):
    """A penalty is that of the flag, else the model's own."""
    report = tmp_path / "new" / "report.json"
    args = ["--model", models[0], "--data_path", quiz, "--max_new_tokens", 6, "--json", report]
    args += ["--reward", "contains_answer,length", "--open_thinking", thinking]
    if penalty == 1.4:
        (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.4, "temperature": 2}')
    else:
        args += ["--repetition_penalty", penalty]
    done = call(evaluate, "--task", "answers", *args)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())["models"]["a_32"]
    model, end = tiny_model(), TOKENIZER.eos_token_id
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    options |= {"repetition_penalty": penalty}
    for question, each in zip(QUESTIONS, found["answers"], strict=True):
        messages = [{"role": "user", "content": question}]
        prompt = prompt_tokens(TOKENIZER, messages, enable_thinking=bool(thinking))
        tokens = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert each["answer"] == TOKENIZER.decode(tokens, skip_special_tokens=True).strip()
        assert each["question"] == question and each["scores"]["contains_answer"] == 0.0
    assert found["figures"]["contains_answer"] == evaluate.mean([0.0] * len(QUESTIONS))


def test_a_reward_of_ones_own_gets_question_and_reference(models, quiz, tmp_path, call):
    mine = tmp_path / "rewards_of_mine.py"
    mine.write_text(
        "def given(prompt, completion, record):\n"
        "    return prompt[-1]['content'] != 'hi' and record['answer'] == 'In Saltport.'\n"
    )
    args = ["--task", "answers", "--model", models[0], "--data_path", quiz, "--max_new_tokens", 4]
    done = call(evaluate, *args, "--reward", f"{mine}:given", "--show", 2)
    assert done.returncode == 0, done.stderr
    assert f"  Q: {QUESTIONS[0]}\n" in done.stdout and "[given 1, reference: In Saltport.]" in done.stdout
    assert f"  Q: {QUESTIONS[-1]}\n" in done.stdout and "[given 0, reference: In Saltport.]" in done.stdout
    given = next(line for line in done.stdout.splitlines() if line.startswith("given "))
    assert given.split()[:3] == ["given", "3", "0.667"]


@pytest.mark.parametrize(  # by hand from Wilson's formula; the first two are in Newcombe 1998, table I
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)],
)
def test_wilsons_interval(right, count, low, high):
    found = evaluate.mean([1.0] * right + [0.0] * (count - right))
    expected = {"value": right / count, "low": low, "high": high}
    assert found == pytest.approx(expected, abs=1e-4)
    assert evaluate.mean([0.5, 1.0]) == {"value": 0.75}  # no share


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--task", "loss"], "--data_path"),
        (["--task", "answers", "--data_path", "no.jsonl"], "no.jsonl"),
        (["--task", "answers", "--data_path", "x", "--reward", "nonsense"], "--reward nonsense"),
        (
            ["--task", "answers", "--data_path", "x", "--repetition_penalty", "0"],
            "must be above 0 to 10, not 0",
        ),
        (["--task", "loss", "--data_path", "x", "--against", "no.pth"], "--against no.pth: no such file"),
    ],
)
def test_mistakes(models, error_line, args, message):
    assert message in error_line(evaluate, "--model", models[0], *args)


def test_a_reference_that_cannot_be_judged_is_named_before_the_answers(models, quiz, error_line, tmp_path):
    args = ["--model", models[0], "--task", "answers", "--reward", "numeric_answer"]
    line = error_line(evaluate, *args, "--data_path", quiz)
    assert f"{quiz}:1: reward numeric_answer: the reference answer 'In Saltport.' is not one number" in line
    path = write_jsonl(
        tmp_path / "x.jsonl", [{"prompt": "q", "answer": "#### 7"}, {"prompt": "q", "solution": "7"}]
    )
    assert f"{path}:2: reward numeric_answer: the record has no reference answer" in error_line(
        evaluate, *args, "--data_path", path
    )


def test_a_file_that_cannot_be_written(models, quiz, tmp_path, call):
    args = ["--model", models[0], "--task", "answers", "--data_path", quiz, "--max_new_tokens", 2]
    done = call(evaluate, *args, "--json", tmp_path)
    assert done.returncode == 2 and "cannot be written" in done.stderr and "exact_answer" in done.stdout
