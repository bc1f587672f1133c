"""The plan of a run: what it chooses, what it says, and that what it writes can be run as it stands."""

import json
import os
import random
import shlex
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.arguments import parse_args
from common.errors import UserError
from common.settings import ModelConfig
from dataset.lm_dataset import StageDataset
from scripts import chat, plan
from scripts.planning import machine, report, stages
from scripts.planning.choice import SMALLEST_SHARE, Plan, Planner, choose
from scripts.planning.machine import Cost
from scripts.planning.stages import Stage
from tests.conftest import sentence, write_jsonl
from trainer import train_full_sft, train_pretrain
from trainer.optim import rules


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(3)
    write_jsonl(folder / "text.jsonl", [{"text": sentence(rng, 20, 60)} for _ in range(300)])
    turns = [[sentence(rng, 3, 9), sentence(rng, 3, 20)] for _ in range(400)]
    chats = [
        {"conversations": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in turns
    ]
    write_jsonl(folder / "chat.jsonl", chats)
    return folder


@pytest.fixture
def start(data, tmp_path, monkeypatch, capsys):
    """Runs the command on small data and returns what it printed."""

    monkeypatch.setattr(machine, "MORE_SECONDS", 0.0)

    def run(*flags, **paths) -> str:
        argv = []
        given = {"pretrain_data": data / "text.jsonl", "save_dir": tmp_path, "cache_dir": data / "cache"}
        for name, value in (given | paths).items():
            if value is not None:
                argv += [f"--{name}", str(value)]
        monkeypatch.setattr(sys, "argv", ["plan.py", *argv, *map(str, flags)])
        plan.main()
        return capsys.readouterr().out

    return run


def commands(folder) -> list[list[str]]:
    lines = (folder / "run.sh").read_text().splitlines()
    return [shlex.split(line) for line in lines if line.startswith(("python", "torchrun"))]


def test_each_command_of_the_shell_file_is_one_that_its_script_takes(start, data, tmp_path):
    out = start(
        "--depth", 1, "--hours", 1, sft_data=data / "chat.jsonl", tokenizer_path=ModelConfig().tokenizer_path
    )
    pretrain, sft, report = commands(tmp_path)
    assert chat_flags(tmp_path).weight is None and chat_flags(tmp_path).form == "chat"
    assert pretrain[1] == "trainer/train_pretrain.py" and sft[1] == "trainer/train_full_sft.py"
    assert report[:2] == ["python", "scripts/plot_metrics.py"]
    for script, command in ((train_pretrain, pretrain), (train_full_sft, sft)):
        args = parse_args(script.Args, "", command[2:])
        assert (args.hidden_size, args.num_hidden_layers) == (64, 1)
        assert args.from_resume and args.eval_share == 0.02
        assert args.optimizer == "muon" and args.accumulation_steps == 1 and 0 < args.learning_rate < 0.1
        assert args.batch_size >= 1 and args.warmup_updates >= 1  # numbers, no auto
        assert f"{args.learning_rate:g}" in out
    assert "64 x 1: 0.47 M parameters" in out and "  memory, at least  " in out
    assert "unwise: pretrain: " in out and "updates teach little" in out  # these data are few
    assert "no forecast of the loss" in out and "a smaller model" not in out  # there is none


def chat_flags(folder):
    """What the chat makes of the command with which the shell file ends."""
    said = shlex.split((folder / "run.sh").read_text().splitlines()[-1])
    command = shlex.split(said[1].partition(": ")[2])
    assert said[0] == "echo" and command[:2] == ["python", "scripts/chat.py"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command[1:])
        return chat.parse_args()


def test_after_pretraining_alone_the_chat_continues_texts(start, tmp_path):
    out = start("--depth", 3, tokenizer_path=ModelConfig().tokenizer_path)
    flags = chat_flags(tmp_path)
    assert (flags.weight, flags.form, flags.save_dir) == ("pretrain", "text", str(tmp_path))
    assert f"--save_dir {tmp_path} --weight pretrain --form text" in out
    assert "tokens per parameter: a smaller model learns as much" in out


def test_relative_paths_and_patterns_mean_what_they_meant_here(start, data, tmp_path, monkeypatch):
    """An empty part is not the current folder."""
    monkeypatch.chdir(data)
    start("--depth", 1, pretrain_data="tex*.jsonl, ,", cache_dir="cache")
    flags = dict(zip(*[iter(commands(tmp_path)[0][2:])] * 2, strict=True))
    assert flags["--data_path"] == str(data / "tex*.jsonl") and flags["--cache_dir"] == str(data / "cache")


def test_a_name_that_is_no_utf_8(start, data, tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.jsonl"
    shutil.copy(data / "text.jsonl", name)
    start("--depth", 1, pretrain_data=os.fsdecode(name))
    assert b"--data_path '" + name + b"'" in (tmp_path / "run.sh").read_bytes()


def test_few_data_get_a_vocabulary_of_their_own(start, tmp_path):
    out = start("--depth", 1)
    assert commands(tmp_path)[0].count("--tokenizer_path") == 1
    assert (tmp_path / "tokenizer/tokenizer.json").is_file()
    assert "64 x 1: 0.0" in out  # at most 512 rows of the embedding, not 6,400


def test_a_gpu_is_arithmetic_with_its_data_sheet(start, tmp_path):
    out = start("--gpu", "rtx4090", "--depth", "1", tokenizer_path=ModelConfig().tokenizer_path)
    assert "arithmetic for rtx4090" in out and ", measured" not in out and "64 x 1: 0.47 M parameters" in out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--hours", "0"], "--hours 0.0 must be above 0"),
        (["--depth", "0"], "--depth 0 must be above 0"),
        (["--depth", "64"], "do not hold a model of 4096 x 64"),
        (["--hours", "0.001", "--depth", "1"], "--hours 0.001: starting the stages alone takes 12 s"),
        (["--hours", "0.003334", "--depth", "1"], "--hours 0.003334: the smallest plan takes"),
    ],
)
def test_wrong_flags_are_one_line(start, flags, line):
    with pytest.raises(UserError) as error:
        start(*flags, tokenizer_path=ModelConfig().tokenizer_path)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_missing_data_are_one_line_before_anything_is_tokenised(start, data, tmp_path):
    for missing in ({"pretrain_data": tmp_path / "missing.jsonl"}, {"sft_data": tmp_path / "missing.jsonl"}):
        with pytest.raises(UserError, match="no such file"):
            start(**missing, cache_dir=tmp_path / "cache")
    with pytest.raises(UserError, match="a plan is for data without weights"):
        start(sft_data=f"{data / 'chat.jsonl'}:0.5", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_conversations_alone_are_pretrained_on_and_then_taught(start, data, tmp_path):
    """The same ones are held out of both stages."""
    cache = tmp_path / "cache"
    start("--depth", 1, pretrain_data=None, sft_data=data / "chat.jsonl", cache_dir=cache)
    flags = [dict(zip(*[iter(each[2:])] * 2, strict=True)) for each in commands(tmp_path)[:2]]
    assert [each["--data_path"] for each in flags] == [str(data / "chat.jsonl")] * 2
    assert chat_flags(tmp_path).weight is None
    held_out = {}
    for meta in cache.glob("*/meta.json"):
        content = json.loads(meta.read_text())
        if content["split"][1]:
            lines = np.fromfile(meta.with_name("sources.bin"), np.int64).reshape(-1, 2)[:, 1]
            held_out.setdefault(content["kind"], set()).add(frozenset(lines.tolist()))
    assert held_out["pretrain"] == held_out["sft"] and len(held_out["sft"]) == 1
    with pytest.raises(UserError, match="give --pretrain_data, --sft_data or both"):
        start(pretrain_data=None)


def test_too_little_time_is_said_before_all_is_tokenised(start, monkeypatch, tmp_path):
    monkeypatch.setattr(stages, "LITTLE_TEXT", 0)
    monkeypatch.setattr(stages, "START", 3.0)
    with pytest.raises(UserError, match=r"--hours 0.001: 100 updates of a model of 192 x 3 take"):
        start("--hours", 0.001, "--depth", 3, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


class Data(SimpleNamespace):
    mean_tokens = StageDataset.mean_tokens
    cache = SimpleNamespace(report={"target_bytes": 3000, "targets": 1000})

    def __len__(self) -> int:
        return self.items


COSTS = st.builds(
    Cost,
    parameters=st.integers(10**5, 10**9),
    flops=st.floats(1e6, 1e10),
    token=st.floats(1e-6, 1e-2),
    update=st.floats(0, 1),
    kept=st.floats(1e3, 1e6),
    measured=st.just(True),
)


@pytest.fixture(scope="module")
def without_model() -> Stage:
    """Pretraining on three million tokens."""
    held_out = Data(num_tokens=6 * 10**4, items=200)
    args = train_pretrain.Args(batch_size=None, learning_rate=None, accumulation_steps=1)
    return Stage(train_pretrain, args, Data(num_tokens=3 * 10**6, items=10**4), held_out, 1, Cost())


@given(st.dictionaries(st.integers(1, 24), COSTS, min_size=1), st.floats(1e9, 1e11), st.floats(60, 1e6))
def test_a_plan_keeps_to_memory_and_time(without_model, costs, memory, limit):
    try:
        best, limited = choose(Planner([without_model], memory, limit, lambda tokens: 5.0), costs)
    except UserError:
        stage = without_model.with_model(min(costs), costs[min(costs)], 1, memory, SMALLEST_SHARE)
        assert len(costs) > 1 or stage.memory > memory or stage.seconds > limit
        return
    (stage,) = best.stages
    assert stage.memory <= memory and stage.seconds <= limit and limited in ("hours", "memory", "data")
    free = stage.args.model_copy(update={"batch_size": None, "learning_rate": None, "accumulation_steps": 1})
    whole = rules.chosen(free, stage.data, 1)
    split = stage.args.batch_size * stage.args.accumulation_steps
    # the memory changes the micro-batch, not the update
    assert whole.batch_size / 2 < split <= whole.batch_size


@pytest.mark.parametrize(
    ("tokens", "passes", "depth", "is_known"),
    [
        (10**6, 1, 2, True),
        (10**4, 4, 2, False),  # 20 kB of text: 3.94 was forecast, 4.50 came
        (10**6, 4, 2, False),
        (10**6, 1, 8, False),
    ],
)
def test_a_loss_is_forecast_only_where_runs_were_measured(tokens, passes, depth, is_known):
    cache = SimpleNamespace(report={"target_bytes": 3000, "targets": 1000})
    data = Data(num_tokens=tokens, items=100, cache=cache)
    args = train_pretrain.Args(hidden_size=64 * depth, num_hidden_layers=depth, epochs=passes)
    stage = Stage(train_pretrain, args, data, data, 1, Cost())
    line = report.describe_loss(Plan([stage], 5.0, 1.0, 1.0), data)
    assert ("5.00 (4.75 to 5.25)" in line) == is_known and ("no forecast" in line) != is_known


def test_little_time_takes_a_part_of_the_data(without_model):
    costs = {1: Cost(10**6, 1e7, 1e-3, 0.01, 1e4, True)}  # 3,000 s for a pass
    best, limited = choose(Planner([without_model], 1e11, 600.0, lambda tokens: 5.0), costs)
    (stage,) = best.stages
    assert limited == "hours" and stage.args.epochs == 1 and 400 < best.seconds <= 600
    assert stage.args.max_tokens > 0 and stage.tokens < 600_000
    row = next(line for line in report.describe(best, limited) if "share of the data" in line)
    assert 0.1 < float(row.split()[-1]) < 0.2
