"""SFT with LoRA (arXiv:2106.09685): the model is frozen, and small adapters beside its matrices are trained.

    python train_lora.py --data_path ../dataset/lora_medical.jsonl                            one device
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_lora.py --data_path ...        two GPUs
    torchrun --nnodes 2 --node_rank N --master_addr IP --nproc_per_node 8 train_lora.py ...   two machines
    python train_lora.py --data_path ... --from_resume 1                                      resume

Reads the conversations of SFT (docs/data.md). Starts from out/full_sft_<hidden_size>[_moe].pth, which is not
changed, and writes the adapter out/<lora_name>_<hidden_size>[_moe]/ in PEFT's format: `--lora` of the tools
loads it.

To change this stage, change it here: `Args` (defaults and flags), `Objective`, `schedule`, `open_data`,
and in `main` the model.
"""

import sys
from functools import partial
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.settings import ROOT, StageArgs, setting
from dataset.lm_dataset import SFTDataset
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
from trainer.objectives import next_token
from trainer.report.trackers import start_tracker
from trainer.weights import lora
from trainer.weights.config import model_config


class Args(StageArgs):
    """The defaults of this stage (MiniMind's, except the learning rate: its 1e-4 learns too little).
    A field that you add here becomes a flag of this stage: `my_flag: float = 0.0`, or `= setting(0.0, "help",
    ge=0)`."""

    aliases = StageArgs.aliases | {"lora_name": "save_weight"}  # MiniMind's name

    data_path: str | None = str(ROOT / "dataset" / "lora_medical.jsonl")
    save_weight: str = "lora_medical"
    from_weight: str = "full_sft"
    epochs: int = 10
    batch_size: int = 32
    learning_rate: float = 1e-3
    max_seq_len: int = 340
    lora_rank: int = setting(16, "rank of the adapters", ge=1)
    lora_alpha: float = setting(32.0, "an adapter's output is multiplied by lora_alpha / lora_rank", gt=0)
    lora_dropout: float = setting(0.0, "dropout probability at the adapters' inputs", ge=0, lt=1)
    lora_targets: str = setting(",".join(lora.TARGETS), "layers that get an adapter, separated by commas")

    def contradictions(self) -> list[str]:
        wrong = super().contradictions()
        if self.from_weight == "none":
            wrong.append(
                "--from_weight none: an adapter belongs to the trained weights that it starts from; name them"
            )
        for name in self.lora_targets.split(","):
            if name not in lora.TARGETS:
                known = ",".join(lora.TARGETS)
                wrong.append(f"--lora_targets: no layer is named {name!r}; choose from {known}")
        return wrong


class Objective(next_token.NextToken):
    """What this stage learns. Only the adapters are written and saved, so a resumed run reads the start
    weights again."""

    saves_trained_only = True

    def extend_model(self, model, args):
        """The frozen model with adapters."""
        targets = args.lora_targets.split(",")
        lora.add_adapters(model, args.lora_rank, args.lora_alpha, args.lora_dropout, targets)
        lora.check_that_adapters_alone_are_trained(model)
        return model

    def loss(self, model, batch, args):
        """Sums, each []: the losses over the targets, the auxiliary losses over the tokens, and metrics by
        name over the targets."""
        return next_token.next_token_loss(model, batch)

    def save(self, model, path, writer, description):
        return lora.save_adapter(model, path, writer, description)


schedule = stage.warmup_cosine  # (update from 1, total updates, args) -> learning rate
open_data = partial(open_datasets, SFTDataset)  # (args, tokenizer) -> training and held-out (or None) data


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

    # 6. Frozen model with adapters, wrapped in DDP or FSDP. Then the optimizer, because FSDP replaces the
    # parameters.
    objective = Objective()
    model, _ = utils.init_model(lm_config, args.from_weight, args.tokenizer_path, args.save_dir)
    model = objective.extend_model(model, args)
    model = stage.compile_and_wrap(model, args, device, autocast, train_set)
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
