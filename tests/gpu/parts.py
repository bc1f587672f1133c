"""What the checks share: a small model whose parts all matter, its gradients after an update of the training
loop, and the same gradients by stock transformers in float32 on the CPU."""

import re
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.settings import StageArgs
from dataset.lm_dataset import collate_flat
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.model.test_model_minimind import stock
from tests.trainer.test_recipe import balance_loss, padded
from trainer.devices.compiling import compile_model
from trainer.devices.device import mixed_precision, native_bfloat16, native_float16, prepare_device
from trainer.devices.wrapping import full_tensor, unwrap, wrap_model
from trainer.loop import train_update, update_size
from trainer.objectives.next_token import NextToken
from trainer.optim.build import build_optimizer
from trainer.run.state import TrainState

SHAPES = {"dense": False, "moe": True}
# tokens of the samples of micro-batches
LENGTHS = ((17, 33, 5), (64, 64, 3, 9), (100,), (7, 1, 40), (12, 90, 31))
EMPTY = 5  # number of the micro-batch without samples
WINDOW = ((150, 1, 33), (64, 7), (), (90, 40))  # those of the update whose gradients are compared
PEAKED = 1.5  # factor on the norms of queries and keys: attention is less even than at random weights


def samples(number: int, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Random samples of these lengths; every token but the first is a target."""
    numbers = np.random.default_rng(number)
    return [
        {
            "input_ids": numbers.integers(3, 6400, n),
            "loss_mask": np.ones(n, bool),
            "sample_id": i,
            "target_bytes": n,
        }
        for i, n in enumerate(lengths)
    ]


def micro_batch(number: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Random samples of these lengths as a flat batch."""
    return collate_flat([samples(number, lengths)])


def new_model(use_moe: bool, width: int = 512, depth: int = 2) -> MiniMindForCausalLM:
    """A small model on the CPU, the same at every call."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=width, num_hidden_layers=depth, use_moe=use_moe))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(PEAKED if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
    return model.train()


def new_state(
    place: torch.device,
    dtype: str,
    use_moe: bool,
    optimizer: str = "adamw",
    width: int = 512,
    depth: int = 2,
    use_compile: bool = False,
    **wrapping: Any,
) -> TrainState:
    """The model ready to be trained; `wrapping`: options of `wrap_model`."""
    prepare_device(place)
    autocast, scaler = mixed_precision(dtype, place)
    model = new_model(use_moe, width, depth)
    if use_compile:
        compile_model(model)
    model = wrap_model(model, place, autocast=autocast, **wrapping)
    return TrainState(
        args=StageArgs(seed=0, grad_clip=0.0),
        lm_config=unwrap(model).config,
        model=model,
        optimizer=build_optimizer(model, 1e-3, 0.1, optimizer),
        scaler=scaler,
        autocast=autocast,
        device=place,
        objective=NextToken(),
        schedule=lambda *_: 1e-3,
        run={"samples": 100, "global_batch": 1, "epochs": 1},
    )


def update(state: TrainState, window: list[dict[str, Any]]) -> float:
    """The loss of an update."""
    sizes = [state.objective.size(batch, state.lm_config) for batch in window]
    targets, tokens, *_ = update_size(state, sizes, missing=0)
    figures = train_update(state, window, targets, tokens)
    state.progress.update += 1
    return figures["loss"][0]


def train(state: TrainState, updates: int) -> list[float]:
    """The loss of each update: two micro-batches, of other sizes in every update, the last one empty now and
    then."""
    losses = []
    for number in range(updates):
        window = []
        for seed in (2 * number, 2 * number + 1):
            lengths = LENGTHS[seed % len(LENGTHS)]
            window.append(micro_batch(seed, () if seed == EMPTY else lengths))
        losses.append(update(state, window))
    return losses


def dtypes(device: torch.device) -> list[str]:
    """Those in which this machine can train."""
    half = ["bfloat16"] if native_bfloat16(device) else []
    return ["float32", *half, *(["float16"] if native_float16(device) else [])]


def gradients(state: TrainState, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """The gradients that the optimizer is given in an update of WINDOW, of which this rank has its share, and
    the loss; in float16 those of the first update that does not overflow."""
    found: dict[str, Tensor] = {}

    def noted() -> None:
        named = unwrap(state.model).named_parameters()
        found.update({name: full_tensor(p.grad).float().cpu() for name, p in named if p.grad is not None})

    state.optimizer.step = noted  # type: ignore[method-assign]
    window = [micro_batch(i, WINDOW[i]) for i in range(rank, len(WINDOW), ranks)]
    for _ in range(12 if state.scaler.is_enabled() else 1):
        loss = update(state, window)
        if found:
            break
    return by_stock_names(found) | {"loss": torch.tensor(loss)}


@cache
def stock_gradients(use_moe: bool) -> dict[str, Tensor]:
    """What they should be: stock transformers, padded, without autocast, one backward pass for all
    samples."""
    ours = new_model(use_moe)
    model, batch = stock(ours).train(), padded([one for i, n in enumerate(WINDOW) for one in samples(i, n)])
    labels, mask = batch.pop("labels"), batch["attention_mask"]
    out = model(**batch, **({"output_router_logits": True} if use_moe else {}))
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    if use_moe:
        loss = loss + balance_loss(out.router_logits, mask, ours.config.router_aux_loss_coef) / mask.sum()
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return by_stock_names(named) | {"loss": loss.detach()}


def by_stock_names(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under stock transformers' names, which holds the experts stacked; of these each expert's by
    itself."""
    stacks: dict[str, dict[tuple[str, int], Tensor]] = defaultdict(dict)
    for name in list(named):
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            stacks[match[1]][match[3], int(match[2])] = named.pop(name)
    for prefix, parts in stacks.items():
        experts = range(1 + max(number for _, number in parts))
        pairs = [torch.cat((parts["gate", e], parts["up", e])) for e in experts]
        named |= {f"{prefix}.gate_up_proj": torch.stack(pairs)}
        named |= {f"{prefix}.down_proj": torch.stack([parts["down", e] for e in experts])}
    matrices = {}
    for name, value in named.items():
        if value.ndim < 3:
            matrices[name] = value
            continue
        for expert, matrix in enumerate(value):
            matrices[f"{name}[{expert}]"] = matrix
    return matrices


def gap(here: Tensor, right: Tensor) -> float:
    """The distance of a tensor from the right one as a share of its norm (not finite: infinite)."""
    here, right = here.detach().float().cpu(), right.detach().float().cpu()
    return float(((here - right).norm() / right.norm().clamp(min=1e-6)).nan_to_num(torch.inf))


def worst(here: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, str]:
    """The largest gap, and of which tensor."""
    assert here.keys() == right.keys(), f"tensors in one of them only: {sorted(here.keys() ^ right.keys())}"
    return max((gap(here[name], right[name]), name) for name in right)


class Allocations(TorchDispatchMode):
    """The most bytes of tensors at a time that were made meanwhile, where the device does not count them."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.seen = 0, 0, set[int]()

    def freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is None or id(storage) in self.seen | given:
                continue
            self.seen.add(id(storage))
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.freed, id(storage), storage.nbytes())
        return out


def peak_of(device: torch.device, work: Callable[[], object]) -> int:
    """The most bytes that a piece of work adds to what is allocated on the device."""
    if device.type != "cuda":
        with Allocations() as made:
            work()
        return made.peak
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before
