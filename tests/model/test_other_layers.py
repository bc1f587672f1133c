"""Other layers than those of the model, put in their place: each is called; none is passed over by the forms
that compute layers without calling them."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from common.errors import UserError
from model import fused, model_minimind
from model.experts import can_group
from model.fused import product_dtype
from model.generation import Decoder
from model.linear import LoRALinear
from model.model_minimind import FeedForward, MiniMindConfig, MiniMindForCausalLM, MOEFeedForward, RMSNorm
from model.sampling import Sampling
from tests.model.test_model_minimind import build, flat_batch, ragged, take_gpu_branch
from trainer.devices.wrapping import transformer_layers, whole_model
from trainer.objectives.lora import add_adapters

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Bent(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).sin()


class BentWeight(nn.Module):
    """Of `parametrize`."""

    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight.sin()


def subclass(layer: nn.Linear) -> nn.Module:
    other = Bent(layer.in_features, layer.out_features, bias=False)
    other.weight = layer.weight
    return other


def biased(layer: nn.Linear) -> nn.Module:
    layer.bias = nn.Parameter(torch.randn(layer.out_features, generator=torch.Generator().manual_seed(5)))
    return layer


def with_own_forward(layer: nn.Linear) -> nn.Module:
    plain = layer.forward
    layer.forward = lambda x: plain(x).sin()
    return layer


def hooked(layer: nn.Linear) -> nn.Module:
    layer.register_forward_hook(lambda _, inputs, out: out.sin())
    return layer


def hooked_before(layer: nn.Linear) -> nn.Module:
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].sin(),))
    return layer


def hooked_backward(layer: nn.Linear) -> nn.Module:
    layer.register_full_backward_hook(lambda _, of_inputs, of_outputs: (of_inputs[0] * 0.2,))
    return layer


def parametrized(layer: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", BentWeight())


CHANGES = {"subclass": subclass, "bias": biased, "own forward": with_own_forward, "hook": hooked}
CHANGES |= {"hook before": hooked_before, "hook of the backward pass": hooked_backward}
CHANGES |= {"parametrized": parametrized, "Sequential": lambda layer: nn.Sequential(layer, nn.Tanh())}


def changed(shape: str, change: str, adapters: bool) -> MiniMindForCausalLM:
    """A model whose projections are changed, all of them, and that has adapters around them."""
    model = build(shape)
    parents = [(module, name) for module in model.modules() for name in PROJECTIONS if hasattr(module, name)]
    for module, name in parents:
        setattr(module, name, CHANGES[change](getattr(module, name)))
    if adapters:
        add_adapters(model, 4, 8.0, 0.0, PROJECTIONS)
        generator = torch.Generator().manual_seed(7)
        for layer in model.modules():
            if isinstance(layer, LoRALinear):
                layer.lora_A.weight.data = 0.2 * torch.randn(layer.lora_A.weight.shape, generator=generator)
                layer.lora_B.weight.data = 0.2 * torch.randn(layer.lora_B.weight.shape, generator=generator)
    return model


def mixture_by_calls(self: MOEFeedForward, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The forward of a mixture in plain words: each expert is called for each token, and weighted."""
    flat = x.reshape(-1, x.shape[-1]).to(product_dtype(x))
    probs = F.softmax(self.gate(flat), dim=-1, dtype=torch.float32)
    weight, chosen = probs.topk(self.top_k, dim=-1)
    weight = weight / weight.sum(dim=-1, keepdim=True)
    share = torch.zeros_like(probs).scatter(1, chosen, weight)  # [N, E]
    out = sum(share[:, i, None].to(flat.dtype) * expert(flat) for i, expert in enumerate(self.experts))
    return out.view(x.shape), (probs, chosen)


def results(model: MiniMindForCausalLM, dtype: torch.dtype, trains: bool) -> dict[str, Tensor]:
    """The log-probabilities, and in training the gradients."""
    batch = flat_batch(ragged([5, 33, 12, 70]))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), torch.set_grad_enabled(trains):
        out = model.train(trains)(**batch, reduction="none")
    found = {"loss": out.loss.detach()}
    if trains:
        (out.loss.sum() + out.aux_loss).backward()
        found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found


FORMS = {  # dtype, training, the branch of a GPU, compiled
    "training": (torch.float32, True, False, False),
    "training on a GPU": (torch.bfloat16, True, True, False),
    "training, compiled": (torch.float32, True, False, True),
    "use on a GPU": (torch.bfloat16, False, True, False),
}


@pytest.mark.parametrize(("shape", "adapters"), [("dense", False), ("moe_top2", True)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", CHANGES)
def test_another_layer_is_called(change, shape, form, adapters, monkeypatch):
    """What is computed is what calls of all layers compute."""
    dtype, trains, on_gpu, is_compiled = FORMS[form]
    if change == "Sequential" and adapters:
        with pytest.raises(UserError, match="no adapter fits a Sequential: it has no in_features"):
            changed(shape, change, adapters)
        return
    model = changed(shape, change, adapters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MOEFeedForward, "forward", mixture_by_calls)
        want = results(changed(shape, change, adapters), dtype, trains)
    if on_gpu:
        take_gpu_branch(monkeypatch, grouped=False)
    if is_compiled:
        torch.compiler.reset()
        for layer in transformer_layers(model):
            layer.compile(dynamic=True, backend="eager")
    got = results(model, dtype, trains)
    assert got.keys() == want.keys() and len(want) >= (2 if trains else 1)
    if dtype == torch.float32:
        for name, value in want.items():
            assert (got[name] - value).norm() <= 1e-4 * value.norm().clamp(min=1e-3), name
        return
    loss = want.pop("loss")
    assert (got.pop("loss") - loss).norm() <= 0.06 * loss.norm()
    if want:  # all gradients together: in bfloat16 they are up to 9 % from those in float32
        flat, exact = (torch.cat([each[name].flatten() for name in want]) for each in (got, want))
        assert (flat - exact).norm() <= 0.08 * exact.norm()


class Smoothed(FeedForward):
    """An expert as a reader may write it: another activation, a factor, dropout."""

    def __init__(self, config, intermediate_size):
        super().__init__(config, intermediate_size)
        self.factor, self.dropout = 0.5, nn.Dropout(0.0)

    def forward(self, x):
        return self.down_proj(self.dropout(F.gelu(self.gate_proj(x)) + self.factor * self.up_proj(x)))


class Squared(FeedForward):
    """One with the usual layers and another forward, which grouped products can compute."""

    def forward(self, x):
        return self.down_proj(self.gate_proj(x).relu().square() * self.up_proj(x))


@pytest.mark.parametrize("kind", [Smoothed, Squared])
def test_experts_compute_what_their_forward_says(kind, monkeypatch):
    monkeypatch.setattr(model_minimind, "FeedForward", kind)
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=32, use_moe=True, num_experts=3, num_experts_per_tok=2)
    layer, x = MOEFeedForward(config), torch.randn(50, 32)
    take_gpu_branch(monkeypatch, grouped=False)
    assert can_group(layer.experts, x) == (kind is Squared)
    torch.testing.assert_close(layer(x)[0], mixture_by_calls(layer, x)[0], rtol=1e-5, atol=1e-5)
    before = layer(x)[0]
    layer.experts[2].register_forward_hook(lambda _, inputs, out: out.sin())
    assert not torch.equal(layer(x)[0], before)
    torch.testing.assert_close(layer(x)[0], mixture_by_calls(layer, x)[0], rtol=1e-5, atol=1e-5)


OTHERS = {"none": None, "scale": (4, 3.0, 0.0), "rank": (2, 2.0, 0.0), "dropout": (4, 2.0, 0.5)}


@pytest.mark.parametrize("other", OTHERS)
def test_adapters_of_experts_that_are_not_alike_are_called(other, monkeypatch):
    """One has another adapter than the others."""
    found = []
    for on_gpu in (False, True):
        model = changed("moe_top2", "parametrized", adapters=True)
        torch.manual_seed(0)
        expert = model.model.layers[1].mlp.experts[3]
        expert.up_proj = expert.up_proj.base
        if OTHERS[other] is not None:
            expert.up_proj = LoRALinear(expert.up_proj, *OTHERS[other])
        if on_gpu:
            take_gpu_branch(monkeypatch, grouped=False)
        assert not can_group(model.model.layers[1].mlp.experts, torch.zeros(1))
        torch.manual_seed(0)
        found.append(results(model, torch.float32, True))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


class UnwrittenRows(torch.autograd.Function):
    """`grouped_mm`, whose unwritten rows hold NaN, also those of the gradient."""

    @staticmethod
    def forward(ctx, x, weights, ends):
        ctx.save_for_backward(x, weights, ends)
        with torch.enable_grad():
            ctx.inputs = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
            ctx.out = GROUPED_MM(*ctx.inputs, offs=ends)
        return ctx.out.detach().index_fill(0, torch.arange(int(ends[-1]), len(x)), torch.nan)

    @staticmethod
    def backward(ctx, *grads):
        of_x, of_weights = torch.autograd.grad(ctx.out, ctx.inputs, grads[0])
        unwritten = torch.arange(int(ctx.saved_tensors[2][-1]), len(of_x))
        return of_x.index_fill(0, unwritten, torch.nan), of_weights, None


GROUPED_MM = F.grouped_mm


@pytest.mark.parametrize("adapters", [False, True], ids=["", "with adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_reads_the_rows_that_grouped_mm_does_not_write(dtype, adapters, monkeypatch):
    want = results(changed("moe_top2", "parametrized", adapters), dtype, True)
    calls = []

    def grouped_mm(x, weights, offs):
        calls.append(int(offs[-1]) < len(x))
        return UnwrittenRows.apply(x, weights, offs)

    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    take_gpu_branch(monkeypatch, grouped=True)
    got = results(changed("moe_top2", "parametrized", adapters), dtype, True)
    products = 3
    if adapters:
        products = 3 * 3
    elif dtype == torch.bfloat16:  # gate and up together
        products = 2
    assert any(calls) and len(calls) == 2 * products
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=False)
    assert all(value.isfinite().all() for value in got.values())


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotation in which dimension 2 i pairs with 2 i + 1."""
    half = x.shape[-1] // 2
    x = x.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)
    return APPLY_ROTARY(x, cos, sin).unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)


APPLY_ROTARY = model_minimind.apply_rotary


@pytest.mark.parametrize("change", ["class", "edited class", "edited rotation", "hook", "epsilon"])
def test_other_norms_and_rotations_of_queries_and_keys_are_called(change, monkeypatch):
    """On a GPU in half precision norm and rotation are one kernel, which knows RMSNorm and Llama's layout
    only."""
    usual = results(build("dense"), torch.bfloat16, True)
    if change == "edited class":
        forward = RMSNorm.forward
        monkeypatch.setattr(RMSNorm, "forward", lambda self, x: forward(self, x - x.mean(-1, keepdim=True)))
    elif change == "edited rotation":
        monkeypatch.setattr(model_minimind, "apply_rotary", interleaved)

    def model() -> MiniMindForCausalLM:
        model = build("dense")
        for layer in model.model.layers:
            norm = layer.self_attn.k_norm
            if change == "class":
                layer.self_attn.k_norm = nn.LayerNorm(norm.weight.shape[0])
            elif change == "hook":
                norm.register_forward_hook(lambda _, inputs, out: out.sin())
            elif change == "epsilon":
                norm.eps = 3.0
        return model

    want = results(model(), torch.bfloat16, True)
    take_gpu_branch(monkeypatch, grouped=False)
    got = results(model(), torch.bfloat16, True)
    error, effect = ((each["loss"] - want["loss"]).norm() for each in (got, usual))
    assert error <= 0.01 * want["loss"].norm() < effect


def test_the_usual_norm_and_rotation_are_one_kernel(monkeypatch):
    take_gpu_branch(monkeypatch, grouped=False)
    with patch.object(fused, "rotated_heads", wraps=fused.rotated_heads) as heads:
        results(build("dense"), torch.bfloat16, True)
    assert heads.call_count == 2


@pytest.mark.parametrize("norm", [nn.Identity, nn.LayerNorm, nn.Linear])
def test_a_norm_of_another_form_is_not_taken_for_the_usual_one(norm):
    assert not fused.is_norm_and_rotary(norm, norm.forward, (("eps", 0.1),), APPLY_ROTARY)


def test_a_norm_that_obeys_an_attribute_of_its_own_is_called(monkeypatch):
    """Such as a field of the config: its class and its forward are those of the usual one."""
    forward = RMSNorm.forward

    def bent(self, x):
        return forward(self, x).sin() if getattr(self, "bent", False) else forward(self, x)

    monkeypatch.setattr(RMSNorm, "forward", bent)

    def model() -> MiniMindForCausalLM:
        model = build("dense")
        for layer in model.model.layers:
            layer.self_attn.q_norm.bent = layer.self_attn.k_norm.bent = True
        return model

    want = results(model(), torch.bfloat16, True)
    usual = results(build("dense"), torch.bfloat16, True)
    take_gpu_branch(monkeypatch, grouped=False)
    found = results(model(), torch.bfloat16, True)
    assert (found["loss"] - want["loss"]).abs().max() < (usual["loss"] - want["loss"]).abs().max() / 5


@torch.no_grad()
def test_another_head_writes_the_answers():
    """Of many answers at once the head's product is a kernel of oneDNN, and not a call."""
    model, answers = build("dense"), []
    model.config.tie_word_embeddings = False
    for head in (model.lm_head, subclass(model.lm_head)):
        model.lm_head = head
        for many in (2, 20):
            decoder = Decoder(model, slots=many, length=30, end_ids=[])
            answer, *_ = decoder.add([5, 6, 7], [Sampling(temperature=0.0)] * many, 12)
            while decoder.rows:
                decoder.step()
            answers.append(answer.tokens)
    assert answers[0] == answers[1] != answers[2] == answers[3]


@pytest.mark.parametrize("change", ["subclass", "hook", "parametrized", "Sequential"])
def test_a_copy_for_decoding_has_the_models_own_layers(change):
    model = changed("dense", change, adapters=False)
    copied, ids = whole_model(model, torch.bfloat16), ragged([9])[0][None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want, got = model(ids).logits, copied(ids).logits
    assert (got - want).abs().max() <= 0.05 * want.abs().max()
    assert {p.dtype for p in copied.parameters() if p.ndim > 1} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
