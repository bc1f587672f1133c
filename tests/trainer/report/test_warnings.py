"""Warnings: each way to go wrong is named once, with its figures; a healthy run says nothing. And the
verdict."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributions import Categorical
from torch.utils.data import DataLoader

from common.settings import StageArgs
from dataset.lm_dataset import PretrainDataset, SFTDataset
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import flags
from trainer.devices import device as device_module
from trainer.report import warnings as verdicts
from trainer.report.metrics import read_metrics
from trainer.report.warnings import Verdict, unigram_entropy
from trainer.run.state import TrainState
from trainer.trainer_utils import warmup_cosine


def run_state(updates=1000, metric_names=(), from_weight="pretrain", data="d", **args) -> SimpleNamespace:
    """What the warnings look at, at the start of a run with a vocabulary of 100 tokens."""
    settings = StageArgs(save_weight="mine", from_weight=from_weight, **args)
    vars(settings)["max_gen_len"] = 8  # of the stages with rollouts
    state = SimpleNamespace(
        args=settings, total_updates=updates, update=0, metric_names=metric_names, device=torch.device("cpu"),
        autocast=nullcontext(), lm_config=MiniMindConfig(vocab_size=100), run={"data": data, "global_batch": 32},
        eval_loader=None, schedule=warmup_cosine, losses=torch.zeros(2 + len(metric_names)),
        update_loss=None, loss_is_cross_entropy=True, reward=None, best_update=None, last_lines=[],
    )  # fmt: skip
    state.state = state
    return state


def last_line(hook: Verdict, state: SimpleNamespace) -> str:
    """What it says at the end of the run."""
    state.last_lines.clear()
    hook.on_train_end(state)
    return "".join(state.last_lines)


def trained(state, losses, capsys, evaluations=None, interval=10, rewards=(), stop=0, dataset=None, **more):
    """The hook after updates with these losses, with an evaluation after some of them and records at an
    interval, and the warnings, which are those of the records. stop: update after which the hook is replaced
    by one that is restored.
    more: further values of the records."""
    hook, noted, evaluations = Verdict(dataset), [], evaluations or {}
    for update, loss in enumerate(losses, 1):
        hook.on_batch_start(state, update)
        state.update, state.update_loss = update, torch.tensor(loss, dtype=torch.float64)
        state.reward = rewards[update - 1] if rewards else None
        hook.on_optimizer_step(state, update)
        saved = hook.state_dict() if update == stop else None
        if update % interval == 0 or update in evaluations:
            record = {"update": update} | more | ({"reward": state.reward} if rewards else {})
            record |= {"eval_loss": evaluations[update]} if update in evaluations else {}
            hook.on_log(state, record)
            noted += record.get("warnings", ())
        if saved is not None and update % interval:
            hook = Verdict(dataset)
            hook.load_state_dict(saved)
    assert [f"warning: {text}" for text in noted] == capsys.readouterr().err.splitlines()
    return hook, noted


def noisy(*levels, updates=40, noise=0.1, seed=0) -> list[float]:
    """So many losses around each of these levels."""
    random = np.random.default_rng(seed)
    return [float(level * math.exp(random.normal(0, noise))) for level in levels for _ in range(updates)]


HEALTHY = {
    "falling": noisy(4.5, 4.0, 3.0, 2.0),
    "one sample per update": noisy(2.0, updates=1000, noise=0.7),
    "jumps that end": [9.0 if update % 15 == 7 else loss for update, loss in enumerate(noisy(4.5, 2.0, 2.0))],
    "skipped updates": [
        math.nan if update % 3 == 0 else loss for update, loss in enumerate(noisy(4.5, 2.0, 2.0))
    ],
    "nothing learned": noisy(4.6, updates=400, noise=0.001),
}


@pytest.mark.parametrize("losses", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_says_nothing(losses, capsys):
    state = run_state(warmup_updates=100)
    state.run["global_batch"] = 1
    assert trained(state, losses, capsys)[1] == []


@pytest.mark.parametrize("stop", [0, 95])
def test_a_loss_that_rises_is_compared_with_the_lowest(stop, capsys):
    """Not with the first one; with the same warning whatever the interval of records is, and after a
    resume."""
    losses = noisy(4.6, 2.0, 3.9, 3.9, updates=50, noise=0.05)
    means = {i: np.mean(losses[i - 20 : i]) for i in range(20, 201)}
    found = set()
    for interval in (1, 10, 100):
        hook, (warning,) = trained(
            run_state(from_weight="none"), losses, capsys, interval=interval, stop=stop
        )
        history = hook.history
        assert history.warned == ["rose"] and warning.endswith("; a smaller learning rate may help")
        assert history.lowest == pytest.approx(min(means.values()), rel=1e-12)
        assert history.lowest_update == min(means, key=lambda update: means[update])
        assert history.losses.means()[1] == pytest.approx(means[200], rel=1e-12)
        found.add(warning)
    assert len(found) == 1


@pytest.mark.parametrize(
    "losses",
    [[2.5, *noisy(3.9, noise=0.02)], [2.5, *noisy(191, 20, noise=2)], noisy(2.0, 3e5, noise=0.5)],
    ids=["fine-tuning at too large a rate", "far above guessing", "late"],
)
def test_a_loss_that_rises_at_once_is_compared_with_the_first(losses, capsys):
    assert trained(run_state(), losses, capsys)[0].history.warned == ["rose"]


@pytest.mark.parametrize(
    ("levels", "falls"), [((1.5, 1.2, 1.0), True), ((2, 2, 2), False), ((2.1, 2.2, 2.3), False)]
)
def test_overfitting_is_a_training_loss_that_falls_while_the_held_out_loss_rises(levels, falls, capsys):
    evaluations = {40: 2.5, 80: 2.0, 120: 2.1, 160: 2.2, 200: 2.3}
    hook, (warning,) = trained(run_state(), noisy(4, 2, *levels, noise=0.001), capsys, evaluations)
    assert hook.history.warned == ["rising"] and hook.history.lowest_evaluation().update == 80
    assert ("overfitting" in warning) == ("overfitting" in last_line(hook, run_state())) == falls


@pytest.mark.parametrize(
    ("updates", "noise"), [(50, 0.7), (3, 0.1)], ids=["one sample per update", "a short run"]
)
def test_a_training_loss_that_falls_by_chance_is_no_overfitting(updates, noise, capsys):
    evaluations = {updates * (i + 1): value for i, value in enumerate((3.0, 3.1, 3.2, 3.3))}
    falls = 0
    for seed in range(20):
        losses = noisy(*[3.0] * 4, updates=updates, noise=noise, seed=seed)
        hook, noted = trained(run_state(), losses, capsys, evaluations)
        falls += hook.history.evaluations[-1].training < hook.history.evaluations[0].training
        assert "rising" in hook.history.warned
        assert "overfitting" not in " ".join([*noted, last_line(hook, run_state())])
    assert falls > 5


def test_evaluations_of_other_held_out_data_are_forgotten(capsys):
    state = run_state()
    state.eval_loader = DataLoader(SimpleNamespace(fingerprint={"data": "a"}, __len__=lambda: 1))  # type: ignore
    hook, _ = trained(state, noisy(2.0), capsys, {10: 1.0, 20: 1.1, 30: 1.2})
    state.callbacks, state.eval_data, monitor = [hook], "a", (state.args.monitor, state.args.mode)
    TrainState.check_held_out(state, monitor)
    assert len(hook.history.evaluations) == 3
    state.eval_loader.dataset.fingerprint["data"] = "b"
    TrainState.check_held_out(state, monitor)
    record = {"update": 50, "eval_loss": 5.0}
    hook.on_log(state, record)
    assert "warnings" not in record
    assert "held-out loss 5.000" in last_line(hook, state) and "1.000" not in last_line(hook, state)


def test_settings_that_cannot_go_well_are_named_before_the_first_update(capsys):
    assert trained(run_state(updates=5, accumulation_steps=8), [2.0], capsys, interval=1)[1] == [
        "only 5 updates in this run; more --epochs, or a smaller --batch_size or --accumulation_steps, make more"
    ]
    (warning,) = trained(run_state(warmup_updates=500), [2.0], capsys, interval=1)[1]
    # half of it, on the cosine
    assert "the learning rate reaches 0.00028, not --learning_rate 0.0005" in warning


REWARDS = {
    "equal in every group": (
        {"frac_reward_zero_std": 1.0},
        "in the rollouts of updates 1 to 10 all completions of a prompt got the same",
    ),
    "cut": (
        {"cut_share": 1.0},
        "in the rollouts of updates 1 to 10 every completion was cut, at --max_gen_len 8 or another limit",
    ),
    "nearly equal": ({"frac_reward_zero_std": 0.99}, None),
}


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_that_tell_nothing(name, capsys):
    changed, text = REWARDS[name]
    figures = {"reward_std": 0.5, "cut_share": 0.0} | changed
    for interval in (1, 10):
        state = run_state(metric_names=("kl",))
        warnings = trained(state, [0.0] * 20, capsys, interval=interval, rewards=[0.5] * 20, **figures)[1]
        assert [warning[: len(text or "")] for warning in warnings] == ([text] if text else [])


def test_the_first_update(capsys):
    """Weights that do not fit, a teacher that is the student; the first only where the loss is the cross
    entropy, of more than a few samples."""
    (warning,) = trained(run_state(), [1.02 * math.log(100)], capsys, interval=1)[1]
    assert warning.startswith(
        "the cross entropy of the first update, 4.70, is above 4.61, that of guessing each"
    )
    other_loss = run_state()
    other_loss.loss_is_cross_entropy = False
    one_sample = run_state()
    one_sample.run["global_batch"] = 1
    for state in (run_state(from_weight="none"), other_loss, one_sample):
        assert trained(state, [9.0], capsys, interval=1)[1] == []
    for divergence, warned in ((1e-7, 1), (1e-3, 0)):
        state = run_state(metric_names=("cross_entropy", "divergence"))
        state.losses[-1] = divergence
        assert len(trained(state, [2.0], capsys, interval=1)[1]) == warned
    assert trained(state, [math.nan], capsys, interval=1)[1] == []  # skipped, or without targets


def test_an_emulated_dtype_and_held_out_data_that_are_trained_on(monkeypatch, capsys):
    state = run_state(dtype="bfloat16_emulated")
    state.autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    state.eval_loader = DataLoader(SimpleNamespace(fingerprint={"data": "d"}, __len__=lambda: 1))  # type: ignore
    for module in (verdicts, device_module):
        monkeypatch.setattr(module, "native_bfloat16", lambda device: False)
    first, second = trained(state, [2.0], capsys, interval=1)[1]
    assert first == "--dtype bfloat16_emulated: this cpu emulates bfloat16; float32 is faster"
    assert second.startswith("the held-out data are the training data")
    monkeypatch.setattr(verdicts, "native_bfloat16", lambda device: True)
    state.run["data"], state.update = "other", 0
    assert trained(state, [2.0], capsys, interval=1)[1] == []


@pytest.fixture(scope="module")
def caches(corpus):
    tokenizer = load_tokenizer("model")
    kinds = {"pretrain": PretrainDataset, "sft": SFTDataset}
    return {
        key: kind(str(corpus[key]), tokenizer, 64, cache_dir=corpus["cache"]) for key, kind in kinds.items()
    }


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
@pytest.mark.parametrize("part", [1 << 14, 700])
def test_the_entropy_of_single_tokens_is_torchs(caches, monkeypatch, stage, part):
    """Of the very targets of the batches, whether the cache is read in one part or in several."""
    dataset = caches[stage]
    monkeypatch.setattr(verdicts, "PART_TOKENS", part)
    targets = dataset.collate([dataset[i] for i in range(len(dataset))])["targets"].numpy()
    expected = Categorical(torch.from_numpy(np.bincount(targets)).double()).entropy()
    assert unigram_entropy(dataset.cache) == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("interval", [1, 10, 100])
def test_the_plateau_is_named_after_a_while_wherever_the_run_was_stopped(caches, interval, capsys):
    """A resumed run counts on: it warns with the figures of the uninterrupted one. Another loss has no
    plateau."""
    height = unigram_entropy(caches["pretrain"].cache)
    found = set()
    for stop in (0, 101, 287):
        losses = [height] * 400
        found.add(
            trained(run_state(), losses, capsys, None, interval, stop=stop, dataset=caches["pretrain"])[1][0]
        )
    assert (
        len(found) == 1
        and f"is still {height:.2f} at update 300; how often each token occurs gives" in found.pop()
    )
    left, other_loss = [height] * 200 + [0.9 * height] * 200, run_state()
    assert trained(run_state(), left, capsys, None, interval, dataset=caches["pretrain"])[1] == []
    other_loss.loss_is_cross_entropy = False
    assert trained(other_loss, [height] * 400, capsys, None, interval, dataset=caches["pretrain"])[1] == []


VERDICTS = {
    "held-out loss 2.200 (+0.200), still falling (2.500 at update 60)": {20: 4, 40: 3, 60: 2.5, 80: 2.2},
    "held-out loss 2.500 (+0.500), the lowest, 2.100, was at update 40 (mine_best)": {40: 2.1, 80: 2.5},
}


@pytest.mark.parametrize("text", VERDICTS)
def test_the_verdict(text, capsys):
    for interval in (1, 10, 80):
        state = run_state(from_weight="none")
        hook, _ = trained(state, [4.0, *[2.0] * 79], capsys, VERDICTS[text], interval)
        first = "cross entropy 4.000 at update 1, 2.000 in the last 8 updates"
        assert last_line(hook, state) == f"verdict: {first}; {text}"
    assert last_line(Verdict(None), state) == ""  # no update was made


def test_a_stopped_run_warns_and_judges_as_one_that_was_not(corpus, tmp_path):
    """A real run: the warnings are on stderr and in the records, once; the verdict only where it ends."""
    argv = flags(corpus, tmp_path, "pretrain", log_interval=3)
    whole = run("pretrain", argv)
    want = [
        (r["update"], r.get("warnings")) for r in read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")
    ]
    assert whole.err == f"warning: {want[0][1][0]}\n" and "only 16 updates in this run" in whole.err
    assert whole.out.count("\nrun: 16 updates of about ") == 1
    argv = flags(corpus, tmp_path / "stopped", "pretrain", log_interval=3)
    stopped = run("pretrain", argv, Faults(signals={5: 15}), status=143)
    assert "verdict" not in stopped.out
    resumed = run("pretrain", [*argv, "--from_resume", "1"])
    assert resumed.err == "" and resumed.out.splitlines()[-1] == whole.out.splitlines()[-1]
    assert "\nrun: 11 of 16 updates are left of about " in resumed.out
    records = read_metrics(tmp_path / "stopped/out/pretrain_32_metrics.jsonl")
    assert [(r["update"], r.get("warnings")) for r in records] == want
