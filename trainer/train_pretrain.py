"""Pretraining: a model with random weights learns to predict the next token of raw text.

    python train_pretrain.py --data_path ../dataset/pretrain.jsonl                                one device
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_pretrain.py --data_path ...        two GPUs
    torchrun --nnodes 2 --node_rank N --master_addr IP --nproc_per_node 8 train_pretrain.py ...   two machines
    python train_pretrain.py --data_path ... --from_resume 1                                      resume

Reads records {"text": ...}. Every token of a document is a target; a document longer than --max_seq_len
becomes several samples; nothing is lost. Writes out/pretrain_<hidden_size>[_moe].pth, from which
train_full_sft.py starts.

To change this stage, change it here: `Args` (defaults and flags), `Objective`, `schedule`,
`frozen_parameters`, `open_data`, and in `main` the model. The engine's task `pretrain` has the same parts; a
change in `main`, and a flag that only `main` reads, affect only the script."""

import sys
from pathlib import Path
from typing import ClassVar, Literal

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.settings import StageArgs, data_file, setting
from dataset.files import expand_paths
from dataset.lm_dataset import PretrainDataset
from dataset.opening import add_replay, open_datasets
from dataset.order import steps_per_epoch, train_loader
from dataset.token_cache import load_tokenizer
from trainer import stage
from trainer import trainer_utils as utils
from trainer.callbacks.train_state import TrainState
from trainer.checkpoint.run import training_files
from trainer.checkpoint.same_run import is_finished
from trainer.devices.errors import training_errors
from trainer.loop import train_epoch
from trainer.objectives import next_token
from trainer.optim.build import PRETRAINING_GROUPS
from trainer.report.trackers import start_tracker
from trainer.weights.config import model_config


class Args(StageArgs):
    """The defaults of this stage (MiniMind's, except Muon, which learns more from the same tokens). If you
    have only some megabytes of text, --accumulation_steps 1 makes eight times as many updates and learns far
    more. A field that you add here becomes a flag of this stage: `my_flag: float = 0.0`, or `= setting(0.0,
    "help", ge=0)` of common/settings.py."""

    data_path: str | None = data_file("pretrain_t2t_mini.jsonl", "pretrain_hq.jsonl")
    save_weight: str = "pretrain"
    from_weight: str = "none"
    epochs: int = 2
    batch_size: int = 32
    accumulation_steps: int = 8
    learning_rate: float = 5e-4
    optimizer: Literal["adamw", "muon"] = "muon"
    max_seq_len: int = 340
    weight_decay: float | None = None  # auto
    replay_data_path: str | None = setting(
        None, "texts trained beside the data, such as those that the start weights have read"
    )
    replay_share: float = setting(0.5, "share of an epoch's tokens that are such texts", gt=0, lt=1)
    compiling_pays: ClassVar[bool] = True
    decays_by_pass: ClassVar[bool] = True
    may_change: ClassVar[str] = "replay_data_path"  # the data's hash is compared

    def check_names(self) -> None:
        """Raise UserError if the texts are missing."""
        if self.replay_data_path:
            expand_paths(self.replay_data_path)


class Objective(next_token.NextToken):
    """What this stage learns; docs/reference.md shows your own losses, metrics and optimizers."""

    def loss(self, model, batch, args):
        """Sums, each []: the losses over the targets, the auxiliary losses over the tokens, and metrics by
        name over the targets."""
        return next_token.next_token_loss(model, batch)

    def groups(self, named_parameters, args):
        """With Muon, the embedding, which AdamW trains, has twice the learning rate."""
        return PRETRAINING_GROUPS if args.optimizer == "muon" else ()


schedule = stage.warmup_cosine  # (update from 1, total updates, args) -> learning rate
frozen_parameters: tuple[str, ...] = ()  # prefixes of the names of frozen parameters, e.g. "model.layers.0."


def open_data(args, tokenizer):
    """The training and held-out (or None) data. Each epoch has all documents, and others in addition."""
    train_set, eval_set = open_datasets(PretrainDataset, args, tokenizer)
    if args.replay_data_path:
        train_set = add_replay(train_set, args, tokenizer)
    return train_set, eval_set


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

    # 7. The state of the run, restored from the checkpoint.
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
