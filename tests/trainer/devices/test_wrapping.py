"""Sharded models (`--parallel fsdp`) train as copies do, and activations that are computed again change
nothing."""

import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.settings import StageArgs
from dataset.batch import FlatBatch
from model import losses
from model.generation import generate
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling
from tests.stage_process import context, finish, free_port, rank_variables
from trainer.callbacks.train_state import TrainState
from trainer.devices.process_group import leave_process_group
from trainer.devices.wrapping import decoding_model, full_tensor, is_sharded, unwrap, wrap_model
from trainer.loop import count_update, evaluate, train_update, update_size
from trainer.objectives.next_token import NextToken, next_token_loss
from trainer.optim.build import build_optimizer
from trainer.trainer_utils import init_distributed_mode
from trainer.weights.files import half_weights

CPU = torch.device("cpu")
CASES = {
    "moe": {"use_moe": True, "activation_checkpointing": 1, "dropout": 0.2},
    "bad": {"bad_update": 1},
    "other_weights": {"evaluated": 3.0},  # as a hook puts them in place, to evaluate their moving average
    "bfloat16": {"dtype": torch.bfloat16, "use_moe": True, "activation_checkpointing": 1},
    "float16": {"dtype": torch.float16},
    "head_in_pieces": {"piece": 16 * 6400},  # 16 targets at once
}


def flat_batch(seed: int, lengths: list[int]) -> FlatBatch:
    """Random samples of these lengths, every token but the first a target."""
    ids = torch.randint(3, 6400, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    samples = []
    for number, tokens in enumerate(ids.split(lengths) if lengths else ()):
        sample = {"input_ids": tokens.numpy(), "loss_weight": np.ones(len(tokens), np.float32)}
        samples.append(sample | {"sample_id": number, "target_bytes": 4 * (len(tokens) - 1)})
    return FlatBatch.from_samples(samples)


@torch.no_grad()
def scale_weights(model: torch.nn.Module, scale: float) -> None:
    for parameter in model.parameters() if scale != 1 else ():
        parameter.mul_(scale)


def seeded_model(config: MiniMindConfig) -> MiniMindForCausalLM:
    """The initial weights."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(config)
    if config.use_moe:
        torch.nn.init.zeros_(model.model.layers[0].mlp.gate.weight)  # ties: all tokens go to the same expert
    return model


def updates(rank: int, case: dict, parallel: str) -> dict:
    """Three updates of two micro-batches, the last of them empty on rank 1, and an evaluation before the
    last."""
    shape = {"use_moe": case.get("use_moe", False), "dropout": case.get("dropout", 0.0)}
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=2, **shape)
    expected = seeded_model(config)
    model = seeded_model(config)
    again = case.get("activation_checkpointing", 0) if parallel == "fsdp" else 0
    losses.MAX_LOGITS = case.get("piece", 2**27)
    dtype = case.get("dtype", torch.float32)
    autocast = torch.autocast("cpu", dtype=dtype) if dtype != torch.float32 else nullcontext()
    wrapped = wrap_model(model, CPU, parallel, bool(again), autocast)
    assert is_sharded(wrapped) == (parallel == "fsdp") and unwrap(wrapped) is model
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=1024.0)
    objective = NextToken()
    state = TrainState(
        args=StageArgs(seed=0, grad_clip=1.0), lm_config=config, model=wrapped, scaler=scaler, autocast=autocast,
        optimizer=build_optimizer(model, 1e-2, 0.1), device=CPU, objective=objective, schedule=lambda *_: 1e-2,
        fingerprint={"samples": 9, "global_batch": 3, "epochs": 1},
    )  # fmt: skip
    assert all(p.dtype == torch.float32 for p in model.parameters())  # the shards, and so the checkpoints
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(full_tensor(one), other)
    found = []
    for update in range(3):
        state.progress.update = update
        micro_batches = [
            flat_batch(10 * update + rank, [7 + rank, 20, 13]),
            flat_batch(5, [] if rank else [9]),
        ]
        sizes = [objective.size(batch, state.lm_config) for batch in micro_batches]
        targets, tokens, *_ = update_size(state, sizes, missing=0)
        if case.get("bad_update") == update and rank == 1:  # NaN on one rank only
            targets = float("nan")
        if update == 2:
            scale = case.get("evaluated", 1.0)
            scale_weights(unwrap(state.model), scale)
            held_out = evaluate(state, [flat_batch(77 + rank, [] if rank else [8, 9])])
            scale_weights(unwrap(state.model), 1 / scale)
            found += [held_out["eval_loss"], held_out["eval_bpb"]]
        figures = train_update(state, micro_batches, targets, tokens)
        for name in ("logits_loss", "aux_loss", "grad_norm"):
            total, count = figures[name]
            found.append(total / (count or 1.0))
        state.progress.update += 1
        count_update(state, micro_batches, figures, targets)
    weights = half_weights(state.model)
    bad = [skipped["update"] for skipped in state.progress.skipped]
    state.model = wrapped = None
    return {"numbers": found, "weights": weights, "bad": bad}


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ |= rank_variables(rank, 2, port)
    os.environ["OMP_NUM_THREADS"] = "2"
    torch.set_num_threads(1)
    init_distributed_mode()
    for name, case in CASES.items():
        for parallel in ("ddp", "fsdp"):
            torch.save(updates(rank, case, parallel), f"{folder}/{name}_{parallel}_{rank}")
    leave_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    """What two ranks find in each case, with copies and with shards."""
    folder = tmp_path_factory.mktemp("both")
    port = free_port()
    finish([context.Process(target=_rank, args=(rank, port, str(folder))) for rank in (0, 1)], 100)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_shards_train_as_copies_do(both, name):
    """Losses, held-out figures, the gradient's norm and the weights; an expert without rows and an empty
    micro-batch do no harm; a NaN on one rank leaves the update out on both."""
    ddp, fsdp, other = (torch.load(both / f"{name}_{kind}") for kind in ("ddp_0", "fsdp_0", "fsdp_1"))
    assert len(ddp["numbers"]) == 11 and ddp["bad"] == fsdp["bad"] == ([2] if name == "bad" else [])
    # the norm sums in float32; in half precision a rounding apart in one update is a larger step apart in the
    # next
    limits, weight_limit = (
        ({"abs": 2e-3, "rel": 2e-3}, 0.03) if "dtype" in CASES[name] else ({"abs": 1e-5, "rel": 3e-5}, 2e-3)
    )
    assert fsdp["numbers"] == pytest.approx(ddp["numbers"], nan_ok=True, **limits)
    assert fsdp["numbers"][:3] == pytest.approx(ddp["numbers"][:3], abs=1e-5, rel=5e-5)  # the first update
    assert list(ddp["weights"]) == list(fsdp["weights"])
    for key, value in ddp["weights"].items():
        assert fsdp["weights"][key].dtype == torch.float16
        assert torch.allclose(value.float(), fsdp["weights"][key].float(), atol=weight_limit), key
        assert torch.equal(fsdp["weights"][key], other["weights"][key])
    tied = [fsdp["weights"][key].data_ptr() for key in ("lm_head.weight", "model.embed_tokens.weight")]
    assert tied[0] == tied[1]


@pytest.mark.parametrize(("use_moe", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_activations_computed_again_are_the_same_bits(use_moe, dtype):
    """Loss and gradients, with dropout; the blocks are computed twice."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "use_moe": use_moe, "dropout": 0.2}
    model = MiniMindForCausalLM(MiniMindConfig(**shape))
    batch = flat_batch(1, [7, 5])
    found, calls = [], []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for again in (False, True):
        assert wrap_model(model, CPU, activation_checkpointing=again) is model
        calls.clear()
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss, aux_loss, _ = next_token_loss(model, batch)
        (loss + aux_loss).backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        assert len(calls) == 1 + again
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("use_moe", [False, True])
def test_a_model_for_decoding_computes_what_autocast_does(use_moe):
    """Its matrices are cast once; it is itself where nothing has to be cast. Log-probabilities are those of
    the flat forward under autocast, up to the rounding of embeddings."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(
        MiniMindConfig(hidden_size=32, num_hidden_layers=2, use_moe=use_moe, num_experts=2)
    )
    model = model.eval().requires_grad_(False)
    assert decoding_model(model) is model
    before = torch.get_rng_state()
    half = decoding_model(model, torch.bfloat16)
    assert torch.equal(before, torch.get_rng_state()) and not half.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {(p.ndim > 1, p.dtype) for p in half.parameters()} == {
        (True, torch.bfloat16),
        (False, torch.float32),
    }
    assert half.lm_head.weight is half.model.embed_tokens.weight
    assert all(one is other for one, other in zip(model.buffers(), half.buffers(), strict=True))
    for value in model.parameters():
        value.mul_(1.25)
    assert decoding_model(model, torch.bfloat16, half) is half  # with the present weights
    for value, copied in zip(model.parameters(), half.parameters(), strict=True):
        assert torch.equal(value.to(copied.dtype), copied)
    prompts, samplings = [[5, 6, 7], [8] * 20], [[Sampling(1.0, seed=1), Sampling(1.0, seed=2)]] * 2
    with torch.autocast("cpu", torch.bfloat16):
        groups = generate(half, prompts, samplings, 12, [2])
        for prompt, group in zip(prompts, groups, strict=True):
            for answer in group:
                tokens = torch.tensor(prompt + answer.tokens)
                spans = {
                    "cu_seqlens": torch.tensor([0, len(tokens)], dtype=torch.int32),
                    "max_seqlen": len(tokens),
                }
                out = model(input_ids=tokens, position_ids=torch.arange(len(tokens)), **spans)
                logits = out.logits[len(prompt) - 1 : -1].float()
                expected = logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]
                torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=0.02, rtol=0)


def test_what_does_not_go_together_is_refused(monkeypatch):
    (line,) = StageArgs(parallel="fsdp", optimizer="muon").contradictions()
    assert line.startswith("--parallel fsdp: Muon needs whole matrices; use --parallel ddp")
    with pytest.raises(UserError, match="--activation_checkpointing 1: this task's model has no layers"):
        wrap_model(torch.nn.Linear(2, 2), CPU, activation_checkpointing=True)
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(UserError, match=r"--parallel fsdp: .* several dtypes \(bfloat16, float32\)"):
        wrap_model(mixed, CPU, "fsdp")
