"""SFT with LoRA (arXiv:2106.09685): the model stays as it is, and small adapters beside its matrices are trained.

    python train_lora.py --data_path ../dataset/lora_medical.jsonl                                       one device
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_lora.py --data_path ...          two GPUs
    torchrun --nnodes 2 --node_rank N --master_addr HOST --nproc_per_node 8 train_lora.py ...   two machines
    python train_lora.py --data_path ... --from_resume 1                                        resume

Reads the conversations of SFT (docs/data.md). Starts from out/full_sft_<hidden_size>[_moe].pth, which it only reads,
and writes the adapter out/<lora_name>_<hidden_size>[_moe]/ in PEFT's format: `--lora` of the tools loads it.

To change this stage, change it here: defaults and flags in `Args`; `loss_fn` and `schedule`; anything else in `main`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.locks import lock_output
from common.settings import ROOT, StageArgs, parse_args, setting
from dataset.lm_dataset import SFTDataset
from trainer.components.adapters import TARGETS, add_adapters, save_adapter, unknown_targets
from trainer.components.bad_updates import BadUpdates
from trainer.components.data import open_datasets
from trainer.components.device import mixed_precision, prepare_device, select_device, use_deterministic_kernels
from trainer.components.failures import training_errors
from trainer.components.flops import peak_rate
from trainer.components.optimizer import build_optimizer
from trainer.components.parallel import wrap_model
from trainer.components.resume import (
    check_resume,
    check_start_weights,
    code_hashes,
    data_fingerprint,
    keep_global_batch,
    model_fingerprint,
    run_fingerprint,
)
from trainer.components.run_files import run_name
from trainer.components.saving import complete_files, open_metrics, save_final_weights
from trainer.components.signals import StopRequest
from trainer.components.state import TrainState
from trainer.components.tracker import start_tracker
from trainer.loop import finish_update, train_epoch
from trainer.trainer_utils import (
    Logger,
    epoch_loader,
    eval_loader,
    init_distributed_mode,
    init_model,
    leave_process_group,
    lm_checkpoint,
    load_tokenizer,
    next_token_loss,
    setup_seed,
    start_model_config,
    start_shape,
    steps_per_epoch,
    warmup_cosine,
)


@dataclass(kw_only=True)
class Args(StageArgs):
    """The defaults of this stage (MiniMind's, but for the learning rate: its 1e-4 learns too little).
    A field added here is a flag of this stage: `my_flag: float = 0.0`, or `= setting(0.0, "help", ge=0)`."""

    aliases: ClassVar[dict[str, str]] = {"lora_name": "save_weight"}  # MiniMind's name

    data_path: str | None = str(ROOT / "dataset" / "lora_medical.jsonl")
    save_weight: str = "lora_medical"
    from_weight: str = "full_sft"
    epochs: int = 10
    batch_size: int = 32
    learning_rate: float = 1e-3
    max_seq_len: int = 340
    lora_rank: int = setting(16, "rank of the adapters", ge=1)
    lora_alpha: float = setting(32.0, "what an adapter adds is multiplied by alpha / rank", gt=0)
    lora_dropout: float = setting(0.0, "dropout probability at the adapters' inputs", ge=0, lt=1)
    lora_targets: str = setting(",".join(TARGETS), "layers that get an adapter, separated by commas")

    def contradictions(self) -> list[str]:
        wrong = super().contradictions()
        if self.from_weight == "none":
            wrong.append("--from_weight none: an adapter belongs to the trained weights that it starts from; name them")
        if unknown := unknown_targets(self.lora_targets):
            wrong.append(f"--lora_targets: no layer is named {unknown}; choose from {','.join(TARGETS)}")
        return wrong


loss_fn = next_token_loss  # (model, batch, args) -> (sum over targets, sum over tokens); see also `target_logits`
schedule = warmup_cosine  # (update from 1, total updates, args) -> learning rate


def build_model(args, lm_config, run):
    """The start weights with adapters beside them; a checkpoint holds the adapters alone."""
    check_start_weights(args, run)
    model, _ = init_model(lm_config, args.from_weight, args.tokenizer_path, args.save_dir)
    add_adapters(model, args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_targets.split(","))
    Logger(f"{sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6:.2f} M of them are trained")
    return model


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
    train_set, eval_set = open_datasets(SFTDataset, args, tokenizer)

    # 3. Processes and seed.
    init_distributed_mode(args.rank_timeout, device)
    prepare_device(device)
    setup_seed(args.seed)
    if args.packing:
        Logger(train_set.describe())

    # 4. Model config, and the checkpoint to resume from.
    lm_config = start_model_config(tokenizer, args)
    checkpoint = lm_checkpoint(lm_config, args.save_weight, save_dir=args.checkpoint_dir) if args.from_resume else None
    args = keep_global_batch(args, checkpoint)  # adapts the accumulation to another number of ranks
    run = run_fingerprint(args, model_fingerprint(lm_config), data_fingerprint(train_set.cache), len(train_set))
    run = check_resume(args, run, checkpoint)  # refuses the checkpoint of another run

    # 5. SwanLab (wandb, as in MiniMind).
    wandb = start_tracker(args, run, checkpoint)

    # 6. Model, compiled and wrapped in DDP or FSDP; then the optimizer, since FSDP replaces the parameters.
    model = build_model(args, lm_config, run)
    model = wrap_model(model, device, args.parallel, args.use_compile, args.activation_checkpointing, autocast)
    optimizer = build_optimizer(model, args.learning_rate, args.weight_decay, args.optimizer)

    # 7. The state of the run, restored from the checkpoint.
    state = TrainState(args, lm_config, model, optimizer, scaler, autocast, device, loss_fn, schedule, run, stop)
    state.save_fn = save_adapter  # of the model only its adapters are used
    state.eval_loader = eval_loader(eval_set, args.batch_size) if eval_set else None
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
            start_step = state.step if epoch == state.epoch else 0
            loader = epoch_loader(train_set, args.batch_size, args.seed, epoch, start_step, args.num_workers)
            train_epoch(state, epoch, loader, steps_per_epoch(len(train_set), args.batch_size), start_step, wandb)
        save_final_weights(state)

    # 9. Clean up: DDP is freed before the process group.
    del model, state
    leave_process_group()


if __name__ == "__main__":
    with training_errors():
        main()
