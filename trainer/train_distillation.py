"""Distillation: for each token a student learns what one or several teachers predict, in addition to the
token.

    python train_distillation.py --data_path ../dataset/sft.jsonl                                   one device
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_distillation.py --data_path ...      two GPUs
    torchrun --nnodes 2 --node_rank N --master_addr IP --nproc_per_node 8 train_distillation.py  two machines
    python train_distillation.py --data_path ... --from_resume 1                                    resume

Reads the conversations of SFT, or with --kind pretrain the text of pretraining (docs/data.md). The loss is
alpha x cross entropy + (1 - alpha) x temperature^2 x KL(teacher, student), over the assistant's tokens, or
over all tokens of a text. With --on_policy the student writes the last answer of a share of the conversations
itself, and learns temperature^2 x KL(student, teacher) over it (arXiv:2306.13649). A teacher may have any
shape, but must have the student's tokenizer. With several teachers, the student learns the mean of their
probabilities. Teachers are not changed. Starts from out/full_sft_<hidden_size>[_moe].pth and writes
full_dist_... beside it.

To change this stage, change it here: `Args` (defaults and flags), `Objective`, `schedule`,
`frozen_parameters`, `open_data`, and in `main` the model.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.settings import data_file, setting
from dataset.lm_dataset import DATASETS
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
from trainer.objectives import base, distillation
from trainer.optim.build import PRETRAINING_GROUPS
from trainer.report.trackers import start_tracker
from trainer.rollouts.own_answers import OwnAnswers, own_metrics
from trainer.rollouts.settings import too_long
from trainer.weights.config import model_config


class Args(distillation.TeacherArgs):
    """The defaults of this stage; --hidden_size, --num_hidden_layers, --use_moe and --from_weight are the
    student's. A field that you add here becomes a flag of this stage: `my_flag: float = 0.0`, or `=
    setting(0.0, "help", ge=0)`; the flags of the teachers are in objectives/distillation.py."""

    data_path: str | None = data_file("sft_t2t_mini.jsonl", "sft_mini_512.jsonl")
    save_weight: str = "full_dist"
    from_weight: str = "full_sft"
    epochs: int = 6
    batch_size: int = 32
    learning_rate: float = 5e-6
    max_seq_len: int = 340
    decays_by_pass: ClassVar[bool] = True
    kind: Literal["sft", "pretrain"] = setting("sft", "conversations, or the text of pretraining")
    alpha: float = setting(0.5, "share of the cross entropy in the loss", ge=0, le=1)
    temperature: float = setting(1.5, "divides the logits of all models before they are compared", gt=0)
    on_policy: float = setting(
        0.0, "share of the conversations whose last answer the student writes itself", ge=0, le=1
    )
    max_gen_len: int = setting(256, "longest answer of --on_policy", "tokens", ge=1)

    def contradictions(self) -> list[str]:
        """Mistakes: flags that have no effect, or that exclude each other."""
        wrong = super().contradictions()
        if not self.on_policy:
            if not self.is_default("max_gen_len"):
                wrong.append("--max_gen_len has no effect without --on_policy; leave it out")
            return wrong
        if self.kind == "pretrain":
            wrong.append("--on_policy needs prompts, which texts do not have; leave out --kind pretrain")
        if self.parallel == "fsdp":
            wrong.append("--parallel fsdp: --on_policy samples from a whole model; use --parallel ddp")
        if self.on_policy == 1 and not self.is_default("alpha"):
            wrong.append("--alpha has no effect on the student's own answers (--on_policy 1); leave it out")
        return wrong + too_long(self.max_seq_len, self.max_gen_len)


class Objective(base.Objective):
    """What this stage learns: the answers or the text, and the predictions of the teachers, which are frozen
    models; with --on_policy also what they say of the student's own answers."""

    console_metrics = ("cross_entropy", "divergence", "reverse_divergence", "completion_length")
    # the settings that a held-out metric depends on; the loss depends on none
    held_out_reads: Mapping[str, str] = {
        "divergence": "temperature from_teacher_weight teacher_hidden_size teacher_num_layers teacher_use_moe"
    }

    def load_frozen_models(self, args, device):
        tokenizer = load_tokenizer(args.tokenizer_path)
        self.teachers = distillation.load_teachers(args, tokenizer, device)
        self.own_answers = OwnAnswers(args, tokenizer)

    def prepare(self, state, micro_batches):
        """The micro-batches, with the student's own answers in a share of the samples."""
        return self.own_answers.write(state, micro_batches) if state.args.on_policy else micro_batches

    def groups(self, named_parameters, args):
        """With Muon and text, the learning rates of pretraining."""
        return PRETRAINING_GROUPS if args.optimizer == "muon" and args.kind == "pretrain" else ()

    def loss(self, model, batch, args):
        """Sums, each []: the losses over the targets, the load-balancing losses over the tokens, and metrics
        by name over the targets."""
        cross_entropy, divergence, reverse_divergence, aux_loss = distillation.distillation_sums(
            model, self.teachers, batch, args.temperature
        )
        loss = args.alpha * cross_entropy + (1 - args.alpha) * args.temperature**2 * divergence
        if not args.on_policy:
            return loss, aux_loss, {"cross_entropy": cross_entropy, "divergence": divergence}
        loss = loss + args.temperature**2 * reverse_divergence
        return loss, aux_loss, own_metrics(batch, cross_entropy, divergence, reverse_divergence)

    def held_out(self, model, batch, args):
        """The cross entropy and the divergence of held-out data, each a sum [] over the targets."""
        sums = distillation.distillation_sums(model, self.teachers, batch, args.temperature)
        return {"loss": sums[0], "divergence": sums[1]}


schedule = stage.warmup_cosine  # (update from 1, total updates, args) -> learning rate
frozen_parameters: tuple[str, ...] = ()  # prefixes of the names of frozen parameters, e.g. "model.layers.0."


def open_data(args, tokenizer):
    """The training and held-out (or None) data."""
    return open_datasets(DATASETS[args.kind], args, tokenizer)


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

    # 7. The state of the run, with its teachers, restored from the checkpoint.
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
