"""One thread does all of torch's work. It loads models and decodes the answers of all requests together; an
answer may join or leave the batch between any two steps.

    route -> Job -> DecodingThread.inbox -> LoadedModel.tokenising, waiting, writing -> Job.progress -> route

There is only one because torch divides an operator among threads that belong to the calling thread. Several
callers would have more threads than there are cores; decoding took twice the time with them.
"""

import asyncio
import queue
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from common.errors import reason, warn
from model.answers import TextStream
from model.generation import READ_AT_ONCE, Answer, Decoder
from model.sampling import Sampling, default_sampling
from scripts.serve.json_answers import JsonTokens, failure, matcher_of
from scripts.serve.limits import CLIENT_LEAVES, MAX_WAITING, REQUEST_LEAVES, TOKENISE_SECONDS
from scripts.serve.models import Models, Weights, not_found
from scripts.serve.protocol import ApiError, GenerationRequest
from scripts.serve.shares import Shares

SAMPLING_FIELDS = {"temperature", "top_p", "top_k"}
SAMPLING_FIELDS |= {"repetition_penalty", "frequency_penalty", "presence_penalty"}


class Progress(NamedTuple):
    """New text of one answer of a job. tokens: number of the answer's tokens so far. finish: why the answer
    ended, "stop" or "length"; None while it is being generated."""

    number: int
    text: str
    tokens: int
    finish: str | None


@dataclass(eq=False)
class Job:
    """A request for answers of the model in `path`, made in the event loop.

    params: the fields of the request. make_prompts: yields the tokens of its prompts one by one, given a
    tokenizer. client: key of its client. progress: queue of the progress of its answers. The first one is
    empty and says that the prompts are accepted; an ApiError ends the job. prompts: of each prompt that has
    not begun, the number of its first answer and its tokens. matcher: checks the JSON schema of its answers.
    dropped_messages: how many of the oldest messages were dropped because the context had no room. has_begun:
    whether one of its answers has begun.
    """

    params: GenerationRequest
    path: Path
    make_prompts: Callable[[Any], Iterator[list[int]]]
    client: str = ""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    progress: "asyncio.Queue[Progress | ApiError]" = field(default_factory=asyncio.Queue)
    unread: Iterator[list[int]] | None = None  # prompts that are not tokenised yet
    prompts: deque[tuple[int, list[int]]] = field(default_factory=deque)
    tokenised: int = 0  # prompts
    matcher: Any = None
    prompt_tokens: int = 0
    dropped_messages: int = 0
    is_accepted: bool = False
    has_begun: bool = False
    cancelled: bool = False

    def send(self, progress: "Progress | ApiError") -> None:
        """Hand progress to the event loop. Called in the decoding thread."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.progress.put_nowait, progress)

    async def next(self) -> Progress:
        """The next progress of an answer. Raises ApiError."""
        progress = await self.progress.get()
        if isinstance(progress, ApiError):
            raise progress
        return progress

    def forget_prompts(self) -> None:
        """Let the prompts be tokenised again: another model will answer, perhaps with another tokenizer."""
        self.unread, self.matcher = None, None
        self.prompts.clear()
        self.tokenised = self.prompt_tokens = 0

    def samplings(self, default: Sampling) -> list[Sampling]:
        """How each answer to a prompt is sampled. The first answer has the seed itself, so it does not depend
        on `n`. default: for fields that the request leaves out."""
        given = self.params.model_dump(include=SAMPLING_FIELDS, exclude_none=True)
        if self.params.top_k == -1:  # vLLM's name for all tokens
            given["top_k"] = 0
        seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        seeds = [seed + number * 0x9E3779B97F4A7C15 for number in range(self.params.n)]
        samplings = [replace(default, **given, seed=seed) for seed in seeds]
        if self.matcher is None:
            return samplings
        return [replace(each, allowed=JsonTokens(self.matcher.deep_copy())) for each in samplings]


@dataclass(eq=False)
class ActiveAnswer:
    """An answer that is being generated. unsent: its text that has not been sent; if its request does not
    stream, all of its text."""

    job: Job
    number: int
    text: TextStream
    unsent: str = ""


class LoadedModel:
    """A model in memory with its requests.

    tokenising: jobs whose prompts are being tokenised. waiting: jobs that wait for slots, oldest first.
    tokenise_shares: how many seconds of tokenising each client has had. read_shares: how many tokens of
    prompts each client has had read. is_draining: whether it begins no more requests, because another model
    will replace it.
    """

    def __init__(self, model: Any, tokenizer: Any, slots: int, context: int, max_new_tokens: int):
        self.tokenizer, self.max_new_tokens = tokenizer, max_new_tokens
        self.sampling = default_sampling(model)
        self.decoder = Decoder(model, slots, context, [tokenizer.eos_token_id])
        self.tokenising: list[Job] = []
        self.waiting: list[Job] = []
        self.tokenise_shares, self.read_shares = Shares(), Shares()
        self.tokenise_debt = 0.0  # seconds by which tokenising exceeded its time
        self.writing: dict[Answer, ActiveAnswer] = {}
        self.loaded_at, self.is_draining = time.monotonic(), False

    @property
    def busy(self) -> bool:
        """Whether it has requests."""
        return bool(self.tokenising or self.waiting or self.writing)

    @property
    def has_begun(self) -> bool:
        """Whether a request is partly answered. It must be completed by the same weights."""
        return bool(self.writing) or any(job.has_begun for job in self.waiting)

    def work(self) -> None:
        """Drop cancelled jobs, begin answers while slots are free, and generate one token of each answer. If
        the step fails, the jobs of all active answers end with an error."""
        self.waiting = [job for job in self.waiting if not job.cancelled]
        for answer in [answer for answer, active in self.writing.items() if active.job.cancelled]:
            self.leave(answer)
        if not self.is_draining:
            self.tokenise()
        self.begin_answers()
        if not self.writing:
            return
        try:
            for answer in self.decoder.step():
                self.send(answer)
        except Exception as error:
            fail([active.job for active in self.writing.values()], error)

    def tokenise(self) -> None:
        """Tokenise prompts for a moment. The next prompt is one of the client that has had the fewest
        seconds; its requests take turns. While answers are being generated, a call that took too long
        shortens the next one."""
        debt = self.tokenise_debt if self.writing else 0
        end = time.monotonic() + TOKENISE_SECONDS - debt
        while self.tokenising and (start := time.monotonic()) < end:
            job = min(self.tokenising, key=lambda job: self.tokenise_shares.of(job.client))
            self.tokenising.remove(job)
            if job.cancelled:
                continue
            try:
                if job.unread is None:
                    job.unread = job.make_prompts(self.tokenizer)
                    if job.params.schema_of_answer is not None:
                        job.matcher = matcher_of(self.tokenizer, job.params.schema_of_answer)
                prompt = next(job.unread, None)
            except ApiError as error:
                job.send(error)
            except Exception as error:
                fail([job], error)
            else:
                self.take_prompt(job, prompt)
            self.tokenise_shares.charge(job.client, time.monotonic() - start)
        self.tokenise_debt = max(0.0, time.monotonic() - end)

    def take_prompt(self, job: Job, prompt: list[int] | None) -> None:
        """Add the next prompt of a request. None: there are no more prompts, and the request waits for
        slots."""
        if prompt is not None:
            job.prompts.append((job.tokenised * job.params.n, prompt))
            job.tokenised += 1
            job.prompt_tokens += len(prompt)
            self.tokenising.append(job)
            return
        if not job.is_accepted:
            job.is_accepted = True
            job.send(Progress(0, "", 0, None))
        if job.prompts:
            self.waiting.append(job)

    def begin_answers(self) -> None:
        """Begin waiting answers. At most about READ_AT_ONCE tokens of prompts are read between two steps."""
        tokens_read = 0
        while tokens_read < READ_AT_ONCE and (job := self.next_job()):
            first, prompt = job.prompts.popleft()
            job.has_begun = True
            self.read_shares.charge(job.client, len(prompt))
            if not job.prompts:
                self.waiting.remove(job)
            longest = min(self.max_new_tokens, self.decoder.length - len(prompt))
            if job.params.max_tokens is not None:
                longest = min(longest, job.params.max_tokens)
            try:
                answers = self.decoder.add(prompt, job.samplings(self.sampling), longest)
                for number, answer in enumerate(answers, first):
                    text = TextStream(self.tokenizer, job.params.stop, job.params.last_words)
                    self.writing[answer] = ActiveAnswer(job, number, text)
                    self.send(answer)
            except Exception as error:
                fail([job], error)
                self.waiting = [each for each in self.waiting if each is not job]
            tokens_read += len(prompt)

    def next_job(self) -> Job | None:
        """The job whose answers begin next. The client with the fewest slots comes first; if several have as
        few, the one that had the fewest tokens read. Of its jobs, the one with the fewest slots comes first,
        then the oldest. One request always leaves some slots to other requests, and one client to other
        clients."""
        slots, free = self.decoder.slots, self.decoder.free
        if not free or not self.waiting:
            return None
        request_counts = Counter(active.job for active in self.writing.values())
        client_counts = Counter(active.job.client for active in self.writing.values())

        def may_begin(job: Job) -> bool:
            held, client_held, n = request_counts[job], client_counts[job.client], job.params.n
            request_leaves = not held or held + n <= slots - slots // REQUEST_LEAVES
            client_leaves = not client_held or client_held + n <= slots - slots // CLIENT_LEAVES
            return request_leaves and client_leaves and (job.has_begun or not self.is_draining)

        def had(job: Job) -> tuple[float, ...]:
            return client_counts[job.client], self.read_shares.of(job.client), request_counts[job]

        allowed = [job for job in self.waiting if may_begin(job)]
        job = min(allowed, key=had, default=None)
        return job if job is not None and job.params.n <= free else None  # otherwise it waits for more slots

    def send(self, answer: Answer) -> None:
        """Send the new text of an answer. Without streaming, send all of it at its end."""
        active = self.writing[answer]
        active.unsent += active.text.take(answer)
        finish = "stop" if active.text.stopped else answer.finish
        if finish:
            self.leave(answer)
        if finish and (error := failure(answer.sampling)):
            active.job.cancelled = True
            active.job.send(error)
        elif finish or (active.job.params.stream and active.unsent):
            active.job.send(Progress(active.number, active.unsent, len(answer.tokens), finish))
            active.unsent = ""

    def leave(self, answer: Answer) -> None:
        """Remove an answer from the batch."""
        self.decoder.remove(answer)
        del self.writing[answer]


def fail(jobs: Iterable[Job], error: Exception) -> None:
    """End jobs with an error. Their answers leave the batch before the next step."""
    warn(f"a request failed while its answer was generated: {reason(error)}")
    for job in dict.fromkeys(jobs):
        job.cancelled = True
        job.send(ApiError(f"The server failed: {reason(error)}", 500))


class DecodingThread:
    """The thread and the models that it has loaded, the least recently used first. If a weights file is
    replaced, it counts as another model: later requests get the new weights, and earlier requests keep the
    old ones.

    The event loop calls `submit`, `finish`, `end` and `health`; everything else runs in the thread.
    """

    def __init__(self, models: Models, slots: int, context: int, max_new_tokens: int, max_models: int):
        self.models, self.slots, self.context = models, slots, context
        self.max_new_tokens, self.max_models = max_new_tokens, max_models
        self.loaded: dict[Weights, LoadedModel] = {}
        self.newest: dict[Path, Weights] = {}  # the weights for the latest requests
        self.load_shares = Shares()  # seconds of loading models for each client
        self.inbox: queue.SimpleQueue[Job | Literal["drop idle models"] | None] = queue.SimpleQueue()
        self.postponed: list[Job] = []  # jobs whose model is not loaded
        # requests without a complete response; only the event loop uses it
        self.unfinished: dict[Job, None] = {}
        self.is_ending = False
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="decoding")
        if models.path is not None:
            # if it cannot be loaded, the program ends
            self.thread.submit(self.load, self.on_disk(models.path)).result()
        self.running = self.thread.submit(self.run)

    # --- called in the event loop

    def submit(self, job: Job) -> None:
        """Queue a request. Raises ApiError if too many requests wait, or if the server is ending."""
        if self.is_ending or self.running.done():
            raise ApiError("The server is ending.", 503)
        client_count = sum(each.client == job.client for each in self.unfinished)
        most = self.slots + MAX_WAITING
        if len(self.unfinished) >= most or client_count >= self.slots + MAX_WAITING // 2:
            raise ApiError("Too many requests are waiting; try again later.", 429, code="rate_limit_exceeded")
        self.unfinished[job] = None
        self.inbox.put(job)

    def finish(self, job: Job) -> None:
        """Forget a request whose response is complete or whose client has gone."""
        job.cancelled = True
        self.unfinished.pop(job, None)

    def end(self, message: str) -> None:
        """End all requests with an error, which is sent after the text that they already have."""
        self.is_ending = True
        for job in self.unfinished:
            job.cancelled = True
            job.progress.put_nowait(ApiError(message, 503))

    def drop_idle_models(self) -> None:
        """Ask the thread to drop the models without requests from memory. May be called from any thread."""
        self.inbox.put("drop idle models")

    def failure(self) -> str | None:
        """Why the thread has died; None if it has not."""
        error = self.running.exception() if self.running.done() else None
        return None if error is None else reason(error)

    def health(self) -> dict[str, Any]:
        """Whether the thread is alive, how many answers are being generated, and how many requests wait."""
        loaded = list(self.loaded.values())
        waiting = self.inbox.qsize() + len(self.postponed)
        waiting += sum(len(model.tokenising) + len(model.waiting) for model in loaded)
        writing = sum(len(model.writing) for model in loaded)
        return {"alive": not self.running.done(), "writing": writing, "waiting": waiting, "slots": self.slots}

    def close(self) -> None:
        """End the thread after its current step."""
        self.inbox.put(None)
        self.thread.shutdown()

    # --- called in the thread; while a model is loaded, no variable may hold another one

    def run(self) -> None:
        """Take requests and generate answers until `close`. Models take turns step by step."""
        while True:
            is_idle = not self.postponed and not any(model.busy for model in self.loaded.values())
            while is_idle or not self.inbox.empty():
                job = self.inbox.get()
                if job is None:
                    return
                if job == "drop idle models":
                    self.drop_idle()
                    continue
                self.postponed.append(job)
                is_idle = False
            self.give_jobs_to_models()
            self.load_what_is_missing()
            self.work()

    def work(self) -> None:
        """Generate one token of each answer of each model."""
        for model in self.loaded.values():
            model.work()
        self.drop_idle(only_replaced=True)

    def drop_idle(self, only_replaced: bool = False) -> None:
        """Drop the models without requests. only_replaced: only those whose weights were replaced."""
        for weights, model in list(self.loaded.items()):
            is_newest = self.newest.get(weights.path, weights) == weights
            if not model.busy and not (only_replaced and is_newest):
                del self.loaded[weights]

    def on_disk(self, path: Path) -> Weights:
        """The current weights of a file. If the file is missing, the weights that were last loaded from
        it."""
        version = self.models.version(path)
        loaded = [weights for weights in self.loaded if weights.path == path]
        return loaded[-1] if version is None and loaded else Weights(path, version)

    def give_jobs_to_models(self) -> None:
        """Move requests to their models if these are loaded and not draining."""
        self.newest |= {path: self.on_disk(path) for path in {job.path for job in self.postponed}}
        left = []
        for job in self.postponed:
            weights = self.newest[job.path]
            model = self.loaded.get(weights)
            if job.cancelled:
                continue
            if model is None or model.is_draining:
                left.append(job)
                continue
            self.loaded[weights] = self.loaded.pop(weights)  # the most recently used stands last
            model.tokenising.append(job)
        self.postponed = left

    def load_what_is_missing(self) -> None:
        """Load a missing model if there is room; otherwise `make_room` lets a loaded model drain first. The
        model is chosen by client: the one for which models were loaded for the fewest seconds, and its oldest
        request."""
        self.drop_idle(only_replaced=True)
        missing = [job for job in self.postponed if self.newest[job.path] not in self.loaded]
        if not missing:
            for model in self.loaded.values():
                model.is_draining = False
        elif self.make_room():
            job, start = min(missing, key=lambda job: self.load_shares.of(job.client)), time.monotonic()
            self.load_for(self.newest[job.path])
            self.load_shares.charge(job.client, time.monotonic() - start)

    def make_room(self) -> bool:
        """Whether there is room for another model. Idle models are dropped. If all are busy, the one that was
        loaded first drains: it completes the requests that it has begun and is then dropped. Its other
        requests are postponed."""
        leaving = [model for model in self.loaded.values() if model.is_draining]
        for weights, model in list(self.loaded.items()):
            is_done = not model.has_begun if model.is_draining else not model.busy
            if len(self.loaded) >= self.max_models and is_done:
                del self.loaded[weights]
                for job in (*model.waiting, *model.tokenising):
                    job.forget_prompts()
                    self.postponed.append(job)
        if len(self.loaded) < self.max_models:
            return True
        if not leaving:
            min(self.loaded.values(), key=lambda model: model.loaded_at).is_draining = True
        return False

    def load_for(self, weights: Weights) -> None:
        """Load a model for the requests that wait for it. If that fails, they end with an error."""
        path = weights.path
        try:
            self.load(weights)
            return
        except Exception as why:
            if self.on_disk(path) != weights:
                return  # replaced meanwhile: the next attempt loads the new ones
            message = f"The model '{path.stem}' cannot be loaded; see the server's log."
            error = ApiError(message, 500, "model", "model_not_loadable")
            if path.exists():
                warn(f"the model {path.stem} cannot be loaded: {reason(why)}")
            else:
                error = not_found(path.stem)
        for job in self.postponed:
            if job.path == path:
                job.send(error)
        self.postponed = [job for job in self.postponed if job.path != path]

    def load(self, weights: Weights) -> None:
        """Load a model. Raises what `Models.load` raises."""
        model, tokenizer = self.models.load(weights.path)
        limits = self.slots, self.context, self.max_new_tokens
        self.loaded[weights] = LoadedModel(model, tokenizer, *limits)
