"""The training recipe: what an update computes, against a plain PyTorch loop over stock transformers models.

`train_plainly` is the whole recipe. The stages are run by their command line and judged by the weights in
their resume checkpoint and by their metrics file; what is counted inside them is counted in torch. So these
tests do not depend on how the trainer is built.
"""

import json
import math
import signal
from collections import Counter
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from dataset.lm_dataset import PretrainDataset, SFTDataset
from dataset.token_cache import load_tokenizer
from dataset.tokenizing import token_byte_lengths
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT, write_jsonl
from tests.model.test_model_minimind import stock
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import flags, saved_state
from trainer.report.metrics import read_metrics

SEED, RATE, DECAY, WARMUP, BATCH, ACCUMULATION = 7, 1e-2, 0.2, 4, 4, 2
# a CPU without float16 arithmetic refuses it; emulated, the measurement of its peak rate would take minutes
ALLOW_FLOAT16 = "import trainer.devices.device as a; a.native_float16 = lambda device: True"


def padded(samples: list[dict]) -> dict[str, torch.Tensor]:
    """Right-padded input_ids, attention_mask, labels (-100: no target) and their weights, all [B, T]."""
    shape = len(samples), max(len(sample["input_ids"]) for sample in samples)
    ids, mask, labels = torch.zeros(shape, dtype=torch.long), torch.zeros(shape), torch.full(shape, -100)
    weights = torch.zeros(shape)
    for row, sample in enumerate(samples):
        tokens = torch.from_numpy(sample["input_ids"].astype(np.int64))
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        weights[row, : len(tokens)] = torch.from_numpy(sample["loss_weight"])
        labels[row, : len(tokens)] = tokens.masked_fill(weights[row, : len(tokens)] == 0, -100)
    labels[:, 0], weights[:, 0] = -100, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "weights": weights}


def weighted_sum(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of the labels' cross entropies times their weights; of labels and weights all but the first of
    each row count."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).sum()


def balance_loss(router_logits: list[torch.Tensor], mask: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Per layer and sample: tokens * E * sum_e (share of the tokens that choose expert e) * (its mean
    probability)."""
    total = torch.zeros(())
    for logits in router_logits:
        for sample, real in zip(logits.view(*mask.shape, -1), mask, strict=True):
            probs = sample[real > 0].softmax(-1)  # [tokens, E]
            share = F.one_hot(probs.argmax(-1), probs.shape[-1]).float().mean(0)
            total = total + len(probs) * probs.shape[-1] * (share * probs.mean(0)).sum()
    return coefficient * total


def train_plainly(model, samples: list[dict], ranks: int, epochs: int, clip: float, dtype: str):
    """Train `model` in place, in one process; returns figures of each update, and the state of the
    GradScaler."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")
    per_update = BATCH * ACCUMULATION * ranks
    generators = [np.random.Generator(np.random.PCG64([SEED, epoch])) for epoch in range(epochs)]
    orders = [generator.permutation(len(samples)) for generator in generators]
    updates = [order[i : i + per_update] for order in orders for i in range(0, len(order), per_update)]
    history = []
    for u, chosen in enumerate(updates, start=1):
        rate = RATE * min(1, u / WARMUP) * (0.1 + 0.45 * (1 + math.cos(math.pi * u / len(updates))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        # which rank or micro-batch a sample is in does not matter
        batches = [padded([samples[i] for i in chosen[b : b + BATCH]]) for b in range(0, len(chosen), BATCH)]
        weight = sum(float(batch["weights"].sum(dtype=torch.float64)) for batch in batches)
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        update_loss = 0.0
        for batch in batches:
            labels, weights, mask = batch.pop("labels"), batch.pop("weights"), batch["attention_mask"]
            has_experts = hasattr(model, "num_experts")
            if has_experts:
                batch["output_router_logits"] = True
            with torch.autocast("cpu", dtype=torch.float16, enabled=dtype == "float16"):
                out = model(**batch)
            loss = weighted_sum(out.logits, labels, weights) / weight
            if has_experts:
                coefficient = MiniMindConfig.router_aux_loss_coef
                loss = loss + balance_loss(out.router_logits, mask, coefficient) / tokens
            scaler.scale(loss).backward()
            update_loss += loss.item()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), clip).item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.append({"loss": update_loss, "grad_norm": norm, "learning_rate": rate})
    return history, scaler.state_dict()


def initial_model(moe: bool) -> MiniMindForCausalLM:
    """Weights that fp16 holds exactly, large enough that a mistake shows."""
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=2, use_moe=moe))
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((0.1 * torch.randn(p.shape, generator=generator) + (p.ndim < 2)).half())
    return model


# close: error of a weight tensor relative to how far it was trained, largest relative errors of loss and
# gradient norm (Adam moves a weight whose gradient is all but zero by its rounding error: on some processors
# one is off by 1e-4)
FLOAT32, FLOAT16 = (5e-4, 5e-6, 1e-4), (8e-2, 1e-4, 2e-3)
# stage, ranks, mixture of experts, dtype, epochs, clipping, close; every epoch ends with a short update
CASES = {
    "dense": ("sft", 1, False, "float32", 2, 1.4, FLOAT32),
    "moe_on_two_ranks": ("sft", 2, True, "float32", 3, 1.41, FLOAT32),
    "float16": ("sft", 1, False, "float16", 1, 1.7, FLOAT16),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_does_what_the_plain_loop_does(corpus, tmp_path, name):
    stage, ranks, moe, dtype, epochs, clip, close = CASES[name]
    model, suffix = initial_model(moe), "_moe" if moe else ""
    (tmp_path / "out").mkdir()
    halves = {key: value.half() for key, value in model.state_dict().items()}
    torch.save(halves, tmp_path / f"out/start_32{suffix}.pth")
    settings = {"from_weight": "start", "use_moe": int(moe), "dtype": dtype, "seed": SEED, "epochs": epochs}
    settings |= {"batch_size": BATCH, "accumulation_steps": ACCUMULATION, "learning_rate": RATE}
    settings |= {"grad_clip": clip, "optimizer": "adamw", "num_hidden_layers": 2}
    settings |= {"warmup_updates": WARMUP, "weight_decay": DECAY, "eval_interval": 0}
    argv = flags(corpus, tmp_path, stage, **settings)
    run(stage, argv, Faults(script=ALLOW_FLOAT16) if dtype == "float16" else None, ranks=ranks)

    kind, run_name = {"sft": (SFTDataset, "full_sft_32"), "pretrain": (PretrainDataset, "pretrain_32")}[stage]
    dataset = kind(str(corpus[stage]), load_tokenizer(ROOT / "model"), 64, cache_dir=corpus["cache"])
    samples = [dataset[i][0] for i in range(len(dataset))]
    start, reference = (deepcopy(stock(model)).train() for _ in range(2))  # stock() shares the model's memory
    history, scaler = train_plainly(reference, samples, ranks, epochs, clip, dtype)
    clipped = sum(update["grad_norm"] > clip for update in history)
    assert len(history) >= 9 and 3 < clipped < len(history)

    saved = saved_state(tmp_path, run_name + suffix)
    assert saved["update"] == len(history) and saved["scaler"] == scaler
    model.load_state_dict(saved["model"])
    trained = dict(stock(model).named_parameters())
    for (key, want), before in zip(reference.named_parameters(), start.parameters(), strict=True):
        error, way = (trained[key] - want).norm().item(), (want - before).norm().item()
        assert error <= close[0] * way, key
    records = read_metrics(tmp_path / f"out/{run_name}{suffix}_metrics.jsonl")
    for record, update in zip(records, history, strict=True):
        assert record["learning_rate"] == pytest.approx(update["learning_rate"], rel=1e-12)
        assert record["loss"] == pytest.approx(update["loss"], rel=close[1])
        assert record["grad_norm"] == pytest.approx(update["grad_norm"], rel=close[2])


def weigh(corpus, folder: Path, stage: str) -> dict[str, Path]:
    """The corpus of a stage, trained and held out, with weights small enough that those of an update's targets
    add up to less than one; some records have none, which counts as 1, or 0."""
    weighed = dict(corpus)
    for name in (stage, f"{stage}_eval"):
        records = [json.loads(line) for line in corpus[name].read_text().splitlines()]
        for i, record in enumerate(records):
            record["weight"] = 0.001 * (0.3, 1, 2.5, 0, 4)[i % 5]
        if stage == "sft":
            del records[7]["weight"]
        weighed[name] = write_jsonl(folder / f"{name}_weighed.jsonl", records)
    return weighed


@pytest.mark.parametrize("stage", ["sft", pytest.param("pretrain", marks=pytest.mark.slow)])
def test_weights_of_records_are_those_of_a_plain_loop(corpus, tmp_path, stage):
    """Accumulated on two ranks, stopped by a signal within an epoch and resumed; evaluated before, within and
    after it."""
    weighed, model = weigh(corpus, tmp_path, stage), initial_model(False)
    (tmp_path / "out").mkdir()
    halves = {key: value.half() for key, value in model.state_dict().items()}
    torch.save(halves, tmp_path / "out/start_32.pth")
    settings = {"from_weight": "start", "dtype": "float32", "seed": SEED, "epochs": 2, "batch_size": BATCH}
    settings |= {"accumulation_steps": ACCUMULATION, "learning_rate": RATE, "grad_clip": 1.4}
    settings |= {"num_hidden_layers": 2}
    settings |= {"optimizer": "adamw", "warmup_updates": WARMUP, "weight_decay": DECAY, "from_resume": 1}
    argv = flags(weighed, tmp_path, stage, **settings)
    stopped = run(stage, argv, Faults(signals={5: signal.SIGTERM}), ranks=2, status=128 + signal.SIGTERM)
    resumed = run(stage, argv, ranks=2)
    assert "stopped: " in stopped.err and "resuming" in resumed.out

    kind, run_name = {"sft": (SFTDataset, "full_sft_32"), "pretrain": (PretrainDataset, "pretrain_32")}[stage]
    tokenizer = load_tokenizer(ROOT / "model")
    train, held_out = (
        kind(str(weighed[name]), tokenizer, 64, cache_dir=corpus["cache"])
        for name in (stage, f"{stage}_eval")
    )
    samples = [train[i][0] for i in range(len(train))]
    weights = sorted({float(sample["loss_weight"].max()) for sample in samples})
    assert weights == pytest.approx(
        [0.0003, 0.001, 0.0025, 0.004] + [1] * (stage == "sft")
    )  # those of 0 are dropped
    reference = deepcopy(stock(model)).train()
    history, _ = train_plainly(reference, samples, 2, 2, 1.4, "float32")
    found = read_metrics(tmp_path / f"out/{run_name}_metrics.jsonl")
    assert [record["update"] for record in found] == list(range(1, len(history) + 1))
    for record, update in zip(found, history, strict=True):
        assert record["loss"] == pytest.approx(update["loss"], rel=1e-6)
        assert record["grad_norm"] == pytest.approx(update["grad_norm"], rel=1e-4)

    # the evaluation at the end, of the reference
    batch = padded([held_out[i][0] for i in range(len(held_out))])
    labels, weights = batch.pop("labels"), batch.pop("weights")
    with torch.no_grad():
        nats = float(weighted_sum(reference.eval()(**batch).logits, labels, weights))
    spelled = token_byte_lengths(tokenizer)[batch["input_ids"].numpy()] * weights.numpy()
    assert found[-1]["eval_loss"] == pytest.approx(nats / float(weights.sum()), rel=1e-5)
    assert found[-1]["eval_bpb"] == pytest.approx(nats / math.log(2) / spelled.sum(), rel=1e-5)


COUNT_ALL_REDUCES = """
import math, multiprocessing.util, torch
profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)

def report():
    profile.stop()
    events = profile.profiler.kineto_results.events()  # profile.events() takes seconds
    sizes = [math.prod(event.shapes()[0]) for event in events if event.name() == "gloo:all_reduce"]
    print("all-reduced", sum(size for size in sizes if size > 16), flush=True)

multiprocessing.util.Finalize(None, report, exitpriority=0)
profile.start()
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_ranks_exchange_their_gradients_once_per_update(corpus, tmp_path, parallel):
    """Counted in gloo, which reduces FSDP's shards by an all-reduce, too; small ones are losses, counts and
    norms."""
    settings = {"parallel": parallel, "batch_size": 1, "accumulation_steps": 3, "epochs": 1}
    settings |= {"num_hidden_layers": 1, "optimizer": "adamw"}
    settings |= {"data_path": corpus["pretrain_eval"], "eval_interval": 0}
    argv = flags(corpus, tmp_path, "pretrain", **settings)
    rank = run("pretrain", argv, Faults(script=COUNT_ALL_REDUCES), ranks=2)
    updates = len(read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl"))
    weights = torch.load(tmp_path / "out/pretrain_32.pth", weights_only=True)
    parameters = sum(value.numel() for key, value in weights.items() if key != "lm_head.weight")  # tied
    (line,) = [line for line in rank.out.splitlines() if line.startswith("all-reduced")]
    exchanges = updates + (parallel == "ddp")  # and an empty one, which settles the buckets
    assert updates >= 2 and int(line.split()[1]) == exchanges * parameters


RECORD_MASKS = """
import torch
drop = torch.nn.functional.dropout

def recorded(input, p=0.5, training=True, inplace=False):
    out = drop(input, p, training, inplace)
    if training:
        mask = (out.detach().flatten()[:64] != 0).long()
        with open(FOLDER + "/masks." + os.environ.get("RANK", "0"), "a") as file:
            print("".join(map(str, mask.tolist())), file=file)
    return out

torch.nn.functional.dropout = recorded
"""


def test_dropout_differs_between_ranks_and_micro_batches_and_is_repeated_by_a_rerun(corpus, tmp_path):
    """Judged by the first 64 places of each mask: two layers and the embedding drop in every micro-batch."""
    settings = {"from_weight": "none", "dropout": 0.5, "batch_size": 4, "accumulation_steps": 2, "epochs": 1}
    settings |= {"num_hidden_layers": 2}
    found = []
    for name in ("one", "again"):
        folder = tmp_path / name
        folder.mkdir()
        script = f"FOLDER = {str(folder)!r}\n{RECORD_MASKS}"
        run("sft", flags(corpus, folder, "sft", **settings), Faults(script=script), ranks=2)
        found.append([(folder / f"masks.{rank}").read_text().split() for rank in (0, 1)])
    one, again = found
    assert one == again
    micro_batches = math.ceil(len(corpus["sft"].read_text().splitlines()) / 8)
    full = [masks[: 3 * (micro_batches - 1)] for masks in one]  # in the last one a rank has no samples
    assert [len(masks) for masks in full] == [3 * (micro_batches - 1)] * 2
    counts = Counter(full[0] + full[1])
    assert {len(mask) for mask in counts} == {64} and max(counts.values()) == 1
    assert 0.4 < "".join(counts).count("0") / (64 * len(counts)) < 0.6


GOLDEN = json.loads(Path(__file__).with_name("golden_losses.json").read_text())
GOLDEN_RUNS = {  # stage, flags, absolute tolerance: for other processors, whose sums round differently
    "dense_sft": ("sft", {"use_moe": 0, "from_weight": "none", "epochs": 2}, 1e-4),
    "moe_pretrain": ("pretrain", {"use_moe": 1, "epochs": 3, "optimizer": "adamw"}, 5e-4),
}


@pytest.mark.parametrize("name", GOLDEN_RUNS)
def test_losses_are_those_of_the_past(corpus, tmp_path, name):
    """From the seed's own initial weights. A change of these figures is a change of what users get: say so if
    meant."""
    stage, extra, close = GOLDEN_RUNS[name]
    settings = {"batch_size": 6, "accumulation_steps": 2, "warmup_updates": 3, "eval_interval": 0}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 8}  # MiniMind has as many heads
    run(stage, flags(corpus, tmp_path, stage, **settings, **extra))
    (path,) = (tmp_path / "out").glob("*_metrics.jsonl")
    assert [record["loss"] for record in read_metrics(path)] == pytest.approx(GOLDEN[name], abs=close, rel=0)
