"""Small data for all tests."""

import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["the", "a", "red", "blue", "fox", "river", "stone", "walks", "sees", "under", "and"]
WORDS += ["山", "水", "红", "的", "在", "走"]

# a suite in the background ignores Ctrl-C, one under nohup SIGHUP; the processes that tests signal must not
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# a failure prints how to repeat it
settings.register_profile("repeatable", max_examples=40, print_blob=True, deadline=None)
settings.load_profile("repeatable")
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# with PYTHONDONTWRITEBYTECODE each process would compile all modules again, 7 s in one that collects the tests
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def sentence(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def without_first_line_breaks(text: str) -> str:
    """What the chat template keeps of an answer: no white space up to the last line break before the first
    word."""
    return re.sub(r"\A\s*[\r\n]", "", text)


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Torch computes in one thread. It is loaded here and not above, as xdist's own process needs no torch."""
    import torch

    from tests.stage_process import QUICK_RATE
    from trainer.report import speed

    torch.set_num_threads(1)
    exec(QUICK_RATE, vars(speed))


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory):
    """What the tests and the processes that they start put into the temporary folder is gone at the end."""
    tmp_path_factory.getbasetemp()  # pytest's own folder stays where it is
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(tempfile.mkdtemp(prefix="tests-"))
        folder.chmod(0o1777)  # some of these processes give up root's rights
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        # after multiprocessing's own, in it, at -100
        Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> dict[str, Path]:
    """Ragged pretrain and SFT files, each with a held-out one. Most records are short, because the head takes
    most of a small run; every ninth is longer than the 64 tokens of `stage_flags.flags`."""
    folder, rng = tmp_path_factory.mktemp("corpus"), random.Random(5)

    def text(number: int, most: int) -> str:
        return sentence(rng, 70, 90) if number % 9 == 4 else sentence(rng, 1, most)

    def chat(number: int) -> dict:
        turns = [{"role": "system", "content": "be brief"}] if rng.random() < 0.3 else []
        for _ in range(rng.randint(1, 2)):
            turns.append({"role": "user", "content": sentence(rng, 1, 5)})
            turns.append({"role": "assistant", "content": text(number, 8)})
        return {"conversations": turns}

    def pair(number: int) -> dict:
        question = {"role": "user", "content": sentence(rng, 1, 5)}
        answers = ({"role": "assistant", "content": text(number, 8)} for _ in range(2))
        return dict(zip(("chosen", "rejected"), ([question, answer] for answer in answers), strict=True))

    def write(name: str, record: Callable[[int], dict], count: int) -> Path:
        return write_jsonl(folder / f"{name}.jsonl", [record(number) for number in range(count)])

    return {
        "pretrain": write("p", lambda number: {"text": text(number, 14)}, 55),
        "pretrain_eval": write("pe", lambda number: {"text": text(number, 14)}, 12),
        "sft": write("s", chat, 75),
        "sft_eval": write("se", chat, 13),
        "dpo": write("d", pair, 37),
        "dpo_eval": write("de", pair, 9),
        "cache": folder / "cache",
    }


def launch(
    script: str | Path, *args, ranks: int = 0, cwd: Path = ROOT, timeout: int = 240, check: bool = True, **env
):
    """Run a Python file as a user does, under torchrun if `ranks` is given; returns the finished process."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += [str(script), *map(str, args)]
    done = subprocess.run(
        command,
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


SKIPPED = "takes minutes, or is one more combination; bash scripts/test.sh --slow runs it"


def pytest_addoption(parser):
    parser.addoption(
        "--slow", action="store_true", help="also run the tests that take minutes, and more combinations"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes, or is one more combination; run with --slow")


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()  # collections in the tests skip the modules that are loaded


def pytest_collection_modifyitems(config, items):
    every = config.getoption("--slow")
    for item in items:
        if "slow" in item.keywords and not every:
            item.add_marker(pytest.mark.skip(reason=SKIPPED))
