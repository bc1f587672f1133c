"""Direct preference optimisation (DPO, arXiv:2305.18290): the model learns to prefer the better of two
answers.

    python train_dpo.py --data_path ../dataset/dpo.jsonl                                     one device
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_dpo.py --data_path ...        two GPUs
    torchrun --nnodes 2 --node_rank N --master_addr IP --nproc_per_node 8 train_dpo.py ...   two machines
    python train_dpo.py --data_path ... --from_resume 1                                      resume

Reads pairs ({"conversations": [...], "chosen": ..., "rejected": ...} and the forms in docs/data.md). The loss
is a mean over pairs. The reference is the model that the run starts from,
out/full_sft_<hidden_size>[_moe].pth, kept as a second, frozen model. Writes out/dpo_<hidden_size>[_moe].pth.

To change this stage, change it here: `Args` (defaults and flags), `Objective`, `schedule`,
`frozen_parameters`, `open_data`, and in `main` the model.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.settings import ROOT, StageArgs, setting
from dataset.lm_dataset import DPODataset
from dataset.opening import open_datasets
from dataset.order import steps_per_epoch, train_loader
from dataset.token_cache import load_tokenizer
from trainer import stage
from trainer import trainer_utils as utils
from trainer.callbacks.train_state import TrainState
from trainer.checkpoint.run import training_files
from trainer.checkpoint.same_run import is_finished
from trainer.devices.errors import training_errors
from trainer.loop import train_epoch
from trainer.objectives import base, preference
from trainer.report.trackers import start_tracker
from trainer.weights.config import model_config


class Args(StageArgs):
    """The defaults of this stage (MiniMind's, except the learning rate: its 4e-8 changes nothing).
    A field that you add here becomes a flag of this stage: `my_flag: float = 0.0`, or `= setting(0.0, "help",
    ge=0)`."""

    data_path: str | None = str(ROOT / "dataset" / "dpo.jsonl")
    save_weight: str = "dpo"
    from_weight: str = "full_sft"
    epochs: int = 1
    batch_size: int = 4
    learning_rate: float = 5e-6
    max_seq_len: int = 1024
    beta: float = setting(0.15, "strength of the pull towards the reference model", gt=0)
    rpo_alpha: float = setting(
        0.0, "weight of the cross entropy of the chosen answers beside that loss (RPO)", ge=0
    )

    def contradictions(self) -> list[str]:
        wrong = super().contradictions()
        if self.from_weight == "none":
            wrong.append("--from_weight none: DPO needs a trained model to start from and to compare with")
        if self.packing:
            wrong.append("--packing 1 does not go with DPO, where the two answers of a pair lie side by side")
        return wrong


class Objective(base.Objective):
    """What this stage learns: to prefer the chosen answers more than a frozen reference model does."""

    console_metrics = ("accuracy", "reward_margin", "reward_chosen", "reward_rejected")
    needs_reference = True
    # the settings that each held-out metric depends on (the start weights are the reference)
    held_out_reads: Mapping[str, str] = {
        "loss": "beta rpo_alpha from_weight",
        "accuracy": "from_weight",
        "reward_margin": "beta from_weight",
        "reward_chosen": "beta from_weight",
        "reward_rejected": "beta from_weight",
    }

    def size(self, batch, lm_config):
        """The loss is a mean over pairs, so bits per byte are not defined."""
        return batch.size(lm_config)._replace(targets=len(batch.target_counts) // 2, text_bytes=0)

    def loss(self, model, batch, args):
        """Sums, each []: the losses over the P pairs, the load-balancing losses over the tokens, and metrics
        by name over the pairs."""
        # [2 P]: chosen, rejected, chosen, rejected ...
        log_probs, aux_loss = preference.answer_log_probs(model, batch)
        before, _ = preference.answer_log_probs(self.reference, batch)  # without a gradient: it is frozen
        losses = preference.preference_loss(log_probs, before, args.beta)  # [P]
        if args.rpo_alpha:
            losses = losses + args.rpo_alpha * preference.chosen_loss(log_probs, batch)
        return losses.sum(), aux_loss, preference.preference_metrics(log_probs, before, args.beta)

    def held_out(self, model, batch, args):
        """The same sums for held-out pairs, each [], by name."""
        loss, _, metrics = self.loss(model, batch, args)
        return {"loss": loss, **metrics}


schedule = stage.warmup_cosine  # (update from 1, total updates, args) -> learning rate
frozen_parameters: tuple[str, ...] = ()  # prefixes of the names of frozen parameters, e.g. "model.layers.0."
open_data = partial(open_datasets, DPODataset)  # (args, tokenizer) -> training and held-out (or None) data


def main() -> None:
    """Run the stage, from its command line to its weights."""
    # 1. Settings, and the config of the start weights if there are any; console, device, precision, locks.
    args, start_config = stage.read_settings(Args, __doc__)
    device, autocast, scaler = stage.set_up_process(args)

    # 2. Data. They are tokenised before the process group exists, because a collective would time out.
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

    # 6. Model, compiled and wrapped in DDP or FSDP. Then the optimizer, because FSDP replaces the parameters.
    objective = Objective()
    weight = args.from_weight if checkpoint is None else "none"  # a checkpoint replaces the start weights
    model, _ = utils.init_model(lm_config, weight, args.tokenizer_path, args.save_dir)
    model = objective.extend_model(model, args)
    model = stage.compile_and_wrap(model, args, device, autocast, train_set, frozen_parameters)
    optimizer = objective.optimizer(model, args)

    # 7. The state of the run, with its reference, restored from the checkpoint.
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
