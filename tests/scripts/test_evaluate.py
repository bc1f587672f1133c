"""The whole script on tiny random models: all tasks at once, two models side by side, and mistakes."""

import json
from pathlib import Path

import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts import evaluate
from scripts.demo.corpus import make_corpus
from tests.conftest import write_jsonl
from tests.trainer.objectives.test_lora import adapted, base, written
from trainer.weights.files import save_weights

QUESTIONS = [{"question": "The sky is", "choices": ["blue", "red"], "answer": 0}] * 3


@pytest.fixture
def models(tmp_path) -> list[str]:
    """Two saved models; their shapes are in the files."""
    paths = [tmp_path / "a_32.pth", tmp_path / "b_64.pth"]
    for seed, (path, size) in enumerate(zip(paths, (32, 64), strict=True)):
        torch.manual_seed(seed)
        save_weights(MiniMindForCausalLM(MiniMindConfig(hidden_size=size, num_hidden_layers=1)), path)
    return list(map(str, paths))


def test_all_tasks_on_two_models(models, corpus, tmp_path, call):
    exam = write_jsonl(tmp_path / "exam.jsonl", make_corpus(0)["exam.jsonl"][::49])
    choices, held_out = tmp_path / "choices.json", tmp_path / "held_out.json"  # arrays in one line
    choices.write_text(json.dumps(QUESTIONS))
    records = [json.loads(line) for line in Path(corpus["sft_eval"]).read_text().splitlines()]
    held_out.write_text(json.dumps(records))
    args = ["--model", models[0], "--against", models[1], "--task", "loss", "exam", "choices"]
    args += ["--data_path", held_out, "--max_seq_len", 48, "--exam_path", exam, "--choices_path", choices]
    args += ["--max_new_tokens", 8, "--show", 2]
    args += ["--json", tmp_path / "new" / "report.json"]
    done = call(evaluate, *args)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert list(report["models"]) == ["a_32", "b_64"] and report["models"]["b_64"]["path"] == models[1]
    rows = {(row["task"], row["metric"], row["group"]): row for row in report["results"]}
    assert {task for task, _, _ in rows} == {"loss", "exam", "choices"}
    assert rows["exam", "right", "zh"]["items"] == 3 and rows["choices", "acc", "all"]["items"] == 3
    keys = [item["key"] for item in report["items"]["loss"]["a_32"]]
    assert len(keys) == rows["loss", "loss", "all"]["items"] > 1 and keys[0] == f"{held_out}[0]"
    # ln(6400), untrained
    assert rows["loss", "loss", "all"]["models"]["a_32"]["value"] == pytest.approx(8.8, abs=1)
    assert set(rows["loss", "bits per byte", "all"]["difference"]) == {"b_64"}
    assert rows["exam", "right", "all"]["items"] == rows["exam", "characters", "all"]["items"] == 6
    assert done.stdout.count("  Q: ") == done.stdout.count("  A: ") == 2 * 2  # of each model
    header, *lines = done.stdout.splitlines()[-len(rows) - 1 :]
    assert header.split() == ["task", "metric", "items", "a_32", "b_64", "difference"] and len(lines) == len(
        rows
    )
    assert list(report["items"]["exam"]) == ["a_32", "b_64"]
    assert report["items"]["choices"]["a_32"][0]["answer"] in QUESTIONS[0]["choices"]
    again = call(evaluate, *args[:-2])
    assert again.stdout.splitlines()[-len(lines) :] == lines  # the same draws, the same resamples


def test_an_adapter_is_judged_beside_its_base(corpus, tmp_path, call):
    save_weights(base(), tmp_path / "base_32.pth")
    lora, report = written(adapted(), tmp_path), tmp_path / "report.json"
    args = [
        "--model",
        tmp_path / "base_32.pth",
        "--lora",
        lora,
        "--against",
        tmp_path / "base_32.pth",
        "--json",
        report,
    ]
    done = call(evaluate, *args, "--task", "loss", "--data_path", corpus["sft_eval"], "--max_seq_len", 48)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())["results"][0]
    values = [found["models"][name]["value"] for name in ("lora_32", "base_32")]
    assert abs(values[0] - values[1]) > 1e-3 and found["difference"].keys() == {"base_32"}


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "--task"),
        (["--task", "loss", "choices"], "that the model was not trained on"),
        (["--task", "exam", "--show", -1], "--show not negative"),
        (["--task", "choices"], "--task choices needs --choices_path"),
        (["--task", "exam", "--batch_tokens", 0], "--batch_tokens"),
        (["--task", "exam", "--show", "many"], "--show"),
        (["--task", "loss", "--data_path", "x", "--against", "no/such.pth"], "--against no/such.pth: no such file"),
        (["--task", "exam", "--exam_path", "no/exam.jsonl"], "--exam_path no/exam.jsonl does not exist"),
    ],
)  # fmt: skip
def test_mistakes(models, call, args, told):
    done = call(evaluate, "--model", models[0], *args)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_model_twice_and_a_file_that_cannot_be_written(models, tmp_path, call):
    done = call(evaluate, "--model", models[0], "--against", models[0], "--task", "loss", "--data_path", "x")
    assert done.returncode == 2 and "names a model twice" in done.stderr
    choices = write_jsonl(tmp_path / "c.jsonl", QUESTIONS)
    args = ["--task", "choices", "--choices_path", choices, "--json", tmp_path]
    done = call(evaluate, "--model", models[0], *args)
    # the table stays
    assert done.returncode == 2 and "cannot be written" in done.stderr and "acc_bytes" in done.stdout
