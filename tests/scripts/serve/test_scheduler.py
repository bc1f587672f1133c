"""What becomes of requests when the decoder fails, or is closed: each gets its end, whatever happens."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from model.generation import Decoder
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling
from model.steps import KeyValueCache
from scripts.serve import scheduler as scheduling
from scripts.serve.scheduler import Job, Progress, QueueFull, Scheduler
from tests.conftest import ROOT
from tests.scripts.serve.scripted_decoder import SAYS, ScriptedDecoder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "model")


@pytest.fixture
def scheduler(tokenizer) -> Iterator[Scheduler]:
    """Of two places, and with an answer that lasts until it is stopped."""
    decoder = ScriptedDecoder(SimpleNamespace(tokenizer=tokenizer), 2, 64, {2})
    SAYS["long"] = "word " * 10**5
    scheduler = Scheduler(decoder, tokenizer, 8)  # type: ignore[arg-type]
    yield scheduler
    scheduler.close()
    SAYS.clear()


class Request:
    """A job of `n` answers; `ends` has how each ended."""

    def __init__(self, prompt: list[int], n: int = 1, max_new_tokens: int = 10**6):
        self.ends: dict[int, str] = {}
        self.begun, self.done = threading.Event(), threading.Event()
        self.job = Job(prompt, [Sampling(seed=i) for i in range(n)], max_new_tokens, self.take)

    def take(self, progress: Progress) -> None:
        self.begun.set()
        if progress.finish:
            self.ends[progress.number] = progress.finish
        if self.ends.keys() == {*self.job.numbers}:
            self.done.set()

    def finished(self) -> set[str]:
        assert self.done.wait(20)
        return {*self.ends.values()}


def requests(tokenizer: Any, scheduler: Scheduler) -> list[Request]:
    """Two that are being answered, and two that wait."""
    prompt = tokenizer.encode("long", add_special_tokens=False)
    asked = [Request(prompt, n) for n in (1, 1, 2, 1)]
    scheduler.submit(*(one.job for one in asked))
    assert all(one.begun.wait(20) for one in asked[:2])
    return asked


def test_when_the_decoder_cannot_even_be_cleared_every_request_ends(scheduler, tokenizer, monkeypatch):
    asked = requests(tokenizer, scheduler)

    def lost(*_: Any) -> Any:
        raise RuntimeError("the device is lost")

    for name in ("remove", "clear", "decode"):
        monkeypatch.setattr(scheduler.decoder, name, lost)
    assert [one.finished() for one in asked] == [{"error"}] * 4
    scheduler.thread.join(20)
    with pytest.raises(QueueFull):
        scheduler.submit(Request([1]).job)


def test_closing_ends_every_request(scheduler, tokenizer):
    asked = requests(tokenizer, scheduler)
    scheduler.close()
    assert [one.finished() for one in asked] == [{"error"}] * 4 and not scheduler.busy


@pytest.mark.parametrize("linger", [0.0, 0.002])
def test_the_thread_ends_without_requests_and_another_one_answers_the_next(
    scheduler, tokenizer, monkeypatch, linger
):
    """Requests that come while it ends are answered, too."""
    monkeypatch.setattr(scheduling, "IDLE_SECONDS", linger)
    threads, prompt = set(), tokenizer.encode("short", add_special_tokens=False)
    for number in range(60):
        request = Request(prompt, 1 + number % 2, max_new_tokens=1)
        scheduler.submit(request.job)
        threads.add(scheduler.thread)
        assert request.finished() == {"length"} and scheduler.alive
        time.sleep(0.002 * (number % 3))
    assert len(threads) > 10 and not scheduler.busy
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert scheduler.alive and not scheduler.closing


def test_it_is_busy_also_while_a_request_begins(scheduler, tokenizer, monkeypatch):
    """So its model is not dropped meanwhile: whoever asks waits until the request has begun."""
    add, begins, goes_on = scheduler.decoder.add, threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        begins.set()
        assert goes_on.wait(20)
        return add(*args)

    monkeypatch.setattr(scheduler.decoder, "add", slow)
    scheduler.submit(Request(tokenizer.encode("long", add_special_tokens=False)).job)
    assert begins.wait(20)
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(lambda: scheduler.busy)
        with pytest.raises(TimeoutError):
            busy.result(0.2)
        goes_on.set()
        assert busy.result()


def test_rows_that_cannot_be_moved_end_their_requests_and_the_next_is_answered(tokenizer, monkeypatch):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=1)).eval()
    failures = iter([torch.OutOfMemoryError()])
    moved = KeyValueCache.move

    def failing(*args: Any) -> None:
        for error in failures:
            raise error
        moved(*args)

    monkeypatch.setattr(KeyValueCache, "move", failing)
    scheduler = Scheduler(Decoder(model, 4, 64, []), tokenizer, 8)
    try:
        asked = [Request([5, 6, 7], 1, 3), Request([8, 9], 2, 20)]
        scheduler.submit(*(one.job for one in asked))
        ends = [one.finished() for one in asked]
        assert {"memory"} in ends and ends[0] <= {"memory", "length"}
        again = Request([5, 6, 7], 2, 3)
        scheduler.submit(again.job)
        assert again.finished() == {"length"}
    finally:
        scheduler.close()
