"""Teaching from the command line: what it writes and prints, kills, and mistakes."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from common.files import is_running
from scripts import teach
from scripts.teaching import asking, recipe, version
from tests.conftest import write_jsonl
from tests.stage_process import Faults, StageProcess, run
from tests.trainer.stage_flags import flags

NAMES = ["Belin", "Kado", "Samo", "Vira", "Zopa", "Nemi", "Lora", "Peki"]
PLACES = ["Saltport", "Redcliff", "Windmoor", "Starhill"]
ASK = ("Where does {} live?", "Where is the home of {}?")


def chat(question: str, answer: str) -> dict:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"conversations": turns}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a tiny model that learned texts and conversations; the data are in it, too."""
    folder, rng = tmp_path_factory.mktemp("model"), random.Random(0)
    home = {name: rng.choice(PLACES) for name in NAMES}
    texts = [{"text": f"{name} lives in {home[name]}. The hat of {name} is red."} for name in NAMES]
    told = [chat(ask.format(name), f"{name} lives in {home[name]}.") for name in NAMES for ask in ASK]
    talk = [chat(question, "Good day!") for question in ("Hi", "Hello", "Hey there", "Good morning")]
    data = {
        "pretrain": write_jsonl(folder / "texts.jsonl", texts),
        "pretrain_eval": write_jsonl(folder / "texts_eval.jsonl", texts[:2]),
        "sft": write_jsonl(folder / "chats.jsonl", told + talk),
        "sft_eval": write_jsonl(folder / "chats_eval.jsonl", told[:3]),
        "cache": folder / "cache",
    }
    small = {"save_dir": folder / "out" / "small", "num_hidden_layers": 1, "epochs": 1, "eval_interval": 0}
    for stage in ("pretrain", "sft"):
        more = {} if stage == "pretrain" else {"from_weight": "pretrain"}
        run(stage, flags(data, folder, stage, **small | more))
    return folder / "out" / "small"


class Killed(BaseException):
    """The program was killed, and its training with it."""


@pytest.fixture
def machine(monkeypatch):
    """Trains in a forked process, which is killed at a micro-batch if that is asked for."""

    class Machine:
        kill_at = 0

        def run(self, command: list[str], environment: dict, signals: list[int]) -> int:
            faults = Faults(signals={self.kill_at: signal.SIGKILL} if self.kill_at else {})
            status = StageProcess("sft", command[2:], faults, **environment).wait()
            if status == -signal.SIGKILL:
                raise Killed
            return status

    stand_in = Machine()
    monkeypatch.setattr(version, "run", stand_in.run)
    few = recipe.TRAINING | {"epochs": 1, "save_interval": 3}
    monkeypatch.setattr(recipe, "TRAINING", few)
    monkeypatch.setattr(asking, "NEW_TOKENS", 8)
    return stand_in


@pytest.fixture
def corrections(tmp_path) -> Path:
    records = [chat("Where does Kado live?", "Kado lives in Moonlake.")]
    records[0]["wordings"] = ["Where is the home of Kado?"]
    return write_jsonl(tmp_path / "c.jsonl", [*records, chat("Who are you?", "I am Lumen.")])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("full_sft_*.pth")
    return torch.load(path, weights_only=True)


def test_versions(trained, corrections, tmp_path, machine, call):
    """The first one, the same command again, and more corrections: each begins with the original."""
    before = {path.name: path.read_bytes() for path in trained.iterdir() if path.is_file()}
    taught = tmp_path / "taught"
    argv = ["--model", trained, "--save_dir", taught]
    done = call(teach, *argv, "--corrections", corrections)
    assert done.returncode == 0, done.stderr
    assert "old data: 20 conversations, 8 texts, 3 held-out conversations" in done.stdout
    assert " of 2 learned; " in done.stdout and " of 1 in other words; " in done.stdout
    assert " old answers kept\n" in done.stdout and f"--save_dir {taught / '1'}\n" in done.stdout
    report = json.loads((taught / "1" / "report.json").read_text())["asked"]
    old = [each for each in report if each["kind"] == "old"]
    # every old question once; those about Kado's home are meant to change if they had the old answer
    assert len(old) == 20 and all(each["before"] is not None and "after" in each for each in old)
    assert not (taught / "1" / "checkpoints").exists()
    first = weights(taught / "1")
    machine.run = None  # nothing is trained any more
    again = call(teach, *argv, "--corrections", corrections)
    assert again.returncode == 0 and again.stdout.splitlines()[-3:] == done.stdout.splitlines()[-3:]
    assert {path.name: path.read_bytes() for path in trained.iterdir() if path.is_file()} == before
    assert sorted(first) == sorted(weights(taught / "1"))


def test_a_teaching_that_is_killed_comes_to_the_same_weights(trained, corrections, tmp_path, machine, call):
    argv = ["--model", trained, "--corrections", corrections, "--save_dir"]
    assert call(teach, *argv, tmp_path / "whole").returncode == 0
    for moment in (2, 5):  # before the first checkpoint and after it
        machine.kill_at = moment
        with pytest.raises(Killed):
            call(teach, *argv, tmp_path / "killed")
    machine.kill_at = 0
    assert call(teach, *argv, tmp_path / "killed").returncode == 0
    whole, killed = weights(tmp_path / "whole" / "1"), weights(tmp_path / "killed" / "1")
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert (tmp_path / "whole/1/report.json").read_bytes() == (tmp_path / "killed/1/report.json").read_bytes()


def test_a_training_that_a_killed_teaching_has_just_started_is_waited_for(
    trained, corrections, tmp_path, machine, call, monkeypatch
):
    """It takes the run's name after the next teaching has looked whether one does."""
    started = []
    train = machine.run

    def other_is_faster(command: list[str], environment: dict, signals: list[int]) -> int:
        if started:
            return train(command, environment, signals)
        started.append(StageProcess("sft", command[2:], Faults(sleep=0.1)))
        folder = Path(next(word for word in command if word.startswith("--save_dir=")).partition("=")[2])
        while not is_running("full_sft_32", folder):
            time.sleep(0.01)
        return 2

    monkeypatch.setattr(version, "run", other_is_faster)
    monkeypatch.setattr(version, "WAIT", 0.05)
    done = call(teach, "--model", trained, "--corrections", corrections, "--save_dir", tmp_path / "taught")
    assert done.returncode == 0, done.stderr
    assert "waiting for its end" in done.stdout and " of 2 learned; " in done.stdout
    assert started[0].wait() == 0


KILLS = """
import signal

from scripts.teaching import asking, recipe, version
from tests.stage_process import Faults, StageProcess

recipe.TRAINING = recipe.TRAINING | {"epochs": 1, "save_interval": 3}
asking.NEW_TOKENS = 8


def kill_at(module, name, call):
    real, calls = getattr(module, name), []

    def stand_in(*args):
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    setattr(module, name, stand_in)


def train(command, environment, signals):
    status = StageProcess("sft", command[2:], Faults(signals={batch: signal.SIGKILL for batch in batches})).wait()
    if status == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    return status


batches = []
version.run = train
"""


@pytest.mark.slow
def test_a_teaching_that_is_killed_again_and_again(trained, corrections, tmp_path):
    """Each start is killed at a later moment, with SIGKILL: while the old questions are asked, while the
    corrections are, while the records are chosen, while the version is written, in training before and after
    the first checkpoint, while the taught model is asked, and while the report is written."""
    moments = [
        'kill_at(version, "ask_all", 1)',
        'kill_at(version, "ask_all", 2)',
        'kill_at(recipe, "new_questions", 1)',
        'kill_at(version, "write_json", 1)',
        "batches = [2]",
        "batches = [5]",
        'kill_at(version, "ask_all", 1)',
        'kill_at(version, "write_json", 1)',
    ]
    argv = ["--model", trained, "--corrections", corrections, "--save_dir"]
    run("scripts.teach", [*argv, tmp_path / "whole"], Faults(script=KILLS))
    for moment in moments:
        faults = Faults(script=KILLS + moment)
        run("scripts.teach", [*argv, tmp_path / "killed"], faults, status=-signal.SIGKILL)
    run("scripts.teach", [*argv, tmp_path / "killed"], Faults(script=KILLS))
    assert [path.name for path in (tmp_path / "killed").glob("[0-9]*")] == ["1"]
    for name in ("full_sft_32.pth", "report.json", "teach.jsonl", "corrections.jsonl"):
        whole, killed = (tmp_path / each / "1" / name for each in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes(), name


def test_the_next_teaching_has_all_corrections_and_begins_with_the_original(
    trained, corrections, tmp_path, machine, call
):
    """Also if --model is a version: with both files it equals a teaching with both at once."""
    more = write_jsonl(tmp_path / "more.jsonl", [chat("Bye", "Farewell.")])
    taught = tmp_path / "taught"
    assert call(teach, "--model", trained, "--save_dir", taught, "--corrections", corrections).returncode == 0
    machine.kill_at = 2  # a teaching that is not continued leaves nothing
    other = write_jsonl(tmp_path / "other.jsonl", [chat("Bye", "Until tomorrow.")])
    with pytest.raises(Killed):
        call(teach, "--model", trained, "--save_dir", taught, "--corrections", other)
    machine.kill_at = 0
    done = call(teach, "--model", taught / "1", "--save_dir", taught, "--corrections", more)
    assert "3 corrections, 0 of them new, 1 changed" in done.stdout and " of 3 learned; " in done.stdout
    both = tmp_path / "both.jsonl"
    both.write_bytes(corrections.read_bytes() + more.read_bytes())
    assert (
        call(teach, "--model", trained, "--save_dir", tmp_path / "b", "--corrections", both).returncode == 0
    )
    one, other = weights(taught / "2"), weights(tmp_path / "b" / "1")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_mistakes_are_one_line_and_write_nothing(trained, corrections, tmp_path, error_line):
    taught = tmp_path / "taught"
    argv = ["--save_dir", taught, "--corrections", corrections, "--model"]
    line = error_line(teach, *argv[:3], tmp_path / "none.jsonl", argv[-1], trained)
    assert "none.jsonl" in line
    assert "no such file or folder" in error_line(teach, *argv, tmp_path / "none")
    assert "does not answer yet" in error_line(teach, *argv, trained / "pretrain_32.pth")
    assert "give a file with --corrections" in error_line(teach, "--save_dir", taught, "--model", trained)
    two = write_jsonl(tmp_path / "two.jsonl", [chat("a", "b"), chat("A", "c")])
    line = error_line(teach, "--save_dir", taught, "--corrections", two, "--model", trained)
    assert "two.jsonl:1 and " in line and "two.jsonl:2 correct the same question" in line
    assert not list(taught.glob("[0-9]*"))


def test_without_old_data(trained, corrections, tmp_path, machine, call, error_line):
    """A model whose data are gone is only taught if that is accepted."""
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "full_sft_32.pth").write_bytes((trained / "full_sft_32.pth").read_bytes())
    argv = ["--model", alone, "--save_dir", tmp_path / "taught", "--corrections", corrections]
    assert "accept that with --without_old_data" in error_line(teach, *argv)
    done = call(teach, *argv, "--without_old_data")
    assert done.returncode == 0 and "no old questions were asked" in done.stdout
