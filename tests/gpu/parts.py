"""What the checks share: a small model whose parts all matter, its gradients after an update of the training
loop, and the same gradients by stock transformers in float32 on the CPU."""

import os
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.settings import StageArgs
from dataset.batch import collate_flat
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.model.test_model_minimind import stock
from tests.trainer.test_recipe import padded
from trainer.callbacks.train_state import TrainState
from trainer.devices.compiling import compile_model, compiler_problem
from trainer.devices.device import mixed_precision, native_bfloat16, native_float16, prepare_device
from trainer.devices.wrapping import full_tensor, unwrap, wrap_model
from trainer.loop import train_update, update_size
from trainer.objectives.next_token import NextToken
from trainer.optim.build import build_optimizer

SHAPES = {"dense": False, "moe": True}  # use_moe
WIDTH = 512 if "GPU_CHECK" in os.environ else 256  # in the suite, on a CPU, smaller
# tokens of the samples of each micro-batch of the update whose gradients are compared; one has none
WINDOW = ((150, 1, 33), (64, 7), (), (90, 40))
# Largest distances of a gradient from the right one, as a share of its norm: some three times what rounding
# makes of it. In half precision rounding sends a few tokens to other experts.
LIMITS = {("dense", "float32"): 1e-3, ("dense", "bfloat16"): 0.1, ("dense", "float16"): 0.05}
LIMITS |= {("moe", "float32"): 1e-3, ("moe", "bfloat16"): 0.6, ("moe", "float16"): 0.4}
# Factors on random weights. Attention is less even by the first two. By the last the activations of `gate`
# are far from linear; else `gate` and `up` could be exchanged and little would change.
SHARPENED = {"q_norm.weight": 1.5, "k_norm.weight": 1.5, "gate_proj.weight": 6.0}


def samples(number: int, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Random samples of these lengths; every token but the first is a target."""
    numbers = np.random.default_rng(number)
    found = []
    for i, n in enumerate(lengths):
        sample = {"input_ids": numbers.integers(3, 6400, n), "loss_weight": np.ones(n, bool)}
        found.append(sample | {"sample_id": i, "target_bytes": n})
    return found


def micro_batch(number: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Random samples of these lengths as a flat batch."""
    return collate_flat([samples(number, lengths)])


def new_model(use_moe: bool, width: int = WIDTH) -> MiniMindForCausalLM:
    """A small model on the CPU, the same at every call; with experts each token has two, and the
    load-balancing loss counts enough to be compared."""
    torch.manual_seed(0)
    shape = {"hidden_size": width, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    shape |= {"router_aux_loss_coef": 0.005}
    model = MiniMindForCausalLM(MiniMindConfig(**shape, use_moe=use_moe))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for ending, factor in SHARPENED.items():
                if name.endswith(ending):
                    parameter.mul_(factor)
    return model.train()


def new_state(
    device: torch.device,
    dtype: str,
    use_moe: bool,
    optimizer: str = "adamw",
    compiled: bool = False,
    **wrapping,
) -> TrainState:
    """The model ready to be trained; `wrapping`: options of `wrap_model`."""
    prepare_device(device)
    autocast, scaler = mixed_precision(dtype, device)
    model = new_model(use_moe)
    if compiled:
        compile_model(model)
    model = wrap_model(model, device, autocast=autocast, **wrapping)
    return TrainState(
        args=StageArgs(seed=0, grad_clip=0.0),
        lm_config=unwrap(model).config,
        model=model,
        optimizer=build_optimizer(model, 1e-3, 0.1, optimizer),
        scaler=scaler,
        autocast=autocast,
        device=device,
        objective=NextToken(),
        schedule=lambda *_: 1e-3,
        fingerprint={"samples": 100, "global_batch": 1, "epochs": 1},
    )


def update(state: TrainState, micro_batches: list[dict[str, Any]]) -> float:
    """Make an update; returns its loss."""
    sizes = [state.objective.size(batch, state.lm_config) for batch in micro_batches]
    targets, tokens, *_ = update_size(state, sizes, missing=0)
    figures = train_update(state, micro_batches, targets, tokens)
    state.progress.update += 1
    return figures["loss"][0]


def dtypes(device: torch.device) -> list[str]:
    """Those in which this machine can train."""
    half = ["bfloat16"] if native_bfloat16(device) else []
    return ["float32", *half, *(["float16"] if native_float16(device) else [])]


def skip_without_compiler(device: torch.device) -> None:
    """Skip where a model cannot be compiled."""
    if device.type == "mps":
        pytest.skip("models are not compiled on a Mac's GPU (MPS)")
    if problem := compiler_problem(device.type):
        pytest.skip(problem)


def gradients(state: TrainState, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """The gradients that the optimizer is given in an update of WINDOW, of which this rank has its share, and
    the loss; in float16 those of the first update that does not overflow."""
    found: dict[str, Tensor] = {}

    def note_gradients(optimizer, *_) -> None:
        for name, parameter in unwrap(state.model).named_parameters():
            if parameter.grad is not None:
                found[name] = full_tensor(parameter.grad).float().cpu()

    hook = state.optimizer.register_step_pre_hook(note_gradients)
    micro_batches = [micro_batch(i, WINDOW[i]) for i in range(rank, len(WINDOW), ranks)]
    for _ in range(12 if state.scaler.is_enabled() else 1):
        found["loss"] = torch.tensor(update(state, micro_batches))
        if len(found) > 1:
            break
    hook.remove()
    return found


@cache
def stock_gradients(use_moe: bool) -> dict[str, Tensor]:
    """What they should be: stock transformers, padded, without autocast, one backward pass for all
    samples."""
    ours = new_model(use_moe)
    all_samples = [sample for i, lengths in enumerate(WINDOW) for sample in samples(i, lengths)]
    model, batch = stock(ours).train(), padded(all_samples)
    labels, mask = batch.pop("labels"), batch["attention_mask"]
    out = model(**batch, **({"output_router_logits": True} if use_moe else {}))
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    if use_moe:
        balance = sum(balance_loss(logits, mask) for logits in out.router_logits)
        loss = loss + ours.config.router_aux_loss_coef * balance / mask.sum()
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found |= by_our_names(name, parameter.grad)
    return found


def balance_loss(router_logits: Tensor, mask: Tensor) -> Tensor:
    """Of a layer, summed over its samples: tokens * E * sum_e (share of the tokens that choose expert e) *
    (its mean probability). Each token chooses two."""
    total = torch.zeros(())
    for logits, real in zip(router_logits.view(*mask.shape, -1), mask, strict=True):
        probs = logits[real > 0].softmax(-1)  # [tokens, E]
        chosen = F.one_hot(probs.topk(2).indices, probs.shape[-1]).sum(1).float()  # [tokens, E]
        total = total + len(probs) * probs.shape[-1] * (chosen.mean(0) * probs.mean(0)).sum()
    return total


def by_our_names(name: str, value: Tensor) -> dict[str, Tensor]:
    """A tensor of stock transformers, which stacks the experts' matrices, as ours."""
    prefix, is_expert, kind = name.partition(".experts.")
    if not is_expert:
        return {name: value}
    found = {}
    for number, matrix in enumerate(value):
        matrices = {"down_proj": matrix}
        if kind == "gate_up_proj":
            matrices = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
        for part, one in matrices.items():
            found[f"{prefix}.experts.{number}.{part}.weight"] = one
    return found


def gap(here: Tensor, right: Tensor) -> float:
    """The distance of a tensor from the right one as a share of its norm (not finite: infinite)."""
    here, right = here.detach().double().cpu(), right.detach().double()
    return float(((here - right).norm() / right.norm().clamp(min=1e-6)).nan_to_num(torch.inf))


def worst(here: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, str]:
    """The largest gap, and of which tensor."""
    assert here.keys() == right.keys(), f"tensors in one of them only: {sorted(here.keys() ^ right.keys())}"
    return max((gap(here[name], right[name]), name) for name in right)


def check_gradients(found: dict[str, Tensor], shape: str, dtype: str, record_property, more="") -> None:
    """Compare gradients of a model of this shape with those of stock transformers. more: what else to say of
    the model."""
    distance, name = worst(found, stock_gradients(SHAPES[shape]))
    record_property(f"{shape} {dtype}{more}", distance)
    message = (
        f"{shape}, {dtype}{more}: gradients are not those of stock transformers, {name} by {distance:.2g}"
    )
    assert distance <= LIMITS[shape, dtype], message
