"""What becomes of requests when the decoder fails, or is closed: each gets its end, whatever happens."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from model.generation import Decoder
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling
from scripts.serve import scheduler as scheduling
from scripts.serve.scheduler import Job, Progress, Scheduler
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


def test_it_is_busy_also_while_a_prompt_is_read(scheduler, tokenizer, monkeypatch):
    """So its model is not dropped meanwhile."""
    add, begins, goes_on = scheduler.decoder.add, threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        begins.set()
        assert goes_on.wait(20)
        return add(*args)

    monkeypatch.setattr(scheduler.decoder, "add", slow)
    request = Request(tokenizer.encode("short", add_special_tokens=False))
    scheduler.submit(request.job)
    assert begins.wait(20) and scheduler.busy
    goes_on.set()
    assert request.finished() == {"stop"}


def test_a_failing_step_ends_what_is_written_and_a_failing_prompt_its_job_alone(tokenizer, monkeypatch):
    """The next request is answered, from rows that are free again."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=1)).eval()
    decoder, fails = Decoder(model, 4, 256, []), threading.Event()
    hidden = decoder._hidden

    def failing(row: int, tokens: Any, positions: Any) -> Any:
        if tokens.shape[1] == 1 and fails.is_set():
            fails.clear()
            raise torch.OutOfMemoryError
        if tokens.shape[1] == 9:
            raise RuntimeError("a prompt of nine tokens")
        return hidden(row, tokens, positions)

    monkeypatch.setattr(decoder, "_hidden", failing)
    scheduler = Scheduler(decoder, tokenizer, 8)
    try:
        fails.set()
        first = Request([5, 6, 7], 3, 20)
        scheduler.submit(first.job)
        assert first.finished() == {"memory"}
        asked = [Request([8, 9], 2, 200), Request([5] * 9, 2, 20), Request([5, 6, 7], 1, 3)]
        scheduler.submit(*(one.job for one in asked))
        assert [one.finished() for one in asked] == [{"length"}, {"error"}, {"length"}]
        assert decoder.free == 4
    finally:
        scheduler.close()
