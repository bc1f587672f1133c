"""Distillation: loads the teachers, and measures how far the student's predictions are from theirs.

Shape legend: M targets, m targets of a piece, V vocabulary, C hidden size.
"""

import math
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.errors import UserError
from common.files import is_file, is_folder, is_there
from common.settings import FrozenModelArgs, StageArgs, setting
from dataset.batch import Batch
from dataset.token_cache import load_tokenizer
from trainer.devices.process_group import Logger
from trainer.objectives.base import frozen_model
from trainer.objectives.next_token import target_logits
from trainer.weights.config import describe_size, vocabulary_hash
from trainer.weights.files import (
    check_model_file,
    described_config,
    fill,
    find_weights,
    read_model,
    weights_hash,
)
from trainer.weights.paths import TOKENIZER_FILE, is_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.model_minimind import MiniMindForCausalLM

TARGETS_AT_ONCE = 1024  # targets whose predictions are compared at once


class TeacherArgs(FrozenModelArgs):
    """The flags that name the teachers."""

    aliases: ClassVar[dict[str, str]] = StageArgs.aliases | {  # MiniMind's names
        "student_hidden_size": "hidden_size",
        "student_num_layers": "num_hidden_layers",
        "student_use_moe": "use_moe",
        "from_student_weight": "from_weight",
    }

    # the hashes of their weights are compared
    may_change: ClassVar[str] = "from_teacher_weight teacher_hidden_size teacher_num_layers teacher_use_moe"

    from_teacher_weight: str = setting(
        "full_sft",
        "the teacher: name of weights in --save_dir, or a path; several, separated by commas, teach the mean "
        "of their probabilities",
    )
    teacher_hidden_size: int = setting(0, "width of each teacher; 0: that of its weights", ge=0)
    teacher_num_layers: int = setting(0, "depth of each teacher; 0: that of its weights", "layers", ge=0)
    teacher_use_moe: Literal["auto", "0", "1"] = setting(
        "auto", "whether each teacher has experts; auto: as it is"
    )

    def teacher_shape(self) -> dict[str, Any]:
        """The teachers' shape, as far as the flags give it."""
        shape: dict[str, Any] = {}
        if self.teacher_hidden_size:
            shape["hidden_size"] = self.teacher_hidden_size
        if self.teacher_num_layers:
            shape["num_hidden_layers"] = self.teacher_num_layers
        if self.teacher_use_moe != "auto":
            shape["use_moe"] = self.teacher_use_moe == "1"
        return shape

    def teachers(self) -> list[Path]:
        """The file or folder of each teacher. Raises UserError if a teacher is missing, or if several files
        have its name."""
        weights = [weight.strip() for weight in self.from_teacher_weight.split(",")]
        if not all(weights):
            raise UserError(
                f"--from_teacher_weight {self.from_teacher_weight}: a name beside a comma is empty"
            )
        return [self.teacher(weight) for weight in weights]

    def teacher(self, weight: str) -> Path:
        """The file or folder of a teacher, given as a name in --save_dir or as a path."""
        if is_path(weight):
            if not is_there(weight):
                raise UserError(f"--from_teacher_weight {weight}: no such file or folder")
            return Path(weight)
        try:
            return find_weights(self.save_dir, weight, **self.teacher_shape())
        except UserError as error:
            message = str(error).replace("--hidden_size", "--teacher_hidden_size")
            message = message.replace("--use_moe", "--teacher_use_moe")
            message = message.replace("--from_weight, --weight", "--from_teacher_weight")
            raise UserError(f"teacher: {message}") from error

    def check_names(self) -> None:
        for path in self.teachers():
            check_model_file(path)
            config = described_config(path)
            for name, value in self.teacher_shape().items():
                if config is not None and getattr(config, name) != value:
                    flag = {"num_hidden_layers": "num_layers"}.get(name, name)
                    raise UserError(
                        f"--teacher_{flag} {int(value)}: --from_teacher_weight {path} is of "
                        f"{int(getattr(config, name))}; leave the flag out"
                    )

    def frozen_model_paths(self) -> dict[str, list[Path]]:
        return {"from_teacher_weight": self.teachers()}

    def frozen_model_hashes(self) -> dict[str, str | None]:
        return {"teacher_sha256": ",".join(str(weights_hash(path)) for path in self.teachers())}


def load_teachers(
    args: TeacherArgs, tokenizer: "PreTrainedTokenizerBase", device: torch.device
) -> "list[MiniMindForCausalLM]":
    """The teachers that the flags name, frozen. tokenizer: the student's. Raises UserError if one is not a
    model, has another shape than the flags say, or has other tokens than the student."""
    from model.model_minimind import MiniMindForCausalLM

    teachers = []
    for path in args.teachers():
        weights, config = read_model(path, **args.teacher_shape())
        folder = path if is_folder(path) else path.parent
        its_tokenizer = load_tokenizer(folder) if is_file(folder / TOKENIZER_FILE) else tokenizer
        hashes = {config.tokenizer_sha256, vocabulary_hash(tokenizer), vocabulary_hash(its_tokenizer)}
        if len(hashes - {None}) > 1 or config.vocab_size != len(tokenizer):
            raise UserError(
                f"the teacher {path} has another tokenizer than the student, so their predictions are of "
                "different tokens; take a teacher with the student's tokenizer"
            )
        teacher = MiniMindForCausalLM(config)
        fill(teacher, weights, path, config)
        Logger(f"teacher: {describe_size(teacher)}, weights: {path}")
        teachers.append(frozen_model(teacher, device))
    return teachers


def mean_prediction(teachers: list[Tensor], temperature: float) -> Tensor:
    """Logarithms [m, V] of the mean probabilities of several logits [m, V] at this temperature."""
    each = ((logits.float() / temperature).log_softmax(-1) for logits in teachers)
    return reduce(torch.logaddexp, each) - math.log(len(teachers))  # with one teacher this costs nothing


def divergence(
    student: Tensor, p: Tensor, temperature: float, weights: Tensor | None = None, is_reverse: bool = False
) -> Tensor:
    """Sum of KL(p, q) over the rows in nats, or of KL(q, p) if it is reverse; each row is multiplied by its
    weight [m], if there are weights. p: logarithms of the teachers' probabilities [m, V]; q: the student's,
    from its logits [m, V] at this temperature."""
    q = (student.float() / temperature).log_softmax(-1)
    approximation, truth = (p, q) if is_reverse else (q, p)
    if weights is None:
        return F.kl_div(approximation, truth, reduction="sum", log_target=True)
    return (F.kl_div(approximation, truth, reduction="none", log_target=True).sum(-1) * weights).sum()


def distillation_sums(
    model: nn.Module, teachers: "list[MiniMindForCausalLM]", batch: Batch, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over the targets, times their weights, and the student's load-balancing loss. The sums are its
    cross entropy and KL(mean of the teachers, student) over the targets of the data, and KL(student, mean of
    the teachers) over those that the student wrote (from target `own_from` of the batch on; without this
    field there are none).

    The predictions are compared piece by piece and not kept for the backward pass. So besides the logits of
    all models, memory holds only [TARGETS_AT_ONCE, V] at a time."""

    def compared(logits: Tensor, targets: Tensor, wanted: list[Tensor], weights: Tensor | None) -> Tensor:
        if weights is None:
            cross_entropy = F.cross_entropy(logits.float(), targets, reduction="sum")
        else:
            cross_entropy = (F.cross_entropy(logits.float(), targets, reduction="none") * weights).sum()
        p = mean_prediction(wanted, temperature)
        return torch.stack((cross_entropy, divergence(logits, p, temperature, weights)))

    def judged(logits: Tensor, wanted: list[Tensor], weights: Tensor | None) -> Tensor:
        return divergence(logits, mean_prediction(wanted, temperature), temperature, weights, is_reverse=True)

    logits, aux_loss = target_logits(model, batch)
    with torch.no_grad():
        wanted = [target_logits(teacher, batch)[0] for teacher in teachers]
    sums = logits.new_zeros(2, dtype=torch.float32)
    own_sum = logits.new_zeros((), dtype=torch.float32)
    weights = batch.get("loss_weight")
    own_from = batch.get("own_from", len(logits))
    for start in range(0, max(1, own_from), TARGETS_AT_ONCE):
        piece = slice(start, min(start + TARGETS_AT_ONCE, own_from))
        sums = sums + checkpoint(
            compared, logits[piece], batch["targets"][piece], [each[piece] for each in wanted],
            None if weights is None else weights[piece],
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
    for start in range(own_from, len(logits), TARGETS_AT_ONCE):
        piece = slice(start, start + TARGETS_AT_ONCE)
        own_sum = own_sum + checkpoint(
            judged, logits[piece], [each[piece] for each in wanted],
            None if weights is None else weights[piece],
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
    return sums[0], sums[1], own_sum, aux_loss
