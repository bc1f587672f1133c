"""Steps of decoding that are recorded and replayed, on a CPU: what stands in for a CUDA graph notes operators
with their tensors, and calls these again. Nothing else of a step runs at a replay, and what lay in its memory
before is spoiled."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import decoding, fused, generation, graphs, steps
from model.generation import Answer, Decoder, generate
from model.sampling import Draws, Sampling
from model.steps import Batch
from tests.model.test_generation import END, prompts_of
from tests.model.test_model_minimind import build
from trainer.objectives.lora import TARGETS, add_adapters

SAMPLINGS = [
    Sampling(1.0, seed=1),
    Sampling(0.7, top_k=20, top_p=0.9, seed=2),
    Sampling(0.0),
    Sampling(1.3, top_p=0.8, seed=4),
]


class Noting(TorchDispatchMode):
    """Notes the operators, and what they overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.overwritten: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device"
        if func._schema.is_mutable:
            values = [*args, *kwargs.values()]
            self.overwritten += [(x, x.clone()) for x in values if isinstance(x, Tensor)]
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


class StandIn:
    """Takes the place of `Recorded`. As with CUDA, recording a step does not make it."""

    replays = 0

    def __init__(self, step: Callable[[], Tensor], pool: Any):
        with Noting() as noted:
            self.result = step()
        for tensor, before in reversed(noted.overwritten):
            tensor.copy_(before)
        self.calls, inputs, self.made = noted.calls, set(), []
        for _, args, kwargs, out in self.calls:
            made = {x.untyped_storage()._cdata for x in self.made}
            inputs |= {x.untyped_storage()._cdata for x in tensors((args, kwargs))} - made
            self.made += [x for x in tensors(out) if x.untyped_storage()._cdata not in inputs]

    def replay(self) -> Tensor:
        StandIn.replays += 1
        for tensor in self.made:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for first, value in zip(tensors(out), tensors(again), strict=True):
                if first.data_ptr() != value.data_ptr():
                    first.copy_(value)
        return self.result


def tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Steps are recorded early, for few tokens each."""
    monkeypatch.setattr(StandIn, "replays", 0)
    monkeypatch.setattr(graphs, "Recorded", StandIn)
    monkeypatch.setattr(graphs, "CALLS_BEFORE_RECORDING", 2)
    monkeypatch.setattr(graphs.Graphs, "has_warned", False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(fused, "HOST", "none")
    monkeypatch.setattr(fused, "has_grouped_mm", lambda x: True)
    monkeypatch.setattr(decoding, "can_record", decoding.waits_for_nothing)
    monkeypatch.setattr(generation, "BURST", {"cpu": 3})
    monkeypatch.setattr(steps, "length_class", lambda length, most: min(length + -length % 16, most))


def model_of(kind: str):
    model = build("moe" if kind == "moe" else "dense")
    if kind == "joined":
        decoding.join_layers(model)
    if kind == "adapters":
        add_adapters(model, 4, 8.0, 0.0, TARGETS)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def written(model: Any, samplings: list[Sampling], slots: int = 7) -> list[Answer]:
    """Answers of different lengths, several to each prompt, some of which wait for a place."""
    prompts = prompts_of(3, 20, 9, 1, 33)
    room = [30, 12, 21, 40, 7]
    groups = generate(model, prompts, [samplings] * 5, room, [END], slots, with_logprobs=True)
    return [answer for group in groups for answer in group]


def assert_equal(answers: list[Answer], others: list[Answer], tolerance: float) -> None:
    for answer, other in zip(answers, others, strict=True):
        assert answer.tokens == other.tokens and answer.finish == other.finish
        first, second = torch.tensor(answer.logprobs), torch.tensor(other.logprobs)
        assert (first - second).abs().max() <= tolerance


@pytest.mark.parametrize("samplings", [SAMPLINGS, SAMPLINGS[:1] * 3, SAMPLINGS[1:2], SAMPLINGS[2:3]])
@pytest.mark.parametrize("kind", ["joined", "plain", "adapters", "moe"])
def test_answers_are_those_of_steps_that_are_not_recorded(kind, samplings, monkeypatch):
    model = model_of(kind)
    found = written(model, samplings)
    assert StandIn.replays > 10
    with pytest.MonkeyPatch.context() as patch:  # the same steps
        patch.setattr(graphs.Graphs, "run", lambda self, kind, step: step())
        assert_equal(written(model, samplings), found, 0.0)
    monkeypatch.setattr(decoding, "can_record", lambda model: False)  # without padding
    assert_equal(written(model, samplings), found, 1e-4)


def test_what_is_recorded_does_not_depend_on_earlier_answers():
    """A rollout is the same in a run that was resumed before it."""
    model = model_of("joined")
    first = written(model, SAMPLINGS[:2])
    written(model, SAMPLINGS[2:], 3)
    assert_equal(written(model, SAMPLINGS[:2]), first, 0.0)


def test_weights_that_change_in_place_are_read():
    model = model_of("joined")
    before = written(model, SAMPLINGS[:1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after, replays = written(model, SAMPLINGS[:1]), StandIn.replays
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.Graphs, "run", lambda self, kind, step: step())
        assert_equal(written(model, SAMPLINGS[:1]), after, 0.0)
    assert replays > 40 and [x.tokens for x in before] != [x.tokens for x in after]


OF_ONE_KIND = [Sampling(0.6 + 0.2 * i, seed=i) for i in range(6)]


def in_company(model: Any, seed: int, samplings: list[Sampling]) -> list[Answer]:
    """Answers that join and leave one decoder, each at its time, as a server's do."""
    decoder, rng, answers = Decoder(model, 6, 80, [END], 16, with_logprobs=True), random.Random(seed), []
    waiting = prompts_of(30, 6, 14, 3, 22, 3, 45, 9)
    while waiting or decoder.rows:
        while waiting and decoder.free >= 2 and rng.random() < 0.5:
            answers += decoder.add(waiting.pop(0), rng.sample(samplings, 2), 25, rng.choice([None, 3]))
        if decoder.answers and rng.random() < 0.1:
            decoder.remove(rng.choice(decoder.answers))
        decoder.step()
    return answers


@pytest.mark.parametrize("samplings", [SAMPLINGS, OF_ONE_KIND])
@pytest.mark.parametrize("seed", range(3))
def test_answers_that_join_and_leave(seed, samplings):
    model = model_of("joined")
    found = in_company(model, seed, samplings)
    assert StandIn.replays > 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.Graphs, "run", lambda self, kind, step: step())
        expected = in_company(model, seed, samplings)
    assert_equal(found, expected, 0.0)
    assert [answer.details for answer in found] == [answer.details for answer in expected]


STALE = {
    "tokens": (Batch, lambda batch, other: REPLACE(batch, other, "tokens")),
    "positions": (Batch, lambda batch, other: REPLACE(batch, other, "positions")),
    "slots": (Batch, lambda batch, other: REPLACE(batch, other, "slots")),
    "draws": (Draws, lambda draws, other: None),
}


def REPLACE(batch: Batch, other: Batch, stale: str) -> None:
    """`Batch.replace`, which forgets a tensor."""
    kept = getattr(batch, stale).clone()
    USUAL_REPLACE(batch, other)
    getattr(batch, stale).copy_(kept)


USUAL_REPLACE = Batch.replace


@pytest.mark.parametrize("stale", STALE)
def test_a_tensor_that_is_stale_is_noticed(stale, monkeypatch):
    """These tests would fail then."""
    model = model_of("joined")
    right = [answer.tokens for answer in in_company(model, 0, OF_ONE_KIND)]
    place, replace = STALE[stale]
    monkeypatch.setattr(place, "replace", replace)
    wrong = [answer.tokens for answer in in_company(model, 0, OF_ONE_KIND)]
    assert wrong != right


def test_a_step_that_cannot_be_recorded_is_launched_kernel_by_kernel(monkeypatch, capfd):
    model = model_of("joined")
    expected = written(model, SAMPLINGS)

    def refused(step: Callable, pool: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "Recorded", refused)
    for _ in range(2):
        assert_equal(written(model, SAMPLINGS), expected, 0.0)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].endswith("not permitted when stream is capturing")


def test_a_model_with_layers_of_a_reader_is_not_recorded(monkeypatch):
    model = model_of("joined")
    assert Decoder(model, 2, 9, [END]).steps.graphs is not None
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert Decoder(model, 2, 9, [END]).steps.graphs is None
    monkeypatch.setattr(fused, "has_grouped_mm", lambda x: False)
    assert Decoder(model_of("moe"), 2, 9, [END]).steps.graphs is None


def test_rows_and_lengths_come_in_few_classes():
    rows = [graphs.rows_class(count, 20) for count in range(1, 21)]
    assert rows == [1, 2, 4, 4] + [8] * 4 + [16] * 8 + [20] * 4
    lengths = [graphs.length_class(length, 5000) for length in (1, 256, 257, 2048, 2049, 4999)]
    assert lengths == [256, 256, 512, 2048, 4096, 5000]
