"""An update of each stage, with the rollout of those that have one, on fake CUDA tensors: they have shapes,
dtypes and devices, but no numbers.

Run with fake_cuda.cpp's library preloaded, it prints a JSON object. Without `--slow` the cases of SLOW are left out,
and nothing is compiled. It holds for each of CASES what made the host wait for the device in the rollout, in the update and in the judging of held-out prompts, the devices of the tensors that met in operators, the names of the operators,
the lengths of the answers, and how many graphs there are after each of some updates of a compiled model.
"""

import json
import sys
import traceback
from functools import partialmethod
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.fake_cuda import pretend  # noqa: F401  # first

# isort: split
from dataset.batch import collate_flat, collate_shared
from dataset.rollout_prompts import RolloutPrompt
from dataset.token_cache import load_tokenizer
from model import losses
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import train_distillation, train_dpo, train_full_sft, train_grpo, train_lora, train_ppo
from trainer.callbacks.train_state import TrainState
from trainer.devices.compiling import compile_model
from trainer.devices.device import mixed_precision
from trainer.devices.wrapping import recompute_layers
from trainer.loop import train_update, update_size
from trainer.rollouts.ppo import ActorCritic
from trainer.rollouts.settings import make_rollouts
from trainer.weights import lora

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
HOPPER, TURING = (9, 0), (7, 5)
SHAPE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
ROLLOUT = {"beta": 0.1, "reward": "length", "max_gen_len": 4}
STOP = 2  # the tokenizer's end token
# stage, its flags, capability of the GPU, and which of the GPUs
CASES: dict[str, tuple[Any, dict[str, Any], tuple[int, int], torch.device]] = {
    "sft": (train_full_sft, {}, HOPPER, FIRST),
    "sft on an old GPU": (train_full_sft, {"dtype": "float16"}, TURING, FIRST),
    "sft in float32": (train_full_sft, {"dtype": "float32"}, HOPPER, SECOND),
    "sft with Muon": (train_full_sft, {"optimizer": "muon"}, HOPPER, FIRST),
    "sft recomputed": (train_full_sft, {"activation_checkpointing": True}, HOPPER, FIRST),
    "sft with experts": (train_full_sft, {"use_moe": True}, HOPPER, FIRST),
    "lora": (train_lora, {}, HOPPER, FIRST),
    "dpo": (train_dpo, {}, HOPPER, FIRST),
    "distillation": (train_distillation, {}, HOPPER, FIRST),
    "grpo": (train_grpo, {"num_generations": 4, "num_iterations": 2, **ROLLOUT}, HOPPER, SECOND),
    "ppo": (train_ppo, {"num_iterations": 2, **ROLLOUT}, HOPPER, SECOND),
    "ppo on an old GPU": (train_ppo, {"dtype": "float16", "num_iterations": 2, **ROLLOUT}, TURING, FIRST),
}
# backends that write no kernels; the first one also traces the backward pass, which takes as long again
COMPILED = {"sft": "aot_eager", "dpo": "eager"}
SLOW = ("ppo",)  # one more combination: "grpo" has the same GPU, "ppo on an old GPU" the same stage


class Recorder(TorchDispatchMode):
    """Notes every operator, the devices that meet in one, and where the host waits: a value that is read, a
    copy between devices that blocks."""

    def __init__(self):
        super().__init__()
        self.operators: set[str] = set()
        self.devices: set[str] = set()
        self.waits: list[str] = []
        self.tokens = count(1)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Or nothing would be compiled under it."""
        return True

    def wait(self, what: str) -> None:
        """Note a wait with the line of the project that causes it."""
        folders = (str(ROOT / "model"), str(ROOT / "trainer"))
        ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(folders)]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "backward pass"
        self.waits.append(f"{what}: {place}")

    def __enter__(self):
        Tensor.bincount = lambda chosen, minlength: self.counts(chosen, minlength)
        FakeTensor.tolist = lambda tensor: self.read(tensor)
        return super().__enter__()

    def read(self, tensor: Tensor) -> list:
        """`Tensor.tolist`: ones; of two rows tokens, of which every seventh ends its answer, and ones."""
        self.wait("read")
        ones = [1.0] * tensor.shape[-1]
        if tensor.ndim == 1:
            return ones
        return [[STOP if next(self.tokens) % 7 == 0 else 3 for _ in ones], ones]

    def counts(self, chosen: Tensor, minlength: int) -> SimpleNamespace:
        """`Tensor.bincount` of the chosen experts: all rows are the first one's."""
        self.wait("counts")
        return SimpleNamespace(tolist=lambda: [len(chosen), *[0] * (minlength - 1)])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, aten = kwargs or {}, torch.ops.aten
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        place = kwargs.get("device") or (tensors[0].device if tensors else "cpu")
        target = torch.device(place).type
        if target == "cpu" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():  # the host's own tensors have numbers
                return func(*args, **kwargs)
        self.operators.add(str(func))
        if func is aten._local_scalar_dense.default:
            self.wait("item")
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 0
        source, blocks = target, False
        if func is aten._to_copy.default:
            source, blocks = args[0].device.type, not kwargs.get("non_blocking")
        if func is aten.copy_.default:
            source, blocks = args[1].device.type, not (args[2:] and args[2])
        if blocks and source != target:
            self.wait(f"copy {source} -> {target}")
        out = func(*args, **kwargs)
        if func not in (aten._to_copy.default, aten.copy_.default):
            # tensors of one number, such as an optimizer's steps, may stay on the host
            tensors += [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self.devices.add(" and ".join(sorted({str(each.device) for each in tensors if each.ndim})))
        return out


def sample(length: int, word: int = 9) -> dict[str, Any]:
    """A sample that begins with five tokens and goes on with this one, to be learned."""
    is_answer = np.arange(length) >= 5
    tokens = np.where(is_answer, word, np.arange(10, 10 + length))
    return {"input_ids": tokens, "loss_weight": is_answer, "sample_id": 0, "target_bytes": 1}


def window_of(stage: Any, more: int = 0) -> list[dict[str, Any]]:
    """Two micro-batches of a stage, on the host; `more`: tokens of each sample or prompt."""
    if stage in (train_grpo, train_ppo):
        question = [{"role": "user", "content": "?"}]
        prompts = [RolloutPrompt([3] * (n + more), question, None, {}, n) for n in range(20, 100, 5)]
        return [{"prompts": prompts[:8]}, {"prompts": prompts[8:]}]
    if stage is train_dpo:
        pairs = [[sample(17 + more), sample(33 + more, 8)], [sample(6 + more), sample(9, 8)]]
        return [collate_shared(pairs)] * 2
    return [collate_flat([[sample(17 + more), sample(33 + more), sample(6)]])] * 2


def state_of(stage: Any, flags: dict[str, Any], device: torch.device, tokenizer: Any) -> TrainState:
    """The state of a run of a stage whose models are on this device."""
    args = stage.Args(**flags)
    config = MiniMindConfig(**SHAPE, use_moe=args.use_moe)
    with device:
        model, frozen = (MiniMindForCausalLM(config) for _ in range(2))
        if stage is train_ppo:
            model = ActorCritic(model)
        if stage is train_lora:
            lora.layers_hash = lambda model: ""  # fake tensors have no values
            lora.add_adapters(model, 4, 8.0, 0.0, ["q_proj", "v_proj"])
    if stage in (train_grpo, train_ppo):
        objective = make_rollouts(stage.Objective, args, tokenizer, device)
    else:
        objective = stage.Objective()
    if stage is train_distillation:
        objective.teachers = [frozen.eval()]
    if objective.needs_reference:
        objective.reference = frozen.eval()
    autocast, scaler = mixed_precision(args.dtype, device)
    if args.activation_checkpointing:
        recompute_layers(model)
    return TrainState(
        args=args, lm_config=config, model=model.train(), device=device, autocast=autocast, scaler=scaler,
        optimizer=objective.optimizer(model, args), objective=objective, schedule=lambda *_: 1e-3,
        fingerprint={"samples": 9, "global_batch": 3, "epochs": 1},
    )  # fmt: skip


def update(
    state: TrainState, micro_batches: list[dict[str, Any]], recorder: Recorder
) -> tuple[list[int], list[str]]:
    """A rollout and an update; returns the targets of its micro-batches, and what made the host wait in the
    rollout."""
    micro_batches = state.objective.prepare(state, micro_batches)
    sizes = [state.objective.size(batch, state.lm_config) for batch in micro_batches]
    targets, tokens, *_ = update_size(state, sizes, missing=0)
    of_rollout, recorder.waits = recorder.waits, []
    train_update(state, micro_batches, targets, tokens)
    return [size.targets for size in sizes], of_rollout


def graphs_of(stage: Any, flags: dict[str, Any], device: torch.device, tokenizer: Any) -> list[int]:
    """How many graphs there are after each update of a compiled model, the batches larger each time; later
    ones have more targets than the head computes at once."""
    torch.compiler.reset()
    counters.clear()
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        state, graphs = state_of(stage, flags, device, tokenizer), []
        compile_model(state.model)
        for more in (0, 30, 60):
            state.progress.update += 1
            update(state, window_of(stage, more), recorder)
            graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def run(
    stage: Any, flags: dict[str, Any], capability: tuple[int, int], device: torch.device, tokenizer: Any
) -> dict[str, Any]:
    """What there is to know of a rollout, an update and an evaluation of what the model writes."""
    torch.cuda.get_device_capability = lambda *_: capability
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = state_of(stage, flags, device, tokenizer)
        with recorder:
            targets, of_rollout = update(state, window_of(stage), recorder)
            found: dict[str, Any] = {"waits": recorder.waits, "rollout": of_rollout, "targets": targets}
            if stage in (train_grpo, train_ppo):
                copy, recorder.waits = state.objective.decoding_copy, []
                with torch.no_grad(), state.autocast:
                    state.objective.held_out(state.model, window_of(stage)[0], state.args)
                assert copy is state.objective.decoding_copy, "the weights are copied into a new model"
                found["held_out"] = recorder.waits
    return found | {"devices": sorted(recorder.devices - {""}), "operators": sorted(recorder.operators)}


if __name__ == "__main__":
    tokenizer = load_tokenizer(ROOT / "model")
    found: dict[str, dict[str, Any]] = {}
    losses.MAX_LOGITS = 50 * len(tokenizer)
    compile_in_place = torch.nn.Module.compile
    slow = "--slow" in sys.argv
    for name, case in CASES.items():
        if name in SLOW and not slow:
            continue
        try:
            found[name] = run(*case, tokenizer)
            if name in COMPILED and slow:
                as_they_are = partialmethod(compile_in_place, backend=COMPILED[name])
                torch.nn.Module.compile = as_they_are  # type: ignore[method-assign, assignment]
                stage, flags, _, device = case
                found[name]["graphs"] = graphs_of(stage, flags, device, tokenizer)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    print(json.dumps(found))
