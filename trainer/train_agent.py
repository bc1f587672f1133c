"""An agent learns from rewards, over several turns with tools, by GRPO (arXiv:2402.03300); all weights are
trained.

    python train_agent.py --data_path ../dataset/agent_rl.jsonl --environment calculator   one device
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_agent.py --data_path ...    two GPUs
    python train_agent.py --data_path ... --from_resume 1                                  resume

Reads prompts like train_grpo.py. The model may call tools in each of up to --max_turns turns. --environment
replies, and its reply is appended after the turn: it is context and never a target. The reward judges the
last turn, and all turns are trained. Starts from out/full_sft_<hidden_size>[_moe].pth and writes
out/agent_<hidden_size>[_moe].pth.

To change this stage, change it here: `Args` (defaults and flags), `Objective`, `schedule`, `open_data`,
and in `main` the model.
Environments are classes in trainer/rollouts/environments.py or in a module of your own.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.settings import LONGEST, ROOT, setting
from dataset.opening import open_prompts
from dataset.order import steps_per_epoch, train_loader
from dataset.token_cache import load_tokenizer
from trainer import stage
from trainer import trainer_utils as utils
from trainer.callbacks.train_state import TrainState
from trainer.checkpoint.run import training_files
from trainer.checkpoint.same_run import is_finished
from trainer.devices.errors import training_errors
from trainer.loop import train_epoch
from trainer.report.trackers import start_tracker
from trainer.rollouts import policy
from trainer.rollouts.batches import Rollouts
from trainer.rollouts.environments import check_tools, load_environment
from trainer.rollouts.settings import ReinforcementArgs, make_rollouts
from trainer.weights.config import model_config


class Args(ReinforcementArgs):
    """The defaults of this stage. A field that you add here becomes a flag of this stage: `my_flag: float =
    0.0`, or `= setting(0.0, "help", ge=0)`; the flags of rewards and rollouts are in rollouts/settings.py."""

    data_path: str | None = str(ROOT / "dataset" / "agent_rl.jsonl")
    save_weight: str = "agent"
    from_weight: str = "full_sft"
    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 1e-5
    max_seq_len: int = 512
    reward: str = "numeric_answer"
    environment: str = setting(
        "calculator", "tools and their replies: module:Class, calculator or mock_tools"
    )
    max_turns: int = setting(3, "turns of a trajectory at most", ge=2)
    max_total_len: int = setting(
        2048, "tokens of a trajectory at most, with its prompt and replies", ge=8, le=LONGEST
    )


class Objective(Rollouts):
    """What this stage learns, from the completions that the model generates."""

    # the settings that all held-out metrics depend on
    held_out_reads: Mapping[str, str] = {
        "": f"{Rollouts.held_out_reads['']} environment max_turns max_total_len"
    }

    def loss(self, model, batch, args):
        """Sums, each []: the losses over the targets, the auxiliary losses over the tokens, and metrics by
        name over the targets."""
        return policy.sampled_tokens_loss(model, batch, args)


schedule = stage.warmup_cosine  # (update from 1, total updates, args) -> learning rate


def open_data(args, tokenizer):
    """The training and held-out (or None) prompts, with the tools of the environment."""
    environment = load_environment(args.environment)
    train_set, eval_set = open_prompts(args, tokenizer, environment.tools)
    check_tools(environment, train_set.prompts)
    if eval_set is not None:
        check_tools(environment, eval_set.prompts)
    return train_set, eval_set


def main() -> None:
    """Run the stage, from its command line to its weights."""
    # 1. Settings, and the config of the start weights if there are any; console, device, precision, locks.
    args, start_config = stage.read_settings(Args, __doc__)
    device, autocast, scaler = stage.set_up_process(args)

    # 2. Prompts, with the tools of the environment.
    tokenizer = load_tokenizer(args.tokenizer_path)
    train_set, eval_set = open_data(args, tokenizer)

    # 3. Processes and seed.
    utils.init_distributed_mode(args.rank_timeout, device)
    utils.setup_seed(args.seed)

    # 4. Model config, and the run: a new one or that of a checkpoint. Another run's checkpoint is refused.
    lm_config = model_config(tokenizer, args, start_config)
    data = stage.data_fingerprint(train_set, eval_set)
    args, fingerprint, checkpoint = stage.find_run(args, lm_config.own_fields(), data, train_set)
    if is_finished(args, fingerprint, checkpoint):
        return

    # 5. SwanLab or Weights & Biases, if one is asked for.
    wandb = start_tracker(args, fingerprint, checkpoint)

    # 6. Model, wrapped in DDP; rollouts, and optimizer.
    weight = args.from_weight if checkpoint is None else "none"  # a checkpoint replaces the start weights
    model, _ = utils.init_model(lm_config, weight, args.tokenizer_path, args.save_dir)
    environment = load_environment(args.environment)
    objective = make_rollouts(Objective, args, tokenizer, device, environment)
    model = objective.extend_model(model, args)
    model = stage.compile_and_wrap(model, args, device, autocast, train_set)
    optimizer = objective.optimizer(model, args)

    # 7. The state of the run, with its rollouts, restored from the checkpoint.
    state = TrainState(
        args=args, lm_config=lm_config, fingerprint=fingerprint,
        model=model, optimizer=optimizer, scaler=scaler, autocast=autocast, device=device,
        objective=objective, schedule=schedule,
    )  # fmt: skip
    stage.begin_run(state, checkpoint, train_set, eval_set)

    # 8. Train.
    with training_files(state, wandb):
        iters = steps_per_epoch(fingerprint["samples"], args.batch_size)
        for epoch in range(state.progress.epoch, args.epochs):
            start_step = state.progress.step if epoch == state.progress.epoch else 0
            loader = train_loader(train_set, args, epoch, start_step)
            train_epoch(state, epoch, loader, iters, start_step, wandb)


if __name__ == "__main__":
    with training_errors():
        main()
