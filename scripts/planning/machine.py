"""Measures what training a model costs on this machine, in seconds and bytes, on the user's data."""

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import repeat
from statistics import median

import psutil
import torch
from torch import Tensor, nn

from common.containers import memory_left
from common.settings import USUAL_DECAY, StageArgs
from dataset.batch import Batch, to_device
from dataset.lm_dataset import StageDataset
from dataset.token_cache import load_tokenizer
from scripts.timing import time_updates
from trainer.callbacks.train_state import TrainState
from trainer.devices.device import device_and_precision
from trainer.loop import evaluate
from trainer.objectives.next_token import NextToken, next_token_loss
from trainer.stage import compile_and_wrap
from trainer.weights.config import model_config

MEMORY_SHARE = 0.8  # share of the free memory that a plan uses
BYTES_PER_PARAMETER = 16  # weight, gradient and two moments of AdamW, in float32
PROCESS_BYTES = 0.6e9  # memory of a process without a model
MEASURED_TOKENS = 2048  # tokens of the larger update that is measured
GPU_FACTOR = 8  # times as many tokens on a GPU: small updates do not keep it busy
MIN_UPDATES, MAX_UPDATES, MIN_SECONDS = 3, 20, 2.0


@dataclass(frozen=True)
class Cost:
    """What training a model costs. All fields are zero before it is measured."""

    parameters: int = 0
    seconds_per_token: float = 0.0  # seconds of forward and backward pass per token
    seconds_per_update: float = 0.0  # further seconds of each update: the optimizer
    eval_seconds_per_token: float = 0.0  # seconds of an evaluation per token
    activation_bytes_per_token: float = 0.0  # bytes per token of a micro-batch, for the backward pass

    def speed(self, tokens: float) -> float:
        """Tokens per second if an update has this many tokens."""
        return tokens / (tokens * self.seconds_per_token + self.seconds_per_update)

    def memory(self, tokens: float) -> float:
        """Bytes of the process if a micro-batch has this many tokens."""
        return state_bytes(self.parameters) + self.activation_bytes_per_token * tokens


def state_bytes(parameters: float) -> float:
    """Bytes of a process with weights, gradients and AdamW's state."""
    return PROCESS_BYTES + BYTES_PER_PARAMETER * parameters


def free_memory(device: torch.device) -> float:
    """Bytes that training may use."""
    if device.type == "cuda":
        return MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]
    return MEMORY_SHARE * min(psutil.virtual_memory().available, memory_left())


def new_state(args: StageArgs, data: StageDataset) -> TrainState:
    """A new model of a stage, ready to be trained; --use_compile 1 compiles it."""
    from model.model_minimind import MiniMindForCausalLM

    args = args.model_copy(update={"weight_decay": USUAL_DECAY})  # its value does not change the time
    device, autocast, scaler = device_and_precision(args)
    config = model_config(load_tokenizer(args.tokenizer_path), args)
    model = compile_and_wrap(MiniMindForCausalLM(config), args, device, autocast, data)
    objective = NextToken()
    return TrainState(
        args=args, lm_config=config, fingerprint={"samples": 1, "global_batch": 1, "epochs": 1},
        model=model, optimizer=objective.optimizer(model, args), scaler=scaler, autocast=autocast,
        device=device, objective=objective, schedule=lambda update, total_updates, args: args.learning_rate,
    )  # fmt: skip


def measure(args: StageArgs, data: StageDataset) -> Cost:
    """Measure the cost of a stage from updates of two sizes on its data, without torch.compile, and from an
    evaluation."""
    state = new_state(args.model_copy(update={"use_compile": False}), data)
    model = state.model
    most = MEASURED_TOKENS * (GPU_FACTOR if state.device.type == "cuda" else 1)
    large, small = first_batch(data, most), first_batch(data, most // 4)
    tokens, small_tokens = len(large["input_ids"]), len(small["input_ids"])
    activation_bytes_per_token = (
        activation_bytes(model, to_device(large, state.device), state.autocast) / tokens
    )

    seconds, small_seconds = update_seconds(state, large), update_seconds(state, small)
    update = 0.0
    if tokens > small_tokens:  # the straight line through both points
        update = (small_seconds * tokens - seconds * small_tokens) / (tokens - small_tokens)
        update = min(max(0.0, update), seconds)
    begin = time.perf_counter()
    evaluate(state, [large])
    eval_seconds_per_token = (time.perf_counter() - begin) / tokens
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(
        parameters, (seconds - update) / tokens, update, eval_seconds_per_token, activation_bytes_per_token
    )


def free_what_was_measured() -> None:
    """Free the GPU memory of the measured models, so that another process can use it."""
    gc.collect()
    torch.cuda.empty_cache()


def micro_batches_that_fit(args: StageArgs, data: StageDataset, memory: float) -> Iterator[tuple[int, int]]:
    """Yield sizes of micro-batches (in items) whose update fits into `memory` bytes of a GPU, with the peak
    in bytes. They are found by trial: first a small part of the update, then twice as many items each time,
    up to all.

    A size is tried only if the sizes before predict that it fits, because a GPU whose memory ran out may fail
    later."""
    state = new_state(args, data)
    held = torch.cuda.memory_allocated(state.device)  # predicted by the weights alone
    update_items = args.batch_size * args.accumulation_steps
    before: list[tuple[int, int]] = []  # tokens and peak of each micro-batch that was run
    for halvings in reversed(range(update_items.bit_length())):
        items = update_items >> halvings
        # the longest item, and others spread over the data
        numbers = [int(data.item_tokens.argmax()), *(i * len(data) // items for i in range(1, items))]
        micro_batches = [data.collate([data[number] for number in numbers])] * min(2, update_items // items)
        tokens = len(micro_batches[0]["input_ids"])
        if before and peak_of(tokens, [(0, held), *before]) > memory:
            return
        torch.cuda.reset_peak_memory_stats(state.device)
        time_updates(state, repeat(micro_batches), updates=2)
        peak = torch.cuda.max_memory_allocated(state.device)
        if before and peak > memory:
            return
        before.append((tokens, peak))
        yield items, peak
        state.optimizer.zero_grad()


def peak_of(tokens: int, found: list[tuple[int, int]]) -> float:
    """The predicted peak of a micro-batch of this many tokens, by linear extrapolation from the last two
    (tokens, peak) in `found`."""
    (few, low), (many, high) = found[-2:]
    return high + (high - low) * (tokens - many) / max(1, many - few)


def first_batch(data: StageDataset, tokens: int) -> Batch:
    """A flat batch of about this many tokens (at least one item), from items spread over the data."""
    count = min(len(data), max(1, round(tokens / data.mean_tokens)))
    return data.collate([data[i * len(data) // count] for i in range(count)])


def update_seconds(state: TrainState, batch: Batch) -> float:
    """Seconds of an update on this batch: the median of several, after a warm-up update."""
    time_updates(state, repeat([batch]))
    seconds: list[float] = []
    while len(seconds) < MIN_UPDATES or (len(seconds) < MAX_UPDATES and sum(seconds) < MIN_SECONDS):
        seconds.append(time_updates(state, repeat([batch]))[0])
    return median(seconds)


def activation_bytes(model: nn.Module, batch: Batch, autocast: AbstractContextManager) -> int:
    """Bytes that a forward pass keeps for the backward pass, without the parameters."""
    # size of each storage, counted once however many tensors are views of it
    sizes = {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with autocast, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        next_token_loss(model, batch)
    return sum(sizes.values())
