"""Runs of PPO and GRPO that a CPU began and fake CUDA tensors continue, between the two updates of a rollout.

It prints, for each of RUNS, where the micro-batches of the second update lie, where the state of the
optimizer lies after it, and what went wrong.
"""

import json
import tempfile
import traceback
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.fake_cuda.updates import AMPERE, CUDA, SHAPE, Recorder, pretend
from trainer import train_grpo, train_ppo
from trainer.devices.device import mixed_precision
from trainer.loop import train_update
from trainer.objectives import ppo
from trainer.rollouts.writer import Trajectory
from trainer.run.callbacks import CallbackList
from trainer.run.saving import save_checkpoint
from trainer.run.state import TrainState
from trainer.trainer_utils import lm_checkpoint, restore

CPU = torch.device("cpu")
RUNS = {"ppo with Muon": {"optimizer": "muon"}, "grpo with experts": {"use_moe": True}}
WINDOW = [{"prompts": [None]}]  # what the loader gives; the rollout of the first update stands in for it


def state_of(name: str, device: torch.device, folder: str, optimizer: str = "adamw", use_moe: bool = False):
    """The state of a run of a stage, with its rollouts."""
    stage, more = train_grpo, {"num_generations": 4}
    if name.startswith("ppo"):
        stage, more = train_ppo, {"early_stop_kl": 10.0}  # more than fake tensors show
    args = stage.Args(
        num_iterations=2, beta=0.1, optimizer=optimizer, checkpoint_dir=folder, save_dir=folder, **more
    )
    config = MiniMindConfig(**SHAPE, vocab_size=100, use_moe=use_moe)
    with device:
        model, reference = (MiniMindForCausalLM(config) for _ in range(2))
        model = ppo.ActorCritic(model) if stage is train_ppo else model
    autocast, scaler = mixed_precision("float32", device)
    objective = stage.Objective(args, None, [])
    objective.reference = reference.eval()
    return TrainState(
        args=args, lm_config=config, model=model.train(), device=device, autocast=autocast, scaler=scaler,
        optimizer=objective.optimizer(model, args), objective=objective, callbacks=CallbackList([objective]),
        schedule=lambda *_: 1e-3, environment={"code": ""},
        run={"samples": 9, "global_batch": 3, "epochs": 1, "from_weight_sha256": None},
    )  # fmt: skip


def make_checkpoint(name: str, folder: str, settings: dict) -> dict:
    """The state after the first update of a rollout, read from its file."""
    state = state_of(name, CPU, folder, **settings)
    hook = state.objective
    prompt = SimpleNamespace(sample_id=0)
    written = [Trajectory(prompt, i, list(range(3, 15)), [False] * 6 + [True] * 6) for i in range(4)]
    rewards = torch.arange(4.0, dtype=torch.float64).view(-1, state.args.num_generations)
    with torch.no_grad():
        [batch] = hook.make_batches(state.model, [(written, rewards)], CPU)
        hook.add_log_probs(state.model, batch)
    hook.rollout_for_next_updates = [batch]
    train_update(state, hook.rollout_for_next_updates, 24.0, 48.0)
    state.progress.update = 1
    save_checkpoint(state)
    state.writer.wait()
    return lm_checkpoint(state.lm_config, state.args.save_weight, save_dir=folder)


def tensors(value) -> list[torch.Tensor]:
    """The tensors in nested dicts and lists."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def devices(values: list[torch.Tensor]) -> list[str]:
    """The types of the devices of tensors."""
    return sorted({value.device.type for value in values})


def continued(name: str, folder: str, settings: dict, checkpoint: dict) -> dict:
    """What there is to know of the second update."""
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder():
        state = state_of(name, CUDA, folder, **settings)
        restore(state, checkpoint)
        batches = state.objective.prepare(state, WINDOW)
        for batch in batches:
            assert batch.pop("sample_ids").device.type == "cpu"  # for the host alone
        train_update(state, batches, 24.0, 48.0)
    # a step's number may stay here
    parts = getattr(state.optimizer, "parts", [state.optimizer])
    moments = [value for value in tensors([part.state_dict() for part in parts]) if value.ndim]
    return {"batches": devices(tensors(batches)), "optimizer": devices(moments)}


if __name__ == "__main__":
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = {name: make_checkpoint(name, folder, settings) for name, settings in RUNS.items()}
        pretend()
        torch.cuda.get_device_capability = lambda *_: AMPERE
        for name, settings in RUNS.items():
            try:
                found[name] = continued(name, folder, settings, checkpoints[name])
            except Exception:
                found[name] = {"error": traceback.format_exc()}
    print(json.dumps(found))
