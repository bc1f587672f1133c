"""Prompts of reinforcement learning: conversations for which the model writes the next turn.

A record is a conversation or a question in any SFT format (dataset/records.py), with or without an answer. If
the last turn is the assistant's, it is the reference answer, not part of the prompt; a blank one, or
MiniMind's placeholder, is dropped. A reference in a separate field ("answer", MiniMind's "gt", verl's
"reward_model") has priority. The reward receives the unchanged record.

Prompts stay in memory with their records. They are few, because each is completed many times.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from common.errors import UserError, say
from common.launcher import launch
from dataset.files import find_files, format_source, is_plain_text, read_records
from dataset.messages import BadRecord
from dataset.order import StageData
from dataset.records import Chat, Parsed, parse, weight_error
from dataset.report import BadRecords, check_bad_records, describe_files, describe_unused, no_samples_error
from dataset.token_cache import CacheOptions, file_hash
from dataset.tokenizing import check_template, document_boundaries, fingerprint
from model.answers import END_THINK
from model.prompts import encode_pieces, prompt_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER_ANSWERS = ("", "无")  # the last turn in MiniMind's data


class RolloutPrompt(NamedTuple):
    """A prompt, and the data that the reward receives with it."""

    input_ids: list[int]  # with the header of the turn to be written
    messages: list[dict]
    tools: list[dict] | None
    record: dict  # of the data file, with the reference as `answer` and the offered tools as `tools`, if any
    sample_id: int
    source: str = ""  # FILE:LINE, for errors


def collate_prompts(prompts: list[RolloutPrompt]) -> dict[str, Any]:
    """A micro-batch of prompts; the rollout makes a flat batch of it."""
    sample_ids = np.array([prompt.sample_id for prompt in prompts], dtype=np.int64)
    return {"prompts": prompts, "sample_ids": sample_ids}


class PromptDataset(StageData):
    """The prompts of one or several files.

    Args:
        data_path: files, globs and folders, separated by commas.
        tokenizer: with a chat template.
        max_length: prompts of more tokens are left out and counted.
        tools: JSON schemas of the tools of an environment, offered where a record names none.
        thinking_ratio: share of the prompts that ask for reasoning first, chosen by a hash of their number.
        check: called with the record as the reward will receive it; raises BadRecord if it cannot be judged.
        options: on_bad_data, max_bad_share and split of CacheOptions.
    """

    kind = "prompts"
    collate: Callable[[list], Any] = staticmethod(collate_prompts)

    def __init__(
        self,
        data_path: str,
        tokenizer: "PreTrainedTokenizerBase",
        max_length: int,
        tools: list[dict] | None = None,
        thinking_ratio: float = 0.0,
        check: Callable[[dict], None] | None = None,
        **options: Any,
    ):
        check_template(tokenizer.chat_template)
        document_boundaries(tokenizer)  # or the model could not end an answer
        self.tokenizer, self.max_length, self.tools = tokenizer, max_length, tools
        self.thinking_ratio, self.check = thinking_ratio, check
        cache_options = CacheOptions("prompts", max_length, **options)
        self.split = cache_options.split
        self.paths, skipped = find_files(data_path)
        for path in filter(is_plain_text, self.paths):
            raise UserError(
                f"{path} is plain text, which contains no prompts; give conversations or questions"
            )
        self.fingerprint = self.make_fingerprint()
        self.prompts: list[RolloutPrompt] = []
        self.too_long = 0
        self.records = 0  # bad ones too
        self.unused: Counter[str] = Counter()  # records per field that is no part of a prompt
        self.read(cache_options)
        if launch().local_rank == 0:
            files = describe_files(self.paths, skipped, bool(self.split and self.split.held_out))
            text = f"{len(self):,} prompts of {files}"
            if self.too_long:
                text += f", {self.too_long:,} left out (more than {max_length} tokens)"
            if self.unused:
                text += f"; fields for the reward alone: {describe_unused(self.unused)}"
            say(text)

    def make_fingerprint(self) -> dict[str, Any]:
        """Hashes that identify prompts and tokenizer."""
        content = [[file_hash(path) for path in self.paths], self.tools, self.thinking_ratio, self.split]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        identity: dict[str, Any] = {"tokenizer": fingerprint(self.tokenizer), "data": digest[:16]}
        if self.split:
            identity["eval_share"] = self.split.share
        return identity

    def read(self, cache_options: CacheOptions) -> None:
        """Read all records. Raises UserError for bad ones, or if no prompt is left."""
        records = read_records(self.paths)
        if self.split:
            records = self.split.choose(records, self.paths, is_document=False)
        bad = BadRecords(self.paths, cache_options.on_bad_data)
        for source, record in records:
            self.records += 1
            prompt = bad.attempt(source, record, self.make_prompt)
            if prompt is None:
                continue
            if len(prompt.input_ids) > self.max_length:
                self.too_long += 1
                continue
            where = format_source(self.paths[source.file], source.line)
            self.prompts.append(prompt._replace(source=where))
        first = bad.lines[0] if bad.lines else ""
        report = {"records": self.records, "samples": len(self), "too_long": self.too_long}
        report |= {"bad": len(bad.lines), "first_bad": first}
        check_bad_records(report, cache_options, f"the first: {first}")
        if not self.prompts:
            raise no_samples_error(report, self.split, self.paths)

    def make_prompt(self, record: dict) -> RolloutPrompt:
        """The prompt of a record. Raises BadRecord and whatever its template raises."""
        parsed = parse(record, "prompt")
        if parsed.weight != 1.0:
            raise weight_error(record, "a prompt")
        chat, answer = to_prompt(parsed)
        tools = chat.tools or self.tools or None
        number = len(self.prompts)
        # a hash of the number decides, so the same prompts begin with thoughts in every run
        digest = hashlib.blake2b(str(number).encode(), digest_size=8).digest()
        thinks = int.from_bytes(digest, "little") / 2**64 < self.thinking_ratio
        pieces = prompt_pieces(self.tokenizer, chat.messages, tools, enable_thinking=thinks)
        for piece in pieces:
            piece.text.encode()  # fails for half a character (\ud83d)
        prompt_record = dict(record)
        if answer is not None:
            prompt_record["answer"] = answer
        if tools:
            prompt_record["tools"] = tools
        if self.check is not None:
            self.check(prompt_record)
        self.unused.update(parsed.unread)
        tokens = encode_pieces(self.tokenizer, pieces)
        return RolloutPrompt(tokens, chat.messages, tools, prompt_record, number)

    @property
    def item_tokens(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt.input_ids) for prompt in self.prompts]

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.item_tokens)

    def epoch_items(self, args: Any) -> int:
        """The number of prompts of an epoch, which has whole updates only. Raises UserError if there are
        fewer prompts than an update takes."""
        items, per_update = super().epoch_items(args), prompts_per_update(args)
        if items < per_update:
            raise UserError(
                f"an epoch has {items} prompts, and an update takes {per_update} (batch_size x "
                "accumulation_steps x processes); lower --batch_size"
            )
        return items // per_update * per_update

    def epoch_samples(self, args: Any) -> int:
        """The number of prompts that an epoch trains; each prompt counts --num_iterations times."""
        return self.epoch_items(args) * args.num_iterations

    def order_of_epoch(self, args: Any, epoch: int) -> np.ndarray:
        """The prompts of an epoch in order. The prompts of an update are repeated --num_iterations times, one
        round after another."""
        updates = super().order_of_epoch(args, epoch).reshape(-1, prompts_per_update(args))
        return np.repeat(updates, args.num_iterations, axis=0).reshape(-1)

    def source(self, sample_id: int) -> str:
        """FILE:LINE of a prompt."""
        return self.prompts[sample_id].source

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> RolloutPrompt:
        return self.prompts[index]


def prompts_per_update(args: Any) -> int:
    """Prompts that an update takes, over all ranks."""
    return args.batch_size * args.accumulation_steps * launch().world_size


def to_prompt(parsed: Parsed) -> tuple[Chat, Any]:
    """The conversation before the turn to be written, and the reference answer or None. Raises BadRecord."""
    (chat,) = parsed.chats
    answer = parsed.reference
    if chat.messages[-1]["role"] == "assistant":
        *before, last = chat.messages
        chat = chat._replace(messages=before)
        text = last["content"]
        if END_THINK in text:  # thoughts are no part of the answer
            text = text.rpartition(END_THINK)[2].strip()
        if answer is None and text.strip() not in PLACEHOLDER_ANSWERS:
            answer = text
    if not chat.messages or chat.messages[-1]["role"] == "assistant":
        raise BadRecord("the conversation has no turn that the assistant could answer; add a user's message")
    return chat, answer
