"""The losses of the model against torch's and transformers', whole and in pieces."""

from itertools import accumulate

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from model import losses
from model.losses import cross_entropy, head_cross_entropy, load_balancing_loss
from tests.model.test_model_minimind import VOCAB, build, flat_batch, gradients, ragged


@pytest.mark.parametrize("rows", [0, 512, 1300])
def test_the_loss_in_pieces_is_torchs_cross_entropy(rows):
    torch.manual_seed(0)
    logits = torch.randn(rows, 50, requires_grad=True)
    targets = torch.randint(50, (rows,))
    targets[::7] = -100
    want = F.cross_entropy(logits, targets, reduction="sum")
    want_grad = torch.autograd.grad(want, logits)[0]
    loss = cross_entropy(logits, targets)
    assert torch.allclose(loss, want, rtol=1e-6)
    assert torch.equal(torch.autograd.grad(loss, logits)[0], want_grad)


@pytest.mark.parametrize("shape", ["dense", "moe"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_head_in_pieces_has_the_same_losses_and_gradients(shape, reduction, monkeypatch):
    found, batch = [], flat_batch(ragged([20, 31, 90])) | {"reduction": reduction}
    for piece in (losses.MAX_LOGITS, 50 * VOCAB):  # 50 of 192 rows at once: the last piece is shorter
        monkeypatch.setattr(losses, "MAX_LOGITS", piece)
        model = build(shape).train()
        out = model(**batch)
        (out.loss.norm() + out.aux_loss).backward()
        found.append([out.loss.detach(), *gradients(model).values()])
        with torch.no_grad():
            assert torch.equal(model(**batch).loss, out.loss)
    assert found[0][0].shape == ((138,) if reduction == "none" else ())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-4)


def peak_bytes(function) -> int:
    """The most memory of torch's CPU allocator that the function has at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize(("large", "pieces", "breaks"), [(VOCAB - 1, 4, 2), (VOCAB, 1, 0)])
def test_a_head_with_a_large_vocabulary_is_not_compiled(large, pieces, breaks, monkeypatch):
    """Compiled for a GPU it would be one piece, however large."""
    monkeypatch.setattr(losses, "LARGE_VOCABULARY", large)
    monkeypatch.setattr(losses, "MAX_LOGITS", 50 * VOCAB)
    monkeypatch.setattr(losses, "is_compiled_for_gpu", lambda hidden: torch.compiler.is_compiling())
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    head, calls = nn.Linear(8, VOCAB, bias=False), []
    hidden, targets = torch.randn(192, 8, requires_grad=True), torch.randint(VOCAB, (192,))
    head.register_forward_hook(lambda *_: calls.append(1) if not torch.compiler.is_compiling() else None)
    whole = torch.compile(head_cross_entropy, backend="aot_eager", dynamic=True)
    loss = whole(head, hidden, targets, "sum")
    assert len(calls) == (pieces if breaks else 0)
    assert sum(counters["graph_break"].values()) == breaks
    right = F.cross_entropy(F.linear(hidden, head.weight), targets, reduction="sum")
    torch.testing.assert_close(loss, right)
    grads = [torch.autograd.grad(each, (hidden, head.weight)) for each in (loss, right)]
    torch.testing.assert_close(*grads)


def test_memory_of_the_head_does_not_grow_with_a_large_vocabulary_times_the_targets(monkeypatch):
    """Whole, the head keeps logits [1024, 20000] in float32 for the backward pass, and makes their
    gradient."""
    head, targets = nn.Linear(16, 20_000, bias=False), torch.arange(1024)
    x = torch.randn(1024, 16, requires_grad=True)
    peaks = {}
    for piece in (2**27, 64 * 20_000, 128 * 20_000):
        monkeypatch.setattr(losses, "MAX_LOGITS", piece)
        peaks[piece] = peak_bytes(lambda: head_cross_entropy(head, x, targets, "sum").backward())
    whole, small, twice = peaks.values()
    logits, weights = 1024 * 20_000 * 4, 16 * 20_000 * 4
    assert whole > 2 * logits
    assert small <= 4 * logits // 16 + 4 * weights
    assert twice <= 4 * logits // 8 + 4 * weights


def test_the_load_balancing_loss_is_switch_transformers():
    """E * sum f_e P_e of each layer and sample from transformers' own function, times the tokens; and how
    many of these each expert got. Padding counts for nothing."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(3))
    probs, sample = logits.softmax(-1), torch.tensor([0] * 30 + [1] * 12 + [2] * 8)  # 2: padding
    for k in (1, 2):
        chosen = probs.topk(k).indices
        found, tokens = load_balancing_loss(probs, chosen, sample, 2)
        for layer in range(3):
            first, second = logits[layer].split((30, 20))
            want = 30 * load_balancing_loss_func((first,), 4, k)
            want += 12 * load_balancing_loss_func((second[:12],), 4, k)
            torch.testing.assert_close(found[layer], want)
            assert tokens[layer].tolist() == chosen[layer, :42].flatten().bincount(minlength=4).tolist()
