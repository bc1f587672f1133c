"""Warnings: each way to go wrong is named once, with its figure; a healthy run says nothing. And the verdict."""

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
from model.model_minimind import MiniMindConfig
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import flags
from trainer.components import verdict as verdicts
from trainer.components.metrics import read_metrics
from trainer.components.verdict import Verdict, unigram_entropy
from trainer.trainer_utils import load_tokenizer


def run_state(updates=1000, metric_names=(), from_weight="pretrain", data="d", **args) -> SimpleNamespace:
    """What the warnings look at, at the start of a run."""
    settings = StageArgs(save_weight="mine", from_weight=from_weight, **args)
    vars(settings)["max_gen_len"] = 8  # of the stages with rollouts
    return SimpleNamespace(
        args=settings, total_updates=updates, update=0, metric_names=metric_names, device=torch.device("cpu"),
        autocast=nullcontext(), lm_config=MiniMindConfig(vocab_size=100), run={"data": data}, eval_loader=None,
        losses=torch.tensor([4.5, 1.0]),
    )  # fmt: skip


def told(hook, state, records, capsys) -> list[str]:
    """The texts of the warnings while a run gives these records, which are those of the records."""
    hook.batch_start(state)
    state.update = 1
    hook.after_step(state)
    noted = [text for record in records for text in hook.remarks(state, record).get("warnings", ())]
    assert [f"warning: {text}" for text in noted] == capsys.readouterr().err.splitlines()
    return noted


def losses(*values, step=10, **more) -> list[dict]:
    return [{"update": step * (i + 1), "mean_loss": value} | more for i, value in enumerate(values)]


def evaluated(*values) -> list[dict]:
    return [{"update": 10 * (i + 1), "mean_loss": 2.0, "eval_loss": value} for i, value in enumerate(values)]


def rewards(count=10, reward=0.5, reward_std=0.5, cut_share=0.0, **more) -> list[dict]:
    figures = {"mean_loss": 0.0, "reward": reward, "reward_std": reward_std, "cut_share": cut_share}
    return [{"update": i + 1} | figures | more for i in range(count)]


HEALTHY = [
    losses(4.5, 4.0, 3.0, 2.0),
    losses(2.0, 9.0, 2.3, 9.0, 2.0),  # jumps that end
    evaluated(2.0, 2.1, 2.2, 2.0, 2.1),
    evaluated(2.0, 2.0001, 2.0002, 2.0003),  # by chance
    rewards(frac_reward_zero_std=0.99),
    [*rewards(9, frac_reward_zero_std=1.0), rewards(frac_reward_zero_std=0.5)[-1]],
    [record | dict.fromkeys(("reward", "reward_std", "cut_share", "frac_reward_zero_std")) for record in rewards(30)],
    losses(None, None, None),
]


@pytest.mark.parametrize("records", HEALTHY)
def test_a_healthy_run_says_nothing(records, capsys):
    assert told(Verdict(None), run_state(warmup_updates=100), records, capsys) == []


WRONG = {
    "5 updates change a model little; raise --epochs or lower --accumulation_steps, which is 8": (
        {"updates": 5, "accumulation_steps": 8}, losses(2.0)),
    "99 updates change a model little; raise --epochs or lower --batch_size": ({"updates": 99}, losses(2.0)),
    "--warmup_updates 500 of 1000 updates": ({"warmup_updates": 500}, losses(2.0)),
    "the loss is 6.00, and was 4.50 at the start: --learning_rate 0.0005 is too large": ({}, losses(4.5, 6.0, 6, 6, 6)),
    "eval_loss has risen 3 times in a row, to 2.300: it remembers its data; the best, 2.000, was at update 20 (mine_bes"
    "t)": ({}, evaluated(2.5, 2.0, 2.1, 2.2, 2.3, 2.4)),
    "for 10 updates all completions of a prompt got the same reward": ({}, rewards(frac_reward_zero_std=1.0)),
    "for 10 updates all completions": ({}, rewards(reward_std=0.0, count=30)),  # PPO
    "for 10 updates every completion was cut": ({}, rewards(cut_share=1.0)),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_goes_wrong_is_named_once_with_its_figures(text, capsys):
    settings, records = WRONG[text]
    hook, state = Verdict(None), run_state(**settings)
    (warning,) = told(hook, state, records, capsys)
    assert warning.startswith(text)
    assert told(hook, state, records, capsys) == []  # once


def test_the_first_update(capsys):
    """Weights of another tokenizer, a teacher that is the student; only where the loss is the cross entropy."""
    state = run_state(updates=200)
    state.losses = torch.tensor([1.02 * math.log(100), 1.0])
    (warning,) = told(Verdict(None), state, losses(5.0), capsys)
    assert warning.startswith(
        "the first loss 4.70 is above 4.61, that of guessing: --from_weight pretrain does not fit"
    )
    state = run_state(from_weight="none")
    state.losses = torch.tensor([9.0, 1.0])
    assert told(Verdict(None), state, losses(5.0), capsys) == []
    for divergence, warned in ((1e-7, 1), (1e-3, 0)):
        state = run_state(metric_names=("cross_entropy", "divergence"))
        state.losses = torch.tensor([9.0, 1.0, 9.0, divergence])
        assert len(told(Verdict(None), state, losses(5.0), capsys)) == warned
    state.losses = torch.tensor([0.0, 0.0, 0.0, 0.0])  # skipped, or without targets
    assert told(Verdict(None), state, losses(None), capsys) == []


def test_an_emulated_dtype_and_held_out_data_that_are_trained_on(monkeypatch, capsys):
    state = run_state(dtype="bfloat16_emulated")
    state.autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    state.eval_loader = DataLoader(SimpleNamespace(fingerprint={"data": "d"}, __len__=lambda: 1))  # type: ignore
    monkeypatch.setattr(verdicts, "native_bfloat16", lambda device: False)
    first, second = told(Verdict(None), state, losses(2.0), capsys)
    assert first == "--dtype bfloat16_emulated: this cpu emulates bfloat16; float32 is faster"
    assert second.startswith("the held-out data are the training data")
    monkeypatch.setattr(verdicts, "native_bfloat16", lambda device: True)
    state.run["data"], state.update = "other", 0
    assert told(Verdict(None), state, losses(2.0), capsys) == []


@pytest.fixture(scope="module")
def caches(corpus):
    tokenizer = load_tokenizer("model")
    kinds = {"pretrain": PretrainDataset, "sft": SFTDataset}
    return {key: kind(str(corpus[key]), tokenizer, 64, cache_dir=corpus["cache"]) for key, kind in kinds.items()}


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
@pytest.mark.parametrize("piece", [1 << 14, 700])
def test_the_entropy_of_single_tokens_is_torchs(caches, monkeypatch, stage, piece):
    """Of the very targets of the batches, whether the cache is read in one piece or in several."""
    dataset = caches[stage]
    monkeypatch.setattr(verdicts, "PIECE", piece)
    targets = dataset.collate([dataset[i] for i in range(len(dataset))])["targets"].numpy()
    expected = Categorical(torch.from_numpy(np.bincount(targets)).double()).entropy()
    assert unigram_entropy(dataset.cache) == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("interval", [1, 10, 100])
def test_the_plateau_is_named_after_a_while_wherever_the_run_was_stopped(caches, interval, capsys):
    """A resumed run counts on: it warns at the update where the uninterrupted one does."""
    height = unigram_entropy(caches["pretrain"].cache)
    stuck = [{"update": u, "mean_loss": height} for u in range(interval, 1001, interval)]
    ends = []
    for stop in (0, interval, 290):
        hook, state = Verdict(caches["pretrain"]), run_state()
        for record in stuck:
            if stop and record["update"] == stop:
                saved, hook = hook.state_dict(), Verdict(caches["pretrain"])
                hook.load_state_dict(saved)
            if hook.remarks(state, record):
                ends.append(record["update"])
    assert ends == [300] * len(ends) and "the frequencies of single tokens alone give" in capsys.readouterr().err
    left = [{"update": u, "mean_loss": height * (1 if u < 200 else 0.9)} for u in range(interval, 1001, interval)]
    hook, state = Verdict(caches["pretrain"]), run_state()
    assert not any(hook.remarks(state, record) for record in left)


SAME = "loss 2.000 at the start, 2.000 at the end; held-out loss "
VERDICTS = {
    "loss 4.000 at the start, 2.000 at the end; whether it learns or remembers, only held-out data": losses(4.0, 2.0),
    f"{SAME}2.200 (+0.200), evaluated at the end only": evaluated(2.2),
    f"{SAME}2.200 (+0.200), still falling": evaluated(4, 3, 2.5, 2.2),
    f"{SAME}2.500 (+0.500), rising since update 20 (2.100)": evaluated(4, 2.1, 2.5),
    f"{SAME}2.099 (+0.099), hardly changing": evaluated(4, 2.1, 2.1, 2.099),
    "reward 0.500 at the start, 0.500 at the end; held-out reward 0.700, the best 0.800 at update 1": [
        rewards()[0] | {"eval_loss": -0.8},
        rewards(2)[1] | {"eval_loss": -0.7},
    ],
    "reward 0.500 at the start, 0.500 at the end; whether": rewards(),
}


@pytest.mark.parametrize("text", VERDICTS)
def test_the_verdict(text, capsys):
    hook, state = Verdict(None), run_state(from_weight="none")
    for record in VERDICTS[text]:
        hook.remarks(state, record)
    assert hook.verdict(state).startswith(f"verdict: {text}")
    assert Verdict(None).verdict(state) == ""  # nothing was reported


def test_a_stopped_run_warns_and_judges_as_one_that_was_not(corpus, tmp_path):
    """A real run: the warnings are on stderr and in the records, once; the verdict only where it ends."""
    argv = flags(corpus, tmp_path, "pretrain", log_interval=3)
    whole = run("pretrain", argv)
    want = [(r["update"], r.get("warnings")) for r in read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")]
    assert whole.err == f"warning: {want[0][1][0]}\n" and "16 updates change a model little" in whole.err
    assert whole.out.count("\nrun: 16 updates of about ") == 1
    assert whole.out.splitlines()[-1].startswith("verdict: loss 8.")
    argv = flags(corpus, tmp_path / "stopped", "pretrain", log_interval=3)
    stopped = run("pretrain", argv, Faults(signals={5: 15}), status=143)
    assert "verdict" not in stopped.out
    resumed = run("pretrain", [*argv, "--from_resume", "1"])
    assert resumed.err == "" and resumed.out.splitlines()[-1] == whole.out.splitlines()[-1]
    assert "\nrun: 11 of 16 updates are left of about " in resumed.out
    records = read_metrics(tmp_path / "stopped/out/pretrain_32_metrics.jsonl")
    assert [(r["update"], r.get("warnings")) for r in records] == want
