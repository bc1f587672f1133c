"""Turns records into samples. `tokenizers` encodes many texts at once, on all cores.

pretrain  BOS + document + EOS, in pieces of `max_length` that overlap by a token: each is a target once
SFT       the conversation as the chat template writes it; targets are the assistant's turns, with their
          end-of-turn tokens; a long one is cut after the last turn that fits, else inside the first one
DPO       two conversations, the chosen one first; targets are what follows their common beginning

In a conversation only the chat template makes special tokens: `<|im_end|>` in the data is encoded as plain
text, as by the server (model/prompts.py).
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer

from common.errors import UserError
from dataset.files import Record, Source
from dataset.messages import BadRecord, is_blank
from dataset.records import Chat, assistant_turns, parse
from dataset.report import BadRecords
from dataset.round_trip import RoundTrip
from model.prompts import SpecialTexts, plain_backend

if TYPE_CHECKING:  # transformers imports torch
    from transformers import PreTrainedTokenizerBase

BLOCK_RECORDS, BLOCK_CHARACTERS = 1024, 1 << 21  # encoded at a time
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
OPEN_REASONING = re.compile(r"<think>\s*$")  # opened at the end of a text
TAG_ADVICE = "put {% generation %} ... {% endgeneration %} around the assistant's text in the chat template"


class Sample(NamedTuple):
    """T tokens to train on."""

    tokens: np.ndarray  # int64 [T]
    loss_mask: np.ndarray  # bool [T]: this token is a target
    source: Source
    weight: float = 1.0  # of the targets in the loss


class Text(NamedTuple):
    """A text to encode."""

    text: str
    spans: list[tuple[int, int]] | None = None  # its characters that are targets; None: a document
    weight: float = 1.0  # of its targets


Block = list[tuple[Source, list[Text]]]  # the texts of each record


class SampleMaker:
    """Makes the samples of one kind of training.

    bad: policy for bad records. counts: outcomes of records. unused: records per ignored field. round_trip:
    compares texts with their decoded tokens.
    """

    def __init__(self, kind: str, tokenizer: "PreTrainedTokenizerBase", max_length: int, bad: BadRecords):
        # set explicitly, or a process that is forked later prints a warning
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        self.kind, self.max_length, self.bad = kind, max_length, bad
        self.backend = copy_backend(tokenizer)
        self.plain_backend = plain_backend(self.backend)
        self.special = SpecialTexts(self.backend)
        self.template: Any = tokenizer.chat_template
        self.special_tokens = tokenizer.special_tokens_map
        if kind != "pretrain":
            check_template(self.template)
        self.begin, self.end = document_boundaries(tokenizer)
        self.round_trip = RoundTrip(self.backend, self.special.hidden)
        self.counts: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()

    def samples(self, records: Iterable[Record]) -> Generator[Sample]:
        """The samples of all records, in order. While a block is encoded in other threads, the next one is
        rendered. Raises UserError."""
        previous: tuple[Block, Future] | None = None
        with ThreadPoolExecutor(1) as pool:
            for block in self.blocks(records):
                encoding = pool.submit(self.encode, block)
                if previous:
                    yield from self.block_samples(*previous)
                previous = block, encoding
            if previous:
                yield from self.block_samples(*previous)

    def blocks(self, records: Iterable[Record]) -> Iterator[Block]:
        """The texts of about a thousand records at a time."""
        block: Block = []
        characters = 0
        for source, record in records:
            self.counts["records"] += 1
            texts = self.bad.attempt(source, record, self.record_texts)
            if texts is None:
                continue
            block.append((source, texts))
            characters += sum(len(text.text) for text in texts)
            if len(block) == BLOCK_RECORDS or characters >= BLOCK_CHARACTERS:
                yield block
                block, characters = [], 0
        if block:
            yield block

    # --- from a record to texts

    def record_texts(self, record: dict) -> list[Text]:
        """The texts of a record: a document, a conversation, or the two conversations of a pair. Raises
        BadRecord."""
        parsed = parse(record, self.kind)
        if parsed.document is not None:
            texts = [Text(parsed.document, None, parsed.weight)]
        elif self.kind == "pretrain":
            check_template(self.template)
            (chat,) = parsed.chats
            if chat.masked:
                raise BadRecord(
                    "a turn is marked as not trained, but pretraining trains every turn; remove the mark"
                )
            text, _ = self.render(chat)
            texts = [Text(text, [], parsed.weight)]
        else:
            texts = [self.render_with_targets(chat, parsed.weight) for chat in parsed.chats]
        for text in texts:
            text.text.encode()  # fails for half a character (\ud83d)
        self.unused.update(parsed.unread)
        return texts

    def render_with_targets(self, chat: Chat, weight: float) -> Text:
        """The conversation as the chat template renders it, with the spans of the trained assistant turns."""
        text, spans = self.render(chat)
        if not GENERATION_TAG.search(self.template):
            spans = self.spans_from_prefixes(chat, text)
        turns = assistant_turns(chat)
        if chat.masked and len(spans) != len(turns):
            raise UserError(f"--tokenizer_path: {TAG_ADVICE}, once for each turn")
        if chat.masked:
            pairs = zip(turns, spans, strict=True)
            spans = [span for index, span in pairs if index not in chat.masked]
        return Text(text, spans, weight)

    def render(self, chat: Chat, **options: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character spans between the template's {% generation %} tags."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options |= self.special_tokens
        options["tools"] = self.special.hide(chat.tools)
        options["return_assistant_tokens_mask"] = bool(GENERATION_TAG.search(self.template))
        messages = self.special.hide(chat.messages)
        texts, spans = render_jinja_template([messages], chat_template=self.template, **options)
        return texts[0], cast(list[tuple[int, int]], spans[0]) if spans else []

    def spans_from_prefixes(self, chat: Chat, text: str) -> list[tuple[int, int]]:
        """The spans of the assistant's turns for a template without generation tags, such as Qwen's. A span
        goes from the end of the generation prompt to the end of the turn. If the prompt ends with an empty
        <think> block that the turn fills, the span begins where the two differ."""
        spans = []
        for index in assistant_turns(chat):
            before = chat._replace(messages=chat.messages[:index])
            until = chat._replace(messages=chat.messages[: index + 1])
            prompt, _ = self.render(before, add_generation_prompt=True)
            turn, _ = self.render(until)
            turn = turn.rstrip()  # white space behind it belongs to the next turn
            begin = len(os.path.commonprefix([prompt, turn]))  # noqa: RUF071 (of characters)
            opened = begin == len(prompt) or OPEN_REASONING.search(prompt[:begin])
            if not (opened and text.startswith(turn)):
                raise UserError(
                    f"--tokenizer_path: the chat template writes turn {index + 1} differently if others "
                    f"follow, so it is unclear what to train on; {TAG_ADVICE}"
                )
            spans.append((begin, len(turn)))
        return spans

    # --- from texts to samples

    def encode(self, block: Block) -> list[Any]:
        """The encodings of all texts of a block; `tokenizers` uses all cores."""
        texts = [text.text for _, record_texts in block for text in record_texts]
        if self.kind == "pretrain":  # without offsets
            return self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return self.backend.encode_batch(texts, add_special_tokens=False)

    def block_samples(self, block: Block, encoding: Future) -> Iterator[Sample]:
        """The samples of a block."""
        encodings = iter(encoding.result())
        for source, texts in block:
            self.round_trip.check(texts[-1].text)
            self.counts["weighted"] += texts[0].weight != 1.0
            if self.kind == "pretrain":
                yield from self.split_document(texts[0], next(encodings).ids, source)
                continue
            samples = [self.label(text, next(encodings), source) for text in texts]
            truncated = [self.truncate(sample) for sample in samples]
            is_alike = len(truncated) == 2 and np.array_equal(truncated[0].tokens, truncated[1].tokens)
            if is_alike or not all(sample.weight and sample.loss_mask.any() for sample in truncated):
                self.counts["dropped"] += 1
                continue
            sizes = [len(sample.tokens) for sample in truncated]
            self.counts["cut"] += sizes != [len(sample.tokens) for sample in samples]
            yield from truncated

    def split_document(self, text: Text, ids: list[int], source: Source) -> Iterator[Sample]:
        """The samples of a document: each begins with the last token of the one before."""
        if text.spans is None:
            ids = [*self.begin, *ids, *self.end] if ids and not is_blank(text.text) else []
        elif self.special.hidden.search(text.text):
            ids, _ = self.encode_literal(text.text)
        tokens = np.array(ids, dtype=np.int64)
        if text.weight == 0:
            self.counts["dropped"] += 1
            return
        self.counts["empty"] += len(tokens) < 2
        self.counts["split"] += len(tokens) > self.max_length
        for first in range(0, len(tokens) - 1, self.max_length - 1):
            piece = tokens[first : first + self.max_length]
            yield Sample(piece, np.arange(len(piece)) > 0, source, text.weight)

    def label(self, text: Text, encoding: Any, source: Source) -> Sample:
        """A conversation with its loss mask: the tokens that overlap a span."""
        ids, offsets = encoding.ids, encoding.offsets
        if self.special.hidden.search(text.text):
            ids, offsets = self.encode_literal(text.text)
        characters = np.array(offsets, dtype=np.int64).reshape(-1, 2)  # [start, end) of each token
        starts, ends = np.maximum.accumulate(characters).T
        loss_mask = np.zeros(len(ids), dtype=bool)
        for start, end in text.spans or ():
            first = np.searchsorted(ends, start, side="right")  # token that ends within
            last = np.searchsorted(starts, end, side="left")  # behind the last one that begins within
            if start < end:  # else the turn is empty
                loss_mask[first:last] = True
        loss_mask[:1] = False  # the first token has nothing to be predicted from
        return Sample(np.array(ids, dtype=np.int64), loss_mask, source, text.weight)

    def encode_literal(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens and their character offsets of a text in which special tokens occur as plain text."""
        ids, offsets, position = [], [], 0
        for piece in self.special.pieces(text):
            backend = self.plain_backend if piece.is_plain else self.backend
            encoding = backend.encode(piece.text, add_special_tokens=False)
            ids += encoding.ids
            offsets += [(start + position, end + position) for start, end in encoding.offsets]
            position += len(piece.text)
        return ids, offsets

    def truncate(self, sample: Sample) -> Sample:
        """Truncate a sample to max_length: in SFT after the last assistant turn that fits, otherwise at
        max_length."""
        if len(sample.tokens) <= self.max_length:
            return sample
        end = self.max_length
        if self.kind == "sft":
            turn_ends = 1 + np.flatnonzero(sample.loss_mask[:-1] & ~sample.loss_mask[1:])
            end = max(turn_ends[turn_ends <= end], default=end)
        return sample._replace(tokens=sample.tokens[:end], loss_mask=sample.loss_mask[:end])


def check_template(template: Any) -> None:
    """Raise UserError if a tokenizer has no usable chat template."""
    if not isinstance(template, str):
        raise UserError("--tokenizer_path: this tokenizer has no chat template, or several; keep one")
    if not GENERATION_TAG.search(template) and "add_generation_prompt" not in template:
        raise UserError(f"--tokenizer_path: {TAG_ADVICE}")


def copy_backend(tokenizer: "PreTrainedTokenizerBase") -> Tokenizer:
    """A copy of the backend without the padding and truncation that an earlier call may have set."""
    backend = Tokenizer.from_str(backend_text(tokenizer))
    backend.no_padding()
    backend.no_truncation()
    return backend


def backend_text(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The backend as JSON. Raises UserError for a tokenizer without one."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError("--tokenizer_path: this tokenizer has no tokenizer.json; save its fast version")
    return cast(Any, tokenizer).backend_tokenizer.to_str()


def document_boundaries(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """The tokens before and after a document: BOS (EOS, if there is no BOS), and EOS. Raises UserError if
    there is no EOS, because documents and answers would have no end."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos is None:
        raise UserError(
            "--tokenizer_path: this tokenizer has no end token, so the model could not learn where a text or "
            "an answer ends; name one as `eos_token` in its tokenizer_config.json"
        )
    return [cast(int, eos if bos is None else bos)], [cast(int, eos)]


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A hash of what determines tokens and labels."""
    backend = sorted_json(backend_text(tokenizer))
    begin, end = document_boundaries(tokenizer)
    content = {
        "backend": backend,
        "chat_template": tokenizer.chat_template,
        "special_tokens": dict(tokenizer.special_tokens_map),
        "start": begin[0],
        "end": end[0],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)  # training and held-out data have the same tokenizer, which takes 12 ms
def sorted_json(backend: str) -> str:
    """A backend as JSON with sorted keys, without padding and truncation."""
    return json.dumps(json.loads(backend) | {"padding": None, "truncation": None}, sort_keys=True)


def token_byte_lengths(tokenizer: "PreTrainedTokenizerBase") -> np.ndarray:
    """UTF-8 bytes of text of each id of the vocabulary, int64 [ids]; 0 for special tokens."""
    backend = copy_backend(tokenizer)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    is_byte_level = '"ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"])
    sizes = np.zeros(1 + max(vocabulary.values()), dtype=np.int64)
    for entry, token in vocabulary.items():
        if token in added:
            sizes[token] = 0 if added[token].special else len(entry.encode())
        elif is_byte_level:  # a character for each byte
            sizes[token] = len(entry)
        elif re.fullmatch("<0x[0-9A-F]{2}>", entry):
            sizes[token] = 1
        else:
            sizes[token] = len(entry.replace("▁", " ").removeprefix("##").encode())
    return sizes
