"""Prompts of reinforcement learning: conversations for which the model writes the next turn.

A record is a conversation, whose last turn, if the assistant speaks it, is the reference answer and no part
of the prompt, unless it is blank or MiniMind's placeholder for that; or {"prompt": text or messages,
"answer": reference}, beside it "system" and "tools". MiniMind's "gt", a list, is a reference, too. Without a
reference answer the reward must do without one. Every other field is left for the reward, which receives the
record as it is.

Prompts are held in memory with their records: there are few of them, compared with the texts that are written
to them.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from common.errors import UserError, say
from common.launcher import launch
from dataset.files import expand_paths, iter_blocks, parse_block, place
from dataset.held_out import first_question
from dataset.json_values import TOO_DEEP, BadRecord
from dataset.records import Chat, to_chat
from dataset.report import judge_bad_records, stop_at_bad_record
from dataset.token_cache import CacheOptions, file_hash
from dataset.tokenizing import TokenizerSpec
from model.prompts import encode_pieces, prompt_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NO_ANSWER = ("", "无")  # what stands in MiniMind's data where the model is to write


class RolloutPrompt(NamedTuple):
    """A prompt and what the reward may want to know of it."""

    input_ids: list[int]  # with the header of the turn to be written
    messages: list[dict]
    tools: list[dict] | None
    record: dict  # of the data file, with the reference as `answer` and the offered tools as `tools`, if any
    sample_id: int
    source: str = ""  # its place, for errors


def collate_prompts(prompts: list[RolloutPrompt]) -> dict[str, Any]:
    """A micro-batch of prompts; the rollout makes a flat batch of it."""
    return {
        "prompts": prompts,
        "sample_ids": np.array([prompt.sample_id for prompt in prompts], dtype=np.int64),
    }


class PromptDataset(Dataset):
    """The prompts of one or several files.

    Args:
        data_path: files, globs and folders, separated by commas.
        tokenizer: with a chat template.
        max_length: prompts of more tokens are left out and counted.
        cache_dir: where the hashes of the files are remembered.
        tools: JSON schemas of the tools of an environment, offered where a record names none.
        thinking_ratio: share of the prompts after which the model begins with thoughts; which ones, their
            number decides.
        options: on_bad_data, max_bad_share and split of CacheOptions.

    Raises:
        UserError: bad records, or no prompt is left.
    """

    collate = staticmethod(collate_prompts)

    def __init__(
        self,
        data_path: str,
        tokenizer: "PreTrainedTokenizerBase",
        max_length: int,
        cache_dir: str,
        tools: list[dict] | None = None,
        thinking_ratio: float = 0.0,
        **options: Any,
    ):
        self.tokenizer, self.max_length, self.tools = tokenizer, max_length, tools
        self.thinking_ratio = thinking_ratio
        how = CacheOptions("prompts", max_length, **options)
        self.split = how.split
        self.paths = expand_paths(data_path, plain_text=False)
        spec = TokenizerSpec.of(tokenizer)
        if not spec.chat_template:
            raise UserError(
                "--tokenizer_path: this tokenizer has no chat template, which prompts need; add one to it"
            )
        described: list = [[file_hash(path, Path(cache_dir)) for path in self.paths], tools, thinking_ratio]
        self.fingerprint: dict[str, Any] = {"tokenizer": spec.fingerprint[:16]}
        if self.split:
            described.append(list(self.split))
            self.fingerprint["eval_share"] = self.split.share
        content = json.dumps(described, sort_keys=True).encode()
        self.fingerprint["data"] = hashlib.sha256(content).hexdigest()[:16]
        self.prompts: list[RolloutPrompt] = []
        self.too_long = 0
        self._read(how)

    def _read(self, how: CacheOptions) -> None:
        bad: list[str] = []
        self.records = 0  # bad ones too
        for block in iter_blocks(self.paths):
            for line, record in parse_block(block):
                if self.split and not self.split.includes_record(record, _split_key):
                    continue
                self.records += 1
                source = place(block.path, line)
                try:
                    if isinstance(record, BadRecord):
                        raise record
                    self._add(source, record)
                except (BadRecord, RecursionError) as error:
                    why = TOO_DEEP if isinstance(error, RecursionError) else error
                    bad.append(f"{source}: {why}")
                    stop_at_bad_record(bad[0], how.on_bad_data)
        if bad:
            judge_bad_records(bad[0], len(bad), self.records, f"the first: {bad[0]}", how.max_bad_share)
        if self.split and not self.records:
            raise self.split.no_records_error(self.paths[0])
        if not self.prompts:
            raise UserError(
                f"{self.paths[0]}: none of the {self.records} records gives a prompt of at most "
                f"{self.max_length} tokens; raise --max_seq_len"
            )
        if launch().local_rank == 0:
            text = f"{len(self):,} prompts"
            if self.too_long:
                text += f", {self.too_long:,} left out (more than {self.max_length} tokens)"
            say(text)

    def _add(self, source: str, record: dict) -> None:
        chat, answer = to_prompt(record)
        tools = chat.tools or self.tools or None
        try:
            thinks = share_of_one(len(self.prompts)) < self.thinking_ratio
            pieces = prompt_pieces(self.tokenizer, chat.messages, tools, enable_thinking=thinks)
        except ValueError as error:
            raise BadRecord(str(error)) from None
        input_ids = encode_pieces(self.tokenizer, pieces)
        if len(input_ids) > self.max_length:
            self.too_long += 1
            return
        kept = dict(record)
        if answer is not None:
            kept["answer"] = answer
        if tools:
            kept["tools"] = tools
        self.prompts.append(RolloutPrompt(input_ids, chat.messages, tools, kept, len(self.prompts), source))

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.input_ids) for prompt in self.prompts)

    def source(self, sample_id: int) -> str:
        """The place of a prompt."""
        return self.prompts[sample_id].source

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> RolloutPrompt:
        return self.prompts[index]


def share_of_one(number: int) -> float:
    """A number from 0 to 1, below 1, evenly distributed: the same for the same argument."""
    digest = hashlib.blake2b(str(number).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _split_key(record: dict) -> str:
    """The text that decides whether a record is held out. Raises BadRecord."""
    chat, _ = to_prompt(record)
    return first_question(chat.messages)


def to_prompt(record: dict) -> tuple[Chat, Any]:
    """The conversation before the turn to be written, and the reference answer or None. Raises BadRecord."""
    answer = record.get("answer")
    if answer is None:
        answer = record.get("gt")
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]
    prompt = record.get("prompt")
    if prompt is not None:
        conversation = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        used = ("prompt", "answer", "completion")
        others = {name: value for name, value in record.items() if name not in used}
        chat = to_chat(others | {"conversations": conversation}, answered=False)
        return chat, record.get("completion") if answer is None else answer
    chat = to_chat(record, answered=False)
    last = chat.messages[-1]
    if last["role"] == "assistant":
        chat = chat._replace(messages=chat.messages[:-1])
        if answer is None and last["content"].strip() not in NO_ANSWER:
            answer = last["content"]
    if not chat.messages or chat.messages[-1]["role"] == "assistant":
        raise BadRecord("the conversation has no turn that the assistant could answer; add a user's message")
    return chat, answer
