from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from common.errors import UserError
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import train_full_sft, train_pretrain
from trainer.checkpoint.same_run import with_weight_decay
from trainer.optim import muon
from trainer.optim.build import MUON_LR_SCALE, build_optimizer


def tiny(use_moe: bool) -> MiniMindForCausalLM:
    torch.manual_seed(0)
    return MiniMindForCausalLM(
        MiniMindConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50, use_moe=use_moe)
    )


def give_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def test_all_ranks_take_one_dtype(monkeypatch):
    """Float32 if one of them would have to emulate bfloat16."""
    for ranks, dtype in (([True, True], torch.bfloat16), ([True, False], torch.float32)):
        monkeypatch.setattr(muon, "all_gather", lambda own, ranks=ranks: ranks)
        assert build_optimizer(tiny(use_moe=False), 1e-3, 0.1, "muon").muon.dtype == dtype


@pytest.mark.parametrize("native", [True, False])
def test_a_step_is_that_of_torchs_own_two_optimizers(native, monkeypatch):
    """torch iterates in bfloat16; where that is emulated ours is in float32, and equal within bfloat16's
    rounding."""
    monkeypatch.setattr(muon, "native_bfloat16", lambda device: native)
    model, reference = tiny(use_moe=True), tiny(use_moe=True)
    optimizer = build_optimizer(model, 1e-3, 0.1, "muon")
    sides = [dict(reference.named_parameters()) for _ in range(2)]
    is_hidden = [
        ".layers." in name and p.ndim == 2 and "gate.weight" not in name for name, p in sides[0].items()
    ]
    hidden = [p for p, mine in zip(sides[0].values(), is_hidden, strict=True) if mine]
    rest = [p for p, mine in zip(sides[1].values(), is_hidden, strict=True) if not mine]
    groups = [
        {"params": [p for p in rest if p.ndim == n], "weight_decay": d} for n, d in ((2, 0.1), (1, 0.0))
    ]
    two = [torch.optim.Muon(hidden, lr=3e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")]
    two.append(torch.optim.AdamW(groups, lr=3e-3))
    start = [p.detach().clone() for p in model.parameters()]
    for seed in range(3):
        for group in optimizer.param_groups:  # as the loop does
            group["lr"] = 3e-3
        optimizer.set_momentum(1 + 200 * seed)
        two[0].param_groups[0]["momentum"] = (0.85, 0.85 + 0.1 * 2 / 3, 0.95)[seed]
        give_gradients(model, seed)
        give_gradients(reference, seed)
        optimizer.step()
        for part in two:
            part.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 if native else 3e-4)
    steps = [(a - s).norm() for a, s in zip(model.parameters(), start, strict=True)]
    gaps = [(a - b).norm() for a, b in zip(model.parameters(), reference.parameters(), strict=True)]
    assert max(gap / step for gap, step in zip(gaps, steps, strict=True)) < (1e-4 if native else 2e-2)


def test_experts_in_one_parameter_are_matrices_of_their_own():
    """[E, 2I, C] holds gate and up of each expert, [E, C, I] down: the steps are those of parameters for
    each."""
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(shape, generator=generator) for shape in ((3, 2 * 24, 16), (3, 16, 24)))
    single = [*gate_up.flatten(0, 1).split(24), *down.unbind()]
    names = [f"a.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj", *map(str, range(9)))]
    values = [torch.nn.Parameter(value.clone()) for value in (gate_up, down, *single)]
    for part in (range(2), range(2, 11)):
        named = [(names[i], values[i]) for i in part]
        model = SimpleNamespace(
            named_parameters=lambda remove_duplicate=True, named=named: named,
            parameters=lambda named=named: [p for _, p in named],
        )
        optimizer = build_optimizer(cast(torch.nn.Module, model), 1e-3, 0.1, "muon")
        for step in (1.0, -0.3):
            for i in part:
                values[i].grad = (values[i].detach() * step).cos()
            optimizer.muon.step()
    stepped = [*values[0].flatten(0, 1).split(24), *values[1].unbind()]
    for one, other in zip(stepped, values[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert not torch.equal(values[0], gate_up) and not torch.equal(values[1], down)


def test_muon_without_a_matrix_is_refused():
    with pytest.raises(UserError, match="--optimizer muon: this model has no matrices"):
        build_optimizer(torch.nn.Linear(4, 4), 1e-3, 0.1, "muon")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_each_layer_may_have_a_rate_of_its_own(kind):
    """Also where no matrix is left for the rate of the others."""
    model, other = tiny(use_moe=False), tiny(use_moe=False)
    groups = [{"match": "layers.0", "lr": 5e-4}, {"match": "embed_tokens", "lr_scale": 0.0}]
    optimizer, usual = (
        build_optimizer(model, 1e-3, 0.0, kind, groups),
        build_optimizer(other, 1e-3, 0.0, kind),
    )
    built = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for part in (optimizer, usual):
        for group in part.param_groups:  # as `train_update` does
            group["lr"] = 2e-3 * group.get("lr_scale", 1.0)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        scale = 0.5 if "layers.0" in name else 0.0 if "embed" in name else 1.0
        scale *= MUON_LR_SCALE if kind == "muon" else 1.0
        assert rates[id(p)] == 2 * built[id(p)] == pytest.approx(2e-3 * scale)
    start = [p.detach().clone() for p in model.parameters()]
    for each, part in ((model, optimizer), (other, usual)):
        give_gradients(each, 0)
        part.step()
    steps, usual_steps = ([p - s for p, s in zip(m.parameters(), start, strict=True)] for m in (model, other))
    for (name, _), step, whole in zip(model.named_parameters(), steps, usual_steps, strict=True):
        expected = whole * (0.5 if "layers.0" in name else 0.0 if "embed" in name else 1.0)
        torch.testing.assert_close(step, expected, rtol=1e-3, atol=2e-7)


WRONG: dict[str, dict] = {
    "no parameter is in a module 'layers.7'": {"match": "layers.7", "lr_scale": 0.5},
    "'layers.0' has both lr and lr_scale": {"match": "layers.0", "lr_scale": 0.5, "lr": 1e-3},
    "'decay' is not a key of a group; its keys are match, lr": {"match": "layers.0", "decay": 0.5},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_group_that_cannot_be_understood_is_refused(message):
    with pytest.raises(UserError, match=f"^groups: {message}"):
        build_optimizer(tiny(use_moe=False), 1e-3, 0.1, "adamw", [WRONG[message]])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_tied_embedding_has_its_own_rate_betas_and_decay_by_either_name(kind):
    """A step is that of torch's AdamW with the same settings; a frozen embedding is in no group."""
    own = {"betas": (0.8, 0.9), "weight_decay": 0.5}
    for name in ("embed_tokens", "lm_head"):
        model, other = tiny(use_moe=False), tiny(use_moe=False)
        group = {"match": name, "lr": 3e-3} | own
        optimizer = build_optimizer(model, 1e-3, 0.1, kind, [group])
        rate = 3e-3 * (MUON_LR_SCALE if kind == "muon" else 1.0)
        alone = torch.optim.AdamW([other.model.embed_tokens.weight], lr=rate, **own, fused=True)
        for each, part in ((model, optimizer), (other, alone)):
            give_gradients(each, 0)
            part.step()
        assert torch.equal(model.model.embed_tokens.weight, other.model.embed_tokens.weight)
        assert [set(g["betas"]) for g in optimizer.param_groups if "betas" in g].count({0.8, 0.9}) == 1
        model.model.embed_tokens.weight.requires_grad_(False)
        frozen = build_optimizer(model, 1e-3, 0.1, kind, [group])
        assert all(p.requires_grad for g in frozen.param_groups for p in g["params"])


def test_the_weights_shrink_alike_in_each_pass_over_the_data():
    """Whatever the rate and the length of a pass, and however many there are; in pretraining of random weights
    with Muon alone. A resumed run keeps what it began with."""
    data = SimpleNamespace(item_tokens=np.full(4000, 9))

    def resolved(checkpoint=None, kind=train_pretrain.Args, **settings):
        args = kind(**{"batch_size": 8, "accumulation_steps": 1, "learning_rate": 1e-3} | settings)
        return with_weight_decay(args, checkpoint, data).weight_decay

    assert resolved() == pytest.approx(0.7 / (8e-3 * 500), rel=5e-3)  # 500 updates at eight times the rate
    assert resolved(epochs=9) == resolved(max_steps=15) == resolved(max_tokens=90) == resolved()
    assert resolved(batch_size=4, accumulation_steps=4) == pytest.approx(2 * resolved(), rel=5e-3)
    assert resolved(learning_rate=5e-4) == pytest.approx(2 * resolved(), rel=5e-3)
    assert resolved(batch_size=4000) == 2.0  # at most
    assert resolved(weight_decay=0.3) == 0.3
    others = {"from_weight": "base"}, {"optimizer": "adamw"}, {"kind": train_full_sft.Args}
    for other in (*others, {"kind": train_full_sft.Args, "weight_decay": "auto"}):
        assert resolved(**other) == 0.01
    assert resolved({"fingerprint": {"weight_decay": 1.25}}, from_weight="gone") == 1.25


def test_muons_momentum_rises_with_the_updates_of_the_run():
    """A function of the update alone, so that a resumed run has that of an uninterrupted one."""
    optimizer = build_optimizer(tiny(use_moe=False), 1e-3, 0.1, "muon")
    for update, momentum in ((1, 0.85), (151, 0.9), (301, 0.95), (9_999, 0.95)):
        optimizer.set_momentum(update)
        assert all(group["momentum"] == pytest.approx(momentum) for group in optimizer.muon.param_groups)


def test_the_embedding_learns_faster_in_pretraining_with_muon():
    model = tiny(use_moe=False)
    args = train_pretrain.Args(learning_rate=1e-3, weight_decay=0.1, optimizer="muon")
    rates = {}
    for name, stage in (("pretrain", train_pretrain), ("sft", train_full_sft)):
        optimizer = stage.Objective().optimizer(model, args)
        rates[name] = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        scale = 2 if "embed_tokens" in name else 1
        assert rates["pretrain"][id(p)] == scale * rates["sft"][id(p)] == scale * MUON_LR_SCALE * 1e-3
