"""Each check of tests/gpu fails when what it checks is broken, with the CPU in place of the GPU.

Gradients, losses and processes of several ranks are broken in tests/scripts/test_gpu_check.py."""

from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import count
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import attention, model_minimind
from tests.gpu import parts, ranks, test_all_reduce, test_ranks, test_runs, test_stages
from tests.gpu import test_numbers as numbers
from trainer import loop

CPU = torch.device("cpu")


def nothing(*_) -> None:
    """Takes the place of `record_property` and of what leaves a check out."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Dense models in float32."""
    for module in (numbers, parts):
        monkeypatch.setattr(module, "dtypes", lambda device: ["float32"])
        monkeypatch.setattr(module, "SHAPES", {"dense": False})


def narrow(patch) -> None:
    patch.setattr(numbers, "new_state", partial(parts.new_state, width=64))


# --- what breaks. Each takes a MonkeyPatch.


def checkpointing_is_forgotten(patch) -> None:
    def new_state(*args, activation_checkpointing: bool, **options):
        return parts.new_state(*args, **options)

    patch.setattr(numbers, "new_state", new_state)


def a_recomputed_layer_has_another_gradient(patch) -> None:
    def new_state(*args, activation_checkpointing: bool, **options):
        state = parts.new_state(*args, activation_checkpointing=activation_checkpointing, **options)
        if activation_checkpointing:
            state.model.model.layers[0].mlp.up_proj.weight.register_hook(torch.neg)
        return state

    patch.setattr(numbers, "new_state", new_state)


def muon_goes_uphill(patch) -> None:
    move = numbers.Muon.move
    patch.setattr(numbers.Muon, "move", lambda self, g, p, directions: move(self, g, p, -directions))


def muon_forgets_its_momentum(patch) -> None:
    momentum = numbers.Muon.momentum

    def fresh(self, *args):
        self.state.clear()
        return momentum(self, *args)

    patch.setattr(numbers.Muon, "momentum", fresh)


def muon_does_not_decay(patch) -> None:
    move = numbers.Muon.move

    def without_decay(self, group, *args):
        move(self, group | {"weight_decay": 0.0}, *args)

    patch.setattr(numbers.Muon, "move", without_decay)


def a_loader_hands_out_one_buffer(patch) -> None:
    loader = numbers.epoch_loader

    def batches(*args, num_workers: int):
        buffer = torch.zeros(1000, dtype=torch.int64)
        for batch in loader(*args, num_workers=0):
            if num_workers:
                buffer[: len(batch["input_ids"])] = batch["input_ids"]
                batch["input_ids"] = buffer[: len(batch["input_ids"])]
            yield batch

    patch.setattr(numbers, "epoch_loader", batches)


def no_causal_mask(patch) -> None:
    def attend(q, k, v, spans):
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, enable_gqa=True)[0].transpose(0, 1)

    patch.setattr(numbers, "flat_attention", attend)


def attention_across_samples(patch) -> None:
    """In half precision; the reference is in float32."""
    by_sample = attention.attention_by_sample

    def attend(q, k, v, *spans):
        if v.dtype == torch.float32:
            return by_sample(q, k, v, *spans)
        return attention.attention_of_sample(q.float(), k.float(), v.float(), None).to(v.dtype)

    patch.setattr(attention, "attention_by_sample", attend)


def the_scale_stays(patch) -> None:
    patch.setattr(torch.amp.GradScaler, "update", nothing)


def an_overflow_is_not_noticed(patch) -> None:
    unscale = torch.amp.GradScaler._unscale_grads_

    def finite(self, *args):
        return {device: 0.0 * found for device, found in unscale(self, *args).items()}

    patch.setattr(torch.amp.GradScaler, "_unscale_grads_", finite)


def padding_is_seen(patch) -> None:
    attend = attention.padded_attention
    patch.setattr(model_minimind, "padded_attention", lambda q, k, v, mask: attend(q, k, v, mask | True))


def weights_get_noise(patch) -> None:
    narrow(patch)

    def train(state, updates):
        with torch.no_grad():
            next(state.model.parameters()).add_(1e-3 * next(calls))

    calls = count()
    patch.setattr(numbers, "train", train)


def the_host_reads_the_loss(patch) -> None:
    """torch's debug mode is played: a value that is read is an error."""
    mode, item, count_figures = ["default"], Tensor.item, loop.update_figures
    patch.setattr(torch.cuda, "synchronize", nothing)
    patch.setattr(torch.cuda, "set_sync_debug_mode", lambda name: mode.__setitem__(0, name))
    patch.setattr(Tensor, "pin_memory", lambda self: self)

    def read(tensor):
        if mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return item(tensor)

    def update_figures(*args):
        torch.ones(()).item()
        return count_figures(*args)

    patch.setattr(Tensor, "item", read)
    patch.setattr(loop, "update_figures", update_figures)


def compile_with(patch, **options) -> None:
    """torch writes no kernels here."""
    compile_ = nn.Module.compile
    patch.setattr(nn.Module, "compile", lambda self, **_: compile_(self, backend="eager", **options))


def each_size_is_compiled(patch) -> None:
    compile_with(patch, dynamic=False)


def nothing_is_compiled(patch) -> None:
    def compile_(self, **_):
        self._compiled_call_impl = self._call_impl

    patch.setattr(nn.Module, "compile", compile_)


def compiled_layers_do_not_rotate(patch) -> None:
    parts.stock_gradients(use_moe=False)
    compile_with(patch, dynamic=True)
    patch.setattr(model_minimind, "apply_rotary", lambda x, *_: x)


def answers_that_are_drawn_together_differ(patch) -> None:
    write = test_stages.generate

    def generate(model, prompts, *rest):
        return write(model, [[9, *prompt] for prompt in prompts] if len(prompts) > 1 else prompts, *rest)

    patch.setattr(test_stages, "generate", generate)


def the_loader_is_slow(patch) -> None:
    patch.setattr(test_runs, "benchmark", lambda *_: {"data_wait": 0.3})


def compiled_layers_are_slower(patch) -> None:
    def benchmark(preset, folder, gpus, device, use_compile, record_property):
        return {"tokens_per_second": 100.0 - use_compile}

    patch.setattr(test_runs, "benchmark", benchmark)


CHECKS = {
    numbers.test_recomputed: (CPU, nothing),
    numbers.test_muon: (CPU, nothing),
    numbers.test_workers: (CPU, nothing),
    numbers.test_long_attention: (512, 0, CPU, nothing),
    numbers.check_attention: (64, False, CPU, nothing),
    numbers.test_overflow: (0, CPU, nothing),
    numbers.test_rollouts: (CPU, nothing),
    numbers.test_host_waits: (1, CPU, pytest.MonkeyPatch()),
    numbers.test_compiled: ("dense", CPU, nothing, nothing),
}
SABOTAGES = [
    (numbers.test_recomputed, checkpointing_is_forgotten, "of the memory"),
    (numbers.test_recomputed, a_recomputed_layer_has_another_gradient, "have other gradients"),
    (numbers.test_muon, muon_goes_uphill, "steps of Muon are wrong"),
    (numbers.test_muon, muon_forgets_its_momentum, "steps of Muon are wrong"),
    (numbers.test_muon, muon_does_not_decay, "steps of Muon are wrong"),
    (numbers.test_workers, a_loader_hands_out_one_buffer, "input_ids of a micro-batch"),
    (numbers.test_long_attention, no_causal_mask, "are wrong at 512 tokens"),
    (numbers.check_attention, attention_across_samples, "are not those of a CPU"),
    (numbers.test_overflow, the_scale_stays, "get_scale"),
    (numbers.test_overflow, an_overflow_is_not_noticed, "get_scale"),
    (numbers.test_rollouts, padding_is_seen, "log-probabilities"),
    (numbers.test_host_waits, the_host_reads_the_loss, "synchronizing CUDA operation"),
    (numbers.test_compiled, each_size_is_compiled, "compiled again"),
    (numbers.test_compiled, nothing_is_compiled, "no layer is compiled"),
    (numbers.test_compiled, compiled_layers_do_not_rotate, "not those of stock"),
]


@pytest.mark.parametrize(("check", "sabotage", "message"), SABOTAGES)
def test_a_check_finds_what_is_broken(check, sabotage, message, monkeypatch):
    torch.compiler.reset()
    sabotage(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        check(*CHECKS[check])


@pytest.mark.parametrize("has_kernel", [False, True])
def test_attention_that_is_right_passes(has_kernel, monkeypatch):
    """By sample, and with the variable-length kernel of a GPU, by its documented arithmetic."""
    import_module("tests.fake_cuda.varlen")
    kernel = lambda values: has_kernel and values.dtype != torch.float32  # noqa: E731
    monkeypatch.setattr(attention, "has_varlen_kernel", kernel)
    for shared in (False, True):
        numbers.check_attention(64, shared, CPU, nothing)


def test_compiled_layers_that_are_right_pass(monkeypatch):
    """Without a GPU the check is left out elsewhere."""
    torch.compiler.reset()
    compile_with(monkeypatch, dynamic=True)
    numbers.test_compiled("dense", CPU, nothing, nothing)


def test_answers_that_differ_are_found(monkeypatch):
    """Of those that are drawn together."""
    answers_that_are_drawn_together_differ(monkeypatch)
    with pytest.raises(AssertionError, match="answers that are drawn together"):
        test_stages.test_decoding(0, CPU, nothing)


def test_other_bits_are_found(monkeypatch):
    weights_get_noise(monkeypatch)
    monkeypatch.setattr(numbers, "use_deterministic_kernels", nothing)
    with pytest.raises(AssertionError, match="other bits in dense float32"):
        numbers.test_same_bits(CPU, monkeypatch)


def test_one_other_bit_of_a_run_is_found(tmp_path):
    (tmp_path / "save").mkdir()
    for name, value in (("a", 1.0), ("b", 1.0 + 2**-23)):
        torch.save({"norm": torch.tensor(value)}, tmp_path / f"save/{name}_64.pth")
        (tmp_path / f"save/{name}_metrics.jsonl").write_text('{"loss": 1.0}\n')
    test_stages.same_weights(tmp_path, "a", "a")
    with pytest.raises(AssertionError, match="nothing is learned"):
        test_stages.has_learned(tmp_path, "a")
    with pytest.raises(AssertionError, match="1 tensors have other bits, norm the first"):
        test_stages.same_weights(tmp_path, "a", "b")


def test_a_slow_loader_and_slow_compiled_layers_are_found(tmp_path, monkeypatch):
    the_loader_is_slow(monkeypatch)
    with pytest.raises(AssertionError, match="the GPU waits for data"):
        test_runs.test_speed("30m", tmp_path, 0, CPU, nothing)
    compiled_layers_are_slower(monkeypatch)
    with pytest.raises(AssertionError, match="compiled layers are slower"):
        test_runs.test_compiled_speed(tmp_path, 0, CPU, nothing, nothing)


def test_a_loss_that_is_not_finite_is_found(tmp_path, monkeypatch):
    """Of a run that ends well."""

    def run(*commands):
        for words in commands:
            name = next(word for word in words if word.startswith("--save_weight=")).partition("=")[2]
            (tmp_path / "save").mkdir(exist_ok=True)
            (tmp_path / f"save/{name}_64_metrics.jsonl").write_text('{"loss": 1.0}\n{"loss": null}\n')

    monkeypatch.setattr(test_stages, "run", run)
    with pytest.raises(AssertionError, match="float32: losses"):
        monkeypatch.setattr(test_stages, "dtypes", lambda device: ["float32"])
        test_stages.test_stages("pretrain", CPU, tmp_path, nothing)


# --- checks of runs: what ends otherwise than it should


@pytest.mark.parametrize("status", [None, 0, 1, -9])
def test_ranks_that_end_otherwise_are_found(status, tmp_path, monkeypatch):
    """They go on, end as if all were well, crash or are killed."""

    @contextmanager
    def running(folder, count):
        process = SimpleNamespace(kill=nothing, send_signal=nothing, poll=lambda: status)
        yield [process] * count

    monkeypatch.setattr(test_runs, "running", running)
    monkeypatch.setattr(test_runs, "PATIENCE", 0.2)
    for rank in range(2):
        (tmp_path / f"rank_{rank}.log").write_text("stopped: at update 3, which is saved\n")
    with pytest.raises(AssertionError, match="which is saved"):
        test_runs.test_killed_rank(tmp_path, lambda: 2, nothing)
    with pytest.raises(AssertionError, match="which is saved"):
        test_runs.test_sigterm(tmp_path, 0, CPU, lambda: 2, nothing)


def test_a_traceback_is_not_one_line(tmp_path, monkeypatch):
    failed = CompletedProcess(
        [], 1, "FAIL update 7 differs", "Traceback\ntorch.OutOfMemoryError: CUDA out of memory"
    )
    monkeypatch.setattr(test_runs.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(AssertionError, match="Traceback"):
        test_runs.test_out_of_memory(tmp_path, 1)
    with pytest.raises(AssertionError, match="FAIL update 7 differs"):
        test_runs.test_resume("one_rank", 1, lambda: 2)


# --- several processes


def sums_are_forgotten() -> None:
    """Called in each process: each rank keeps its own tensor."""
    ranks.dist.all_reduce = nothing


@pytest.mark.slow
def test_a_sum_of_ranks_that_is_missed_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv(ranks.BREAK, "tests.scripts.test_gpu_check:no_all_reduce")
    with pytest.raises(AssertionError, match="tensors in one of them only"):
        test_ranks.test_gradients_of_ranks("fsdp", 0, CPU, lambda: 2, nothing, tmp_path, nothing)
    monkeypatch.setenv(ranks.BREAK, f"{__name__}:sums_are_forgotten")
    with pytest.raises(RuntimeError, match="the sum over the ranks is wrong"):
        test_all_reduce.test_all_reduce(0, lambda: 2, tmp_path, nothing)


@pytest.mark.slow
def test_programs_that_fail_are_found(tmp_path, monkeypatch):
    """A server without weights; a repeated run with another seed."""
    monkeypatch.setattr(test_stages, "dtypes", lambda device: ["float32"])
    command = test_stages.command

    def seeded(stage, folder, device, save_weight, **flags):
        return command(stage, folder, device, save_weight=save_weight, seed=len(save_weight), **flags)

    monkeypatch.setattr(test_stages, "command", seeded)
    with pytest.raises(AssertionError, match="tensors have other bits"):
        test_stages.test_deterministic_rollouts("grpo", CPU, tmp_path)
    monkeypatch.setattr(test_stages, "write_start", nothing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AssertionError, match="the server gives no answer"):
        test_stages.test_server(CPU, tmp_path / "empty")
