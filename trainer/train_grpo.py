"""GRPO: a chat model learns from rewards for what it writes itself (arXiv:2402.03300); all weights are
trained.

    python train_grpo.py --data_path ../dataset/rl.jsonl --reward exact_answer           one device
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_grpo.py --data_path ...   two GPUs
    python train_grpo.py --data_path ... --from_resume 1                                 resume

Reads prompts ({"prompt", "answer"}, or conversations whose last turn is the reference answer; see
docs/data.md). To each prompt the model writes --num_generations completions; --reward judges them, and those
better than the mean of their group become likelier. Starts from out/full_sft_<hidden_size>[_moe].pth, writes
out/grpo_<hidden_size>[_moe].pth.

To change this stage, change it here: `Args` (defaults and flags), `loss_fn`, `schedule`, `open_data`,
`extend_run`, and in `main` the model.
Rewards are functions in trainer/rollouts/rewards.py or in a module of your own.
"""

import sys
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.settings import data_file
from dataset.token_cache import load_tokenizer
from trainer import trainer_utils as utils
from trainer.data.datasets import open_prompts, train_loader
from trainer.loop import train_epoch
from trainer.objectives.next_token import model_config
from trainer.objectives.policy import METRICS, sampled_tokens_loss
from trainer.optim.build import build_optimizer
from trainer.report.trackers import start_tracker
from trainer.rollouts.settings import ReinforcementArgs, add_rollouts
from trainer.run.errors import training_errors
from trainer.run.saving import is_finished, training_files
from trainer.run.state import TrainState


class Args(ReinforcementArgs):
    """The defaults of this stage. A field added here is a flag of this stage: `my_flag: float = 0.0`, or
    `= setting(0.0, "help", ge=0)`; the flags of rewards and rollouts are in rollouts/settings.py."""

    data_path: str | None = data_file("rlaif.jsonl", "rlaif-mini.jsonl")
    save_weight: str = "grpo"
    from_weight: str = "full_sft"
    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 1e-5
    max_seq_len: int = 512


# (model, batch, args) -> sums: of the policy loss, of auxiliary losses, and METRICS
loss_fn = sampled_tokens_loss
schedule = utils.warmup_cosine  # (update from 1, total updates, args) -> learning rate
open_data = open_prompts  # (args, tokenizer) -> training and held-out (or None) prompts


def extend_run(state, tokenizer, train_set, eval_set):
    """Have a micro-batch of prompts become the completions that the model writes to them, with their
    rewards."""
    add_rollouts(state, tokenizer)


def main() -> None:
    """Run the stage, from its command line to its weights."""
    # 1. Settings, and the config of the start weights, if any; console, device, precision, signals, locks.
    args, start = utils.read_settings(Args, __doc__)
    device, autocast, scaler, stop_request = utils.set_up_process(args)

    # 2. Prompts.
    tokenizer = load_tokenizer(args.tokenizer_path)
    train_set, eval_set = open_data(args, tokenizer)

    # 3. Processes and seed.
    utils.init_distributed_mode(args.rank_timeout, device)
    utils.setup_seed(args.seed)

    # 4. Model config, and the checkpoint to resume from; that of another run is refused.
    lm_config = model_config(tokenizer, args, start)
    where = {"save_dir": args.checkpoint_dir, "resume_from": args.resume_from}
    checkpoint = utils.lm_checkpoint(lm_config, args.save_weight, **where) if args.from_resume else None
    args, run = utils.resolve_settings_and_check_resume(args, checkpoint, lm_config, train_set)
    if checkpoint is not None and is_finished(args, run, checkpoint):
        return

    # 5. SwanLab (wandb, as in MiniMind).
    wandb = start_tracker(args, run, checkpoint) if args.use_wandb else None

    # 6. Model, wrapped in DDP, and optimizer.
    weight = utils.weights_to_load(args, run, checkpoint)
    model, _ = utils.init_model(lm_config, weight, args.tokenizer_path, args.save_dir)
    model = utils.compile_and_wrap(model, args, device, autocast, train_set)
    optimizer = build_optimizer(model, args.learning_rate, args.weight_decay, args.optimizer)

    # 7. The state of the run, with its rollouts, restored from the checkpoint.
    state = TrainState(
        args=args, lm_config=lm_config, run=run, stop_request=stop_request,
        model=model, optimizer=optimizer, scaler=scaler, autocast=autocast, device=device,
        loss_fn=loss_fn, schedule=schedule, metric_names=METRICS,
    )  # fmt: skip
    extend_run(state, tokenizer, train_set, eval_set)
    utils.begin_run(state, checkpoint, train_set, eval_set, code=[__file__, *args.code_files()])

    # 8. Train.
    with training_files(state, wandb):
        for epoch in range(state.epoch, args.epochs):
            start_step = state.step if epoch == state.epoch else 0
            loader = train_loader(train_set, args, epoch, start_step)
            train_epoch(state, epoch, loader, state.iters, start_step, wandb)


if __name__ == "__main__":
    with training_errors():
        main()
