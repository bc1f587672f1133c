"""Runs of every optimizer that are stopped, restored from a file into new objects, and compared with runs
that were not: in this process, or as ranks (`main`)."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.checkpoint.file import write_checkpoint
from trainer.checkpoint.state import copy_to_host, first_difference, host_copy, load_into
from trainer.devices.process_group import is_main_process, meet
from trainer.devices.wrapping import freeze, unwrap, wrap_model
from trainer.optim.build import build_optimizer
from trainer.trainer_utils import init_distributed_mode
from trainer.weights.lora import add_adapters
from trainer.weights.tensor_file import read_file

CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64)
SAVED_AFTER, LATE, UPDATES = 2, 3, 4  # a late parameter has its first gradient in an update after the save
TOKENS = torch.arange(40).reshape(UPDATES + 1, 1, 8) % 64

Groups = list[dict]
OPTIMIZERS: dict[str, Callable[[Groups], Optimizer]] = {
    "adam": lambda groups: Adam(groups, 1e-2),
    "sgd": lambda groups: SGD(groups, 1e-2),
    "sgd_momentum": lambda groups: SGD(groups, 1e-2, momentum=0.9),
    "nadam": lambda groups: NAdam(groups, 1e-2),
    "rmsprop": lambda groups: RMSprop(groups, 1e-2, momentum=0.5, centered=True),
    "adafactor": lambda groups: Adafactor(groups, 1e-2),
    "adagrad": lambda groups: Adagrad(groups, 1e-2),
    "adadelta": lambda groups: Adadelta(groups, 1.0),
    "adamax": lambda groups: Adamax(groups, 1e-2),
    "radam": lambda groups: RAdam(groups, 1e-2),
    "asgd": lambda groups: ASGD(groups, 1e-2),
    "rprop": lambda groups: Rprop(groups, 1e-2),
}
KINDS = ("adamw", "muon", *OPTIMIZERS)
ON_RANKS = [kind for kind in KINDS if kind not in ("adadelta", "adamax", "radam", "asgd", "rprop")]
CASES = ("plain", "late", "frozen", "lora", "groups")


def make(kind: str, case: str, parallel: str = "ddp", seed: int = 0) -> tuple[nn.Module, Optimizer]:
    """A model, wrapped where there are ranks, and its optimizer."""
    torch.manual_seed(seed)
    model = MiniMindForCausalLM(CONFIG)
    if case == "lora":
        torch.manual_seed(0)  # the base is not part of a checkpoint
        model = MiniMindForCausalLM(CONFIG)
        torch.manual_seed(seed)
        add_adapters(model, 2, 4.0, 0.0, ("q_proj", "down_proj"))
    if case == "frozen":
        freeze(model, ("model.embed_tokens", "model.layers.0.self_attn"))
    wrapped = wrap_model(model, torch.device("cpu"), parallel)
    own = [{"match": "mlp", "lr_scale": 0.5}] if case == "groups" else []
    if kind in ("adamw", "muon"):
        return wrapped, build_optimizer(model, 1e-2, 0.1, kind, own)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p for name, p in named if not (own and ".mlp." in name)]}]
    if own:
        groups.append({"params": [p for name, p in named if ".mlp." in name], "lr": 5e-3})
    return wrapped, OPTIMIZERS[kind](groups)


def train(model: nn.Module, optimizer: Optimizer, case: str, first: int, last: int) -> None:
    """The updates from `first` to `last`."""
    for update in range(first, last + 1):
        tokens = TOKENS[update]
        model(tokens, labels=tokens).loss.backward()
        for name, parameter in unwrap(model).named_parameters():
            if case == "late" and update < LATE and ("q_proj" in name or "norm" in name):
                parameter.grad = None  # as of layers that are frozen until then
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def differences(folder: Path, parallel: str, kinds=KINDS, cases=CASES) -> Iterator[str]:
    """What is not the same in a run that was stopped and restored, of each kind in each case."""
    for kind in kinds:
        for case in cases:
            trained_only = case == "lora"
            model, optimizer = make(kind, case, parallel)
            train(model, optimizer, case, 1, SAVED_AFTER)
            weights, optimizer_state = copy_to_host(model, optimizer, trained_only)
            path = folder / f"{kind}_{case}.pth"
            if is_main_process():
                write_checkpoint(path, {"model": weights, "optimizer": optimizer_state})
            meet()
            train(model, optimizer, case, SAVED_AFTER + 1, UPDATES)
            restored, its_optimizer = make(kind, case, parallel, seed=1)
            load_into(restored, its_optimizer, read_file(path))
            train(restored, its_optimizer, case, SAVED_AFTER + 1, UPDATES)
            one = host_copy((unwrap(model).state_dict(), optimizer.state_dict()))
            other = host_copy((unwrap(restored).state_dict(), its_optimizer.state_dict()))
            difference = first_difference(one, other)
            if difference is not None:
                yield f"{kind} {case} {parallel}: {difference}"


def main() -> None:
    """One rank: prints how many runs are not the same, and which."""
    init_distributed_mode()
    folder, parallel = Path(sys.argv[1]), sys.argv[2]
    kinds = list(ON_RANKS)
    if parallel == "fsdp":  # Muon is refused there; torch's Adafactor cannot step sharded parameters
        kinds = [kind for kind in ON_RANKS if kind not in ("muon", "adafactor")]
    # all kinds in all cases: in one process
    others = [case for case in CASES if case != "late"]
    found = [
        *differences(folder, parallel, kinds, ["late"]),
        *differences(folder, parallel, ["adamw"], others),
    ]
    print(f"{len(found)} of {len(kinds) + len(others)} runs differ", *found, sep="\n")
