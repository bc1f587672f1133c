"""Edits as a reader makes them: what is written into the page is what runs, in training, in decoding, behind
shared prefixes, for experts and with adapters."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dataset.batch import collate_shared
from model import model_minimind
from model.generation import generate
from model.lora import LoRALinear
from model.model_minimind import Attention, FeedForward, MiniMindForCausalLM, RMSNorm
from model.sampling import Sampling
from tests.model.test_model_minimind import VOCAB, build, flat_batch, padded_batch, ragged, stock
from trainer.weights.lora import add_adapters

WINDOW, SINKS = 6, 4
APPLY_ROTARY = model_minimind.apply_rotary


def layer_norm(patch) -> None:
    forward = RMSNorm.forward
    patch.setattr(RMSNorm, "forward", lambda self, x: forward(self, x - x.mean(-1, keepdim=True)))


def window_with_sinks(self, queries: Tensor, keys: Tensor) -> Tensor:
    return (keys <= queries) & ((queries - keys < WINDOW) | (keys < SINKS))


def sliding_window(patch) -> None:
    patch.setattr(Attention, "visible", window_with_sinks)


def soft_cap(patch) -> None:
    patch.setattr(Attention, "score", lambda self, scores, queries, keys: 2 * (scores / 2).tanh())


def biased_window(patch) -> None:
    """Both rules: ALiBi's bias within a window."""
    sliding_window(patch)
    patch.setattr(Attention, "score", lambda self, scores, queries, keys: scores - 0.1 * (queries - keys))


def add_to_layers(patch, name: str, size: int) -> None:
    """A parameter in each layer of attention."""
    init = Attention.__init__

    def with_parameter(self, *args) -> None:
        init(self, *args)
        setattr(self, name, nn.Parameter(torch.zeros(size)))

    patch.setattr(Attention, "__init__", with_parameter)


def learned_sinks(patch) -> None:
    add_to_layers(patch, "sinks", 8)


def learned_bias_by_distance(patch) -> None:
    """As T5's: a table of each layer."""
    add_to_layers(patch, "by_distance", 16)

    def score(self, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return scores + self.by_distance[(queries - keys).clamp(0, 15)]

    patch.setattr(Attention, "score", score)


def window_in_some_layers(patch) -> None:
    def visible(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        return window_with_sinks(self, queries, keys) if self.layer_idx % 2 == 1 else None

    patch.setattr(Attention, "visible", visible)


class Squared(FeedForward):
    """With another activation, an attribute and a layer more."""

    def __init__(self, config, intermediate_size):
        super().__init__(config, intermediate_size)
        self.factor, self.extra = 0.5, nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out = self.down_proj(self.gate_proj(x).relu().square() + self.factor * self.up_proj(x))
        return out + self.extra(x)


def other_layer(patch) -> None:
    patch.setattr(model_minimind, "FeedForward", Squared)


class Capped(model_minimind.Head):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * (super().forward(input) / 2).tanh()


def other_head(patch) -> None:
    patch.setattr(model_minimind, "Head", Capped)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotation in which dimension 2 i pairs with 2 i + 1."""
    half = x.shape[-1] // 2
    x = x.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)
    return APPLY_ROTARY(x, cos, sin).unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)


def other_rotary(patch) -> None:
    patch.setattr(model_minimind, "apply_rotary", interleaved)


EDITS = [layer_norm, sliding_window, soft_cap, biased_window, other_layer, other_head, other_rotary]
EDITS += [learned_sinks, learned_bias_by_distance, window_in_some_layers]


def adapted(shape: str, adapters: bool) -> MiniMindForCausalLM:
    model = build(shape)
    if adapters:
        torch.manual_seed(7)
        add_adapters(model, 4, 8.0, 0.0, ("q_proj", "v_proj", "up_proj", "down_proj"))
        for layer in model.modules():
            if isinstance(layer, LoRALinear):
                nn.init.normal_(layer.lora_B.weight, std=0.2)
    return model


def log_probs(model: MiniMindForCausalLM, ids: Tensor) -> Tensor:
    """Of the tokens of a sample behind the first, by the padded form, alone."""
    logits = model(ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def shared_batch(prompt: Tensor, answers: list[Tensor]) -> dict:
    """The flat batch of answers to one prompt, which is there once."""
    group = []
    for number, answer in enumerate(answers):
        ids = torch.cat((prompt, answer)).numpy()
        mask = np.arange(len(ids)) >= len(prompt)
        group.append({"input_ids": ids, "loss_weight": mask, "sample_id": number, "target_bytes": 0})
    batch = collate_shared([group])
    return batch.model_inputs() | {"targets": batch["targets"]}


PLACES = [("dense", False), ("moe_top2", True), ("moe_top2", False), ("dense", True)]
CASES = [(edit, *place) for edit in EDITS for place in PLACES]


def places_of(number: int) -> list[int]:
    """Of PLACES, those in which the edit of this number is always tested: one, in turn; of another layer, which
    experts and adapters replace, all."""
    return [0, 1, 2, 3] if EDITS[number] is other_layer else [number % len(PLACES)]


@pytest.mark.parametrize(
    ("edit", "shape", "adapters"),
    [
        pytest.param(*case, marks=[] if i % 4 in places_of(i // 4) else pytest.mark.slow)
        for i, case in enumerate(CASES)
    ],
)
def test_an_edit_is_obeyed_everywhere(edit, shape, adapters, monkeypatch):
    samples = ragged([5, 33, 12, 70])
    with torch.no_grad():
        plain = torch.cat([log_probs(adapted(shape, adapters), ids) for ids in samples])
    edit(monkeypatch)
    model = adapted(shape, adapters)
    want = torch.cat([log_probs(model, ids) for ids in samples])
    assert (want - plain).abs().max() > 0.05  # the edit does something

    # training: the flat batch, its gradients
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = model(**flat_batch(samples), reduction="none").loss
    torch.testing.assert_close(-loss, want, rtol=1e-4, atol=1e-4)
    wanted = torch.autograd.grad(-want.sum(), trained, allow_unused=True)
    found = torch.autograd.grad(loss.sum(), trained, allow_unused=True)
    for each, other in zip(found, wanted, strict=True):
        assert other is None or (each - other).norm() <= 1e-4 * other.norm() + 1e-5

    with torch.no_grad():
        # answers behind a prompt that is there once
        prompt, answers = samples[1], [samples[0], samples[2], samples[3]]
        shared = -model(**shared_batch(prompt, answers), reduction="none").loss
        whole = [log_probs(model, torch.cat((prompt, answer)))[len(prompt) - 1 :] for answer in answers]
        torch.testing.assert_close(shared, torch.cat(whole), rtol=1e-4, atol=1e-4)

        # the body alone, without a mask
        embeds, positions = model.model.embed_tokens(prompt[None]), torch.arange(len(prompt))[None]
        hidden, _ = model.model(embeds, positions)
        logits = model(prompt[None]).logits
        torch.testing.assert_close(model.lm_head(hidden), logits, rtol=1e-4, atol=1e-4)

        # decoding, out of the window, many at once and by transformers' generate
        greedy = [[Sampling(temperature=0.0)] * 9] * len(samples)
        written = generate(model, [ids.tolist() for ids in samples], greedy, 8, [VOCAB])
        for ids, group in zip(samples, written, strict=True):
            tokens = ids
            for _ in range(8):
                tokens = torch.cat((tokens, model(tokens[None]).logits[0, -1:].argmax(-1)))
            assert [answer.tokens for answer in group] == [tokens[len(ids) :].tolist()] * 9
            options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
            assert torch.equal(model.generate(ids[None], **options)[0], tokens)


@torch.no_grad()
def test_a_window_is_that_of_stock_qwen3_with_its_mask(monkeypatch):
    """Padded on the left, where positions are not places."""
    model, samples = build("dense"), ragged([9, 33, 20])
    reference = stock(model)
    sliding_window(monkeypatch)
    ids, real = padded_batch(samples, side="left")
    padded = model(ids, attention_mask=real, position_ids=(real.cumsum(-1) - 1).clamp(min=0)).logits
    for row, sample in enumerate(samples):
        positions = torch.arange(len(sample))
        mask = window_with_sinks(None, positions[:, None], positions)[None, None]
        want = reference(sample[None], attention_mask=mask).logits[0]
        torch.testing.assert_close(padded[row, -len(sample) :], want, rtol=1e-4, atol=1e-4)


def mixture_by_calls(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The forward of a mixture in plain words: each expert is called for each token, and weighted."""
    probs = F.softmax(self.gate(x), dim=-1, dtype=torch.float32)
    weight, chosen = probs.topk(self.top_k, dim=-1)
    weight = weight / weight.sum(dim=-1, keepdim=True)
    share = torch.zeros_like(probs).scatter(1, chosen, weight)  # [N, E]
    out = sum(share[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
    return out, (probs, chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_all_kinds_are_called(dtype, monkeypatch):
    """A hook, another class and an adapter within one layer; one expert that no token chooses."""
    found = {}
    for forward in (model_minimind.MOEFeedForward.forward, mixture_by_calls):
        model = build("moe_top2").train()
        experts = model.model.layers[0].mlp.experts
        experts[0].register_forward_hook(lambda _, inputs, out: out.sin())
        torch.manual_seed(3)
        experts[1] = Squared(model.config, 64)
        experts[2].up_proj = LoRALinear(experts[2].up_proj, 2, 2.0)
        model.model.layers[0].mlp.gate.weight.data[4] = -5.0
        with monkeypatch.context() as patch:
            patch.setattr(model_minimind.MOEFeedForward, "forward", forward)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = model(**flat_batch(ragged([5, 33, 12, 70])), reduction="none").loss
            loss.sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert all(grad is not None for grad in grads.values())  # DDP waits for each
        found[forward] = [loss.detach(), torch.cat([grad.flatten() for grad in grads.values()])]
    for got, want in zip(*found.values(), strict=True):
        tolerance = 1e-4 if dtype == torch.float32 else 0.08
        assert (got - want).norm() <= tolerance * want.norm()
