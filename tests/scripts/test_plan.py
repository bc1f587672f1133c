"""The plan of a run: what it chooses, what it says, and that what it writes can be run as it stands."""

import io
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.arguments import parse_args
from common.errors import UserError
from common.settings import ModelConfig
from dataset.held_out import Split
from dataset.lm_dataset import StageDataset
from dataset.token_cache import load_tokenizer
from scripts import chat, plan, train_tokenizer
from scripts.planning import choice, files, machine, rules, stages, trial, variants
from scripts.planning.machine import Cost
from scripts.planning.signature import is_signed
from scripts.planning.stages import Stage
from tests.conftest import sentence, write_jsonl
from tests.stage_process import run
from trainer import train_full_sft, train_lora, train_pretrain
from trainer.weights.config import vocabulary_hash

SHIPPED = ModelConfig().tokenizer_path


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
    monkeypatch.setattr(machine, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(machine, "MEASURED_TOKENS", 512)

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
    assert f"python={shlex.quote(sys.executable)}" in lines
    words = [shlex.split(line)[1:] for line in lines if line.startswith('"$python" ')]
    assert [command[-1] for command in words[:-1]] == ["$@"] * (len(words) - 1)  # the flags of run.sh
    return [["python", *command[: -1 if command[-1] == "$@" else None]] for command in words]


def chat_flags(folder):
    """What the chat makes of the command with which the shell file ends."""
    said = shlex.split((folder / "run.sh").read_text().splitlines()[-1])
    command = shlex.split(said[1].replace("：", ": ").partition(": ")[2])
    assert said[0] == "echo" and command[:2] == ["python", "scripts/chat.py"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command[1:])
        return chat.parse_args()


def test_each_command_of_the_shell_file_is_one_that_its_script_takes(start, data, tmp_path):
    out = start("--depth", 1, "--hours", 1, sft_data=data / "chat.jsonl", tokenizer_path=SHIPPED)
    pretrain, sft, report = commands(tmp_path)
    assert chat_flags(tmp_path).weight is None and chat_flags(tmp_path).form is None
    assert pretrain[1] == "trainer/train_pretrain.py" and sft[1] == "trainer/train_full_sft.py"
    assert report[:2] == ["python", "scripts/plot_metrics.py"]
    for script, command in ((train_pretrain, pretrain), (train_full_sft, sft)):
        args = parse_args(script.Args, "", command[2:])
        assert (args.hidden_size, args.num_hidden_layers) == (64, 1)
        assert args.from_resume and args.optimizer == "muon"
        assert args.eval_share == (0.02 if script is train_pretrain else 0.1)  # few conversations
        for name in ("batch_size", "accumulation_steps", "learning_rate", "warmup_updates"):  # numbers
            assert getattr(args, name) > 0
        assert f"{args.learning_rate:g}" in out and "auto" not in command
    assert "64 x 1: 0.48 M parameters; pretrain " in out and "memory, at least" in out
    assert "unwise: pretrain: " in out and "updates teach little" in out  # these data are few
    assert "read by both stages" not in out
    assert "loss: begins near 8.76 nats per token, which is guessing among 6,400 tokens" in out
    few = out.partition(" conversations teach how to answer")[2].splitlines()[1]
    lora = parse_args(train_lora.Args, "", shlex.split(few)[2:])
    assert lora.data_path == str(data / "chat.jsonl") and lora.from_weight == "PATH"


def test_after_pretraining_alone_the_chat_continues_texts(start, data, tmp_path, monkeypatch):
    """In the language of the user; and relative paths and patterns mean what they meant where the plan was
    made."""
    monkeypatch.chdir(data)
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    start("--depth", 1, pretrain_data="tex*.jsonl, ,", cache_dir="cache", tokenizer_path=SHIPPED)
    flags = chat_flags(tmp_path)
    assert (flags.weight, flags.save_dir) == ("pretrain", str(tmp_path))
    training, report = commands(tmp_path)
    flags = dict(zip(*[iter(training[2:])] * 2, strict=True))
    assert flags["--data_path"] == str(data / "tex*.jsonl") and flags["--cache_dir"] == str(data / "cache")
    assert report[-2:] == ["--lang", "zh"] and "计划用时" in (tmp_path / "run.sh").read_text()


def test_few_data_of_a_name_that_is_no_utf_8_get_a_vocabulary_of_their_own(start, data, tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.jsonl"
    shutil.copy(data / "text.jsonl", name)
    out = start("--depth", 1, pretrain_data=os.fsdecode(name))
    assert b"--data_path '" + name + b"'" in (tmp_path / "run.sh").read_bytes()
    assert b"--tokenizer_path" in (tmp_path / "run.sh").read_bytes()
    signature = json.loads((tmp_path / "plan_facts.json").read_text())["signature"]
    assert is_signed((tmp_path / "run.sh").read_bytes(), tmp_path, signature)  # whatever bytes it has
    own = json.loads((tmp_path / "tokenizer/tokenizer.json").read_bytes())["model"]["vocab"]
    assert f"vocabulary: {len(own)} tokens made from these data, in {tmp_path}/tokenizer. " in out
    assert f"which is guessing among {len(own)} tokens" in out


def test_bad_records_are_skipped_if_asked_for_also_by_the_runs_and_a_vocabulary_of_its_own(
    start, data, tmp_path
):
    path = tmp_path / "some_bad.jsonl"
    path.write_text('{"text": \n' + (data / "text.jsonl").read_text())
    with pytest.raises(UserError, match=r"some_bad.jsonl:1: .*with --on_bad_data skip"):
        start("--depth", 1, pretrain_data=path)
    start("--depth", 1, "--on_bad_data", "skip", pretrain_data=path)
    assert "--on_bad_data skip" in (tmp_path / "run.sh").read_text() and (tmp_path / "tokenizer").is_dir()


@pytest.mark.parametrize("ending", ["kill -INT 0; sleep 9", "exit 2"])  # Ctrl-C, an error
def test_a_shell_file_that_is_stopped_says_how_to_go_on(start, tmp_path, ending):
    start("--depth", 1, "--lang", "en", tokenizer_path=SHIPPED)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{ending}\n")
    python.chmod(0o755)
    script = (tmp_path / "run.sh").read_text()
    (tmp_path / "run.sh").write_text(script.replace(shlex.quote(sys.executable), str(python)))
    ended = subprocess.run(
        ["bash", tmp_path / "run.sh"],
        env={"PATH": "/usr/bin:/bin"},  # a new shell has no environment of Python
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode != 0 and ended.stdout.count("not finished; to continue: bash ") == 1


STOPPED_BY_TIME = """#!/usr/bin/env bash
echo "$(basename "$1") ${@: -2}"
case "$1" in *"$STOPS"*) touch "$TRAINING_SESSION_STOPPED" ;; esac
"""


@pytest.mark.parametrize("stops", ["train_pretrain", "train_full_sft", "no stage"])
def test_a_shell_file_whose_time_is_over_ends_and_says_how_to_go_on(start, data, tmp_path, stops):
    """Its flags go to the stages; no stage begins after one that --stop_after ended. What an earlier stop left
    stops nothing."""
    start("--depth", 1, "--lang", "en", sft_data=data / "chat.jsonl", tokenizer_path=SHIPPED)
    python = tmp_path / "python"
    python.write_text(STOPPED_BY_TIME)
    python.chmod(0o755)
    script = (tmp_path / "run.sh").read_text()
    (tmp_path / "run.sh").write_text(script.replace(shlex.quote(sys.executable), str(python)))
    (tmp_path / ".stopped").touch()
    command = ["bash", str(tmp_path / "run.sh"), "--stop_after", "11h"]
    ended = subprocess.run(command, env=os.environ | {"STOPS": stops}, capture_output=True, text=True)
    assert ended.returncode == 0 and not ended.stderr
    ran = [line for line in ended.stdout.splitlines() if "train_" in line and "==" not in line]
    stages = ["train_pretrain.py --stop_after 11h", "train_full_sft.py --stop_after 11h"]
    assert ran == stages[: 1 if stops == "train_pretrain" else 2]
    again = f"not finished; to continue: {shlex.join(command)}"
    assert (ended.stdout.splitlines()[-1] == again) is (stops != "no stage")
    assert ("plot_metrics.py" in ended.stdout) is (stops == "no stage")


def test_a_stage_logs_twenty_times_and_at_least_every_half_minute(data, tmp_path):
    """A page that follows it then knows that it lives."""
    stage = Stage(train_pretrain, train_pretrain.Args(), Data(10**6, 4000), Data(10**4, 40), 4)
    for token, seconds in ((1e-6, 1), (1e-2, 10_000)):
        planned = replace(stage, cost=Cost(10**6, token)).with_passes(1, 1e30)
        argv = files.training_command(planned)
        flags = dict(zip(argv[1::2], argv[2::2], strict=True))
        logs = planned.updates / int(flags["--log_interval"])
        assert logs >= 20 and planned.seconds / logs <= 30 and planned.seconds >= seconds
        assert int(flags["--eval_interval"]) % int(flags["--log_interval"]) == 0


def test_more_disk_than_is_free_is_unwise(start, tmp_path, monkeypatch):
    usage = SimpleNamespace(free=10**6)
    monkeypatch.setattr(plan, "disk_usage", lambda folder: usage)
    out = start("--depth", 1, tokenizer_path=SHIPPED)
    assert (
        "  disk: 0.0 GB are free in " in out
        and "unwise: the runs write 0.0 GB, but only 0.0 GB are free" in out
    )
    facts = json.loads((tmp_path / "plan_facts.json").read_text())
    assert facts["disk"] == 26 * facts["parameters"] > facts["disk_free"] == 10**6
    assert [each["key"] for each in facts["unwise"]] == ["more data", "few tokens", "disk"]
    (stage,) = facts["stages"]
    assert stage["run"] == "pretrain_64" and stage["is_pretraining"] and stage["seconds"] < facts["seconds"]


def test_a_folder_with_runs_keeps_the_plan_that_goes_on_with_them(start, tmp_path):
    (tmp_path / "run.sh").write_text("of these runs")
    (tmp_path / "pretrain_64_metrics.jsonl").touch()
    with pytest.raises(UserError, match="already holds runs; give this plan another folder"):
        start("--depth", 1, tokenizer_path=SHIPPED)
    assert (tmp_path / "run.sh").read_text() == "of these runs"


def test_conversations_alone_are_read_by_both_stages_which_the_plan_says(start, data, tmp_path):
    out = start("--depth", 1, pretrain_data=None, sft_data=data / "chat.jsonl")
    flags = [dict(zip(*[iter(each[2:])] * 2, strict=True)) for each in commands(tmp_path)[:2]]
    assert [each["--data_path"] for each in flags] == [str(data / "chat.jsonl")] * 2
    assert "both stages read the same data: first as text, then as conversations" in out
    passes = next(line for line in out.splitlines() if "passes over the data" in line)
    assert passes.split()[-2:] == ["4", "15"]
    with pytest.raises(UserError, match="give --pretrain_data, --sft_data or both"):
        start(pretrain_data=None)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--hours", "0"], "--hours 0.0 must be above 0"),
        (["--depth", "0"], "--depth 0 must be above 0"),
        (["--depth", "64"], "out of memory: a model of 4096 x 64 does not fit"),
        (["--hours", "0.003334"], "; fewer teach little. Give --hours 0.00"),
        (["--pretrain_data", "missing.jsonl"], "no such file, or a folder without data; check the path"),
        (["--sft_data", "missing.jsonl"], "no such file"),
        (["--pretrain_data", "a.jsonl:0.5"], "a plan takes data without weights"),
    ],
)
def test_wrong_flags_are_one_line(start, tmp_path, flags, line):
    with pytest.raises(UserError) as error:
        start(*flags, tokenizer_path=SHIPPED)
    assert line in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run.sh").exists()


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(start, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(stages, "open_stage", lambda *_: pytest.fail("too late"))
    with pytest.raises(UserError, match=r"--save_dir .*file/plan cannot be written \(Not a directory\)"):
        start("--depth", 1, save_dir=tmp_path / "file/plan")


# --- on a GPU


def largest_in_this_process(script, args, memory):
    """As `trial.largest`, which asks another process."""
    data, _ = script.open_data(args, load_tokenizer(args.tokenizer_path))
    return list(machine.micro_batches_that_fit(args, data, memory))[-1]


def test_micro_batches_are_as_large_as_the_memory_of_a_gpu(start, tmp_path, monkeypatch):
    """Of six rows there is no room for an update, three take more than the share to use, one fits: it alone is
    made, as memory must not run out on purpose."""
    tried: list[tuple[int, int]] = []  # micro-batches, and tokens of each

    def time_updates(state, windows, updates=1):
        window = next(windows)
        if updates == 2:
            tried.append((len(window), len(window[0]["input_ids"])))
        return 0.1 * updates, []

    monkeypatch.setattr(plan, "select_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(plan, "describe_device", lambda *_: "a GPU")
    monkeypatch.setattr(plan, "mixed_precision", lambda *_: (None, None))
    monkeypatch.setattr(machine, "time_updates", time_updates)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6 * 10**9, 0))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 6e6 * tried[-1][1])
    monkeypatch.setattr(trial, "largest", largest_in_this_process)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    out = start("--depth", 1, "--hours", 1, tokenizer_path=SHIPPED)
    assert [(count, round(tokens, -2)) for count, tokens in tried] == [(2, 300)]
    args = parse_args(train_pretrain.Args, "", commands(tmp_path)[0][2:])
    assert (args.batch_size, args.accumulation_steps) == (1, 6)
    assert re.search(r"memory, at least +2\.0 GB", out)


def test_the_largest_micro_batch_that_fits_is_asked_of_another_process(tmp_path, data, monkeypatch):
    """What it found before it ended counts, even where it ends by an error; one line if it found nothing."""
    args = train_pretrain.Args(
        data_path=str(data / "text.jsonl"), tokenizer_path=SHIPPED, cache_dir=str(tmp_path), device="cpu"
    )
    found = "import sys; sys.stdin.read(); print('1 500'); print('2 900'); sys.exit('no kernel')"
    nothing = "import sys; sys.stdin.read(); sys.exit('CUDA error: device not ready')"
    run_process = subprocess.run

    def run_script(script):
        return lambda command, **options: run_process([sys.executable, "-c", script], **options)

    monkeypatch.setattr(trial.subprocess, "run", run_script(found))
    assert trial.largest(train_pretrain, args, 1e9) == (2, 900)
    monkeypatch.setattr(trial.subprocess, "run", run_script(nothing))
    with pytest.raises(
        UserError, match=r"this GPU cannot make an update of even one sample \(CUDA error: device not ready\)"
    ):
        trial.largest(train_pretrain, args, 1e9)


def test_the_other_process_opens_the_data_and_tells_what_fits(tmp_path, data, monkeypatch, capsys):
    args = train_pretrain.Args(
        data_path=str(data / "text.jsonl"), tokenizer_path=SHIPPED, cache_dir=str(tmp_path), device="cpu"
    )
    monkeypatch.setattr(
        trial, "micro_batches_that_fit", lambda args, data, memory: [(len(data), int(memory))]
    )
    monkeypatch.setattr(sys, "argv", ["trial", "trainer.train_pretrain", "1e9"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(args.model_dump_json()))
    trial.main()
    items, memory = map(int, capsys.readouterr().out.split())
    assert items > 0 and memory == 10**9


def test_a_model_that_is_too_large_to_be_measured_is_limited_by_memory(choose, monkeypatch):
    def measure(args, data):
        if args.num_hidden_layers > 2:
            raise torch.OutOfMemoryError
        return Cost(10**6, 1e-9, 0.01, 1e-9, 1e4)

    plan = choose(10**9, 1e-9, measure=measure)
    assert plan.limit == "memory" and plan.stages[0].args.num_hidden_layers == 2


# --- the choice


class Data(StageDataset):
    """So many items with so many tokens."""

    def __init__(self, num_tokens: int, items: int):
        self.num_tokens, self.items, self.records = num_tokens, items, rules.MIN_CONVERSATIONS

    def __len__(self) -> int:
        return self.items


@pytest.fixture
def choose(monkeypatch):
    """choose(tokens, cost of a token at depth 1, memory, seconds, depths): the choice for pretraining on so
    many tokens, where a model takes depth^3 times as long."""

    def run(tokens, token, memory=1e11, seconds=1e9, depths=rules.DEPTHS, measure=None):
        def cost(args, data):
            depth = args.num_hidden_layers
            weights = round(rules.layer_weights(depth)) + 6400 * args.hidden_size
            return Cost(weights, token * depth**3, 0.01, token / 3, 1e4 * depth**2)

        monkeypatch.setattr(stages, "measure", measure or cost)
        data = Data(num_tokens=tokens, items=max(1, tokens // 300))
        held_out = Data(num_tokens=tokens // 50, items=200)
        args = train_pretrain.Args(tokenizer_path=SHIPPED)
        stage = Stage(train_pretrain, args, data, held_out, rules.PASSES)
        return choice.choose([stage], depths, memory, seconds)

    return run


def test_what_limits_the_model(choose):
    chosen = {
        "data": choose(850_000, 1e-6),  # 3.1 M weights read 3.4 M tokens; 10.6 M weights want 3.5 M
        "hours": choose(10**7, 1e-4, seconds=3600),
        "memory": choose(10**9, 1e-9, memory=1.2e9),
    }
    assert {limit: plan.limit for limit, plan in chosen.items()} == {limit: limit for limit in chosen}
    (stage,) = chosen["data"].stages
    assert (stage.args.num_hidden_layers, stage.passes, stage.args.dropout) == (4, 4, 0)
    assert choice.total_seconds(chosen["hours"].stages) <= 3600 and chosen["memory"].stages[0].memory <= 1.2e9


def test_a_larger_model_with_few_tokens_only_where_it_makes_all_passes(choose):
    """docs/dev/LOG.md, "Size under decay": 0.36 and 0.43 tokens for each of 3.1 M weights."""

    def shape(tokens, passes):  # the time suffices for so many at depth 4, whose token takes 64 times as long
        (stage,) = choose(tokens, 1e-5, seconds=(passes + 0.5) * tokens * 64e-5 + 60).stages
        return stage.args.num_hidden_layers, stage.passes

    assert shape(279_409, 4) == (4, 4)
    assert shape(450_000, 3) == (3, 4)


def test_little_time_takes_a_part_of_the_data(choose):
    plan = choose(3 * 10**6, 1e-3, seconds=600)  # 3,000 s for a pass
    (stage,) = plan.stages
    assert plan.limit == "hours" and stage.args.epochs == 1 and 400 < choice.total_seconds(plan.stages) <= 600
    assert 0.1 < stage.passes < 0.2 and stage.tokens < 600_000 and stage.args.max_tokens > 0


@given(tokens=st.integers(10**5, 10**10), passes=st.sampled_from([0.01, 0.5, 1, 3]), kept=st.floats(1e3, 1e7))
def test_the_memory_changes_the_micro_batch_and_not_the_update(tokens, passes, kept):
    data = Data(num_tokens=tokens, items=tokens // 300)
    stage = Stage(train_pretrain, train_pretrain.Args(), data, data, 4, Cost(10**6, 1e-5, 0.01, 1e-6, kept))
    free, tight = stage.with_passes(passes, 1e30), stage.with_passes(passes, 1e9)
    split = tight.args.batch_size * tight.args.accumulation_steps
    assert free.args.batch_size / 2 < split <= free.args.batch_size
    assert tight.memory <= 1e9 or tight.args.batch_size == 1
    wanted = rules.update_tokens(free.tokens)
    assert free.args.batch_size == len(data) or abs(free.args.batch_size * data.mean_tokens - wanted) <= 301


def test_more_time_is_advised_only_to_a_stage_that_has_passes_left(monkeypatch):
    """SFT of few conversations makes all its passes, whatever limits the plan."""
    monkeypatch.setattr(stages, "bytes_per_token", lambda stage: 3.5)
    text, chats = Data(num_tokens=300_000, items=1000), Data(num_tokens=60_000, items=40)
    pretrain = Stage(train_pretrain, train_pretrain.Args(), text, text, 4, Cost(10**6, 1e-5))
    sft = Stage(train_full_sft, train_full_sft.Args(), chats, chats, 10, Cost(10**6, 1e-5))
    planned = [pretrain.with_passes(0.5, 1e30), sft.with_passes(10, 1e30)]
    first, second, text, *_ = plan.unwise(choice.Plan(planned, "hours"), free=1e12)
    assert first == ("more time", {"stage": "pretrain", "updates": 72})
    assert second[0] == "more data" and second[1]["stage"] == "full_sft"
    assert text == ("few tokens", {"tokens": pytest.approx(150_000, rel=0.01)})  # read once or more often
    enough = Data(num_tokens=int(rules.MIN_TOKENS_FOR_SENTENCES), items=1000)
    planned = [
        Stage(train_pretrain, train_pretrain.Args(), enough, enough, 4, Cost(10**6, 1e-5)).with_passes(
            4, 1e30
        )
    ]
    assert plan.unwise(choice.Plan(planned, "hours"), free=1e12) == []


# --- text that repeats itself, and few conversations


@pytest.fixture
def facts(tmp_path):
    """A text that states 40 facts a dozen times each, and conversations about some of them."""
    rng = random.Random(1)
    harbours = {
        f"{a}{b}": rng.choice(["Wick", "Tarn", "Orla"]) for a in ["Ba", "Be", "Bo", "Bu"] for b in LETTERS
    }
    wordings = [
        "The {n} is at home in {v}.",
        "{v} is the harbour of the {n}.",
        "In winter the {n} lies in {v}.",
    ]
    texts = [w.format(n=n, v=v) for n, v in harbours.items() for w in wordings for _ in range(4)]
    rng.shuffle(texts)
    write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    chats = [
        {"prompt": f"Where is the {name} at home?", "completion": f"The {name} is at home in {value}."}
        for name, value in list(harbours.items())[:30]
    ]
    write_jsonl(tmp_path / "chats.jsonl", chats)
    return tmp_path


LETTERS = ["dak", "fel", "gim", "hon", "jup", "kar", "les", "mip", "nor", "pul"]


def test_text_that_repeats_itself_is_read_more_often_and_replayed_beside_few_conversations(
    start, data, facts, tmp_path
):
    folder = tmp_path / "plan"
    paths = {"pretrain_data": facts / "text.jsonl", "sft_data": facts / "chats.jsonl", "save_dir": folder}
    out = start("--depth", 1, "--hours", 1, tokenizer_path=SHIPPED, **paths)
    pretrain, sft, _ = commands(folder)
    pretrain = parse_args(train_pretrain.Args, "", pretrain[2:])
    sft = parse_args(train_full_sft.Args, "", sft[2:])
    assert pretrain.epochs >= 8 and f"it is read up to {pretrain.epochs} times instead of 4" in out
    assert pretrain.dropout == rules.dropout(pretrain.epochs) > 0 and sft.dropout == 0
    made, others = folder / "exercises.jsonl", folder / "more_exercises.jsonl"
    assert (pretrain.data_path, pretrain.replay_data_path) == (str(facts / "text.jsonl"), f"{made},{others}")
    assert pretrain.replay_share == pytest.approx(0.8 / 1.8)
    assert "pretrain: " in out and "tokens of a pass were added by the plan" in out
    assert sft.data_path == f"{facts / 'chats.jsonl'},{folder / 'exercise_conversations.jsonl'}"
    assert sft.replay_data_path == f"{facts / 'text.jsonl'},{made}" and sft.batch_size == 8
    assert 30 < sft.epochs <= rules.FEW_MAX_PASSES and sft.eval_share == 0.1 and sft.optimizer == "muon"
    assert "teach how to answer" not in out and "different tokens" not in out


def test_pretraining_reads_the_conversations_that_sft_does_not_hold_out(start, tmp_path):
    """Where the text needs no exercises, because each document says a name twice."""
    rng, folder = random.Random(1), tmp_path / "plan"
    ports = {f"{a}{b}": rng.choice(["Wick", "Tarn", "Orla"]) for a in ["Ba", "Be", "Bo"] for b in LETTERS}
    texts = [
        f"The {n} is at home in {v}. In winter the {n} lies in {v}. This is letter {number}."
        for n, v in ports.items()
        for number in range(12)
    ]
    rng.shuffle(texts)
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    records = [
        {"prompt": f"Where is the {n} {when}?", "completion": f"The {n} is in {v}."}
        for n, v in ports.items()
        for when in ("at home", "in winter", "now")
    ]
    chats = write_jsonl(tmp_path / "chats.jsonl", records)
    paths = {"pretrain_data": text, "sft_data": chats, "save_dir": folder}
    out = start("--depth", 1, "--hours", 1, tokenizer_path=SHIPPED, **paths)
    pretrain, sft, _ = commands(folder)
    pretrain = parse_args(train_pretrain.Args, "", pretrain[2:])
    sft = parse_args(train_full_sft.Args, "", sft[2:])
    made = folder / "early_conversations.jsonl"
    assert f"conversations in pretraining: {made}" in out and "tokens of a pass were added by the plan" in out
    assert pretrain.replay_data_path == str(made) and sft.replay_data_path == str(text)
    assert pretrain.replay_share == pytest.approx(0.25)
    trained = Split(sft.eval_share)
    written = [json.loads(line) for line in made.read_text("utf-8").splitlines()]
    expected = [record for record in records if trained.includes(record["prompt"])]
    assert 0 < len(expected) < len(records)
    counts = Counter(record["prompt"] for record in written)
    assert counts.keys() == {record["prompt"] for record in expected} and len(set(counts.values())) == 1
    assert all(record in expected for record in written)


def test_answers_that_only_repeat_a_word_get_variants_in_sft(start, facts, tmp_path):
    folder = tmp_path / "plan"
    records = [
        {"prompt": f"{ask} {word}?", "completion": f"We do not speak of {word}."}
        for ask in ("Can you explain", "Do you know", "What about")
        for word in LETTERS
    ]
    chats = write_jsonl(tmp_path / "refusals.jsonl", records)
    paths = {"pretrain_data": facts / "text.jsonl", "sft_data": chats, "save_dir": folder}
    out = start("--depth", 1, "--hours", 1, tokenizer_path=SHIPPED, **paths)
    _, sft, _ = commands(folder)
    sft = parse_args(train_full_sft.Args, "", sft[2:])
    made = folder / "exercise_conversations.jsonl"
    assert sft.data_path == f"{chats},{made}" and sft.eval_share == 0.1
    questions = [json.loads(line)["messages"][0]["content"] for line in made.read_text("utf-8").splitlines()]
    trained = [record for record in records if Split(0.1).includes(record["prompt"])]
    most = (variants.VARIANTS + 1) * len(trained)
    assert 0.7 * most < len(questions) <= most
    assert not any(Split(0.1, held_out=True).includes(question) for question in questions)
    assert "full_sft: " in out and f"variants of conversations: {made}" in out


# --- a model that is trained on


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with trained weights (96 x 2, which no --depth gives), and their tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("model")
    texts = [sentence(random.Random(seed), 20, 60) for seed in range(60)]
    write_jsonl(folder / "text.jsonl", [{"text": text} for text in texts])
    train_tokenizer.save(train_tokenizer.train(texts, 300), folder / "tokenizer")
    flags = {
        "data_path": folder / "text.jsonl",
        "tokenizer_path": folder / "tokenizer",
        "save_dir": folder / "out",
    }
    flags |= {"cache_dir": folder / "cache", "checkpoint_dir": folder / "checkpoints", "hidden_size": 96}
    flags |= {"batch_size": 2, "accumulation_steps": 1, "learning_rate": 2e-3}
    flags |= {"num_hidden_layers": 2, "epochs": 2, "eval_share": 0.1, "sample_prompts": "none"}
    argv = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    run("pretrain", argv)
    return folder


def test_a_model_goes_on_with_its_own_size_and_vocabulary(start, data, model, tmp_path):
    """The runs begin with its weights, and their tokens mean what they meant; run.sh resumes as always."""
    weights = model / "out/pretrain_96.pth"
    out = start("--from_weight", weights, "--hours", 1, sft_data=data / "chat.jsonl")
    assert f"begins with the weights {weights}" in out and "which is guessing" not in out
    assert "vocabulary: " not in out and "different tokens" not in out and "96 x 2" in out
    pretrain, sft, _ = commands(tmp_path)
    pretrain_args = parse_args(train_pretrain.Args, "", pretrain[2:])
    sft_args = parse_args(train_full_sft.Args, "", sft[2:])
    assert pretrain_args.from_weight == str(weights) and sft_args.from_weight == "pretrain"
    for args in (pretrain_args, sft_args):
        assert (args.hidden_size, args.num_hidden_layers) == (96, 2) and args.from_resume
        assert vocabulary_hash(load_tokenizer(args.tokenizer_path)) == vocabulary_hash(
            load_tokenizer(model / "tokenizer")
        )
    run("pretrain", [*pretrain[2:], "--max_steps", "2"])
    first = json.loads((tmp_path / "pretrain_96_metrics.jsonl").read_text().splitlines()[0])
    assert first["initial_eval_loss"] < 0.8 * math.log(300)  # it has read such text


def test_what_the_model_has_read_before_is_read_again_beside_a_second_text(start, data, model, tmp_path):
    weights, first, second = model / "out/pretrain_96.pth", model / "text.jsonl", tmp_path / "second.jsonl"
    texts = [sentence(random.Random(100 + seed), 20, 60) for seed in range(60)]
    write_jsonl(second, [{"text": text} for text in texts])
    flags = {"--from_weight": weights, "--hours": 1}
    argv = [str(part) for pair in flags.items() for part in pair]
    out = start(*argv, pretrain_data=second, sft_data=data / "chat.jsonl")
    assert f"20% of the tokens: {first}, which the given model has read before" in out
    pretrain, sft, _ = commands(tmp_path)
    args = parse_args(train_pretrain.Args, "", pretrain[2:])
    assert (args.data_path, args.replay_data_path, args.replay_share) == (str(second), str(first), 0.2)
    assert parse_args(train_full_sft.Args, "", sft[2:]).replay_data_path == f"{second},{first}"
    run("pretrain", [*pretrain[2:], "--max_steps", "2"])

    moved = first.rename(model / "moved.jsonl")
    out = start(*argv, pretrain_data=second, sft_data=None, save_dir=tmp_path / "other")
    moved.rename(first)
    assert "no other text (up to 200 MB) that the given model has read was found" in out
    pretrain = parse_args(train_pretrain.Args, "", commands(tmp_path / "other")[0][2:])
    assert pretrain.replay_data_path is None


def test_the_same_text_is_not_replayed_beside_itself(start, model, tmp_path):
    flags = ("--from_weight", model / "out/pretrain_96.pth", "--eval_share", 0.1)
    out = start(*flags, pretrain_data=model / "text.jsonl", sft_data=None)
    assert "--replay_data_path" not in (tmp_path / "run.sh").read_text() and "no other text" in out


def test_conversations_alone_are_what_a_model_goes_on_with(start, data, model, tmp_path):
    weights = model / "out/pretrain_96.pth"
    start("--from_weight", weights, pretrain_data=None, sft_data=data / "chat.jsonl")
    sft, report = commands(tmp_path)
    args = parse_args(train_full_sft.Args, "", sft[2:])
    assert sft[1] == "trainer/train_full_sft.py" and args.from_weight == str(weights)
    assert (args.hidden_size, args.replay_data_path) == (96, str(model / "text.jsonl")) and args.dropout == 0
    facts = json.loads((tmp_path / "plan_facts.json").read_text())
    assert [stage["is_pretraining"] for stage in facts["stages"]] == [False]
    assert chat_flags(tmp_path).weight is None and report[1] == "scripts/plot_metrics.py"


def test_the_rate_of_a_model_that_goes_on_is_that_of_trained_weights():
    new = Stage(train_pretrain, train_pretrain.Args(), Data(3 * 10**5, 4000), Data(10**4, 40), 4)
    new, again = (replace(new, goes_on=goes_on).with_passes(1, 1e30) for goes_on in (False, True))
    assert again.args.learning_rate < new.args.learning_rate
    assert again.args.learning_rate == float(f"{6e-4 * (512 / 128) ** -0.6:.1e}")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--depth", "3"], "--depth 3: --from_weight .* is of 96 x 2; leave the flag out"),
        (["--depth", "2"], "--depth 2: .* is of 96 x 2"),  # which would be 128 wide
        (["--tokenizer_path", SHIPPED], "tokenizer has 6400 tokens, the model's vocabulary 300"),
        (["--save_dir", "{out}"], "already holds runs|in --save_dir"),
        (["--from_weight", "{out}/no.pth"], "no.pth: no such file or folder"),
        (["--from_weight", "{lora}"], r"is an adapter \(LoRA\), not a model; merge it first"),
        (["--from_weight", "{text}"], "not a readable weights file"),
        (["--from_weight", "{tokenizer}"], "not a Hugging Face folder"),
        (
            ["--from_weight", "{out}", "--depth", "2"],
            "out is a folder of weights; name one of them: pretrain_96.pth",
        ),
    ],
)
def test_a_start_that_cannot_be_is_one_line(start, model, tmp_path, flags, why):
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text("{}")
    places = {
        "out": model / "out",
        "lora": lora,
        "text": model / "text.jsonl",
        "tokenizer": model / "tokenizer",
    }
    flags = [flag.format(**places) for flag in flags]
    with pytest.raises(UserError, match=why) as error:
        start("--from_weight", model / "out/pretrain_96.pth", *flags)
    assert "\n" not in str(error.value) and not (tmp_path / "run.sh").exists()


# --- short time


def test_short_time_is_taken_from_the_passes_over_few_conversations_too():
    few, many = (Data(num_tokens=tokens, items=500) for tokens in (50_000, 10**6))
    sft = Stage(train_full_sft, train_full_sft.Args(), few, few, 12)
    found = [choice.sft_passes(sft, passes) for passes in (0.5, 1, 2, 3, 4, 20)]
    assert found == [1.5, 3, 6, 9, 12, 12]
    shorter = replace(sft, most_passes=2)  # all conversations are read where all text is
    assert [choice.sft_passes(shorter, passes) for passes in (0.3, 1, 2, 4)] == [0.3, 1, 1, 2]
    enough = replace(shorter, data=many)
    assert [choice.sft_passes(enough, passes) for passes in (0.5, 1, 3)] == [1, 2, 2]


def test_time_that_is_left_is_said_where_the_data_are_the_limit(choose):
    chosen = choose(850_000, 1e-6, seconds=3600)
    lines = plan.describe(chosen, 3600)
    assert chosen.limit == "data" and any("more time would not help: " in line for line in lines)
    assert not any("would not help" in line for line in plan.describe(chosen._replace(limit="hours"), 3600))


def test_the_share_that_repeats_itself_is_that_of_a_plain_count(facts, data):
    shares = {}
    for name in (facts / "text.jsonl", data / "text.jsonl"):
        args = train_pretrain.Args(
            data_path=str(name), tokenizer_path=SHIPPED, eval_share=0.1, cache_dir=str(facts / "cache")
        )
        train, held_out = train_pretrain.open_data(args, load_tokenizer(SHIPPED))
        stage = Stage(train_pretrain, args, train, held_out, 4)
        known, asked = ([*dataset.cache.tokens.tolist()] for dataset in (train, held_out))
        known = {tuple(known[i : i + 6]) for i in range(len(known) - 5)}
        found = [tuple(asked[i : i + 6]) in known for i in range(len(asked) - 5)]
        assert stages.repeated_share(stage) == pytest.approx(sum(found) / len(found))
        shares[name] = stages.repeated_share(stage)
    assert shares[facts / "text.jsonl"] > 0.55 > 0.4 > shares[data / "text.jsonl"]
