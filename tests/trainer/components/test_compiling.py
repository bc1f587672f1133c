"""--use_compile auto: when the layers are compiled, and what is said of it."""

from dataclasses import replace

import pytest
import torch

from common.errors import UserError
from common.settings import StageArgs, parse_args
from trainer.components import compiling
from trainer.components.compiling import has_compiler, uses_compile
from trainer.components.parallel import wrap_model
from trainer.train_grpo import Args as GRPOArgs

LONG = StageArgs(packing=True, max_seq_len=512, epochs=2, device="cpu")
RUN = {"samples": 1_000_000}  # rows


@pytest.fixture(autouse=True)
def with_compiler(monkeypatch):
    monkeypatch.setattr(compiling, "has_compiler", lambda: True)


def test_long_packed_runs_are_compiled_and_one_line_says_so(capsys):
    assert uses_compile(LONG, RUN) is True
    out = capsys.readouterr().out
    assert out.startswith("--use_compile auto: the layers are compiled") and out.count("\n") == 1


@pytest.mark.parametrize(
    "other", [{"packing": False}, {"use_moe": True}, {"activation_checkpointing": True}, {"parallel": "fsdp"}]
)
def test_other_runs_are_not(other, capsys):
    assert uses_compile(replace(LONG, **other), RUN) is False
    assert capsys.readouterr().out == ""


def test_short_runs_are_not_nor_those_without_a_compiler(monkeypatch):
    assert not uses_compile(LONG, {"samples": 100})
    monkeypatch.setattr(compiling, "has_compiler", lambda: False)
    assert not uses_compile(LONG, RUN)


def test_what_compiling_needs_is_looked_for(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not has_compiler()


def test_zero_and_one_stay(capsys):
    assert uses_compile(replace(LONG, use_compile=False), RUN) is False
    assert uses_compile(replace(LONG, use_compile=True, packing=False), {"samples": 1}) is True
    assert capsys.readouterr().out == ""


def test_what_does_not_ask_is_not_compiled(monkeypatch):
    """Stages whose batches differ in size hand `auto` on as it is."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: pytest.fail("compiled"))
    wrap_model(torch.nn.Linear(2, 2), torch.device("cpu"), use_compile="auto")
    assert parse_args(GRPOArgs, "", []).use_compile == "auto"
    with pytest.raises(UserError, match="--use_compile 1 has no effect on completions"):
        parse_args(GRPOArgs, "", ["--use_compile", "1"])


def test_the_switch_takes_three_values():
    for text, value in (("auto", "auto"), ("0", False), ("1", True)):
        found = parse_args(StageArgs, "", ["--use_compile", text]).use_compile
        assert found == value and type(found) is type(value)
    assert parse_args(StageArgs, "", ["--use_compile"]).use_compile is True
    with pytest.raises(UserError, match="--use_compile must be auto, 0 or 1, not 'maybe'"):
        parse_args(StageArgs, "", ["--use_compile", "maybe"])
