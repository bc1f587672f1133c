"""The kernels beside the plain definition, `attend`: padded, decoding, flat; CUTLASS's, which only GPUs have, by
a stand-in."""

import pytest
import torch
from torch import Tensor

from model import attention, kernels
from model.attention import Spans, flat_attention, layout_with_padding, padded_attention
from model.model_minimind import MiniMindConfig


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


def spans_of_lengths(lengths: list[int]) -> Spans:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return Spans(ends, max(lengths), ends)


@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "shared prefix"])
def test_one_kernel_gives_what_a_call_for_each_sample_does(shared, request):
    """Outputs and gradients; also where the last two samples continue the first one."""
    lengths, first = [20, 1, 7, 33], [0, 0, 20, 20] if shared else [0, 0, 0, 0]
    spans = spans_of_lengths(lengths)
    if shared:
        begins = spans.cu_seqlens.tolist()
        rows = [[*range(n), *range(b, b + own)] for n, b, own in zip(first, begins, lengths, strict=False)]
        keys = spans_of_lengths([len(each) for each in rows])
        spans = spans._replace(shared_prefix=(torch.tensor(sum(rows, [])), keys))
    torch.manual_seed(0)
    inputs = [torch.randn(sum(lengths), heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    grad = torch.randn_like(inputs[0])

    def found(spans: Spans) -> list[Tensor]:
        out = flat_attention(*inputs, spans)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    right = found(spans._replace(config=MiniMindConfig()))  # as if `score` were another one: `attend`
    torch.testing.assert_close(found(spans), right, rtol=1e-5, atol=1e-5)
    request.getfixturevalue("kernel")
    torch.testing.assert_close(found(spans), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("before", [0, 5], ids=["whole", "behind a cache"])
@pytest.mark.parametrize("length", [1, 7])
def test_padded_and_decoding_forms_are_the_plain_one(length, before):
    """Grouped heads, with rows that end earlier; against scores and a softmax for each head and query alone."""
    torch.manual_seed(0)
    end, config = before + length, MiniMindConfig()
    q = torch.randn(3, length, 4, 16, dtype=torch.float64)
    k, v = (torch.randn(3, end, 2, 16, dtype=torch.float64) for _ in range(2))
    real = torch.ones(3, end)
    real[1, :2] = 0
    layout = layout_with_padding(config, real, 3, length, before, end, "cpu")
    by_kernel = padded_attention(q, k, v, layout)
    plain = padded_attention(q, k, v, layout._replace(other_scores=True))
    for row in range(3):
        for place in range(length):
            if not real[row, before + place]:
                continue
            keys = [i for i in range(before + place + 1) if real[row, i]]
            for head in range(4):
                scores = k[row, keys, head // 2] @ q[row, place, head] / 4
                want = scores.softmax(0) @ v[row, keys, head // 2]
                torch.testing.assert_close(by_kernel[row, place, head], want, rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(plain[row, place, head], want, rtol=1e-5, atol=1e-5)


def test_scores_are_float32_under_autocast():
    """A rule of one's own, such as a soft-cap, would lose its precision in bfloat16."""
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    positions = torch.arange(9)
    plain = attention.attend(q, k, v, positions, positions, MiniMindConfig())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention.attend(q, k, v, positions, positions, MiniMindConfig()), plain)
