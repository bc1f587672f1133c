"""Decoding in few kernels against the model's own forward, on a CPU that takes the branch of a GPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model import attention, decoding, fused, model_minimind
from model.finite_decoder import FiniteDecoder
from model.generation import Decoder, generate
from model.model_minimind import Attention, FeedForward, MiniMindBlock, MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling
from tests.model.test_generation import prompts_of
from tests.model.test_model_minimind import SHAPES, VOCAB, build
from tests.model.test_other_layers import CHANGES, changed, interleaved
from trainer.devices.wrapping import whole_model

SAMPLINGS = [Sampling(seed=1), Sampling(0.7, top_k=20, top_p=0.9, seed=2), Sampling(0.0)]


@pytest.fixture
def on_gpu(monkeypatch):
    """The model takes the branch of a GPU."""
    monkeypatch.setattr(fused, "HOST", "none")
    monkeypatch.setattr(fused, "has_grouped_mm", lambda x: False)


def in_dtype(model: MiniMindForCausalLM, dtype: torch.dtype) -> MiniMindForCausalLM:
    """A model as it decodes on a GPU."""
    model = whole_model(model, dtype)
    decoding.join_layers(model)
    return model


def first_logits(model: MiniMindForCausalLM, dtype: torch.dtype, is_fast: bool) -> torch.Tensor:
    """Of a step that writes one token of each of three answers behind prompts of different lengths."""
    decoder = Decoder(model, 4, 64, [])
    assert (decoder.steps.one_token is not None) == is_fast
    for prompt in prompts_of(7, 30, 1):
        decoder.add(prompt, [Sampling(0.0)], 5)
    found = []
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        decoder.step()
        write = decoder.steps.write_tokens
        decoder.steps.write_tokens = lambda *given: found.append(write(*given)) or found[-1]
        decoder.step()
    return found[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_one_token_is_what_the_models_forward_computes(shape, on_gpu, monkeypatch):
    model, found = in_dtype(build(shape), torch.float32), []
    for enabled in (True, False):
        monkeypatch.setattr(fused, "ENABLED", enabled)
        found.append(first_logits(model, torch.float32, enabled))
    assert (found[0] - found[1]).norm() <= 1e-4 * found[1].norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_token_in_half_precision_is_about_as_exact(dtype, on_gpu, monkeypatch):
    """Of the logits' distance from those that float32 gives with the same weights: the model's own forward,
    which sums in float32, is as far from them."""
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=256, num_hidden_layers=8, vocab_size=VOCAB)
    model = in_dtype(MiniMindForCausalLM(config).eval(), dtype)
    exact = copy.deepcopy(model).float()
    decoding.join_layers(exact)
    right, distances = first_logits(exact, torch.float32, True), []
    for enabled in (True, False):
        monkeypatch.setattr(fused, "ENABLED", enabled)
        distances.append(float((first_logits(model, dtype, enabled) - right).norm()))
    assert distances[0] <= 1.5 * distances[1] <= 0.05 * float(right.norm())


def test_answers_are_those_of_the_plain_form(on_gpu, monkeypatch):
    model, prompts, found = in_dtype(build("dense"), torch.float32), prompts_of(3, 40, 17, 1), []
    for enabled in (True, False):
        monkeypatch.setattr(fused, "ENABLED", enabled)
        groups = generate(model, prompts, [SAMPLINGS] * 4, 20, [2], 5, with_logprobs=True)
        found.append([answer for group in groups for answer in group])
    for fast, plain in zip(*found, strict=True):
        assert fast.tokens == plain.tokens
        assert torch.allclose(torch.tensor(fast.logprobs), torch.tensor(plain.logprobs), atol=1e-4)


@pytest.mark.parametrize("change", CHANGES)
def test_another_layer_is_called(change, on_gpu):
    model = changed("dense", change, adapters=False)
    decoding.join_layers(model)
    assert not decoding.can_step(model.model)


def test_other_models_are_called(on_gpu):
    for model in (changed("dense", "parametrized", adapters=True), build("dense").train()):
        decoding.join_layers(model)
        assert not decoding.can_step(model.model)
    model = build("dense")
    assert not decoding.can_step(model.model)  # its weights are not joined
    decoding.join_layers(model)
    assert decoding.can_step(model.model)
    model.model.layers[1].self_attn.q_norm.eps = 3.0
    assert not decoding.can_step(model.model)


def test_chat_and_server_join_the_layers(on_gpu):
    model = build("dense")
    assert Decoder(model, 1, 9, [2]).steps.one_token is None
    for _ in range(2):
        assert FiniteDecoder(model, 1, 9, [2]).steps.one_token is not None


def test_edited_arithmetic_is_noticed(on_gpu, monkeypatch):
    model = build("dense")
    decoding.join_layers(model)
    assert decoding.can_step(model.model)
    forward, attend = FeedForward.forward, Attention.forward
    edits = {
        (model_minimind, "apply_rotary"): interleaved,
        (FeedForward, "forward"): lambda self, x: self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x)),
        (Attention, "forward"): lambda self, x, *rest: attend(self, x, *rest) * 1.1,
        (attention, "padded_attention"): lambda q, k, v, mask: v[:, -1:].repeat_interleave(2, dim=2),
    }
    for (place, name), edited in edits.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, name, edited)
            patch.setattr(model_minimind, "padded_attention", attention.padded_attention)
            assert not decoding.can_step(model.model), name
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: forward(self, x))
    assert decoding.can_step(model.model)  # another function, and the same arithmetic


@pytest.mark.parametrize("place", [FeedForward, MiniMindBlock])
@pytest.mark.parametrize("shape", ["dense", "moe_top2"])
def test_a_field_that_was_added_to_the_config_is_obeyed(place, shape, on_gpu, monkeypatch):
    """And read by a layer whose class is the usual one."""
    monkeypatch.setitem(MiniMindConfig.__annotations__, "bent", bool)
    monkeypatch.setattr(MiniMindConfig, "bent", False, raising=False)
    begin, forward = place.__init__, place.forward

    def init(self, config, *rest):
        begin(self, config, *rest)
        self.bent = config.bent

    def bent(self, x, *rest):
        out = forward(self, x, *rest)
        if not self.bent:
            return out
        return (out[0].sin(), out[1]) if isinstance(out, tuple) else out.sin()

    monkeypatch.setattr(place, "__init__", init)
    monkeypatch.setattr(place, "forward", bent)
    for is_bent in (False, True):
        model = build(shape, bent=is_bent)
        decoding.join_layers(model)
        is_experts_own = shape == "moe_top2" and place is FeedForward  # which are called
        assert decoding.can_step(model.model) == (not is_bent or is_experts_own)


def test_joined_weights_are_parts_of_one_matrix():
    """No weight is there twice; what is written into a layer is in the matrix; a layer put in another's place
    and a model that was moved are not passed over."""
    model = build("dense")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decoding.join_layers(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    attention = model.model.layers[0].self_attn
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    joint = decoding.joint_weight(*layers)
    assert sum(layer.weight.untyped_storage().nbytes() for layer in layers) == 3 * joint.nbytes
    with torch.no_grad():
        attention.k_proj.weight.fill_(3.0)
    assert (joint[len(attention.q_proj.weight) :][: len(attention.k_proj.weight)] == 3.0).all()
    assert decoding.joint_weight(attention.q_proj, attention.v_proj, attention.k_proj) is None
    attention.v_proj = nn.Linear(64, len(attention.v_proj.weight), bias=False)
    assert decoding.joint_weight(attention.q_proj, attention.k_proj, attention.v_proj) is None
    mlp = model.model.layers[0].mlp
    assert decoding.joint_weight(mlp.gate_proj, mlp.up_proj) is not None
    model.to(torch.bfloat16)
    assert decoding.joint_weight(mlp.gate_proj, mlp.up_proj) is None
