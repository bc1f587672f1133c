"""--use_compile auto: when the layers are compiled, and what is said of it."""

import pytest
import torch
from torch._dynamo import config as dynamo

from common.settings import StageArgs
from dataset.lm_dataset import StageDataset
from trainer import train_pretrain
from trainer.devices import wrapping
from trainer.devices.wrapping import compiles

LONG = train_pretrain.Args(packing=True, max_seq_len=512, epochs=2, device="cpu")


class Data(StageDataset):
    """Data of so many tokens."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens


CPU = torch.device("cpu")
RUN = Data(500_000_000)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """It has a compiler."""
    monkeypatch.setattr(wrapping, "has_compiler", lambda device: True)
    with dynamo.patch(suppress_errors=False):
        yield


PLAIN = {"packing": False}
# device, whether it has a matrix unit or bfloat16 of its own -> settings that are compiled, that are not
COMPILED: dict[tuple[str, bool], tuple[list[dict], list[dict]]] = {
    ("cpu", False): (
        [{}],
        [PLAIN, {"use_moe": True}, {"activation_checkpointing": True}, {"parallel": "fsdp"}],
    ),
    ("cpu", True): (
        [PLAIN, {"use_moe": True}, PLAIN | {"dtype": "bfloat16"}],
        [PLAIN | {"dtype": "float32"}, {"parallel": "fsdp"}],
    ),
    ("cuda", False): ([], [{}, PLAIN]),
    ("cuda", True): (
        [{}, PLAIN, {"use_moe": True}, {"parallel": "fsdp"}, {"dtype": "float16"}],
        [PLAIN | {"dtype": "float32"}, PLAIN | {"activation_checkpointing": True}],
    ),
}


@pytest.mark.parametrize(("kind", "has_unit"), COMPILED)
def test_which_long_runs_are_compiled(kind, has_unit, monkeypatch, capsys):
    """And one line says so. Short runs, and a machine without a compiler, never."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_unit)
    monkeypatch.setattr(wrapping, "native_bfloat16", lambda device: has_unit)
    device = torch.device(kind)
    compiled, others = COMPILED[kind, has_unit]
    for settings in compiled:
        args = LONG.model_copy(update=settings)
        assert compiles(args, RUN, device) is True
        out = capsys.readouterr().out
        assert out.startswith("--use_compile auto: the layers are compiled") and out.count("\n") == 1
        assert not compiles(args, Data(50_000), device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wrapping, "has_compiler", lambda device: False)
            assert not compiles(args, RUN, device)
    for settings in others:
        assert compiles(LONG.model_copy(update=settings), RUN, device) is False
    assert capsys.readouterr().out == ""


def test_what_was_not_measured_is_not():
    """Other stages, data of one's own."""
    assert not compiles(StageArgs(packing=True, max_seq_len=512, epochs=2, device="cpu"), RUN, CPU)
    assert not compiles(LONG, range(10**9), CPU)


def test_what_cannot_be_compiled_runs_as_it_is():
    """With `auto`: nobody asked for wrapping. `1` ends in the compiler's error."""

    def broken(graph, inputs):
        raise RuntimeError("no kernels")

    layer, x = torch.nn.Linear(2, 2), torch.ones(3, 2)
    for auto in (False, True):
        torch.compiler.reset()
        args = LONG if auto else LONG.model_copy(update={"use_compile": True})
        assert compiles(args, RUN, CPU)
        compiled = torch.compile(layer, backend=broken)
        if auto:
            assert torch.equal(compiled(x), layer(x))
        else:
            with pytest.raises(Exception, match="no kernels"):
                compiled(x)


def test_zero_and_one_stay(capsys):
    assert compiles(LONG.model_copy(update={"use_compile": False}), RUN, CPU) is False
    assert compiles(LONG.model_copy(update={"use_compile": True, "packing": False}), Data(500), CPU) is True
    assert capsys.readouterr().out == ""
