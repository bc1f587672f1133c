"""What is saved can be restored: every optimizer, the first save of a run, states of other code, what cannot be
read at present."""

import errno
import os
import re
import shutil
import signal
import sysconfig
from pathlib import Path

import pytest
import torch

from common.errors import ReadError, UserError
from common.settings import StageArgs
from tests.stage_process import Faults, StageProcess, run, start_ranks
from tests.trainer.checkpoint.restored_runs import KINDS, differences, make, train
from tests.trainer.rollout_runs import rollout_flags, write_prompts
from tests.trainer.stage_flags import assert_same_run, flags, saved_state, write_start_weights
from trainer.checkpoint.earlier import complete_moves, set_earlier_run_aside
from trainer.checkpoint.file import newest_checkpoint, write_checkpoint
from trainer.checkpoint.same_run import source_files, warn_of_changes
from trainer.checkpoint.state import copy_to_host, first_difference, host_copy, load_into

# --- optimizers


# the others go on with the same bits on two ranks, below
ALONE = ("adamw", "muon", "adadelta", "adamax", "radam", "asgd", "rprop")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ALONE else pytest.mark.slow) for kind in KINDS]
)
def test_every_optimizer_goes_on_with_the_same_bits(tmp_path, kind):
    assert list(differences(tmp_path, "ddp", kinds=[kind])) == []


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_every_optimizer_goes_on_with_the_same_bits_on_two_ranks(tmp_path, parallel):
    process = run("tests.trainer.checkpoint.restored_runs", [tmp_path, parallel], ranks=2)
    runs = {"ddp": 13, "fsdp": 11}[parallel]
    assert process.out.splitlines()[-1] == f"0 of {runs} runs differ"


SHORT = {
    "max_steps": 7,
    "num_hidden_layers": 1,
    "save_interval": 2,
    "eval_interval": 0,
    "from_weight": "none",
}
LATE_HEAD = """
import torch
from trainer import train_full_sft as t

def extend_model(self, model, args):
    model.extra = torch.nn.Linear(4, 4)
    return model

def loss(self, model, batch, args, loss=t.Objective.loss):
    total, aux, metrics = loss(self, model, batch, args)
    self.calls = getattr(self, "calls", 0) + torch.is_grad_enabled()
    if self.update >= 5:
        total = total + model.extra.weight.square().sum() * len(batch["targets"])
    return total, aux, metrics

def prepare(self, state, micro_batches):
    self.update = state.progress.update
    return micro_batches

t.Objective.extend_model, t.Objective.loss, t.Objective.prepare = extend_model, loss, prepare
t.Objective.optimizer = lambda self, model, args: torch.optim.NAdam(model.parameters(), args.learning_rate)
"""
FREEZE = "import trainer.train_{stage} as t; t.frozen_parameters = {names}"
VECTORS = ("model.embed_tokens", "model.norm", "model.layers.0.input", "model.layers.0.post")
VECTORS += ("model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.k_norm")
KILLED = {
    # AdamW's part has no parameters
    "muon on adapters": ("lora", "lora", {"optimizer": "muon", "save_weight": "lora"}, ""),
    "muon on matrices": (
        "sft",
        "full_sft",
        {"optimizer": "muon"},
        FREEZE.format(stage="full_sft", names=VECTORS),
    ),
    # the group of the embedding has no parameters
    "muon without embedding": (
        "pretrain",
        "pretrain",
        {},
        FREEZE.format(stage="pretrain", names=VECTORS[:1]),
    ),
    "head used late": ("sft", "full_sft", {}, LATE_HEAD),
}


@pytest.mark.parametrize("kind", KILLED)
def test_runs_whose_optimizer_has_no_state_of_some_parameters(corpus, tmp_path, kind):
    stage, name, more, script = KILLED[kind]
    data = "pretrain" if stage == "pretrain" else "sft"
    runs = [tmp_path / "whole", tmp_path / "broken"]
    argvs = []
    for folder in runs:
        (folder / "out").mkdir(parents=True)
        write_start_weights(folder / "out", {"start_32": {"hidden_size": 32, "num_hidden_layers": 1}})
        settings = SHORT | more | ({"from_weight": "start"} if stage == "lora" else {})
        argvs.append([*flags(corpus, folder, data, **settings), "--from_resume", "1"])
    run(stage, argvs[0], Faults(script=script))
    run(stage, argvs[1], Faults(script=script, signals={4: signal.SIGKILL}), status=-9)
    assert "resuming" in run(stage, argvs[1], Faults(script=script)).out
    if stage == "lora":
        one, other = (saved_state(folder, "lora_32") for folder in runs)
        parts = [(one[part], other[part]) for part in ("model", "optimizer")]
        assert all(first_difference(*pair) is None for pair in parts)
    else:
        assert_same_run(*runs, f"{name}_32")


def test_an_optimizer_that_computes_the_loss_itself_is_refused_at_the_start(corpus, tmp_path):
    script = "import torch; import trainer.train_full_sft as t; "
    script += "t.Objective.optimizer = lambda self, model, args: torch.optim.LBFGS(model.parameters())"
    refused = run("sft", flags(corpus, tmp_path, "sft", **SHORT), Faults(script=script), status=2)
    assert "LBFGS computes the loss several times in a step" in refused.error_lines[-1]
    assert "Epoch" not in refused.out


def test_another_optimizer_is_one_line(tmp_path):
    state = dict(zip(("model", "optimizer"), copy_to_host(*make("adam", "plain")), strict=True))
    with pytest.raises(UserError, match="the checkpoint is of the optimizer Adam, not SGD"):
        load_into(*make("sgd", "plain"), state)
    with pytest.raises(UserError, match=r"model.embed_tokens.weight is trained in the checkpoint or here"):
        load_into(*make("adam", "frozen"), state)


def test_other_groups_keep_the_state_of_each_parameter(capsys):
    model, optimizer = make("adam", "plain")
    tokens = torch.tensor([[3, 4, 5]])
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    state = dict(zip(("model", "optimizer"), copy_to_host(model, optimizer), strict=True))
    other, its_optimizer = make("adam", "groups")
    load_into(other, its_optimizer, state)
    assert "has other parameters than in the checkpoint" in capsys.readouterr().err
    assert [group["lr"] for group in its_optimizer.param_groups] == [1e-2, 5e-3]
    for name, value in other.named_parameters():
        saved = state["optimizer"]["state"][name]
        assert first_difference(saved, its_optimizer.state[value]) is None


def test_groups_without_parameters_keep_their_settings_each():
    model, _ = make("adam", "plain")
    decays = (0.1, 0.2, 0.3)
    groups = [{"params": [], "weight_decay": decay} for decay in decays[:2]]
    groups.append({"params": list(model.parameters()), "weight_decay": decays[2]})
    optimizer = torch.optim.AdamW(groups, 1e-2)
    state = dict(zip(("model", "optimizer"), copy_to_host(model, optimizer), strict=True))
    load_into(model, optimizer, state)
    assert tuple(group["weight_decay"] for group in optimizer.param_groups) == decays


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_a_group_that_somebody_has_kept_is_still_used_by_the_optimizer(kind):
    """As of a callback that changes `optimizer.param_groups[0]` during the run."""
    model, optimizer = make(kind, "plain")
    kept = list(optimizer.param_groups)
    state = dict(zip(("model", "optimizer"), copy_to_host(model, optimizer), strict=True))
    load_into(model, optimizer, state)
    for group in kept:
        group["lr"] = 0.0
    before = [value.clone() for value in model.parameters()]
    train(model, optimizer, "plain", 1, 1)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_group_without_parameters_may_be_new():
    """Such as that of layers which are all frozen."""
    state = dict(zip(("model", "optimizer"), copy_to_host(*make("adam", "plain")), strict=True))
    model, _ = make("adam", "plain")
    optimizer = torch.optim.Adam([{"params": list(model.parameters())}, {"params": [], "lr": 0.5}])
    load_into(model, optimizer, state)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 0.5]


def test_a_tensor_outside_the_model_is_refused():
    model, _ = make("adam", "plain")
    optimizer = torch.optim.Adam([*model.parameters(), torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(UserError, match="not a parameter of the model"):
        copy_to_host(model, optimizer)


# --- the first save

CALLBACK = """
from trainer import stage
from trainer.callbacks.base import Callback

class Counter(Callback):
    count = 0

    def on_optimizer_step(self, state, update):
        self.count += 1

    def state_dict(self):
        return {{"count": self.count}}

    def load_state_dict(self, saved):
        {load}

def add_callbacks(state, data, add=stage.add_callbacks):
    add(state, data)
    state.callbacks.append(Counter())

stage.add_callbacks = add_callbacks
"""
OTHER_DTYPE = """
import torch
import trainer.train_full_sft as t

class Precise(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.ones(2, dtype=torch.float64) / 3

t.Objective.optimizer = lambda self, model, args: Precise(model.parameters(), args.learning_rate)
"""
UNRESTORABLE = {
    "a callback that loses it": (
        CALLBACK.format(load="self.count = 7"),
        "['callbacks']['Counter']['count'] was 1 and is 7",
    ),
    "a dtype that torch changes": (OTHER_DTYPE, "of torch.float64, has other values"),
}


LOST_CALLBACK, OTHER_DTYPES = UNRESTORABLE


@pytest.mark.parametrize(
    "where, kind",
    [
        ("one rank", OTHER_DTYPES),
        ("two ranks", LOST_CALLBACK),
        pytest.param("sharded", OTHER_DTYPES, marks=pytest.mark.slow),
        ("engine", OTHER_DTYPES),
        ("engine, two ranks", LOST_CALLBACK),
    ],
)
def test_what_cannot_be_restored_ends_the_run_at_its_first_update(corpus, tmp_path, where, kind):
    script, told = UNRESTORABLE[kind]
    argv = flags(corpus, tmp_path, "sft", **SHORT, parallel="fsdp" if where == "sharded" else "ddp")
    stage, ranks = "sft", 1 if where in ("one rank", "engine") else 2
    if where.startswith("engine"):
        stage, argv = "engine", ["--task", "full_sft", *argv]
    line = run(stage, argv, Faults(script=script), ranks=ranks, status=2).error_lines[-1]
    assert "the run cannot be restored from it" in line and told.replace("'", "") in line.replace("'", "")
    assert saved_state(tmp_path, "full_sft_32")["update"] == 1


SLOW_WRITER = """
import time
import trainer.checkpoint.run as saving

def slow(*args, write=saving.write_and_keep):
    time.sleep(1)  # the other rank is there long before the file
    write(*args)

saving.write_and_keep = slow
"""


def test_the_other_ranks_wait_for_the_first_file(corpus, tmp_path):
    script = SLOW_WRITER + UNRESTORABLE["a callback that loses it"][0]
    process = run("sft", flags(corpus, tmp_path, "sft", **SHORT), Faults(script=script), ranks=2, status=2)
    assert "the run cannot be restored from it" in process.error_lines[-1]


DOES_NOT_LOOK = "\nimport trainer.checkpoint.run as s; s.restore_first = lambda *_: None"
RANKS_OWN = CALLBACK.format(load='self.count = saved["count"]').replace(
    "self.count += 1", 'self.count += 1 + int(os.environ["RANK"]); print("count", self.count, flush=True)'
)


def test_a_state_that_only_another_rank_has_is_named_and_left_to_it(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "sft", **SHORT)
    ranks = start_ranks(2, "sft", argv, dict.fromkeys(range(2), Faults(script=f"import os\n{RANKS_OWN}")))
    assert [rank.wait() for rank in ranks] == [0, 0]
    (line,) = [line for line in ranks[0].error_lines if "Counter" in line]
    assert line.startswith("warning: the state of Counter on rank 1 differs from that on rank 0")
    assert "count 3" in ranks[0].out and "count 4" in ranks[1].out  # 2 and 2, not 1 and 2


def test_the_first_save_changes_nothing_on_two_ranks(corpus, tmp_path):
    """As a run that does not look, dropout and Muon included."""
    script = CALLBACK.format(load='self.count = saved["count"]')
    for name, more in (("looks", ""), ("not", DOES_NOT_LOOK)):
        settings = SHORT | {"max_steps": 3, "accumulation_steps": 2, "dropout": 0.1, "optimizer": "muon"}
        argv = flags(corpus, tmp_path / name, "sft", **settings)
        process = run("sft", argv, Faults(script=script + more), ranks=2)
        assert "differs from that on rank 0" not in process.err
    assert_same_run(tmp_path / "looks", tmp_path / "not", "full_sft_32")


def test_a_callback_that_counts_time_is_no_reason_to_end_a_run(corpus, tmp_path):
    script = CALLBACK.format(load='self.start = time.monotonic() - saved["count"]')
    script = script.replace('"count": self.count', '"count": time.monotonic() - self.start')
    script = f"import time\n{script}\nCounter.start = 0.0\n"
    run("sft", flags(corpus, tmp_path, "sft", **SHORT | {"max_steps": 1}), Faults(script=script))


def test_the_first_save_is_restored_by_the_way_of_a_resume(corpus, tmp_path):
    """The callback is given what it saved, once, and the run has the bits of one that does not look."""
    script = CALLBACK.format(load='self.count = saved["count"]; print("given", saved, flush=True)')
    for name, more in (("looks", ""), ("not", DOES_NOT_LOOK)):
        settings = SHORT | {"max_steps": 3, "accumulation_steps": 2, "dropout": 0.1}
        process = run("sft", flags(corpus, tmp_path / name, "sft", **settings), Faults(script=script + more))
        assert process.out.count("given {'count': 1}") == (name == "looks")
    assert_same_run(tmp_path / "looks", tmp_path / "not", "full_sft_32")


def test_a_tensor_of_a_callback_is_copied_before_it_changes():
    value = torch.zeros(3)
    copied = host_copy({"ema": [value, value]})
    value.add_(1)
    assert copied["ema"][0].sum() == 0 and copied["ema"][0] is copied["ema"][1]


# --- the state of an Objective

WEIGHTED = """
import torch
import trainer.train_full_sft as t

class Objective(t.Objective):
    # each update's loss is weighted by the mean of the losses before it
    def __init__(self):
        self.mean, self.seen = torch.ones(()), {{"updates": 0}}

    def loss(self, model, batch, args):
        total, aux, metrics = super().loss(model, batch, args)
        self.last = total.detach() / max(1, len(batch["targets"]))
        return total * self.mean, aux, metrics

    def before_step(self, state, micro_batches):
        self.mean = 0.9 * self.mean + 0.1 * self.last
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.mean)
            self.mean = self.mean / torch.distributed.get_world_size()
        self.seen["updates"] += 1
        return {{}}

    def state_dict(self):
        return {{"mean": self.mean, "seen": self.seen}}

    def load_state_dict(self, saved):
        {load}

t.Objective = Objective
"""
RESTORES = 'self.mean, self.seen = saved["mean"].clone(), dict(saved["seen"])'


@pytest.mark.parametrize(
    "where", ["one rank", pytest.param("sharded", marks=pytest.mark.slow), "engine, two ranks"]
)
def test_the_state_of_an_objective_goes_on_with_the_same_bits(corpus, tmp_path, where):
    ranks, stage = 1 if where == "one rank" else 2, "engine" if "engine" in where else "sft"
    script = WEIGHTED.format(load=RESTORES)
    argvs = []
    for name in ("whole", "broken"):
        settings = SHORT | {"parallel": "fsdp" if where == "sharded" else "ddp", "save_weight": "full_sft"}
        argv = [*flags(corpus, tmp_path / name, "sft", **settings), "--from_resume", "1"]
        argvs.append(["--task", "full_sft", *argv] if stage == "engine" else argv)
    run(stage, argvs[0], Faults(script=script), ranks=ranks)
    stopped = Faults(script=script, signals={3: signal.SIGTERM})
    run(stage, argvs[1], stopped, ranks=ranks, status=143)
    broken = saved_state(tmp_path / "broken", "full_sft_32")
    state = broken["callbacks"]["the Objective"]
    assert state["seen"]["updates"] == broken["update"] and state["mean"] != 1.0
    resumed = run(stage, argvs[1], Faults(script=script), ranks=ranks)
    assert "resuming" in resumed.out
    assert_same_run(tmp_path / "whole", tmp_path / "broken", "full_sft_32")


FORGETS = {
    "a number": (
        'self.mean, self.seen = saved["mean"].clone(), {"updates": 9}',
        "['updates'] was 1 and is 9",
    ),
    "a tensor": ('self.mean, self.seen = torch.ones(()), dict(saved["seen"])', "['mean'], a tensor []"),
}


@pytest.mark.parametrize("kind, ranks", [("a number", 1), ("a tensor", 2)])
def test_an_objective_that_forgets_its_state_ends_the_run_at_its_first_update(corpus, tmp_path, kind, ranks):
    load, told = FORGETS[kind]
    script = WEIGHTED.format(load=load)
    refused = run(
        "sft", flags(corpus, tmp_path, "sft", **SHORT), Faults(script=script), ranks=ranks, status=2
    )
    line = refused.error_lines[-1]
    assert "['callbacks']['the Objective']".replace("'", "") in line.replace("'", "")
    assert told.replace("'", "") in line.replace("'", "")


def test_a_state_that_nothing_restores_is_refused_before_the_first_update(corpus, tmp_path):
    """Restored into the run that saved it, it would look restored."""
    objective = WEIGHTED.format(load="pass").replace("def load_state_dict", "def another_name")
    callback = CALLBACK.format(load="pass").replace("def load_state_dict", "def another_name")
    for script, name in ((objective, "Objective"), (callback, "Counter")):
        refused = run("sft", flags(corpus, tmp_path, "sft", **SHORT), Faults(script=script), status=2)
        assert refused.error_lines[-1].startswith(f"error: {name} has state_dict and no load_state_dict")
        assert "Epoch" not in refused.out


def test_a_checkpoint_from_before_the_objective_had_a_state(corpus, tmp_path):
    argv = [*flags(corpus, tmp_path, "sft", **SHORT), "--from_resume", "1"]
    run("sft", argv, Faults(signals={5: signal.SIGTERM}), status=143)
    resumed = run("sft", argv, Faults(script=WEIGHTED.format(load=RESTORES)))
    assert "resuming" in resumed.out and "Traceback" not in resumed.err


# --- what cannot be read at present

FAILING_READS = """
import builtins, io, os, torch, zipfile
opened, real, reader, read = [0], io.open, torch._C.PyTorchFileReader, zipfile.ZipExtFile.read

def fail(path):
    # each look at a state or at weights is counted, and the one of this number fails
    if str(path).endswith((".pth", "_metrics.jsonl", "_run.json")):
        opened[0] += 1
        if opened[0] == {number}:
            raise {error}

def failing_open(file, mode="r", *args, **options):
    if "r" in mode:
        fail(file)
    return real(file, mode, *args, **options)

begun = set()

def failing_read(archive, *args):
    path = archive._fileobj._file.name
    if path not in begun:  # within a file, the first record stands for all
        begun.add(path)
        fail(path)
    return read(archive, *args)

class Reader(reader):
    def __init__(self, file):
        fail(file)
        super().__init__(file)

builtins.open = io.open = failing_open
zipfile.ZipExtFile.read = failing_read
torch._C.PyTorchFileReader = Reader
"""
ERRORS = [
    f"OSError({code}, os.strerror({code}), str(path))" for code in (errno.EIO, errno.ESTALE, errno.EMFILE)
]
ERRORS += [f"PermissionError({errno.EACCES}, os.strerror({errno.EACCES}), str(path))", "MemoryError()"]


def listing(folder: Path) -> dict[str, bytes]:
    """The states and weights of a run, with what describes them. (Records after the newest state are dropped by
    every resume.)"""
    files = [path for path in folder.rglob("*.*") if ".pth" in path.name or path.suffix == ".json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_what_cannot_be_read_now_is_neither_renamed_nor_begun_anew(corpus, tmp_path):
    """At each place that reads a state, weights or records, in turn with each error: one line, and nothing is
    touched. Then the same command goes on with the same bits."""
    settings = SHORT | {"from_weight": str(tmp_path / "start.pth")}
    write_start_weights(tmp_path, {"start": {"hidden_size": 32, "num_hidden_layers": 1}})
    whole, argv = (flags(corpus, tmp_path / name, "sft", **settings) for name in ("whole", "broken"))
    run("sft", whole)
    argv += ["--from_resume", "1"]
    run("sft", argv, Faults(signals={6: signal.SIGKILL}), status=-9)
    before, number = listing(tmp_path / "broken"), 0
    while True:
        number += 1
        script = FAILING_READS.format(number=number, error=ERRORS[number % len(ERRORS)])
        probe = StageProcess("sft", argv, Faults(script=script, signals={1: signal.SIGKILL}))
        status = probe.wait()
        if status == -9:  # it trained: there is no look of this number before
            break
        assert status == 2 and len(probe.error_lines) == 1, probe.err
        assert "cannot be read" in probe.error_lines[0] and "Traceback" not in probe.err
        assert listing(tmp_path / "broken") == before, number
    assert number > 8
    run("sft", argv)
    assert_same_run(tmp_path / "whole", tmp_path / "broken", "full_sft_32")


AS_PYTHON_314 = """
import errno, os, pathlib
pathlib.Path.exists = lambda path: os.path.exists(path)  # False after any OSError
pathlib.Path.is_file = lambda path: os.path.isfile(path)
pathlib.Path.is_dir = lambda path: os.path.isdir(path)
stat, looks = os.stat, [0]

def failing_stat(path, *args, **options):
    if str(path).endswith((".pth", "_metrics.jsonl", "_run.json", "_moves.json")):
        looks[0] += 1
        if looks[0] == {number}:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
    return stat(path, *args, **options)

os.stat = failing_stat
"""


def test_what_cannot_be_looked_at_is_not_taken_for_absent(corpus, tmp_path):
    """Each look at a state, at weights or at records fails once, where Python itself would say: absent."""
    argv = [*flags(corpus, tmp_path, "sft", **SHORT), "--from_resume", "1"]
    run("sft", argv, Faults(signals={6: signal.SIGKILL}), status=-9)
    before, number = listing(tmp_path), 0
    while True:
        number += 1
        faults = Faults(script=AS_PYTHON_314.format(number=number), signals={1: signal.SIGKILL})
        probe = StageProcess("sft", argv, faults)
        if probe.wait() == -9:
            break
        assert probe.process.exitcode == 2 and len(probe.error_lines) == 1, probe.err
        assert "cannot be read at present (Input/output error)" in probe.error_lines[0]
        assert listing(tmp_path) == before, number
    assert number > 4 and "new run" not in probe.out and "resuming" in probe.out


def test_a_new_run_sets_nothing_aside_unless_it_sees_all(corpus, tmp_path, monkeypatch):
    """A file of the earlier run that cannot be looked at, a folder that cannot be listed."""
    (tmp_path / "out").mkdir()
    args = StageArgs(save_dir=str(tmp_path / "out"), checkpoint_dir=str(tmp_path / "out"), save_weight="w")
    for name in ("w_512.pth", "w_512_metrics.jsonl", "earlier_1"):
        (tmp_path / "out" / name).write_text(name)
    stat, listdir = os.stat, os.listdir

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    for name in ("earlier_1", "w_512.pth"):
        with monkeypatch.context() as patch:

            def refuse(path, *args, name=name, **options):
                return fail(path) if str(path).endswith(name) else stat(path, *args, **options)

            patch.setattr(os, "stat", refuse)
            with pytest.raises(ReadError, match="Input/output error"):
                set_earlier_run_aside(args)
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fail)
        patch.setattr(os, "scandir", fail)
        with pytest.raises(ReadError, match="Input/output error"):
            set_earlier_run_aside(args)
    complete_moves(args)  # what was begun, as the next start does
    set_earlier_run_aside(args)
    assert sorted(listdir(tmp_path / "out")) == ["earlier_1", "earlier_2"]
    assert sorted(listdir(tmp_path / "out/earlier_2")) == ["w_512.pth", "w_512_metrics.jsonl"]


@pytest.mark.parametrize("where", ["newest", "weights"])
def test_errors_of_torchs_own_reader_are_no_damage(tmp_path, monkeypatch, where):
    """As on a machine without memory: torch raises a RuntimeError."""
    path = tmp_path / "w_32_resume.pth"
    state = dict.fromkeys(("model", "optimizer", "epoch", "step", "world_size"), 0)
    write_checkpoint(path, state)
    texts = [
        "unable to mmap 8 bytes from file <w>: Cannot allocate memory (12)",
        "open file failed because of errno 24",
    ]
    for text in (*texts, "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"):

        def load(*_, text=text, **__):
            raise RuntimeError(text)

        monkeypatch.setattr(torch, "load", load)
        with pytest.raises(ReadError, match="cannot be read at present"):
            newest_checkpoint(path)
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert newest_checkpoint(path)["step"] == 0


# --- no start begins anew by accident


def states(folder: Path, *names: str) -> Path:
    state = dict.fromkeys(("model", "optimizer", "epoch", "step", "world_size"), 0)
    for name in names:
        write_checkpoint(folder / name, state)
    return folder / "w_32_resume.pth"


def test_a_run_begins_anew_only_without_a_trace_of_its_states(tmp_path):
    path = states(tmp_path, "w_32_update_00000010.pth", "w_32_best_resume.pth")
    for name in ("w_32_resume.pth", "w_32_resume_previous.pth"):
        (tmp_path / name).write_bytes(b"damaged")
    before = listing(tmp_path)
    for _ in range(2):  # the same command again says the same
        with pytest.raises(UserError) as raised:
            newest_checkpoint(path)
        line = str(raised.value)
        assert f"{path} is damaged" in line and "w_32_resume_previous.pth is damaged" in line
        assert f"--resume_from {tmp_path}/w_32_best_resume.pth --save_weight NAME" in line
        assert listing(tmp_path) == before
    for name in ("w_32_resume.pth", "w_32_resume_previous.pth"):
        (tmp_path / name).unlink()
    with pytest.raises(
        UserError, match=r"is missing, but there are w_32_best_resume.pth, w_32_update_00000010"
    ):
        newest_checkpoint(path)
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / "w_32_resume.pth.damaged").touch()
    with pytest.raises(UserError, match=r"there are w_32_resume.pth.damaged; --from_resume 0"):
        newest_checkpoint(path)
    states(tmp_path, "w_3_resume.pth", "other_w_32_best_resume.pth", "w_32_moe_update_00000001.pth")
    (tmp_path / "w_32_resume.pth.damaged").unlink()
    assert newest_checkpoint(path) is None  # nothing of that is of this run
    assert newest_checkpoint(tmp_path / "no_such_folder" / path.name) is None


# --- other code


def test_each_edit_of_the_code_is_named_and_promises_nothing(capsys):
    saved = {
        "environment": {"torch": "1"},
        "code": {"sources": {"a.py": "1", "gone.py": "1"}, "optimizer": {}},
        "update": 4,
    }
    same = {"sources": {"a.py": "1", "new.py": "2"}, "optimizer": {}}
    assert warn_of_changes(saved, {"torch": "1", "not noted then": "2"}, same) == []
    assert capsys.readouterr().err == ""
    results = warn_of_changes(saved, {"torch": "1"}, same | {"sources": {"a.py": "2"}})
    assert results == ["by other code from update 4 on (a.py)"]
    line = capsys.readouterr().err
    assert "other code (a.py)" in line and "the current code is used" in line and "rounding" not in line
    results = warn_of_changes(saved, {"torch": "2"}, same)
    assert results == ["to rounding from update 4 on (torch: 1 -> 2)"]
    assert "only up to rounding" in capsys.readouterr().err
    warn_of_changes(saved, {"torch": "1"}, same | {"optimizer": {"weight_decay of group 0": "0.1"}})
    assert "weight_decay of group 0: None -> 0.1" in capsys.readouterr().err


def test_the_sources_of_a_run(tmp_path):
    """Two edits that git would both call dirty, of a user's reward and of a module beside it."""
    assert "trainer/loop.py" in source_files() and "common/files.py" in source_files()
    (tmp_path / "helper.py").write_text("VALUE = 1.0\n")
    reward = tmp_path / "mine.py"
    reward.write_text(
        "from helper import VALUE\n\ndef score(prompt, completion, record):\n    return VALUE * len(completion)\n"
    )
    prompts = write_prompts(tmp_path)
    argv = rollout_flags(prompts, tmp_path, num_hidden_layers=1, reward=f"{reward}:score", from_resume=1)
    run("grpo", argv, Faults(signals={2: signal.SIGKILL}), status=-9)
    (tmp_path / "helper.py").write_text("VALUE = 2.0\n")
    again = run("grpo", argv, Faults(signals={2: signal.SIGKILL}), status=-9)
    assert "other code (helper.py)" in again.err


PACKAGES = {
    "tasks/mine.py": "from nets import layers\nfrom parts.deep import rewards\nimport alone\n"
    "def score(prompt, completion, record):\n    return alone.VALUE * layers.VALUE * rewards.VALUE * len(completion)\n",
    "tasks/alone.py": "VALUE = 1.0\n",
    "nets/__init__.py": "",
    "nets/layers.py": "VALUE = 1.0\n",
    "parts/deep/rewards.py": "VALUE = 1.0\n",
}


def test_edits_of_a_users_modules_in_all_folders_are_named(tmp_path):
    """Beside the named one, in a package, deep in another; the folders may lie elsewhere at the resume."""
    prompts, stopped = write_prompts(tmp_path), []
    for home, more in (("before", ""), ("after", "# edited\n")):
        for file, text in PACKAGES.items():
            (tmp_path / home / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / home / file).write_text(text + (more if file != "tasks/mine.py" else ""))
        script = f"sys.path[:0] = [{str(tmp_path / home)!r}, {str(tmp_path / home / 'tasks')!r}]"
        stopped.append(Faults(script=script, signals={2: signal.SIGKILL}))
    argv = rollout_flags(prompts, tmp_path, num_hidden_layers=1, reward="mine:score", from_resume=1)
    run("grpo", argv, stopped[0], status=-9)
    again = run("grpo", argv, stopped[1], status=-9)
    assert "other code (alone.py, nets/__init__.py, nets/layers.py, parts/deep/rewards.py)" in again.err


def test_installed_packages_and_python_are_no_sources_of_a_run():
    names = source_files().values()
    assert not any({"site-packages", "dist-packages"} & set(file.parts) for file in names)
    assert not any(file.is_relative_to(sysconfig.get_path("stdlib")) for file in names)
    assert Path(__file__) in names  # a module that is loaded, outside the folders of the trainer


@pytest.mark.parametrize("where", ["sft", "engine"])
def test_a_module_that_rank_0_alone_has_loaded_is_no_other_code(corpus, tmp_path, where):
    for name in ("both", "plots"):
        (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
    script = f"sys.path.insert(0, {str(tmp_path)!r})\nimport both\n"
    script += "if os.environ['RANK'] == '0':\n    import plots\n"
    argv = flags(corpus, tmp_path, "sft", **SHORT | {"max_steps": 1})
    run(where, ["--task", "full_sft", *argv] if where == "engine" else argv, Faults(script=script), ranks=2)
    sources = saved_state(tmp_path, "full_sft_32")["code"]["sources"]
    assert {"both.py", "plots.py"} <= sources.keys()


def test_ranks_with_other_code_are_refused(corpus, tmp_path):
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}/both.py").write_text(f"VALUE = {rank}\n")
    script = f"sys.path.insert(0, {str(tmp_path)!r} + '/' + os.environ['RANK'])\nimport both\n"
    refused = run("sft", flags(corpus, tmp_path, "sft", **SHORT), Faults(script=script), ranks=2, status=2)
    assert "the ranks do not agree (rank 0 -> rank 1: both.py:" in refused.error_lines[-1]


def test_a_state_of_older_code_takes_the_default_of_a_new_field(corpus, tmp_path):
    argv = [*flags(corpus, tmp_path, "sft", **SHORT), "--from_resume", "1"]
    run("sft", argv, Faults(signals={4: signal.SIGKILL}), status=-9)
    path = tmp_path / "checkpoints/full_sft_32_resume.pth"
    state = saved_state(tmp_path, "full_sft_32")
    del state["overflows"], state["branch_of"], state["code"]
    state["environment"]["code"] = "a82c7d8a"  # where it stood before
    write_checkpoint(path, state)
    process = run("sft", argv)
    assert "resuming full_sft" in process.out
    assert "by other code: from here on the current code is used" in process.err
    assert "up to rounding" not in process.err


# --- start weights that are gone


def test_start_weights_given_by_a_path_may_be_gone(corpus, tmp_path):
    """Also where the shape came from them; the description of the weights keeps their hash."""
    start = tmp_path / "start.pth"
    write_start_weights(tmp_path, {"start": {"hidden_size": 32, "num_hidden_layers": 1}})
    argvs = []
    for name in ("whole", "broken"):
        argv = flags(corpus, tmp_path / name, "sft", **SHORT | {"from_weight": str(start)}, from_resume=1)
        for flag in ("--hidden_size", "--num_hidden_layers"):
            del argv[argv.index(flag) : argv.index(flag) + 2]
        argvs.append(argv)
    run("sft", argvs[0])
    run("sft", argvs[1], Faults(signals={4: signal.SIGKILL}), status=-9)
    start.unlink()
    assert "resuming full_sft" in run("sft", argvs[1]).out
    assert_same_run(tmp_path / "whole", tmp_path / "broken", "full_sft_32")
    described = [(tmp_path / name / "out/full_sft_32.json").read_text() for name in ("whole", "broken")]
    hashes = [re.search(r'"sha256": "(\w{64})"', text) for text in described]
    assert hashes[0] and hashes[1] and hashes[0][1] == hashes[1][1]
    shutil.copy(
        tmp_path / "broken/checkpoints/full_sft_32_resume.pth",
        tmp_path / "broken/checkpoints/full_sft_64_resume.pth",
    )
    assert "holds several runs of this name" in run("sft", argvs[1], status=2).error_lines[-1]
    run("sft", [*argvs[1], "--hidden_size", "32"])
    new = [*argvs[1], "--save_weight", "new"]
    assert "no such file or folder" in run("sft", new, status=2).error_lines[-1]
