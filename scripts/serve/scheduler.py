"""One thread that decodes the answers of all requests together, each request joining and leaving between two
steps. Without requests it ends, and with it the threads that torch started for it, so that they do not slow
down those of another model (see `in_own_thread` in models.py).

A request is a `Job`. Its texts go to `Job.notify`, which is called in this thread and must not wait. A step
that fails is repeated job by job: those that fail alone end with an error, the others and the thread go on.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.errors import reason, warn
from model.answers import TextStream
from model.finite_decoder import NotFinite
from model.generation import Answer, Decoder
from model.sampling import Sampling, TokenLogprob
from trainer.run.errors import is_out_of_memory

IDLE_SECONDS = 1.0  # that the thread waits for another request before it ends


class QueueFull(Exception):
    """As many jobs wait as may wait."""


class Progress(NamedTuple):
    """News of one answer of a job. finish: "stop", "length" or, if it failed, "memory", "not_finite" or
    "error"."""

    number: int  # of the answer
    text: str
    tokens: int  # of the answer so far
    finish: str | None
    logprobs: Sequence[TokenLogprob] = ()  # of the tokens that this text consists of


@dataclass(eq=False)
class Job:
    """A prompt and how to answer it, once for each sampling."""

    prompt: list[int]
    samplings: list[Sampling]
    max_new_tokens: int
    notify: Callable[[Progress], None]
    first: int = 0  # number of the first answer in what is reported
    stops: tuple[str, ...] = ()
    streams: bool = True  # whether it wants the text as it is written, or each answer as a whole
    top: int | None = None  # as that of `Decoder.add`
    cancelled: bool = False

    @property
    def numbers(self) -> range:
        """The numbers of its answers."""
        return range(self.first, self.first + len(self.samplings))


@dataclass(eq=False)
class ActiveAnswer:
    """An answer that is being written, and what its client has not been sent yet."""

    job: Job
    number: int
    text: TextStream
    unsent: str = ""
    sent: int = 0  # tokens whose log-probabilities were sent

    def news(self, answer: Answer) -> Progress | None:
        """Take the answer's last token; returns what to send now, if anything."""
        self.unsent += self.text.take(answer)
        finish = "stop" if self.text.stopped else answer.finish
        if not finish and not (self.job.streams and self.unsent):
            return None
        tokens = self.text.shown_tokens
        if finish and not self.text.stopped:
            tokens = len(self.text.starts)  # also the last ones without text
        logprobs = answer.details[self.sent : tokens]
        news = Progress(self.number, self.unsent, len(answer.tokens), finish, logprobs)
        self.unsent, self.sent = "", tokens
        return news


class Scheduler:
    """Decodes jobs in the order in which they came; at most `max_queue` of them wait for a place."""

    def __init__(self, decoder: Decoder, tokenizer: Any, max_queue: int):
        self.decoder, self.tokenizer, self.max_queue = decoder, tokenizer, max_queue
        self.waiting: deque[Job] = deque()
        self.writing: dict[Answer, ActiveAnswer] = {}
        self.changed = threading.Condition()
        self.closing = self.running = False
        self.thread = threading.Thread()  # the last one; started while there are requests

    def submit(self, *jobs: Job) -> None:
        """Queue jobs, all or none; each may have as many answers as there are slots. Raises QueueFull if so
        many may not wait."""
        with self.changed:
            places = max(0, self.decoder.slots - len(self.writing))
            if self.closing or len(self.waiting) + len(jobs) > places + self.max_queue:
                raise QueueFull
            self.waiting.extend(jobs)
            self.changed.notify()
            if not self.running:
                self.running = True
                self.thread = threading.Thread(target=self._run, name="decoder", daemon=True)
                self.thread.start()

    def cancel(self, *jobs: Job) -> None:
        """Stop writing the answers of jobs and free their places, at the next step."""
        with self.changed:
            for job in jobs:
                job.cancelled = True
            self.changed.notify()

    def close(self) -> None:
        """End all jobs with an error, and the thread."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        if self.running:
            self.thread.join()

    @property
    def alive(self) -> bool:
        """Whether it answers: its thread can be started, or has not died."""
        with self.changed:
            return not self.closing and (not self.running or self.thread.is_alive())

    @property
    def busy(self) -> bool:
        """Whether there are jobs."""
        with self.changed:
            return bool(self.writing or self.waiting)

    def _run(self) -> None:
        try:
            while True:
                try:
                    if not self._admit():
                        break
                    self._advance(self.decoder.decode)
                    self._advance(self.decoder.prefill)
                except Exception as error:  # of no job in particular: the thread must go on
                    self._fail(list(self.writing), error)
        except Exception as error:
            warn(f"no more requests are answered, since the decoder cannot be cleared: {reason(error)}")
            self.closing = True
        with self.changed:
            if not self.closing:  # there was nothing to do; by now another thread may have begun
                return
            jobs = [(writing.job, writing.number) for writing in self.writing.values()]
            jobs += [(job, number) for job in self.waiting for number in job.numbers]
            self.writing.clear()
            self.waiting.clear()
        for job, number in jobs:
            self._notify(job, Progress(number, "", 0, "error"))

    def _admit(self) -> bool:
        """Drop cancelled jobs and begin what there is room for, in order; waits a while if there is nothing
        to do. Whether there is something."""
        with self.changed:
            while not self.closing:
                for answer in [answer for answer, writing in self.writing.items() if writing.job.cancelled]:
                    self._leave(answer)
                while self.waiting and (
                    self.waiting[0].cancelled or len(self.waiting[0].samplings) <= self.decoder.free
                ):
                    self._begin(self.waiting.popleft())
                if self.writing:
                    return True
                if not self.changed.wait(IDLE_SECONDS) and not self.waiting:
                    self.running = False
                    return False
        return False

    def _advance(self, phase: Callable[..., list[Answer]]) -> None:
        """Prefill or decode for all answers; if that fails, for those of each job alone."""
        advanced: list[Answer] = []
        try:
            advanced = phase()
        except Exception as error:
            if self.decoder.broken:
                self._fail([], error)
            for job in {writing.job: None for writing in self.writing.values()}:
                answers = [answer for answer, writing in self.writing.items() if writing.job is job]
                try:
                    advanced += phase(answers)
                except Exception as own_error:
                    self._fail(answers, own_error)
        for answer in advanced:
            try:
                if answer in self.writing:
                    self._send(answer)
            except Exception as error:  # its text cannot be decoded
                self._fail([answer], error)

    def _send(self, answer: Answer) -> None:
        """Send what the answer's last token brings, if it is time to."""
        writing = self.writing[answer]
        news = writing.news(answer)
        if news is None:
            return
        if news.finish:
            self._leave(answer)
        self._notify(writing.job, news)

    def _begin(self, job: Job) -> None:
        if job.cancelled:
            return
        try:
            answers = self.decoder.add(job.prompt, job.samplings, job.max_new_tokens, job.top)
        except Exception as error:  # the request was not checked before
            warn(f"a request was not answered: {reason(error)}")
            for number in job.numbers:
                self._notify(job, Progress(number, "", 0, "error"))
            return
        for number, answer in zip(job.numbers, answers, strict=True):
            self.writing[answer] = ActiveAnswer(job, number, TextStream(self.tokenizer, job.stops))

    def _leave(self, answer: Answer) -> None:
        self.decoder.remove(answer)
        del self.writing[answer]

    def _notify(self, job: Job, progress: Progress) -> None:
        try:
            job.notify(progress)
        except Exception:  # nobody listens any more
            job.cancelled = True

    def _fail(self, answers: list[Answer], error: Exception) -> None:
        """End answers with an error, all of them if the decoder is broken; if none are left, clear the
        decoder."""
        warn(f"a request failed while its answer was written: {reason(error)}")
        answers = list(self.writing) if self.decoder.broken else answers
        finish = "error"
        if is_out_of_memory(error):
            finish = "memory"
        elif isinstance(error, NotFinite):
            finish = "not_finite"
        failed = {answer: self.writing.pop(answer) for answer in answers if answer in self.writing}
        for answer, writing in failed.items():
            self._notify(writing.job, Progress(writing.number, "", len(answer.tokens), finish))
        if not self.writing:
            self.decoder.clear()
        for answer in failed:
            self.decoder.remove(answer)
