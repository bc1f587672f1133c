"""One thread that decodes the answers of all requests together, each request joining and leaving between two
steps. Without requests it ends, and with it the threads that torch started for it, so that they do not slow
down those of another model (see `in_own_thread` in models.py).

A request is a `Job`. Its texts go to `Job.notify`, which is called in this thread and must not wait. A prompt
that cannot be read ends its job with an error; a step that fails ends all answers that are being written. The
thread goes on.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.errors import reason, warn
from model.answers import TextStream
from model.generation import READ_AT_ONCE, Answer, Decoder, NotFinite
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
        while self._admit():
            try:
                if self.writing:
                    for answer in self.decoder.step():
                        self._send(answer)
            except Exception as error:
                self._fail(list(self.writing), error)
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
        """Drop cancelled jobs and begin what there is room for, in order, but only some prompts between two
        steps; waits a while if there is nothing to do. Whether there is something."""
        with self.changed:
            while not (self.closing or self.writing or self.waiting):
                if not self.changed.wait(IDLE_SECONDS) and not self.waiting:
                    self.running = False
                    return False
            for answer in [answer for answer, writing in self.writing.items() if writing.job.cancelled]:
                self._leave(answer)
        tokens = 0
        while tokens < READ_AT_ONCE and (job := self._next_job()) is not None:
            self._begin(job)
            tokens += len(job.prompt)
        return not self.closing

    def _next_job(self) -> Job | None:
        """The first job that waits, if there is room for its answers; cancelled ones are dropped. It stays
        among those that wait until it is begun."""
        with self.changed:
            while self.waiting and self.waiting[0].cancelled:
                self.waiting.popleft()
            if not self.waiting or len(self.waiting[0].samplings) > self.decoder.free:
                return None
            return self.waiting[0]

    def _send(self, answer: Answer) -> None:
        """Send what the answer's last token brings, if it is time to."""
        writing = self.writing.get(answer)
        if writing is None:
            return
        try:
            news = writing.news(answer)
        except Exception as error:  # its text cannot be decoded
            self._fail([answer], error)
            return
        if news is None:
            return
        if news.finish:
            self._leave(answer)
        self._notify(writing.job, news)

    def _begin(self, job: Job) -> None:
        try:
            answers = self.decoder.add(job.prompt, job.samplings, job.max_new_tokens, job.top)
        except Exception as error:
            with self.changed:
                self.waiting.popleft()
            self._end(job, list(job.numbers), error)
            return
        with self.changed:
            self.waiting.popleft()
            for number, answer in zip(job.numbers, answers, strict=True):
                self.writing[answer] = ActiveAnswer(job, number, TextStream(self.tokenizer, job.stops))
        for answer in answers:
            self._send(answer)

    def _leave(self, answer: Answer) -> None:
        self.decoder.remove(answer)
        del self.writing[answer]

    def _notify(self, job: Job, progress: Progress) -> None:
        try:
            job.notify(progress)
        except Exception:  # nobody listens any more
            job.cancelled = True

    def _fail(self, answers: list[Answer], error: Exception) -> None:
        """End answers with an error."""
        for answer in answers:
            writing = self.writing[answer]
            self._leave(answer)
            self._end(writing.job, [writing.number], error)

    def _end(self, job: Job, numbers: list[int], error: Exception) -> None:
        warn(f"a request failed while its answer was written: {reason(error)}")
        finish = "error"
        if is_out_of_memory(error):
            finish = "memory"
        elif isinstance(error, NotFinite):
            finish = "not_finite"
        for number in numbers:
            self._notify(job, Progress(number, "", 0, finish))
