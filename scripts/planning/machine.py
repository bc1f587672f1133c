"""What training a model costs on this machine: seconds and bytes, measured on the user's data."""

import gc
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import repeat
from statistics import median

import psutil
import torch
from torch import Tensor, nn

from common.settings import USUAL_DECAY, StageArgs
from dataset.lm_dataset import StageDataset
from dataset.token_cache import load_tokenizer
from scripts.timing import time_updates
from trainer.devices.device import device_and_precision
from trainer.loop import evaluate
from trainer.objectives.next_token import Batch, NextToken, next_token_loss, to_device
from trainer.run.state import TrainState
from trainer.stage import compile_and_wrap
from trainer.weights.config import model_config

USABLE = 0.8  # share of the free memory
STATE = 16  # bytes per parameter: weight, gradient and two moments of AdamW, in float32
LIBRARIES = 0.6e9  # bytes of a process without a model
LARGE_UPDATE = 2048  # tokens of the larger update that is measured
ON_GPU = 8  # times as many: few keep it no busier than none
MIN_UPDATES, MAX_UPDATES, ENOUGH_SECONDS = 3, 20, 2.0


@dataclass(frozen=True)
class Cost:
    """What training a model costs; zeros before it is measured."""

    parameters: int = 0
    token: float = 0.0  # seconds of forward and backward pass per token
    update: float = 0.0  # seconds of an update beside them: the optimizer
    eval_token: float = 0.0  # seconds of an evaluation per token
    kept: float = 0.0  # bytes per token of a micro-batch, for the backward pass

    def speed(self, tokens: float) -> float:
        """Tokens per second in updates of so many tokens."""
        return tokens / (tokens * self.token + self.update)

    def memory(self, tokens: float) -> float:
        """Bytes with micro-batches of so many tokens."""
        return state_bytes(self.parameters) + self.kept * tokens


def state_bytes(parameters: float) -> float:
    """Bytes of a process with weights, gradients and AdamW's state."""
    return LIBRARIES + STATE * parameters


def free_memory(device: torch.device) -> float:
    """Bytes that training may use."""
    if device.type == "cuda":
        return USABLE * torch.cuda.mem_get_info(device)[0]
    return USABLE * psutil.virtual_memory().available


def new_state(args: StageArgs, data: StageDataset) -> TrainState:
    """A new model of a stage, ready to be trained; --use_compile 1 compiles it."""
    from model.model_minimind import MiniMindForCausalLM

    args = args.model_copy(update={"weight_decay": USUAL_DECAY})  # whatever it will be, it takes as long
    device, autocast, scaler = device_and_precision(args)
    config = model_config(load_tokenizer(args.tokenizer_path), args)
    model = compile_and_wrap(MiniMindForCausalLM(config), args, device, autocast, data)
    objective = NextToken()
    return TrainState(
        args=args, lm_config=config, run={"samples": 1, "global_batch": 1, "epochs": 1},
        model=model, optimizer=objective.optimizer(model, args), scaler=scaler, autocast=autocast,
        device=device, objective=objective, schedule=lambda update, total_updates, args: args.learning_rate,
    )  # fmt: skip


def measure(args: StageArgs, data: StageDataset) -> Cost:
    """The cost of a stage: of updates of two sizes on its data, without torch.compile, and an evaluation."""
    state = new_state(args.model_copy(update={"use_compile": False}), data)
    model = state.model
    most = LARGE_UPDATE * (ON_GPU if state.device.type == "cuda" else 1)
    large, small = first_batch(data, most), first_batch(data, most // 4)
    tokens, small_tokens = len(large["input_ids"]), len(small["input_ids"])
    kept = kept_bytes(model, to_device(large, state.device), state.autocast) / tokens

    seconds, small_seconds = update_seconds(state, large), update_seconds(state, small)
    update = 0.0
    if tokens > small_tokens:  # the line through both
        update = (small_seconds * tokens - seconds * small_tokens) / (tokens - small_tokens)
        update = min(max(0.0, update), seconds)
    begin = time.perf_counter()
    evaluate(state, [large])
    eval_token = (time.perf_counter() - begin) / tokens
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, (seconds - update) / tokens, update, eval_token, kept)


def micro_batch_that_fits(args: StageArgs, data: StageDataset, memory: float) -> tuple[int, int]:
    """Items of the largest micro-batch with which so many bytes of a GPU hold an update, found by making
    some: all items of the update, else half of them, a quarter ...; and the bytes at its peak."""
    gc.collect()  # models that were measured before
    state = new_state(args, data)
    of_update = items = args.batch_size * args.accumulation_steps
    while True:
        window = [batch_of(data, items)] * min(2, of_update // items)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(state.device)
        try:
            time_updates(state, repeat(window), updates=2)
            peak = torch.cuda.max_memory_allocated(state.device)
            if peak <= memory or items == 1:
                return items, peak
        except torch.OutOfMemoryError:
            if items == 1:
                raise
        state.optimizer.zero_grad()
        items //= 2


def batch_of(data: StageDataset, count: int) -> Batch:
    """The flat batch of so many items: the longest, and others spread over the data."""
    numbers = [int(data.item_tokens.argmax()), *(i * len(data) // count for i in range(1, count))]
    return data.collate([data[number] for number in numbers])


def first_batch(data: StageDataset, tokens: int) -> Batch:
    """The flat batch of items spread over the data, of about so many tokens, at least one item."""
    count = min(len(data), max(1, round(tokens / data.mean_tokens)))
    return data.collate([data[i * len(data) // count] for i in range(count)])


def update_seconds(state: TrainState, batch: Batch) -> float:
    """Seconds of an update on this batch: the median of some, after a first one."""
    time_updates(state, repeat([batch]))
    seconds: list[float] = []
    while len(seconds) < MIN_UPDATES or (len(seconds) < MAX_UPDATES and sum(seconds) < ENOUGH_SECONDS):
        seconds.append(time_updates(state, repeat([batch]))[0])
    return median(seconds)


def kept_bytes(model: nn.Module, batch: Batch, autocast: AbstractContextManager) -> int:
    """Bytes that a forward pass keeps for the backward pass, without the parameters."""
    # of each memory its size, once, however many tensors look into it
    sizes = {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with autocast, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        next_token_loss(model, batch)
    return sum(sizes.values())
