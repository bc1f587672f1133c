"""Direct preference optimisation (DPO, arXiv:2305.18290): the model learns to prefer the better of two answers.

    python train_dpo.py --data_path ../dataset/dpo.jsonl                                       one device
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_dpo.py --data_path ...          two GPUs
    torchrun --nnodes 2 --node_rank N --master_addr HOST --nproc_per_node 8 train_dpo.py ...   two machines
    python train_dpo.py --data_path ... --from_resume 1                                        resume

Reads pairs ({"conversations": [...], "chosen": ..., "rejected": ...} and the forms in docs/data.md). The loss is a mean
over pairs. The reference is the model that the run starts from, out/full_sft_<hidden_size>[_moe].pth: what it says of
the answers is computed once and kept beside the tokens. Writes out/dpo_<hidden_size>[_moe].pth.

To change this stage, change it here: defaults and flags in `Args`; `loss_fn`, `schedule` and `frozen`; anything else in
`main`.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.errors import UserError
from common.locks import lock_output
from common.settings import ROOT, StageArgs, parse_args, setting
from dataset.lm_dataset import DPODataset, collate_pairs
from trainer.components.bad_updates import BadUpdates
from trainer.components.data import open_datasets
from trainer.components.device import mixed_precision, prepare_device, select_device, use_deterministic_kernels
from trainer.components.failures import training_errors
from trainer.components.flops import peak_rate
from trainer.components.optimizer import build_optimizer
from trainer.components.parallel import freeze, wrap_model
from trainer.components.preference import (
    SHOWN,
    answer_log_probs,
    chosen_loss,
    pair_size,
    preference_figures,
    preference_loss,
    reference_log_probs,
)
from trainer.components.resume import (
    check_resume,
    check_start_weights,
    code_hashes,
    data_fingerprint,
    keep_global_batch,
    model_fingerprint,
    run_fingerprint,
)
from trainer.components.run_files import run_name, start_path
from trainer.components.saving import complete_files, open_metrics, save_final_weights
from trainer.components.signals import StopRequest
from trainer.components.state import TrainState
from trainer.components.tracker import start_tracker
from trainer.loop import finish_update, train_epoch
from trainer.trainer_utils import (
    epoch_loader,
    eval_loader,
    init_distributed_mode,
    init_model,
    leave_process_group,
    lm_checkpoint,
    load_tokenizer,
    setup_seed,
    start_model_config,
    start_shape,
    steps_per_epoch,
    warmup_cosine,
)


@dataclass(kw_only=True)
class Args(StageArgs):
    """The defaults of this stage (MiniMind's, but for the learning rate: its 4e-8 changes nothing).
    A field added here is a flag of this stage: `my_flag: float = 0.0`, or `= setting(0.0, "help", ge=0)`."""

    data_path: str | None = str(ROOT / "dataset" / "dpo.jsonl")
    save_weight: str = "dpo"
    from_weight: str = "full_sft"
    epochs: int = 1
    batch_size: int = 4
    learning_rate: float = 5e-6
    max_seq_len: int = 1024
    beta: float = setting(0.15, "how closely the model stays with the reference (of ipo: its tau)", gt=0)
    loss_type: Literal["sigmoid", "ipo", "hinge"] = setting("sigmoid", "loss of a pair: DPO's, IPO's or SLiC's")
    rpo_alpha: float = setting(0.0, "weight of the cross entropy of the chosen answers beside that loss (RPO)", ge=0)

    def frozen_weights(self) -> dict[str, Path]:
        return {"from_weight": start_path(self.save_dir, self.from_weight, self)}

    def contradictions(self) -> list[str]:
        wrong = super().contradictions()
        if self.from_weight == "none":
            wrong.append("--from_weight none: DPO needs a trained model to start from and to compare with")
        if self.packing:
            wrong.append("--packing 1 does not go with DPO, where the two answers of a pair lie side by side")
        return wrong


def loss_fn(model, batch, args):
    """Sums: the losses of the pairs, the load-balancing losses of the tokens, and the figures SHOWN of the pairs."""
    log_probs, aux_loss = answer_log_probs(model, batch)  # [2 P]: chosen, rejected, chosen, rejected ...
    losses = preference_loss(log_probs, batch, args.beta, args.loss_type)  # [P]
    if args.rpo_alpha:
        losses = losses + args.rpo_alpha * chosen_loss(log_probs, batch)
    return losses.sum(), aux_loss, preference_figures(log_probs, batch, args.beta)


def held_out(args, model, batch):
    """The same sums of held-out pairs, by name."""
    loss, _, figures = loss_fn(model, batch, args)
    return {"loss": loss, **figures}


schedule = warmup_cosine  # (update from 1, total updates, args) -> learning rate
frozen: tuple[str, ...] = ()  # prefixes of the names of frozen parameters, e.g. "model.layers.0."


def add_reference(sets, args, lm_config, run, device, autocast):
    """Give the datasets what the reference, which is the model that the run starts from, says of their answers."""

    def build():
        try:
            check_start_weights(args, run)
        except UserError as error:
            raise UserError(
                f"{error}; or put back reference_*.npz in {args.cache_dir}, where the reference log-probabilities were "
                "stored; or, if an earlier version began the run, finish it with that version"
            ) from error
        return init_model(lm_config, args.from_weight, args.tokenizer_path, args.save_dir)[0]

    for data in filter(None, sets):
        data.reference = reference_log_probs(data, run, build, args.batch_size, device, autocast)


def main() -> None:
    """Run the stage, from its command line to its weights."""
    # 1. Settings, device and precision; signals end the run at an update, and no other run may write its files.
    args = start_shape(parse_args(Args, __doc__))
    use_deterministic_kernels(args.deterministic)
    device = select_device(args.device)
    autocast, scaler = mixed_precision(args.dtype, device)
    stop = StopRequest().install()
    lock_output(run_name(args.save_weight, args), save_dir=args.save_dir, checkpoint_dir=args.checkpoint_dir)

    # 2. Data, tokenised before the process group exists: that may take longer than a collective waits.
    tokenizer = load_tokenizer(args.tokenizer_path)
    train_set, eval_set = open_datasets(DPODataset, args, tokenizer)

    # 3. Processes and seed.
    init_distributed_mode(args.rank_timeout, device)
    prepare_device(device)
    setup_seed(args.seed)

    # 4. Model config, and the checkpoint to resume from.
    lm_config = start_model_config(tokenizer, args)
    checkpoint = lm_checkpoint(lm_config, args.save_weight, save_dir=args.checkpoint_dir) if args.from_resume else None
    args = keep_global_batch(args, checkpoint)  # adapts the accumulation to another number of ranks
    run = run_fingerprint(args, model_fingerprint(lm_config), data_fingerprint(train_set.cache), len(train_set))
    run = check_resume(args, run, checkpoint)  # refuses the checkpoint of another run

    # 5. SwanLab (wandb, as in MiniMind).
    wandb = start_tracker(args, run, checkpoint)

    # 6. What the reference says, once; then the model, compiled and wrapped in DDP or FSDP, and the optimizer.
    add_reference((train_set, eval_set), args, lm_config, run, device, autocast)
    model, _ = init_model(lm_config, "none" if checkpoint else args.from_weight, args.tokenizer_path, args.save_dir)
    freeze(model, frozen)
    model = wrap_model(model, device, args.parallel, args.use_compile, args.activation_checkpointing, autocast)
    optimizer = build_optimizer(model, args.learning_rate, args.weight_decay, args.optimizer)

    # 7. The state of the run, restored from the checkpoint.
    parts = (lm_config, model, optimizer, scaler, autocast, device, loss_fn, schedule, run, stop)
    state = TrainState(args, *parts, SHOWN, partial(pair_size, lm_config), eval_fn=partial(held_out, args))
    state.eval_loader = eval_loader(eval_set, args.batch_size, collate_pairs) if eval_set else None
    state.bad_updates = BadUpdates(args.max_bad_updates, train_set.cache.source)
    state.peak_flops = peak_rate(autocast, device)  # for the MFU
    state.code = code_hashes([__file__])  # resuming with other code is a warning
    if checkpoint:
        state.restore(checkpoint)
    state.metrics = open_metrics(state, resumed=checkpoint is not None)

    # 8. Train.
    with complete_files(state, wandb):
        if state.record:
            finish_update(state, wandb)  # the checkpoint was written before its update was logged
        for epoch in range(state.epoch, args.epochs):
            start = state.step if epoch == state.epoch else 0
            loader = epoch_loader(train_set, args.batch_size, args.seed, epoch, start, args.num_workers, collate_pairs)
            train_epoch(state, epoch, loader, steps_per_epoch(len(train_set), args.batch_size), start, wandb)
        save_final_weights(state)

    # 9. Clean up: DDP is freed before the process group.
    del model, state
    leave_process_group()


if __name__ == "__main__":
    with training_errors():
        main()
