"""One thread that does all of torch's work: it loads models and decodes the answers of all requests together,
each joining and leaving between two steps.

    route -> Job -> DecodingThread.inbox -> LoadedModel.waiting -> .writing -> Job.progress -> route

One thread, since the threads among which torch divides an operator belong to the thread that calls it: with
several callers they outnumber the cores, and decoding took twice the time.
"""

import asyncio
import queue
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import reason, warn
from model.answers import TextStream
from model.generation import READ_AT_ONCE, Answer, Decoder
from model.sampling import Sampling, default_sampling
from scripts.serve.models import Models
from scripts.serve.protocol import ApiError, GenerationRequest


class Progress(NamedTuple):
    """New text of one answer of a job. tokens: of the answer so far. finish: why it ended, "stop" or
    "length"; None while it is written."""

    number: int
    text: str
    tokens: int
    finish: str | None


@dataclass(eq=False)
class Job:
    """A request for answers of the model in `path`, made in the event loop.

    make_prompts: the tokens of its prompts, from a tokenizer. progress: of its answers; the first one, of no
    text, says that the prompts are accepted; an ApiError ends it.
    """

    asked: GenerationRequest
    path: Path
    make_prompts: Callable[[Any], list[list[int]]]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    progress: "asyncio.Queue[Progress | ApiError]" = field(default_factory=asyncio.Queue)
    prompt_tokens: int = 0
    cancelled: bool = False

    def send(self, progress: "Progress | ApiError") -> None:
        """Hand progress to the event loop; called in the decoding thread."""
        self.loop.call_soon_threadsafe(self.progress.put_nowait, progress)

    async def next(self) -> Progress:
        """The next progress of an answer. Raises ApiError."""
        progress = await self.progress.get()
        if isinstance(progress, ApiError):
            raise progress
        return progress

    def samplings(self, default: Sampling) -> list[Sampling]:
        """How each answer to a prompt is drawn; the first one has the seed itself, so it does not depend on
        `n`. default: for what the request leaves out."""
        given = self.asked.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
        if self.asked.top_k == -1:  # vLLM's name for all tokens
            given["top_k"] = 0
        seed = secrets.randbits(63) if self.asked.seed is None else self.asked.seed
        seeds = [seed + number * 0x9E3779B97F4A7C15 for number in range(self.asked.n)]
        return [replace(default, **given, seed=seed) for seed in seeds]


@dataclass(eq=False)
class ActiveAnswer:
    """An answer that is being written. unsent: its text while its client wants it as a whole."""

    job: Job
    number: int
    text: TextStream
    unsent: str = ""


class LoadedModel:
    """A model in memory with its requests. waiting: (job, number of its first answer, prompt)."""

    def __init__(self, model: Any, tokenizer: Any, slots: int, context: int, max_new_tokens: int):
        self.tokenizer, self.max_new_tokens = tokenizer, max_new_tokens
        self.sampling = default_sampling(model)
        self.decoder = Decoder(model, slots, context, [tokenizer.eos_token_id])
        self.waiting: deque[tuple[Job, int, list[int]]] = deque()
        self.writing: dict[Answer, ActiveAnswer] = {}

    @property
    def busy(self) -> bool:
        """Whether it has requests."""
        return bool(self.waiting or self.writing)

    def queue(self, job: Job) -> None:
        """Let the prompts of a job wait for places. Raises ApiError if they cannot be answered."""
        prompts = job.make_prompts(self.tokenizer)
        job.prompt_tokens = sum(map(len, prompts))
        self.waiting += [(job, job.asked.n * number, prompt) for number, prompt in enumerate(prompts)]
        job.send(Progress(0, "", 0, None))

    def work(self) -> None:
        """Drop what is cancelled, begin answers while there are places, and write a token of each. A step
        that fails ends all of them."""
        for answer in [answer for answer, active in self.writing.items() if active.job.cancelled]:
            self.leave(answer)
        self.begin_answers()
        if not self.writing:
            return
        try:
            for answer in self.decoder.step():
                self.send(answer)
        except Exception as error:
            fail([active.job for active in self.writing.values()], error)

    def begin_answers(self) -> None:
        """Begin what waits, in order, but read only some prompts between two steps."""
        tokens_read = 0
        while self.waiting and tokens_read < READ_AT_ONCE:
            job, first, prompt = self.waiting[0]
            if not job.cancelled and job.asked.n > self.decoder.free:
                return
            self.waiting.popleft()
            if job.cancelled:
                continue
            longest = min(self.max_new_tokens, self.decoder.length - len(prompt))
            if job.asked.max_tokens is not None:
                longest = min(longest, job.asked.max_tokens)
            try:
                answers = self.decoder.add(prompt, job.samplings(self.sampling), longest)
                for number, answer in enumerate(answers, first):
                    text = TextStream(self.tokenizer, job.asked.stop)
                    self.writing[answer] = ActiveAnswer(job, number, text)
                    self.send(answer)
            except Exception as error:
                fail([job], error)
            tokens_read += len(prompt)

    def send(self, answer: Answer) -> None:
        """Send the text of an answer's last token, or at its end all of it if its client wants the whole."""
        active = self.writing[answer]
        active.unsent += active.text.take(answer)
        finish = "stop" if active.text.stopped else answer.finish
        if finish:
            self.leave(answer)
        if finish or (active.job.asked.stream and active.unsent):
            active.job.send(Progress(active.number, active.unsent, len(answer.tokens), finish))
            active.unsent = ""

    def leave(self, answer: Answer) -> None:
        """Stop writing an answer."""
        self.decoder.remove(answer)
        del self.writing[answer]


def fail(jobs: Iterable[Job], error: Exception) -> None:
    """End jobs with an error; their answers leave before the next step."""
    warn(f"a request failed while its answer was written: {reason(error)}")
    for job in dict.fromkeys(jobs):
        job.cancelled = True
        job.send(ApiError(f"The server failed: {reason(error)}", 500))


class DecodingThread:
    """The thread, and the models that it has loaded, the least recently used first."""

    def __init__(self, models: Models, slots: int, context: int, max_new_tokens: int, max_models: int):
        self.models, self.slots, self.context = models, slots, context
        self.max_new_tokens, self.max_models = max_new_tokens, max_models
        self.loaded: dict[Path, LoadedModel] = {}
        self.inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.postponed: list[Job] = []  # their model finds no room beside busy ones
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="decoding")
        self.thread.submit(self.load, models.path).result()  # what is wrong with it ends the program
        self.running = self.thread.submit(self.run)

    def health(self) -> dict[str, Any]:
        """Whether it answers, and how many answers are being written and how many requests wait."""
        loaded = list(self.loaded.values())
        waiting = self.inbox.qsize() + len(self.postponed) + sum(len(model.waiting) for model in loaded)
        writing = sum(len(model.writing) for model in loaded)
        return {"alive": not self.running.done(), "writing": writing, "waiting": waiting, "slots": self.slots}

    def close(self) -> None:
        """End the thread after its step."""
        self.inbox.put(None)
        self.thread.shutdown()

    def run(self) -> None:
        """Take requests and write answers until `close`; models take turns step by step."""
        while True:
            jobs, self.postponed = self.postponed, []
            is_idle = not jobs and not any(model.busy for model in self.loaded.values())
            while is_idle or not self.inbox.empty():
                job = self.inbox.get()
                if job is None:
                    return
                jobs.append(job)
                is_idle = False
            for job in jobs:
                self.begin(job)
            for model in self.loaded.values():
                model.work()

    def begin(self, job: Job) -> None:
        """Queue a job at its model, which is loaded if need be."""
        if job.cancelled:
            return
        if job.path not in self.loaded:
            if not self.make_room():
                self.postponed.append(job)
                return
            try:
                self.load(job.path)
            except Exception as error:
                warn(f"the model {job.path.stem} cannot be loaded: {reason(error)}")
                message = f"The model '{job.path.stem}' cannot be loaded; the server's log says why."
                job.send(ApiError(message, 500, "model", "model_not_loadable"))
                return
        model = self.loaded.pop(job.path)
        self.loaded[job.path] = model  # the last one used stands last
        try:
            model.queue(job)
        except ApiError as error:
            job.send(error)
        except Exception as error:
            fail([job], error)

    def make_room(self) -> bool:
        """Drop idle models until there is room for another; False if all are busy."""
        idle = [path for path, model in self.loaded.items() if not model.busy]
        while len(self.loaded) >= self.max_models and idle:
            del self.loaded[idle.pop(0)]
        return len(self.loaded) < self.max_models

    def load(self, path: Path) -> None:
        """Load a model. Raises what its loading raises."""
        model, tokenizer = self.models.load(path)
        limits = self.slots, self.context, self.max_new_tokens
        self.loaded[path] = LoadedModel(model, tokenizer, *limits)
