"""Runs of a stage on weighted sources of which a share is held out: resumed, on two ranks, refused."""

import signal
from itertools import product

import pytest

from common.errors import UserError
from common.settings import ROOT, StageArgs
from dataset.held_out import Split
from dataset.lm_dataset import PretrainDataset, SFTDataset
from dataset.opening import open_datasets, open_prompts, warn_of_share
from dataset.token_cache import load_tokenizer
from tests.conftest import write_jsonl
from tests.stage_process import Faults, run
from tests.trainer.rollout_runs import rollout_flags, write_prompts
from tests.trainer.stage_flags import assert_same_run, flags
from trainer import train_grpo
from trainer.report.metrics import read_metrics

SPLIT = {"eval_data_path": "none", "eval_share": 0.2, "packing": 1, "batch_size": 4}


def weighted(corpus, first: float = 0.3, second: float = 0.7) -> str:
    return f"{corpus['pretrain']}:{first},{corpus['pretrain_eval']}:{second}"


def test_a_killed_run_of_a_mixture_goes_on_to_the_bit(corpus, tmp_path):
    settings = SPLIT | {"data_path": weighted(corpus), "num_workers": 1}
    argvs = {
        n: flags(corpus, tmp_path / n, "pretrain", **settings, from_resume=1) for n in ("whole", "killed")
    }
    done = run("pretrain", argvs["whole"])
    lines = done.out.splitlines()
    for share, path in ((30, corpus["pretrain"]), (70, corpus["pretrain_eval"])):
        (line,) = [line for line in lines if line.startswith(f"{path}: ")]
        # few rows: one is a few per cent
        assert abs(float(line.split("tokens; ")[1].split("%")[0]) - share) < 10
    assert sum(line.startswith("data: ") and "; held out: " in line for line in lines) == 1
    assert "pe.jsonl:0.7" not in done.out and "pe.jsonl is read" in done.err
    run("pretrain", argvs["killed"], Faults(signals={6: signal.SIGKILL}), status=-9)
    assert "resuming" in run("pretrain", argvs["killed"]).out
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    for change, line in (
        ({"data_path": weighted(corpus, 0.5, 0.5)}, "weights: 0.3, 0.7 -> 0.5, 0.5"),
        ({"data_path": corpus["pretrain"]}, "weights: 0.3, 0.7 -> None"),
        ({"eval_share": 0.25}, "eval_share: 0.2 -> 0.25"),
    ):
        argv = flags(corpus, tmp_path / "killed", "pretrain", **settings | change, from_resume=1)
        error = run("pretrain", argv, status=2).error_lines[-1]
        assert "the checkpoint belongs to another run" in error and line in error


def test_an_evaluation_on_two_ranks_is_that_of_one(corpus, tmp_path):
    """Before the rate has changed anything: the loss per target, the bits per byte, of all the ranks' data."""
    settings = {"epochs": 1, "num_hidden_layers": 1, "learning_rate": 1e-12, "eval_interval": 0}
    settings["from_weight"] = "none"
    found = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        run("sft", flags(corpus, folder, "sft", **settings), ranks=ranks)
        found[ranks] = read_metrics(folder / "out/full_sft_32_metrics.jsonl")[-1]
    for name in ("eval_loss", "eval_bpb"):
        assert found[2][name] == pytest.approx(found[1][name], rel=1e-6)


def test_what_does_not_go_together_is_one_line(corpus, tmp_path):
    both = flags(corpus, tmp_path, "pretrain", eval_share=0.1)
    (error,) = run("pretrain", both, status=2).error_lines
    assert "--eval_share and --eval_data_path both give held-out data" in error
    prompts = write_prompts(tmp_path)
    prompts["rl"] = f"{prompts['rl']}:1,{prompts['rl_eval']}:1"
    (error,) = run("grpo", rollout_flags(prompts, tmp_path), status=2).error_lines
    assert "prompts cannot be mixed by weight" in error


def test_a_data_module_that_holds_nothing_out_refuses_the_share(tmp_path):
    script = "from llm.training.data.synthetic import SyntheticDataModule as M\nsetup = M.setup\n"
    script += "def alone(self):\n    setup(self)\n    self.val_dataset = None\nM.setup = alone\n"
    argv = ["--task", "regression", "--eval_share", "0.1", "--save_dir", str(tmp_path), "--checkpoint_dir"]
    argv += [str(tmp_path / "c")]
    (error,) = run("engine", argv, Faults(script=script), status=2).error_lines
    assert "--eval_share: SyntheticDataModule sets no val_dataset" in error


# --- what a share holds out

BAD = {
    "no field of a text": (PretrainDataset, [{"txt": "one"}] * 40),
    "no conversation": (SFTDataset, [{"messages": "hello"}] * 40),
    "no answer": (SFTDataset, [{"conversations": [{"role": "user", "content": str(i)}]} for i in range(40)]),
    "no JSON": (SFTDataset, ["a line"] * 40),
}


@pytest.mark.parametrize(("kind", "policy"), list(product(BAD, ("stop", "skip"))))
def test_a_file_of_bad_records_is_told_as_it_is_without_a_share(tmp_path, kind, policy):
    data, records = BAD[kind]
    path, tokenizer = write_jsonl(tmp_path / "a.jsonl", records), load_tokenizer(ROOT / "model")
    told = {}
    for share in (0.0, 0.02, 0.3):
        own = {"eval_share": share, "on_bad_data": policy, "cache_dir": str(tmp_path / "cache")}
        with pytest.raises(UserError) as raised:
            open_datasets(data, StageArgs(data_path=str(path), **own), tokenizer)
        told[share] = str(raised.value)
    assert told[0.02] == told[0.0] and "hold" not in told[0.3], told
    assert f"{path}:1: " in told[0.0]


def test_a_bad_source_of_a_mixture_and_bad_prompts_are_told_too(tmp_path):
    tokenizer, good = load_tokenizer(ROOT / "model"), [{"text": "a word"}] * 9
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", good), ("b", [{"no": 1}] * 9))
    ]
    own = {"eval_share": 1e-9, "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=r"b.jsonl:1: no 'text'"):
        open_datasets(PretrainDataset, StageArgs(data_path=f"{paths[0]}:1,{paths[1]}:2", **own), tokenizer)
    with pytest.raises(
        UserError, match=r"holds out none of the records.* first question or text are held out tog"
    ):
        open_datasets(PretrainDataset, StageArgs(data_path=str(paths[0]), **own), tokenizer)


@pytest.mark.parametrize("kind", ["sft", "pretrain", "prompts"])
def test_a_question_that_repeats_is_said_where_the_share_is_another(tmp_path, capsys, kind):
    """The records of one question go together: of the same file 2 % may be 95 %, or hardly any."""
    tokenizer = load_tokenizer(ROOT / "model")

    def record(question: str, number: int) -> dict:
        if kind == "pretrain":
            return {"text": question}
        return {
            "conversations": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"{number}"},
            ]
        }

    held_out = next(f"say {i}" for i in range(999) if Split(0.02, True).includes(f"say {i}"))
    for name, repeated, is_told in (("many", held_out, True), ("each", None, False)):
        rows = [record(repeated if repeated and i % 20 else f"question {i}", i) for i in range(400)]
        path = write_jsonl(tmp_path / f"{name}.jsonl", rows)
        args = StageArgs(data_path=str(path), eval_share=0.02, cache_dir=str(tmp_path / "cache"))
        if kind == "prompts":
            args = train_grpo.Args(data_path=str(path), eval_share=0.02)
            open_prompts(args, tokenizer)
        else:
            open_datasets({"sft": SFTDataset, "pretrain": PretrainDataset}[kind], args, tokenizer)
        told = capsys.readouterr().err
        assert ("records (95" in told and "same first question or text" in told) == is_told, told


@pytest.mark.parametrize(
    ("share", "trained", "held_out", "is_told"),
    [
        (0.02, 980, 20, False),
        (0.02, 50, 950, True),
        (0.02, 998, 2, False),
        (0.02, 9_990, 10, True),
        (0.02, 10, 1, False),
        (0.0, 500, 500, False),
        (0.1, 85_000, 15_000, False),
        (0.5, 100, 100, False),
    ],
)
def test_how_far_a_share_may_be_off(share, trained, held_out, is_told, capsys):
    warn_of_share(share, trained, held_out)
    assert bool(capsys.readouterr().err) == is_told
