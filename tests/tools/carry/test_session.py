"""A run that moves: sessions in other folders, with kills and ends of time, come to the bytes of the run that
stayed where it was."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import Interrupted, UserError
from tests.conftest import ROOT
from tests.stage_process import Faults, StageProcess, run
from tests.trainer.stage_flags import flags
from tools.carry import session
from tools.carry.pack_file import before_path, open_pack
from tools.verify.compare import compare_runs
from trainer.report.metrics import read_metrics

# the clock shows the number of updates that this process has made
UPDATES_AS_SECONDS = """
from itertools import count
from trainer.callbacks import train_state
calls = count(1)
train_state.session_seconds = lambda: next(calls)
"""
STAGES = {"pretrain": "train_pretrain", "sft": "train_full_sft"}
SHAPE = {"dropout": 0.1, "epochs": 1, "save_interval": 3, "eval_interval": 4, "from_resume": 1}


def write_plan(corpus, folder: Path) -> Path:
    """A folder with the run.sh of a plan of two stages, 8 and 6 updates or so."""
    folder.mkdir()
    lines = ["set -e"]
    for stage, script in STAGES.items():
        more = {"from_weight": "pretrain"} if stage == "sft" else {}
        argv = flags(
            corpus, folder, stage, save_dir=folder, checkpoint_dir=folder / "checkpoints", **SHAPE | more
        )
        lines.append(f'"$python" trainer/{script}.py {shlex.join(argv)} "$@"')
    (folder / "run.sh").write_text("\n".join(lines) + "\n")
    return folder


def train_here(folder: Path) -> None:
    """Run the plan where it is, without a stop."""
    for line in (folder / "run.sh").read_text().splitlines()[1:]:
        words = shlex.split(line)[1:-1]
        run("sft" if "sft" in words[0] else "pretrain", words[1:])


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two runs; the best state, from which a branch may begin, is not carried."""
    return [line for line in compare_runs(one, other) if "_best_resume.pth is missing" not in line]


class Killed(BaseException):
    """Everything was killed, the program that packs, too."""


class Machine:
    """Stands in for the processes that `go` starts: forked, with a clock that counts updates, and killed or
    signalled at a micro-batch if that is asked for."""

    def __init__(self):
        self.signals: dict[int, int] = {}
        self.commands: list[list[str]] = []

    def run(self, command: list[str], environment: dict[str, str], signals: list[int]) -> int:
        self.commands.append(command)
        if command[1].endswith("plot_metrics.py"):
            return 0
        assert Path(command[1]).parent == ROOT / "trainer"
        name = {script: stage for stage, script in STAGES.items()}[Path(command[1]).stem]
        faults = Faults(script=UPDATES_AS_SECONDS, signals=self.signals)
        status = StageProcess(name, command[2:], faults, **environment).wait()
        if status == -signal.SIGKILL:
            raise Killed
        if status == 128 + signal.SIGTERM:
            signals.append(signal.SIGTERM)
        return status


@pytest.fixture
def machine(monkeypatch):
    stand_in = Machine()
    monkeypatch.setattr(session, "run", stand_in.run)
    return stand_in


def test_sessions_elsewhere_are_the_run_that_stayed(corpus, tmp_path, machine, capsys):
    """One ends by its time, one is killed, one gets a signal; each is in a fresh folder, and the data come
    along. The pack before is kept."""
    train_here(write_plan(corpus, tmp_path / "whole"))
    pack = tmp_path / "a pack.mmt"
    session.pack(write_plan(corpus, tmp_path / "plan"), pack, with_data=True)
    first = pack.read_bytes()
    session.go(pack, tmp_path / "one", None, "5s")
    said = capsys.readouterr().out
    assert "stopped: by --stop_after 5s" not in said  # that is the stage's
    again = shlex.join(["python", "scripts/carry.py", "go", str(pack), "--to", str(tmp_path / "one")])
    assert f"not finished; to continue, here or elsewhere: {again} --stop_after 5s" in said
    assert "pretrain_32: 1 starts on " in said and said.count("bit for bit") == 1
    assert before_path(pack).read_bytes() == first and len(machine.commands) == 1
    second = pack.read_bytes()
    machine.signals = {2: signal.SIGKILL}
    with pytest.raises(Killed):
        session.go(pack, tmp_path / "two", None, None)
    assert pack.read_bytes() == second
    machine.signals = {2: signal.SIGTERM}
    with pytest.raises(Interrupted, match=r"by SIGTERM; python scripts/carry.py go .* continues") as caught:
        session.go(pack, tmp_path / "three", None, None)
    assert caught.value.number == signal.SIGTERM and before_path(pack).read_bytes() == second
    machine.signals = {}
    for name in ("four", "five", "six", "seven", "eight"):
        session.go(pack, tmp_path / name, None, "3s")
        if "finished; the models are in" in (said := capsys.readouterr().out):
            break
    assert "full_sft_32: " in said and said.count("; bit for bit") == 2
    assert machine.commands[-1][1].endswith("plot_metrics.py")
    assert differences(tmp_path / "whole", tmp_path / name) == []
    # the finished pack is the model, and has nothing to do
    session.go(pack, tmp_path / "model", None, None)
    assert differences(tmp_path / "whole", tmp_path / "model") == []
    assert (tmp_path / "model/full_sft_32.pth").read_bytes() == (
        tmp_path / name / "full_sft_32.pth"
    ).read_bytes()


def test_a_folder_that_is_ahead_goes_on_and_one_that_is_behind_is_set_aside(
    corpus, tmp_path, machine, capsys
):
    plan, pack, here = write_plan(corpus, tmp_path / "plan"), tmp_path / "run.mmt", tmp_path / "here"
    session.pack(plan, pack, with_data=True)
    machine.signals = {6: signal.SIGKILL}
    with pytest.raises(Killed):
        session.go(pack, here, None, None)
    machine.signals = {}
    session.go(pack, here, None, "1s")
    assert f"{here} has 4 updates, the pack has 0: continued there" in capsys.readouterr().out
    session.go(pack, tmp_path / "elsewhere", None, "2s")
    with open_pack(pack) as (_, manifest):
        assert manifest.updates == {"pretrain_32": 7}
    session.go(pack, here, None, "1s")
    assert f"{here} was behind the pack, with 5 updates; it is now {here}_2" in capsys.readouterr().out
    assert (tmp_path / "here_2/pretrain_32.pth").exists()


def test_a_folder_of_something_else_is_not_touched(corpus, tmp_path, machine):
    plan, pack = write_plan(corpus, tmp_path / "plan"), tmp_path / "run.mmt"
    session.pack(plan, pack, with_data=True)
    with pytest.raises(
        UserError, match=r"plan exists, and is not this pack's; give another folder with --to"
    ):
        session.go(pack, plan, None, None)


def test_data_that_stay_are_found_by_their_content(corpus, tmp_path, machine, capsys):
    """Under any name; others are one line, and nothing is trained on them."""
    pack = tmp_path / "run.mmt"
    session.pack(write_plan(corpus, tmp_path / "plan"), pack, with_data=False)
    with pytest.raises(
        UserError, match=r"does not hold data/0/p.jsonl; give the folder of the data with --data"
    ):
        session.go(pack, tmp_path / "one", None, "2s")
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    with pytest.raises(UserError, match=r"--data .* holds no file with the content of data/0/p.jsonl"):
        session.go(pack, tmp_path / "one", folder, "2s")
    for i, name in enumerate(("pretrain", "pretrain_eval", "sft", "sft_eval")):
        (folder / f"deep/{i}.txt").write_bytes(corpus[name].read_bytes())
    session.go(pack, tmp_path / "one", folder, "2s")
    assert "not finished; to continue" in capsys.readouterr().out
    (folder / "deep/0.txt").write_bytes(corpus["pretrain"].read_bytes().replace(b"a", b"b"))
    with pytest.raises(
        UserError, match=r"deep/0.txt is not the file that the runs began with \(data/0/p.jsonl\)"
    ):
        session.go(pack, tmp_path / "one", folder, "2s")
    assert len(machine.commands) == 1


def test_a_change_of_machine_is_in_the_history(corpus, tmp_path, machine, capsys):
    """What is trained there is no longer bit for bit the run; what a kill loses there does not count."""
    pack = tmp_path / "run.mmt"
    session.pack(write_plan(corpus, tmp_path / "plan"), pack, with_data=True)
    session.go(pack, tmp_path / "one", None, "3s")
    other = "from trainer.checkpoint import same_run\nsame_run.processor_name = lambda device: 'Z80'\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "UPDATES_AS_SECONDS", UPDATES_AS_SECONDS + other)
        machine.signals = {2: signal.SIGKILL}
        with pytest.raises(Killed):
            session.go(pack, tmp_path / "lost", None, None)
        machine.signals = {}
        session.go(pack, tmp_path / "two", None, "1s")
    capsys.readouterr()
    session.go(pack, tmp_path / "three", None, "2s")
    said = capsys.readouterr().out
    assert "pretrain_32: 3 starts on " in said
    assert "; to rounding from update 3 on (processor: " in said
    assert " -> Z80); to rounding from update 4 on (processor: Z80 -> " in said
    about = json.loads((tmp_path / "three/pretrain_32_run.json").read_text())
    assert [start["update"] for start in about["starts"]] == [0, 3, 4]
    assert about["starts"][1]["environment"]["processor"] == "Z80"


def test_an_error_of_a_stage_leaves_the_pack(corpus, tmp_path, machine, monkeypatch):
    pack = tmp_path / "run.mmt"
    session.pack(write_plan(corpus, tmp_path / "plan"), pack, with_data=True)
    before = pack.read_bytes()
    monkeypatch.setattr(session, "run", lambda *_: 2)
    with pytest.raises(UserError, match="pretrain_32 ended with status 2; its own line above says why"):
        session.go(pack, tmp_path / "one", None, None)
    assert pack.read_bytes() == before and not before_path(pack).exists()


def test_runs_that_were_started_by_hand(corpus, tmp_path, machine, capsys):
    """In the order of their starts, with weights from elsewhere and another folder of checkpoints."""
    argv = flags(corpus, tmp_path / "start", "pretrain", max_steps=1, save_weight="other start")
    run("pretrain", argv)
    begun = tmp_path / "start/out/other start_32.pth"
    again = {"from_weight": begun, "max_steps": 4, "from_resume": 1}
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **again))
    run("pretrain", [*flags(corpus, tmp_path / "hand", "pretrain", **again), "--stop_after", "1s"],
        TRAINING_SESSION_START="0")  # fmt: skip
    session.pack(tmp_path / "hand/out", tmp_path / "run.mmt", with_data=True)
    session.go(tmp_path / "run.mmt", tmp_path / "there", None, None)
    assert "finished; the models are in" in capsys.readouterr().out
    assert differences(tmp_path / "whole/out", tmp_path / "there") == []
    assert (tmp_path / "there/start/0/other start_32.pth").read_bytes() == begun.read_bytes()


def end_of_session(process: subprocess.Popen, folder: Path, kind: str, rng: random.Random, done: int) -> int:
    """The status with which a session ends; it is killed where its kind says so: with all its processes, while
    it starts or after some updates. done: those of the pack."""
    begin, seconds, updates = time.monotonic(), rng.uniform(0.5, 6), done + rng.randint(1, 5)
    while process.poll() is None:
        time.sleep(0.02)
        records = sum(len(read_metrics(path)) for path in folder.glob("*_metrics.jsonl"))
        is_due = {"start": time.monotonic() - begin > seconds, "training": records >= updates}
        if is_due.get(kind):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode


@pytest.mark.slow
def test_twelve_sessions_in_twelve_fresh_clones(corpus, tmp_path):
    """Real processes, killed or ended by their time: the bytes of the run that stayed."""
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    train_here(write_plan(corpus, tmp_path / "whole"))
    pack = tmp_path / "run.mmt"
    session.pack(write_plan(corpus, tmp_path / "plan"), pack, with_data=True)
    kinds = ["time"] * 6 + ["start"] * 2 + ["training"] * 3
    rng.shuffle(kinds)
    told = [("packed", 0, 0)]
    for number, kind in enumerate([*kinds, "end"]):
        clone = tmp_path / f"clone_{number}"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        limit = ["--stop_after", f"{rng.randint(1, 4)}s"] if kind == "time" else []
        command = [sys.executable, "scripts/carry.py", "go", str(pack), *limit]
        process = subprocess.Popen(command, cwd=clone, start_new_session=True)
        status = end_of_session(process, clone / "out/plan", kind, rng, told[-1][2])
        with open_pack(pack) as (_, manifest):
            told.append((kind, status, sum(manifest.updates.values())))
        assert status == (0 if kind in ("time", "end") else -signal.SIGKILL), told
    print(f"seed {seed}: {told}")
    assert [updates for _, _, updates in told] == sorted(updates for _, _, updates in told)
    assert differences(tmp_path / "whole", clone / "out/plan") == []
