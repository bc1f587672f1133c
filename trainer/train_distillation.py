"""Distillation: a student learns what a teacher predicts for each token of SFT's answers, beside the answers.

    python train_distillation.py --data_path ../dataset/sft.jsonl                                       one device
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_distillation.py --data_path ...          two GPUs
    torchrun --nnodes 2 --node_rank N --master_addr HOST --nproc_per_node 8 train_distillation.py ...   two machines
    python train_distillation.py --data_path ... --from_resume 1                                        resume

Reads the conversations of SFT (docs/data.md). The loss is alpha x cross entropy + (1 - alpha) x temperature^2 x
divergence of student and teacher, over the tokens that the assistant says. The teacher may have any shape, and the
student's tokenizer; it is only read. Starts from out/full_sft_<hidden_size>[_moe].pth and writes full_dist_... beside.

To change this stage, change it here: defaults and flags in `Args`; `loss_fn`, `schedule` and `frozen`; anything else in
`main`.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.locks import lock_output
from common.settings import ROOT, StageArgs, parse_args, setting
from dataset.lm_dataset import SFTDataset
from trainer.components.bad_updates import BadUpdates
from trainer.components.data import open_datasets
from trainer.components.device import mixed_precision, prepare_device, select_device, use_deterministic_kernels
from trainer.components.distillation import SHOWN, distillation_sums, load_teacher, teacher_path
from trainer.components.failures import training_errors
from trainer.components.flops import peak_rate
from trainer.components.language_model import frozen_model
from trainer.components.optimizer import build_optimizer
from trainer.components.parallel import freeze, wrap_model
from trainer.components.resume import (
    check_resume,
    code_hashes,
    data_fingerprint,
    keep_global_batch,
    model_fingerprint,
    run_fingerprint,
    weights_fingerprint,
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
    setup_seed,
    start_model_config,
    start_shape,
    steps_per_epoch,
    warmup_cosine,
)


@dataclass(kw_only=True)
class Args(StageArgs):
    """The defaults of this stage; --hidden_size, --num_hidden_layers, --use_moe and --from_weight are the student's.
    A field added here is a flag of this stage: `my_flag: float = 0.0`, or `= setting(0.0, "help", ge=0)`."""

    aliases: ClassVar[dict[str, str]] = {  # MiniMind's names
        "student_hidden_size": "hidden_size",
        "student_num_layers": "num_hidden_layers",
        "student_use_moe": "use_moe",
        "from_student_weight": "from_weight",
    }

    data_path: str | None = str(ROOT / "dataset" / "sft_mini_512.jsonl")
    save_weight: str = "full_dist"
    from_weight: str = "full_sft"
    epochs: int = 6
    batch_size: int = 32
    learning_rate: float = 5e-6
    max_seq_len: int = 340
    from_teacher_weight: str = setting("full_sft", "the teacher: name of weights in --save_dir, or a path")
    teacher_hidden_size: int = setting(0, "width of the teacher; 0: its weights tell it", ge=0)
    teacher_num_layers: int = setting(0, "depth of the teacher; 0: its weights tell it", "layers", ge=0)
    teacher_use_moe: Literal["auto", "0", "1"] = setting("auto", "whether the teacher has experts; auto: as it is")
    alpha: float = setting(0.5, "share of the cross entropy in the loss", ge=0, le=1)
    temperature: float = setting(1.5, "by which both models' logits are divided before they are compared", gt=0)
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = setting("forward_kl", "of the student from the teacher")
    jsd_beta: float = setting(0.5, "with --divergence jsd: share of the teacher in the mixture", gt=0, lt=1)

    def teacher_shape(self) -> dict[str, int | bool]:
        """What the flags say of the teacher's shape."""
        shape = {"hidden_size": self.teacher_hidden_size, "num_hidden_layers": self.teacher_num_layers}
        told: dict[str, int | bool] = {name: value for name, value in shape.items() if value}
        return told if self.teacher_use_moe == "auto" else told | {"use_moe": self.teacher_use_moe == "1"}

    def teacher(self) -> Path:
        """The file or folder of the teacher."""
        return teacher_path(self.from_teacher_weight, self.save_dir, **self.teacher_shape())

    def frozen_weights(self) -> dict[str, Path]:
        return {"from_teacher_weight": self.teacher()}


def loss_fn(teacher, model, batch, args):
    """Sums: the losses of the targets, the load-balancing losses of the tokens, and the figures SHOWN."""
    how = (args.temperature, args.divergence, args.jsd_beta)
    cross_entropy, divergence, aux_loss = distillation_sums(model, teacher, batch, *how)
    loss = args.alpha * cross_entropy + (1 - args.alpha) * args.temperature**2 * divergence
    return loss, aux_loss, {"cross_entropy": cross_entropy, "divergence": divergence}


def held_out(teacher, args, model, batch):
    """The cross entropy and the divergence of held-out data."""
    _, _, shown = loss_fn(teacher, model, batch, args)
    return {"loss": shown["cross_entropy"], "divergence": shown["divergence"]}


schedule = warmup_cosine  # (update from 1, total updates, args) -> learning rate
frozen: tuple[str, ...] = ()  # prefixes of the names of frozen parameters, e.g. "model.layers.0."


def build_models(args, lm_config, tokenizer, device, resumed):
    """The student, from its weights unless a checkpoint replaces them, and the teacher."""
    teacher = load_teacher(args.teacher(), tokenizer, **args.teacher_shape())
    student, _ = init_model(lm_config, "none" if resumed else args.from_weight, args.tokenizer_path, args.save_dir)
    freeze(student, frozen)
    return student, frozen_model(teacher, device)


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
    run = check_resume(args, run | weights_fingerprint("teacher", args.teacher(), args.cache_dir), checkpoint)

    # 5. SwanLab (wandb, as in MiniMind).
    wandb = start_tracker(args, run, checkpoint)

    # 6. Model, compiled and wrapped in DDP or FSDP; then the optimizer, since FSDP replaces the parameters.
    model, teacher = build_models(args, lm_config, tokenizer, device, resumed=checkpoint is not None)
    model = wrap_model(model, device, args.parallel, args.use_compile, args.activation_checkpointing, autocast)
    optimizer = build_optimizer(model, args.learning_rate, args.weight_decay, args.optimizer)

    # 7. The state of the run, restored from the checkpoint.
    parts = (lm_config, model, optimizer, scaler, autocast, device, partial(loss_fn, teacher), schedule, run, stop)
    state = TrainState(args, *parts, shown=SHOWN, eval_fn=partial(held_out, teacher, args))
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
