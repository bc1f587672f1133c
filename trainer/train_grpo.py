"""GRPO: a chat model learns from rewards for what it writes itself (arXiv:2402.03300); all weights are trained.

    python train_grpo.py --data_path ../dataset/rl.jsonl --reward exact_answer                      one device
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_grpo.py --data_path ...              two GPUs
    python train_grpo.py --data_path ... --from_resume 1                                            resume

Reads prompts ({"prompt", "answer"}, or conversations whose last turn is the reference answer; see docs/data.md). To
each prompt the model writes --num_generations completions; --reward judges them, and those better than the mean of
their group become likelier. Starts from out/full_sft_<hidden_size>[_moe].pth, writes out/grpo_<hidden_size>[_moe].pth.

To change this stage, change it here: defaults and flags in `Args`; `loss_fn` and `schedule`; anything else in `main`.
Rewards are functions in trainer/components/rewards.py or in a module of your own.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.locks import lock_output
from common.settings import ROOT, parse_args
from dataset.prompts import collate_prompts
from trainer.components.bad_updates import BadUpdates
from trainer.components.device import mixed_precision, prepare_device, select_device, use_deterministic_kernels
from trainer.components.failures import training_errors
from trainer.components.flops import peak_rate
from trainer.components.optimizer import build_optimizer
from trainer.components.parallel import wrap_model
from trainer.components.policy_loss import SHOWN, sampled_tokens_loss
from trainer.components.reinforcement import (
    ReinforcementArgs,
    open_prompts,
    prompt_loader,
    reward_model_fingerprint,
    rollout_code,
    run_rewards,
    samples_per_epoch,
    trajectory_writer,
)
from trainer.components.resume import check_resume, code_hashes, keep_global_batch, model_fingerprint, run_fingerprint
from trainer.components.rollouts import Rollouts
from trainer.components.run_files import run_name
from trainer.components.saving import complete_files, open_metrics, save_final_weights
from trainer.components.signals import StopRequest
from trainer.components.state import TrainState
from trainer.components.tracker import start_tracker
from trainer.loop import finish_update, train_epoch
from trainer.trainer_utils import (
    eval_loader,
    init_distributed_mode,
    leave_process_group,
    lm_checkpoint,
    load_tokenizer,
    policy_and_reference,
    setup_seed,
    start_model_config,
    start_shape,
    steps_per_epoch,
    warmup_cosine,
)


@dataclass(kw_only=True)
class Args(ReinforcementArgs):
    """The defaults of this stage. A field added here is a flag of this stage: `my_flag: float = 0.0`, or
    `= setting(0.0, "help", ge=0)`; the flags of rewards and rollouts are in components/reinforcement.py."""

    data_path: str | None = str(ROOT / "dataset" / "rlaif-mini.jsonl")
    save_weight: str = "grpo"
    from_weight: str = "full_sft"
    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 1e-5
    max_seq_len: int = 512


loss_fn = sampled_tokens_loss  # (model, batch, args) -> sums: of the policy loss, of auxiliary losses, and to show
schedule = warmup_cosine  # (update from 1, total updates, args) -> learning rate


def main() -> None:
    """Run the stage, from its command line to its weights."""
    # 1. Settings, device and precision; signals end the run at an update, and no other run may write its files.
    args = start_shape(parse_args(Args, __doc__))
    use_deterministic_kernels(args.deterministic)
    device = select_device(args.device)
    autocast, scaler = mixed_precision(args.dtype, device)
    stop = StopRequest().install()
    lock_output(run_name(args.save_weight, args), save_dir=args.save_dir, checkpoint_dir=args.checkpoint_dir)

    # 2. Rewards and prompts.
    rewards = run_rewards(args, device)
    tokenizer = load_tokenizer(args.tokenizer_path)
    prompts, held_out = open_prompts(args, tokenizer)

    # 3. Processes and seed.
    init_distributed_mode(args.rank_timeout, device)
    prepare_device(device)
    setup_seed(args.seed)

    # 4. Model config, and the checkpoint to resume from.
    lm_config = start_model_config(tokenizer, args)
    checkpoint = lm_checkpoint(lm_config, args.save_weight, save_dir=args.checkpoint_dir) if args.from_resume else None
    args = keep_global_batch(args, checkpoint)  # adapts the accumulation to another number of ranks
    data = prompts.fingerprint | reward_model_fingerprint(args, checkpoint)
    run = run_fingerprint(args, model_fingerprint(lm_config), data, samples_per_epoch(prompts, args))
    run = check_resume(args, run, checkpoint)  # refuses the checkpoint of another run

    # 5. SwanLab (wandb, as in MiniMind).
    wandb = start_tracker(args, run, checkpoint)

    # 6. Model, wrapped in DDP, and optimizer; with --beta also the reference.
    model, reference = policy_and_reference(args, lm_config, device, run, resumed=checkpoint is not None)
    model = wrap_model(model, device, args.parallel, args.use_compile, args.activation_checkpointing, autocast)
    optimizer = build_optimizer(model, args.learning_rate, args.weight_decay, args.optimizer)

    # 7. The state of the run, restored from the checkpoint. Rollouts are made where a micro-batch becomes samples.
    rollouts = Rollouts(args, lm_config, trajectory_writer(args, tokenizer, prompts), rewards, reference)
    parts = (lm_config, model, optimizer, scaler, autocast, device, loss_fn, schedule, run, stop, SHOWN, rollouts.size)
    state = TrainState(args, *parts, eval_fn=rollouts.held_out, hooks=rollouts, monitor=("eval_reward", "max"))
    state.eval_loader = eval_loader(held_out, args.batch_size, collate_prompts) if held_out else None
    state.bad_updates = BadUpdates(args.max_bad_updates, prompts.source)
    state.peak_flops = peak_rate(autocast, device)  # for the MFU
    state.code = code_hashes([__file__, *rollout_code(args)])  # resuming with other code is a warning
    if checkpoint:
        state.restore(checkpoint)
    state.metrics = open_metrics(state, resumed=checkpoint is not None)

    # 8. Train.
    with complete_files(state, wandb):
        if state.record:
            finish_update(state, wandb)  # the checkpoint was written before its update was logged
        for epoch in range(state.epoch, args.epochs):
            start_step = state.step if epoch == state.epoch else 0
            loader = prompt_loader(prompts, args, epoch, start_step)
            train_epoch(state, epoch, loader, steps_per_epoch(run["samples"], args.batch_size), start_step, wandb)
        save_final_weights(state)

    # 9. Clean up: DDP is freed before the process group.
    del model, state, rollouts
    leave_process_group()


if __name__ == "__main__":
    with training_errors():
        main()
