"""GRPO: a chat model learns from rewards for its own completions (arXiv:2402.03300); all weights are trained.

    python train_grpo.py --data_path ../dataset/rl.jsonl --reward exact_answer           one device
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_grpo.py --data_path ...   two GPUs
    python train_grpo.py --data_path ... --from_resume 1                                 resume

Reads prompts ({"prompt", "answer"}, or conversations whose last turn is the reference answer; see
docs/data.md). The model generates --num_generations completions for each prompt. --reward judges them, and
training makes those that are better than the mean of their group likelier. Starts from
out/full_sft_<hidden_size>[_moe].pth, writes out/grpo_<hidden_size>[_moe].pth.

To change this stage, change it here: `Args` (defaults and flags), `Objective`, `schedule`, `open_data`,
and in `main` the model.
Rewards are functions in trainer/rollouts/rewards.py or in a module of your own.
"""

import sys
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.settings import data_file
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
from trainer.rollouts.batches import Rollouts
from trainer.rollouts.policy import sampled_tokens_loss
from trainer.rollouts.settings import ReinforcementArgs, make_rollouts
from trainer.weights.config import model_config


class Args(ReinforcementArgs):
    """The defaults of this stage. A field that you add here becomes a flag of this stage: `my_flag: float =
    0.0`, or `= setting(0.0, "help", ge=0)`; the flags of rewards and rollouts are in rollouts/settings.py."""

    data_path: str | None = data_file("rlaif.jsonl", "rlaif-mini.jsonl")
    save_weight: str = "grpo"
    from_weight: str = "full_sft"
    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 1e-5
    max_seq_len: int = 512


class Objective(Rollouts):
    """What this stage learns, from the completions that the model generates."""

    def loss(self, model, batch, args):
        """Sums, each []: the losses over the targets, the auxiliary losses over the tokens, and metrics by
        name over the targets."""
        return sampled_tokens_loss(model, batch, args)


schedule = stage.warmup_cosine  # (update from 1, total updates, args) -> learning rate
open_data = open_prompts  # (args, tokenizer) -> training and held-out (or None) prompts


def main() -> None:
    """Run the stage, from its command line to its weights."""
    # 1. Settings, and the config of the start weights if there are any; console, device, precision, locks.
    args, start_config = stage.read_settings(Args, __doc__)
    device, autocast, scaler = stage.set_up_process(args)

    # 2. Prompts.
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
    objective = make_rollouts(Objective, args, tokenizer, device)
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
