"""Divergences and the distillation loss against formulas in float64; the teacher's tokenizer."""

import json

import pytest
import torch

from common.arguments import parse_args
from common.errors import UserError
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT
from tests.trainer.devices.test_wrapping import flat_batch
from trainer import train_distillation
from trainer.objectives import distillation
from trainer.objectives.base import frozen_model
from trainer.objectives.distillation import TeacherArgs, load_teachers
from trainer.weights.files import save_weights, weights_hash


def small_teacher(hidden_size: int = 48) -> MiniMindForCausalLM:
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=hidden_size, num_hidden_layers=1))
    return frozen_model(model, torch.device("cpu"))


def plain(student: torch.Tensor, teachers: list[torch.Tensor], temperature: float) -> torch.Tensor:
    """The definition, in probabilities, of each target."""
    q, *each = ((logits.double() / temperature).softmax(-1) for logits in (student, *teachers))
    p = sum(each) / len(each)
    return (p * (p / q).log()).sum(-1)


@pytest.mark.parametrize(("weighted", "widths"), [(False, [48]), (True, [48]), (True, [48, 32, 16])])
def test_the_loss_is_that_of_the_formula_and_scales_no_balancing_loss(weighted, widths, monkeypatch):
    """In pieces of 8 targets; from dense teachers of other widths to a student with experts."""
    monkeypatch.setattr(distillation, "TARGETS_AT_ONCE", 8)
    torch.manual_seed(0)
    student = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=2, use_moe=True))
    teachers = [small_teacher(width) for width in widths]
    batch = flat_batch(3, [9, 30, 5])
    weights = torch.ones(len(batch["targets"]))
    if weighted:
        weights = batch.loss_weight = torch.rand(len(weights)) * 3
    args = train_distillation.Args(alpha=0.3, temperature=2.0)
    objective = train_distillation.Objective()
    objective.teachers = teachers
    loss, aux_loss, metrics = objective.loss(student, batch, args)
    gradients = torch.autograd.grad(loss + aux_loss, list(student.parameters()), retain_graph=True)
    inputs = {k: batch[k] for k in ("input_ids", "position_ids", "cu_seqlens", "max_seqlen", "target_index")}
    out, wanted = student(**inputs), [teacher(**inputs).logits.detach() for teacher in teachers]
    losses = torch.nn.functional.cross_entropy(out.logits.double(), batch["targets"], reduction="none")
    cross_entropy, apart = (losses * weights).sum(), (plain(out.logits, wanted, 2.0) * weights).sum()
    expected = 0.3 * cross_entropy + 0.7 * 4.0 * apart
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and torch.equal(aux_loss, out.aux_loss)
    assert abs(metrics["divergence"].item() - apart.item()) <= 1e-6 * len(batch["targets"])
    wanted_gradients = torch.autograd.grad(expected + out.aux_loss, list(student.parameters()))
    for one, other in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert not any(parameter.requires_grad for teacher in teachers for parameter in teacher.parameters())


def test_an_empty_batch_has_a_zero_gradient():
    student = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=1))
    teacher = small_teacher()
    args = train_distillation.Args()
    objective = train_distillation.Objective()
    objective.teachers = [teacher]
    loss, aux_loss, _ = objective.loss(student, flat_batch(0, []), args)
    (loss + aux_loss).backward()
    assert loss == 0 and not any(p.grad.any() for p in student.parameters())


def teacher_in(path, **flags):
    args = TeacherArgs(from_teacher_weight=str(path), **flags)
    return load_teachers(args, load_tokenizer(ROOT / "model"), torch.device("cpu"))


def write_teacher(path, **fields):
    config = MiniMindConfig(**{"hidden_size": 32, "num_hidden_layers": 1} | fields)
    save_weights(MiniMindForCausalLM(config), path)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path):
    write_teacher(tmp_path / "t_32.pth")
    assert [each.config.hidden_size for each in teacher_in(tmp_path / "t_32.pth")] == [32]
    with pytest.raises(UserError, match="contradicts the weights"):
        teacher_in(tmp_path / "t_32.pth", teacher_num_layers=3)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((ROOT / "model" / name).read_bytes())
    other = json.loads((ROOT / "model/tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="has another tokenizer"):
        teacher_in(tmp_path / "t_32.pth")


def test_teachers_are_compared_by_their_weights_in_order(tmp_path):
    for name, width in (("a", 16), ("b", 32)):
        write_teacher(tmp_path / f"{name}_{width}.pth", hidden_size=width)
    a, b = (weights_hash(tmp_path / name) for name in ("a_16.pth", "b_32.pth"))
    for names, expected in (("b", b), ("a,b", f"{a},{b}"), ("b, a", f"{b},{a}")):
        args = TeacherArgs(from_teacher_weight=names, save_dir=str(tmp_path))
        assert args.frozen_model_hashes() == {"teacher_sha256": expected}


def test_a_teacher_whose_file_says_that_its_tokens_are_others_is_refused(tmp_path):
    write_teacher(tmp_path / "t_32.pth", tokenizer_sha256="0" * 64)
    with pytest.raises(UserError, match="has another tokenizer"):
        teacher_in(tmp_path / "t_32.pth")


def test_minimind_names_of_the_student_are_the_common_flags():
    typed = ["--student_hidden_size", "64", "--student_num_layers", "3", "--student_use_moe", "1"]
    typed += ["--from_student_weight", "w", "--teacher_use_moe", "0"]
    args = parse_args(train_distillation.Args, None, typed)
    assert (args.hidden_size, args.num_hidden_layers, args.use_moe, args.from_weight) == (64, 3, True, "w")
    assert args.teacher_shape() == {"use_moe": False}
    args = train_distillation.Args(teacher_hidden_size=768, teacher_num_layers=16)
    assert args.teacher_shape() == {"hidden_size": 768, "num_hidden_layers": 16}
