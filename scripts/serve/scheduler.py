"""One thread that decodes the answers of all requests together, each request joining and leaving between two steps.

A request is a `Job`. Its texts go to `Job.notify`, which is called in this thread and must not wait. A step that fails
ends the jobs that are in it; the thread goes on.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.errors import reason, warn
from model.generation import Answer, Decoder
from model.sampling import Sampling
from scripts.serve.text import TextStream


class QueueFull(Exception):
    """As many jobs wait as may wait."""


class Piece(NamedTuple):
    """News of one answer of a job. finish: "stop", "length" or, after a failed step, "error"."""

    number: int  # of the answer in its job
    text: str
    tokens: int  # of the answer so far
    finish: str | None


@dataclass(eq=False)
class Job:
    """A prompt and how to answer it, once for each sampling."""

    prompt: list[int]
    samplings: list[Sampling]
    max_new_tokens: int
    notify: Callable[[Piece], None]
    stops: tuple[str, ...] = ()
    streams: bool = True  # whether it wants the text as it is written, or each answer as a whole
    cancelled: bool = False


@dataclass(eq=False)
class Writing:
    """An answer that is being written."""

    job: Job
    number: int
    text: TextStream
    unsent: list[str] = field(default_factory=list)


class Scheduler:
    """Decodes jobs in the order in which they came; at most `max_queue` of them wait for a place."""

    def __init__(self, decoder: Decoder, tokenizer: Any, max_queue: int):
        self.decoder, self.tokenizer, self.max_queue = decoder, tokenizer, max_queue
        self.waiting: deque[Job] = deque()
        self.writing: dict[Answer, Writing] = {}
        self.changed = threading.Condition()
        self.closing = False
        self.thread = threading.Thread(target=self._run, name="decoder", daemon=True)
        self.thread.start()

    def submit(self, *jobs: Job) -> None:
        """Queue jobs, all or none; each may have as many answers as there are slots.

        Raises:
            QueueFull: so many may not wait.
        """
        with self.changed:
            places = max(0, self.decoder.slots - len(self.writing))
            if self.closing or len(self.waiting) + len(jobs) > places + self.max_queue:
                raise QueueFull
            self.waiting.extend(jobs)
            self.changed.notify()

    def cancel(self, *jobs: Job) -> None:
        """Stop writing the answers of jobs and free their places, at the next step."""
        with self.changed:
            for job in jobs:
                job.cancelled = True
            self.changed.notify()

    def close(self) -> None:
        """Drop all jobs and end the thread."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()

    def _run(self) -> None:
        while self._admit():
            try:
                advanced = self.decoder.step()
            except Exception as error:
                self._fail(error)
                continue
            for answer in advanced:
                self._tell(answer)

    def _admit(self) -> bool:
        """Begin what there is room for; waits while there is nothing to do. False when the scheduler is closed."""
        with self.changed:
            while not self.closing:
                self._exchange()
                if self.writing:
                    return True
                self.changed.wait()
        return False

    def _exchange(self) -> None:
        """Drop cancelled jobs, and begin waiting ones in their order."""
        for answer, writing in list(self.writing.items()):
            if writing.job.cancelled:
                self._leave(answer)
        while self.waiting and (self.waiting[0].cancelled or len(self.waiting[0].samplings) <= self.decoder.free):
            self._begin(self.waiting.popleft())

    def _begin(self, job: Job) -> None:
        if job.cancelled:
            return
        try:
            answers = self.decoder.add(job.prompt, job.samplings, job.max_new_tokens)
        except ValueError as error:  # whoever queued it has not looked
            warn(f"a request was not answered: {reason(error)}")
            for number in range(len(job.samplings)):
                self._notify(job, Piece(number, "", 0, "error"))
            return
        for number, answer in enumerate(answers):
            self.writing[answer] = Writing(job, number, TextStream(self.tokenizer, job.stops))

    def _tell(self, answer: Answer) -> None:
        """Send the text of the answer's last token, if it is time to."""
        writing = self.writing[answer]
        job, text = writing.job, writing.text
        if answer.finish != "stop":  # then the last token is an end token
            writing.unsent.append(text.push(answer.tokens[-1]))
        finish = "stop" if text.stopped else answer.finish
        if finish and not text.stopped:
            writing.unsent.append(text.end())
            finish = "stop" if text.stopped else finish
        if finish:
            self._leave(answer)
        new = "".join(writing.unsent) if job.streams or finish else ""
        if new or finish:
            writing.unsent = []
            self._notify(job, Piece(writing.number, new, len(answer.tokens), finish))

    def _leave(self, answer: Answer) -> None:
        self.decoder.remove(answer)
        del self.writing[answer]

    def _notify(self, job: Job, piece: Piece) -> None:
        try:
            job.notify(piece)
        except Exception:  # nobody listens any more
            job.cancelled = True

    def _fail(self, error: Exception) -> None:
        """End all jobs of a step that failed."""
        warn(f"a step of the decoder failed and its requests with it: {reason(error)}")
        failed, self.writing = self.writing, {}
        for answer, writing in failed.items():
            self._notify(writing.job, Piece(writing.number, "", len(answer.tokens), "error"))
        try:
            self.decoder.clear()
        except Exception as again:
            warn(f"the decoder cannot be cleared: {reason(again)}")
