"""The fast forms beside the plain one, `attend`, for every layout and rule; CUTLASS's, which only GPUs have, by a
stand-in. `attend` itself beside a loop and beside stock gpt-oss."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from model import attention, cpu, kernels
from model.layout import Layout, flat_layout, layout_with_padding, padded_layout
from model.model_minimind import Attention, MiniMindConfig

HEADS, KEY_HEADS, SIZE = 4, 2, 16
CONFIG = MiniMindConfig(hidden_size=64, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS)


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    """The softmax [H, T, T'] of a sample's queries [T, H, D], the last of its keys [T', H, D]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    sees = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
    return scores.masked_fill(~sees, -torch.inf).softmax(-1)


def samples_of(tensors: tuple[Tensor, ...], ends: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Of tensors [1, N, H, D] the parts of each sample, [T, H, D]."""
    parts = [x[0].split(each.diff().tolist()) for x, each in zip(tensors, ends, strict=True)]
    return list(zip(*parts, strict=True))


def forward(q, k, v, bias, ends_q, ends_k, most_q, most_k, dropout, mask_type, *_, **__) -> tuple:
    assert q.shape[2] == k.shape[2] == v.shape[2]  # it knows no grouped heads
    assert ends_q.dtype == ends_k.dtype == torch.int32
    assert (most_q, most_k) == (ends_q.diff().max(), ends_k.diff().max()) and not dropout
    assert mask_type == 2  # causal, counted from the last query and the last key
    out = []
    for queries, keys, values in samples_of((q, k, v), (ends_q, ends_k, ends_k)):
        out.append(torch.einsum("hqk,khd->qhd", probabilities(queries, keys), values))
    none = torch.zeros((), dtype=torch.int64)
    return torch.cat(out)[None], q.new_zeros(len(out), q.shape[2], most_q), none, none.clone(), most_q, most_k


def backward(grad, q, k, v, bias, out, ends_q, ends_k, *_, **__) -> tuple:
    grads: list[list[Tensor]] = [[], [], []]
    for g, queries, keys, values in samples_of((grad, q, k, v), (ends_q, ends_q, ends_k, ends_k)):
        weights = probabilities(queries, keys)
        up = torch.einsum("qhd,khd->hqk", g, values)
        scores = weights * (up - (weights * up).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        grads[0].append(torch.einsum("hqk,khd->qhd", scores, keys))
        grads[1].append(torch.einsum("hqk,qhd->khd", scores, queries))
        grads[2].append(torch.einsum("hqk,qhd->khd", weights, g))
    return *(torch.cat(each)[None] for each in grads), q.new_zeros(0)


@pytest.fixture
def kernel(monkeypatch):
    """The kernel on a CPU."""
    monkeypatch.setattr(kernels, "has_cutlass_kernel", lambda values: True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_efficient_attention_forward", forward, "CPU")
        library.impl("_efficient_attention_backward", backward, "CPU")
        yield


class Window(Attention):
    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys <= queries) & (queries - keys < 6)


def cumulative(lengths: list[int]) -> tuple[Tensor, int, np.ndarray]:
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    return torch.from_numpy(ends), max(lengths), ends


def flat(shared: bool = False) -> tuple[Layout, int, int]:
    """Four samples and three rows of padding; shared: the last two samples continue the first one."""
    lengths, first, padding = [20, 1, 7, 33], [0, 0, 20, 20], 3
    total = sum(lengths) + padding
    if not shared:
        return flat_layout(*cumulative(lengths)), total, total
    begins = cumulative(lengths)[2].tolist()
    rows = [[*range(n), *range(b, b + own)] for n, b, own in zip(first, begins, lengths, strict=False)]
    shared_keys = (torch.tensor(sum(rows, [])), *cumulative([len(each) for each in rows]))
    return flat_layout(*cumulative(lengths), shared_keys, padding), total, total


def with_padding(length: int, before: int) -> tuple[Layout, int, int]:
    """Three rows, of which one begins with padding."""
    real = torch.ones(3, before + length)
    real[1, :2] = 0
    return layout_with_padding(real, 3, length, before, before + length, "cpu"), length, before + length


def cached(length: int, on_gpu: bool = False) -> tuple[Layout, int, int]:
    """As the decoder makes it: rows at places of their own; on a GPU with a mask that is added."""
    starts = torch.tensor([[9], [4], [11]]) if length == 1 else torch.tensor([[8]])
    layout = padded_layout(starts + torch.arange(length), torch.arange(20)[None])
    if on_gpu:
        layout = layout._replace(causal_mask=torch.where(layout.causal_mask, 0.0, -torch.inf))
    return layout, length, 20


def of_a_given_mask() -> tuple[Layout, int, int]:
    """Not causal, and taken as it is."""
    mask = torch.rand(3, 1, 9, 9, generator=torch.Generator().manual_seed(5)) < 0.5
    mask |= torch.eye(9, dtype=torch.bool)
    return padded_layout(torch.arange(9)[None], torch.arange(9)[None], (mask, mask)), 9, 9


LAYOUTS = {
    "flat": flat,
    "flat, shared prefix": lambda: flat(shared=True),
    "rows": lambda: (padded_layout(torch.arange(12)[None]), 12, 12),
    "rows with padding": lambda: with_padding(12, 0),
    "padding, behind a cache": lambda: with_padding(7, 5),
    "padding, one token": lambda: with_padding(1, 5),
    "mask": of_a_given_mask,
    "decoder, part of a prompt": lambda: cached(5),
    "decoder, part of a prompt, GPU": lambda: cached(5, on_gpu=True),
    "decoder, one token": lambda: cached(1),
    "decoder, one token, GPU": lambda: cached(1, on_gpu=True),
}


def inputs_of(layout: Layout, queries: int, keys: int) -> list[Tensor]:
    """Random q, k and v that fit a layout."""
    torch.manual_seed(0)
    rows = () if layout.samples else (3,)
    shapes = [(*rows, queries, HEADS, SIZE), *[(*rows, keys, KEY_HEADS, SIZE)] * 2]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def computed(layer: Attention, inputs: list[Tensor], layout: Layout) -> list[Tensor]:
    """The output of attention and its gradients. Padding may be anything, so it has no part in them."""
    out = attention.attention(layer, *inputs, layout)
    if layout.samples is not None:
        out = out[: layout.samples[0].host_cu_seqlens[-1]]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rule", [Attention, Window])
def test_the_fast_form_is_the_plain_one(name, rule, monkeypatch):
    """Outputs and gradients, and without them, where a CPU decodes in a way of its own."""
    layout, queries, keys = LAYOUTS[name]()
    layer, inputs = rule(CONFIG, 0), inputs_of(layout, queries, keys)
    assert attention.kernels_fit(layer, inputs[0])
    if "GPU" in name:
        monkeypatch.setattr(cpu, "is_eager_cpu", lambda x: False)
    fast = computed(layer, inputs, layout)
    with torch.no_grad():
        decoded = attention.attention(layer, *inputs, layout)
    monkeypatch.setattr(attention, "kernels_fit", lambda *_: False)
    plain = computed(layer, inputs, layout)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decoded[: len(plain[0])], plain[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["flat", "flat, shared prefix"])
def test_one_kernel_gives_what_a_call_for_each_sample_does(name, kernel, monkeypatch):
    layout, *lengths = LAYOUTS[name]()
    rows = layout.samples[0].host_cu_seqlens[-1]  # it needs no padding, which only CPUs have
    layout = layout._replace(key_rows=None if layout.key_rows is None else layout.key_rows[:-3])
    layer, inputs = (
        Attention(CONFIG, 0),
        [x.detach()[:rows].requires_grad_() for x in inputs_of(layout, *lengths)],
    )
    found = computed(layer, inputs, layout)
    monkeypatch.setattr(attention, "kernels_fit", lambda *_: False)
    torch.testing.assert_close(found, computed(layer, inputs, layout), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("before", [0, 5], ids=["whole", "behind a cache"])
@pytest.mark.parametrize("length", [1, 7])
def test_attention_is_a_softmax_for_each_head_and_query(length, before):
    """Grouped heads, with rows that end earlier, against a loop."""
    (layout, _, end), layer = with_padding(length, before), Attention(CONFIG, 0)
    q, k, v = (x.detach().double() for x in inputs_of(layout, length, end))
    found = attention.attention(layer, q, k, v, layout)
    for row in range(3):
        for place in range(length):
            keys = [i for i in range(before + place + 1) if row != 1 or i >= 2]
            if before + place not in keys:
                continue
            for head in range(HEADS):
                scores = k[row, keys, head // 2] @ q[row, place, head] / 4
                want = scores.softmax(0) @ v[row, keys, head // 2]
                torch.testing.assert_close(found[row, place, head], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["rows with padding", "decoder, part of a prompt", "decoder, one token, GPU"]
)
def test_sinks_are_those_of_gpt_oss(name):
    """Their gradients, too."""
    layout, *lengths = LAYOUTS[name]()
    layer, inputs = Attention(CONFIG, 0), inputs_of(layout, *lengths)
    layer.sinks = torch.nn.Parameter(torch.tensor([2.0, -1.0, 0.5, 30.0]))
    out = attention.attention(layer, *inputs, layout)
    mask = layout.mask(layer)
    added = mask if mask.is_floating_point() else torch.where(mask, 0.0, -torch.inf)
    of_stock = SimpleNamespace(sinks=layer.sinks, num_key_value_groups=HEADS // KEY_HEADS, training=False)
    want, _ = eager_attention_forward(of_stock, *(x.transpose(1, 2) for x in inputs), added, SIZE**-0.5)
    torch.testing.assert_close(out, want)
    grad, leaves = torch.randn_like(out), [layer.sinks, *inputs]
    grads = [torch.autograd.grad(each, leaves, grad) for each in (out, want)]
    torch.testing.assert_close(*grads)


class OwnRules(Attention):
    """Each rule with a parameter."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sinks, self.cap = torch.nn.Parameter(torch.zeros(HEADS)), torch.nn.Parameter(torch.ones(1))

    def score(self, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return self.cap * scores.tanh()


@pytest.mark.parametrize("rules", [Attention, Window, OwnRules])
def test_an_empty_micro_batch_gives_zero_gradients(rules):
    """DDP waits for the gradient of each parameter, on each rank."""
    layer, nothing = rules(CONFIG, 0), torch.zeros(1, dtype=torch.int32)
    rotary = (torch.zeros(0, SIZE), torch.zeros(0, SIZE))
    layout = flat_layout(nothing, 0, nothing.numpy())
    layer(torch.zeros(0, 64, requires_grad=True), rotary, layout).sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_scores_are_float32_under_autocast():
    """A rule of one's own, such as a soft-cap, would lose its precision in bfloat16."""
    layout, *lengths = LAYOUTS["rows"]()
    layer, inputs = Attention(CONFIG, 0), inputs_of(layout, *lengths)
    plain = attention.attend(layer, *inputs, layout.queries, layout.keys, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention.attend(layer, *inputs, layout.queries, layout.keys, None), plain)
