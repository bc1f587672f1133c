"""Updates of the training loop on fake CUDA tensors, which have shapes, dtypes and devices but no numbers.

Run with fake_cuda.cpp's library preloaded, it prints a JSON object: for each of MODES and for evaluations
what made the host wait for the device, with its line, and the names of the operators that ran.
"""

import json
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.settings import StageArgs
from dataset.lm_dataset import collate_flat, collate_shared
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.devices.device import mixed_precision
from trainer.loop import count_figures, evaluate, make_record, train_update
from trainer.objectives.next_token import NextToken
from trainer.optim.build import build_optimizer
from trainer.run.state import TrainState

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda", 0)
HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
SHAPE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
MODES = {  # dtype, capability of the GPU, and other settings
    "dense": ("bfloat16", HOPPER, {}),
    "old GPU": ("float16", TURING, {}),
    "float32": ("float32", AMPERE, {}),
    "Muon": ("bfloat16", HOPPER, {"optimizer": "muon"}),
    "Muon float16": ("float16", AMPERE, {"optimizer": "muon"}),
    "recomputed": ("bfloat16", HOPPER, {"activation_checkpointing": 1}),
    "shared": ("bfloat16", HOPPER, {"shared": 4}),
    "shared, old GPU": ("float16", TURING, {"shared": 4}),
    "MoE": ("bfloat16", HOPPER, {"use_moe": True}),
    "empty": ("bfloat16", HOPPER, {"lengths": ()}),
    "empty float32": ("float32", AMPERE, {"lengths": ()}),
}


class Recorder(TorchDispatchMode):
    """Notes every operator, and where the host waits: a value read, a copy between devices that blocks."""

    def __init__(self):
        super().__init__()
        self.operators: set[str] = set()
        self.waits: list[str] = []

    def wait(self, what: str) -> None:
        # a virtual environment may lie in the project's folder
        folders = (str(ROOT / "model"), str(ROOT / "trainer"))
        ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(folders)]
        place = "backward pass"
        if ours:
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].line}"
        self.waits.append(f"{what}: {place}")

    def __enter__(self):
        Tensor.bincount = lambda chosen, minlength: self.counts(chosen, minlength)
        FakeTensor.tolist = lambda tensor: self.read(tensor)
        return super().__enter__()

    def read(self, tensor: Tensor) -> list[float]:
        """`Tensor.tolist` of a fake tensor: ones."""
        if tensor.device.type != "cpu":
            self.wait("read")
        return [1.0] * tensor.numel()

    def counts(self, chosen: Tensor, minlength: int) -> SimpleNamespace:
        """`Tensor.bincount` of the chosen experts: all rows are the first one's."""
        self.wait("counts")
        return SimpleNamespace(tolist=lambda: [len(chosen), *[0] * (minlength - 1)])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, aten = kwargs or {}, torch.ops.aten
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.operators.add(str(func))
        target = torch.device(kwargs.get("device") or (tensors[0].device if tensors else CUDA))
        if tensors and target.type == "cpu" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():  # the host's own tensors have numbers
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self.wait("item")
            return 1.0 if args[0].is_floating_point() else 0
        begin, end, blocks = target.type, target.type, False
        if func is aten._to_copy.default:
            begin, blocks = args[0].device.type, not kwargs.get("non_blocking")
        if func is aten.copy_.default:
            begin, end, blocks = args[1].device.type, args[0].device.type, not (args[2:] and args[2])
        if blocks and begin != end:
            self.wait(f"copy {begin} -> {end}")
        return func(*args, **kwargs)


def pretend() -> None:
    """What torch and the trainer ask about CUDA on the host."""
    torch.cuda.is_available = torch.cuda.is_bf16_supported = lambda *_: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.manual_seed_all = lambda _: None
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    FakeTensorMode.avoid_device_init = property(lambda _: True)


def flat_batch(lengths: tuple[int, ...], shared: int = 0) -> dict:
    """A batch of samples of these lengths, on the host; the first so many tokens are there once."""
    ids = [np.arange(3, n + 3, dtype=np.uint16) for n in lengths]
    masks = [x > 3 + shared for x in ids]
    both = zip(ids, masks, strict=True)
    samples = [{"input_ids": x, "loss_mask": y, "sample_id": 0, "target_bytes": 1} for x, y in both]
    return (collate_shared if shared else collate_flat)([samples])


def state_of(
    dtype: str, use_moe: bool = False, optimizer: str = "adamw", activation_checkpointing: int = 0
) -> TrainState:
    """The state of a run whose model is on the fake device."""
    args = StageArgs(seed=1, grad_clip=1.0, optimizer=optimizer)
    config = MiniMindConfig(**SHAPE, vocab_size=100, use_moe=use_moe)
    with CUDA:
        model = MiniMindForCausalLM(config)
    if activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    autocast, scaler = mixed_precision(dtype, CUDA)
    return TrainState(
        args=args,
        lm_config=config,
        model=model.train(),
        optimizer=build_optimizer(model, 1e-3, 0.1, optimizer),
        scaler=scaler,
        autocast=autocast,
        device=CUDA,
        objective=NextToken(),
        schedule=lambda *_: 1e-3,
        run={"samples": 9, "global_batch": 3, "epochs": 1},
    )


def update(dtype: str, capability: tuple[int, int], lengths=(17, 33, 5), shared: int = 0, **settings) -> dict:
    """What there is to know of an update of two micro-batches, and of its record."""
    torch.cuda.get_device_capability = lambda *_: capability
    window, recorder = [flat_batch(lengths, shared)] * 2, Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = state_of(dtype, **settings)
        with recorder:
            figures = train_update(state, window, 100.0, 110.0)
            state.progress.update = 1
            count_figures(state, window, figures, 100.0)
            make_record(state, figures, 9)
    return {"waits": recorder.waits, "operators": sorted(recorder.operators)}


def evaluation(batches: int) -> dict:
    """The same of an evaluation of so many micro-batches."""
    torch.cuda.get_device_capability = lambda *_: HOPPER
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = state_of("bfloat16")
        with recorder:
            evaluate(state, [flat_batch((17, 33, 5))] * batches)
    return {"waits": recorder.waits, "operators": sorted(recorder.operators)}


if __name__ == "__main__":
    pretend()
    found = {f"evaluation of {batches}": evaluation(batches) for batches in (2, 7)}
    for name, (dtype, capability, settings) in MODES.items():
        try:
            found[name] = update(dtype, capability, **settings)
        except Exception as error:
            waits = [f"{type(error).__name__}: {error}", traceback.format_exc()]
            found[name] = {"waits": waits, "operators": []}
    print(json.dumps(found))
