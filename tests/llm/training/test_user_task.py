"""The manual's own task, in a folder of its user: trained, stopped early, killed and resumed, and all that
can be wrong with a task, told in one line."""

import random
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT, write_jsonl
from tests.stage_process import FORKED, Faults, run
from tests.trainer.stage_flags import assert_same_run, saved_state
from trainer.report.metrics import read_metrics
from trainer.weights.files import half_weights

ENGINE = str(ROOT / "llm/training/train.py")
PAGE = (ROOT / "docs/engine.md").read_text(encoding="utf-8")
(EXAMPLE,) = (
    block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S) if "class TextClass" in block
)
TASK, NAME = "text_classifier:TextClassifier", "TextClassifier_32"
TOPICS = {
    "cooking": "flour sugar oven butter spoon dough cream salt recipe pepper onion soup bread plate pan boil fry taste",
    "sport": "goal match team player ball coach league cup pitch race medal swim run track score win lose field",
}
STOPPING = {"patience": 2, "monitor": "eval_accuracy", "mode": "max"}
COMMON = ["the", "of", "and", "with", "in", "then", "very", "some", "more", "about"]


def labelled_texts(count: int) -> list[dict]:
    """Texts on two topics, of a few words to some dozens, few of which tell the topic."""
    rng, texts = random.Random(4), []
    for _ in range(count):
        label = rng.choice(sorted(TOPICS))
        words = [rng.choice(TOPICS[label].split()) for _ in range(rng.randint(1, 3))]
        words += [rng.choice(COMMON) for _ in range(rng.randint(1, 25))]
        rng.shuffle(words)
        texts.append({"text": " ".join(words), "label": label})
    return texts


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A user's folder: the example, copied from the manual, and data. 73 of the texts are for training: with
    a global batch of 8 the last one of an epoch is a single text."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "text_classifier.py").write_text(EXAMPLE, encoding="utf-8")
    write_jsonl(folder / "texts.jsonl", labelled_texts(92))
    return folder


def argv(folder: Path, task: str = TASK, **extra) -> list[str]:
    """A small run whose files go to `folder`; `extra` replaces its settings."""
    settings = {"task": task, "data_path": "texts.jsonl", "hidden_size": 32, "num_hidden_layers": 1}
    settings |= {"save_dir": folder / "out", "checkpoint_dir": folder / "checkpoints"}
    settings |= {"log_interval": 1, "batch_size": 8}
    settings |= {"epochs": 20, "learning_rate": 2e-3, "dtype": "float32", "device": "cpu", "seed": 3}
    return [part for key, value in (settings | extra).items() for part in (f"--{key}", str(value))]


def started_in(folder: Path, **faults) -> Faults:
    """A run that is started in a folder."""
    return Faults(script=f"os.chdir({str(folder)!r})", **faults)


def repository() -> set[str]:
    """What lies in the repository, without what tools keep there."""
    left_out = re.compile(r"(^|/)(\.|__pycache__|\w+\.egg-info)")
    names = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*")}
    return {name for name in names if not left_out.search(name)}


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory) -> Path:
    """A run from its beginning until it stops early."""
    folder, before = tmp_path_factory.mktemp("whole"), repository()
    done = run("engine", argv(folder, **STOPPING, tensorboard_dir=folder / "runs"), started_in(home))
    assert "stopping: EarlyStopping: eval_accuracy got no better than" in done.out
    assert repository() == before
    return folder


# --- what the manual promises


def test_it_learns_and_stops_early(whole):
    held_out = [r for r in read_metrics(whole / f"out/{NAME}_metrics.jsonl") if "eval_loss" in r]
    accuracy = [record["eval_accuracy"] for record in held_out]
    assert accuracy[0] < max(accuracy) and max(accuracy) >= 0.8  # 16 of 19; chance: 0.5
    assert len(accuracy) < 20 and accuracy.index(max(accuracy)) == len(accuracy) - 3  # --patience 2
    best = torch.load(whole / f"checkpoints/{NAME}_best_resume.pth", weights_only=True)
    assert best["update"] == held_out[-3]["update"]


def test_killed_and_resumed_it_is_the_same_run(home, whole, tmp_path):
    """In the second epoch; then in the last one, when early stopping has begun to count."""
    settings = STOPPING | {"from_resume": 1, "save_interval": 4, "tensorboard_dir": tmp_path / "runs"}
    updates = saved_state(whole, NAME)["update"]
    for micro_batch in (17, updates - 20):  # of each process
        killed = started_in(home, signals={micro_batch: signal.SIGKILL})
        run("engine", argv(tmp_path, **settings), killed, status=-9)
    done = run("engine", argv(tmp_path, **settings), started_in(home))
    assert "resuming TextClassifier at" in done.out and "stopping: EarlyStopping" in done.out
    assert_same_run(whole, tmp_path, NAME)
    assert saved_state(whole, NAME)["callbacks"] == saved_state(tmp_path, NAME)["callbacks"]
    logs = [read_metrics(folder / f"out/{NAME}_metrics.jsonl") for folder in (whole, tmp_path)]
    one, other = ([record.get("eval_accuracy") for record in log] for log in logs)
    assert one == other
    steps = [point.step for point in EventAccumulator(str(tmp_path / "runs" / NAME)).Reload().Scalars("loss")]
    assert steps == list(range(1, updates + 1))
    refused = {4: "held_out_every: 5 -> 4", 5: "data: "}
    for every, told in refused.items():
        write_jsonl(tmp_path / "other.jsonl", labelled_texts(91)[1:] + labelled_texts(92)[-2:])
        other = ["--held_out_every", every]
        if every == 5:
            other += ["--data_path", tmp_path / "other.jsonl"]
        failed = run("engine", argv(tmp_path, **settings) + other, started_in(home), status=2)
        assert told in failed.error_lines[-1]


def test_the_command_of_the_manual_from_the_users_folder(home, tmp_path):
    """--from_weight starts from a pretrained body."""
    form = rf"^python -m llm.training.train (--task {TASK} .*--from_weight pretrain.*)$"
    command = re.search(form, PAGE, flags=re.M)
    torch.manual_seed(5)
    vocab_size = len(load_tokenizer(ROOT / "model"))
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1, vocab_size=vocab_size, **heads)
    weights = half_weights(MiniMindForCausalLM(config))
    (tmp_path / "out").mkdir()
    torch.save(weights, tmp_path / "out/pretrain_32.pth")
    settings = {"cache_dir": tmp_path / "cache", "epochs": 1, "learning_rate": 1e-12}
    words = [*shlex.split(command[1]), *argv(tmp_path, **settings)[2:]]
    before = repository()
    done = run(ENGINE, words, started_in(home))
    assert "weights: pretrain" in done.out and "done: 10 updates" in done.out
    trained = torch.load(tmp_path / f"out/{NAME}.pth", weights_only=True)
    layer = "layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(trained[f"body.{layer}"], weights[f"model.{layer}"])
    assert repository() == before


def test_the_other_command_of_the_manual_has_a_flag_of_the_task(home, tmp_path):
    """Every tenth text is held out."""
    words = re.search(
        rf"^python -m llm.training.train (--task {TASK}[^\n]*held_out[^\n]*\\\n.*)$", PAGE, flags=re.M
    )
    typed = shlex.split(words[1].replace("\\\n", " "))
    settings = {"epochs": 1, "tensorboard_dir": tmp_path / "runs"}
    done = run(ENGINE, [*typed, *argv(tmp_path, **settings)[2:]], started_in(home))
    assert "done: 11 updates" in done.out  # of 82 texts, 8 at a time


# --- a task that keeps a state

STATEFUL = '''
import torch
from text_classifier import TextClassifier


class Weighted(TextClassifier):
    """Weights each loss by the mean of those before it."""

    def __init__(self, config):
        super().__init__(config)
        self.mean = torch.ones(())

    def train_step(self, model, batch):
        loss = super().train_step(model, batch)
        result = loss * self.mean
        self.mean = 0.9 * self.mean + 0.1 * loss.detach() / max(1, len(batch["labels"]))
        return result

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, saved):
        RESTORE
'''


def test_the_state_of_a_task_goes_on_with_the_same_bits(home, tmp_path):
    (home / "weighted.py").write_text(STATEFUL.replace("RESTORE", 'self.mean = saved["mean"].clone()'))
    settings = {"epochs": 2, "save_weight": "w", "from_resume": 1, "save_interval": 4}
    run("engine", argv(tmp_path / "whole", "weighted:Weighted", **settings), started_in(home))
    broken = argv(tmp_path / "broken", "weighted:Weighted", **settings)
    run("engine", broken, started_in(home, signals={11: signal.SIGKILL}), status=-9)
    assert "resuming" in run("engine", broken, started_in(home)).out
    assert_same_run(tmp_path / "whole", tmp_path / "broken", "w_32")


def test_a_task_that_forgets_its_state_ends_at_once(home, tmp_path):
    (home / "forgets.py").write_text(STATEFUL.replace("RESTORE", "self.mean = torch.ones(())"))
    line = run("engine", argv(tmp_path, "forgets:Weighted"), started_in(home), status=2).error_lines[-1]
    assert "the Objective" in line and "has other values; a resumed run would not be this run" in line
    half = STATEFUL.partition("    def load_state_dict")[0]
    (home / "half.py").write_text(half)
    line = run("engine", argv(tmp_path, "half:Weighted"), started_in(home), status=2).error_lines[-1]
    assert line.startswith("error: Weighted has state_dict and no load_state_dict")


# --- what can be wrong with a task

BROKEN = '''
from llm.training.core.callbacks import Callback
from text_classifier import TextClassifier


class Broken(Callback):
    """Fails after the third update."""

    def on_batch_end(self, engine, update, record):
        if update == 3:
            raise KeyError("no such thing")


class BrokenCallback(TextClassifier):
    """Brings it along."""

    def callbacks(self):
        return [Broken()]

'''


def test_a_callback_that_raises_is_named_once(home, tmp_path):
    """Also in spawned processes; its own traceback is there once."""
    (home / "broken.py").write_text(BROKEN, encoding="utf-8")
    forked = started_in(home)
    forked.script += FORKED
    done = run(ENGINE, argv(tmp_path, "broken:BrokenCallback", world_size=2), forked, status=1)
    for text in ("KeyError: 'no such thing'", "callback Broken failed in on_batch_end"):
        assert done.err.count(text) == 1, done.err
    assert done.err.count('raise KeyError("no such thing")') == 1 and "error: " not in done.err
    found = read_metrics(tmp_path / "out/BrokenCallback_32_metrics.jsonl")
    assert [record["update"] for record in found] == [1, 2, 3]
