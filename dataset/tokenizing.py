"""Turns a block of raw records into training samples. Runs in worker processes, so nothing here imports
torch.

pretrain: BOS + document + EOS. A document longer than `max_length` becomes consecutive samples, each of which
begins with the last token of the previous one, so that every token but the first is a target exactly once. (A
document of plain text may arrive in parts, one block each; see dataset/text_files.py.) If the tokenizer
has no BOS, documents begin with its EOS, as in GPT-2; if it has no EOS, they end with the padding token; if
it has none of the three, documents are not delimited and their first token is not a target.

SFT: the conversation as the chat template renders it, labels by `chat_labels`. If too long, it is cut after
the last assistant turn that fits, or inside the first one if not even that fits; without any label left it is
dropped. All of this is counted.

DPO: the conversations with the chosen and the rejected answer, as two samples in this order; their labels are
what follows the common beginning. Both are cut off at `max_length`; a pair of which one has no label left, or
whose samples are then the same, is dropped and counted.

In a conversation only the chat template writes special tokens: the text of one in the data (`<|im_end|>`) is
text, as for the server (model/prompts.py). A document of pretraining has no template: there it becomes that
token. Target bytes: in pretraining those of the text, so that a document's pieces add up to the document, and
none for BOS and EOS; in SFT those of the assistant's text, and none for special tokens.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from common.errors import UserError
from dataset.blocks import Block, place
from dataset.chat_labels import ChatTemplate, cut_at_turn, token_ranges
from dataset.data_files import parse_block
from dataset.formats import Chat, conversation_fields, to_chat, to_pair, to_text, unread_fields
from dataset.held_out import ALL, Split, first_question, is_one_passage, question_in
from dataset.json_records import TOO_DEEP, BadRecord
from dataset.text_files import DocumentPart
from model.prompts import Piece, SpecialTexts, plain_backend

# ends the hash of data with such text: early versions made special tokens of it
SPECIAL_TEXTS = "+special_texts"


@dataclass(frozen=True)
class TokenizerSpec:
    """Everything of a tokenizer that determines tokens and labels, in a picklable form for worker
    processes."""

    backend: str  # JSON of the `tokenizers` backend
    chat_template: str | dict | None
    special_tokens: dict  # variables of the template, such as bos_token
    start: int | None  # token id before a document
    end: int | None  # token id after a document

    @classmethod
    def of(cls, tokenizer) -> "TokenizerSpec":
        """The spec of a transformers tokenizer. Raises UserError for one that is not backed by
        `tokenizers`."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"--tokenizer_path: {type(tokenizer).__name__} has no fast backend; "
                f"save it with a tokenizer.json (tokenizer.save_pretrained of its fast version)"
            )
        # Padding and truncation reflect the tokenizer's latest call, so they must not change the cache's key.
        described = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
        bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        return cls(
            backend=json.dumps(described, sort_keys=True),
            chat_template=tokenizer.chat_template,
            special_tokens=dict(tokenizer.special_tokens_map),
            start=bos if bos is not None else eos,
            end=eos if eos is not None else pad,
        )

    def fingerprint(self) -> str:
        """SHA-256 of all fields."""
        return hashlib.sha256(json.dumps(astuple(self), sort_keys=True, default=str).encode()).hexdigest()


@dataclass
class Samples:
    """The samples of one block, concatenated: N tokens, S samples."""

    tokens: np.ndarray  # [N]
    lengths: np.ndarray  # int64 [S]
    loss_mask: np.ndarray  # bool [N]: this token is a target
    num_targets: np.ndarray  # int64 [S]
    target_bytes: np.ndarray  # int64 [S]: UTF-8 bytes of the targets' text
    lines: np.ndarray  # int64 [S]: line or row of the record
    counts: Counter
    unused_fields: Counter  # records (or messages) in which each field that nothing reads occurs
    bad: list[tuple[int, str]]  # (line, reason) of each bad record


class BlockTokenizer(ABC):
    """Turns blocks into samples for one kind of training, tokenizer, length and split of the records."""

    def __init__(self, spec: TokenizerSpec, max_length: int, split: Split = ALL):
        self.spec, self.max_length, self.split = spec, max_length, split
        self.backend = Tokenizer.from_str(spec.backend)
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        size = 1 + max(vocabulary.values(), default=0)
        self.dtype = np.min_scalar_type(size - 1)  # the smallest unsigned type that holds every id
        self.is_byte_level = '"ByteLevel"' in json.dumps(json.loads(spec.backend)["decoder"])
        # in a byte-level vocabulary, a character for each byte
        self.entry_lengths = np.zeros(size, dtype=np.int64)
        self.entry_lengths[list(vocabulary.values())] = [len(entry) for entry in vocabulary]

    @abstractmethod
    def split_key(self, record: dict) -> str:
        """The text that decides whether a record is held out. Raises BadRecord."""

    def chosen(self, record: dict | BadRecord) -> Iterable[tuple[dict | BadRecord, int]]:
        """What of a record belongs to the split that is read, and how many records that is."""
        return [(record, 1)] if self.split.includes_record(record, self.split_key) else []

    @abstractmethod
    def add(self, record: dict, line: int) -> None:
        """Add the samples of a record and count what became of it. Raises BadRecord."""

    def __call__(self, block: Block) -> Samples:
        """The samples of a block. Raises UserError for problems of the tokenizer rather than of a record."""
        # tokens, loss_mask, target bytes, line
        self.samples: list[tuple[np.ndarray, np.ndarray, int, int]] = []
        self.counts: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()
        bad = []
        records = ((line, *each) for line, record in parse_block(block) for each in self.chosen(record))
        for line, record, count in records:
            self.counts["records"] += count
            try:
                if isinstance(record, BadRecord):
                    raise record
                self.add(record, line)
            except (BadRecord, RecursionError) as error:
                bad.append((line, str(error) if isinstance(error, BadRecord) else TOO_DEEP))
            except UserError as error:
                raise UserError(f"{place(block.path, line)}: {error}") from None
        tokens, masks, bytes_per_token, lines = (
            zip(*self.samples, strict=True) if self.samples else ([], [], [], [])
        )
        return Samples(
            tokens=np.concatenate([np.empty(0, dtype=self.dtype), *tokens]),
            lengths=np.array([len(each) for each in tokens], dtype=np.int64),
            loss_mask=np.concatenate([np.empty(0, dtype=bool), *masks]),
            num_targets=np.array([mask.sum() for mask in masks], dtype=np.int64),
            target_bytes=np.array(bytes_per_token, dtype=np.int64),
            lines=np.array(lines, dtype=np.int64),
            counts=self.counts,
            unused_fields=self.unused,
            bad=bad,
        )

    @cached_property
    def plain_backend(self) -> Tokenizer:
        """The backend for the text of special tokens, which must stay text."""
        return plain_backend(self.backend)

    def encode(self, pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int64 [T] of a text and their [start, end) characters int64 [T, 2]."""
        token_ids, offsets, begin = [], [np.empty((0, 2), np.int64)], 0
        for text, is_plain in pieces:
            encoding = (self.plain_backend if is_plain else self.backend).encode(
                text, add_special_tokens=False
            )
            token_ids += encoding.ids
            offsets.append(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + begin)
            begin += len(text)
        return np.array(token_ids, dtype=np.int64), np.concatenate(offsets)

    def byte_ends(self, text: str, token_ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """int64 [T]: UTF-8 bytes of the text up to the end of each token.

        The entries of a byte-level vocabulary say how many bytes they spell; if the sum is that of the text,
        no normaliser has changed it. Otherwise the offsets say it, in characters: a character that several
        tokens share counts for the first one, and text after the last token is part of it.

        Example: "a河b" is 1 + 3 + 1 bytes, so `edges` is [0, 1, 4, 5]. The tokens are "a", two bytes of "河",
        its third byte, and "b". A byte-level vocabulary reaches [1, 3, 4, 5]. By the offsets their characters
        end at 1, 2, 2 and 3, which is at the bytes [1, 4, 4, 5].
        """
        if len(token_ids) == 0:
            return np.zeros(0, dtype=np.int64)
        edges = bytes_before(text)
        reached = np.cumsum(self.entry_lengths[token_ids])
        if not (self.is_byte_level and reached[-1] == edges[-1]):
            reached = edges[np.maximum.accumulate(offsets[:, 1])]
            reached[-1] = edges[-1]
        return reached

    def add_sample(
        self, tokens: np.ndarray, mask: np.ndarray, bytes_per_token: np.ndarray, line: int
    ) -> None:
        """Add a sample, unless it has no target. tokens, bytes_per_token: integers [T]. mask: bool [T]."""
        mask[:1] = False  # the first token has no context to be predicted from
        if mask.any():
            self.samples.append((tokens.astype(self.dtype), mask, int(bytes_per_token[mask].sum()), line))
        else:
            self.counts["dropped_without_label"] += 1


class DocumentTokenizer(BlockTokenizer):
    """Documents of pretraining."""

    def split_key(self, record: dict) -> str:
        text = to_text(record)
        if not any(token in text for token in self.added_tokens):
            return text  # no template made it; do not load what renders one
        question = question_in(text, self.around_question)
        return text if question is None else question

    @cached_property
    def added_tokens(self) -> list[str]:
        """The text of the special tokens and of other tokens that are not made of merges."""
        return [token.content for token in self.backend.get_added_tokens_decoder().values()]

    @cached_property
    def around_question(self) -> tuple[str, str] | None:
        """What the chat template, if there is one, writes before and after a user's message."""
        if not isinstance(self.spec.chat_template, str):
            return None
        return ChatTemplate(self.spec.chat_template, self.spec.special_tokens).around_question()

    def chosen(self, record: dict | BadRecord) -> Iterable[tuple[dict | BadRecord, int]]:
        if self.split.share and isinstance(record, DocumentPart) and not is_one_passage(record):
            return self.split.passages(record)
        return super().chosen(record)

    def add(self, record: dict, line: int) -> None:
        """Split a document, or a part of one, into samples; each begins with the last token of the one
        before."""
        part = record if isinstance(record, DocumentPart) else DocumentPart()
        self.counts["records"] -= bool(part.context)  # it was counted when it began
        text = to_text(record)
        self.unused.update(unread_fields(record, {"text"}))
        token_ids, offsets = self.encode([Piece(text, False)])
        self.counts["documents"] += part.begins
        if len(token_ids) or not part.begins:
            before, after = (
                [] if token_id is None else [token_id] for token_id in (self.spec.start, self.spec.end)
            )
            if not part.begins:
                before = self.backend.encode(part.context, add_special_tokens=False).ids[-1:]
            after = after if part.ends else []
            bytes_per_token = np.diff(self.byte_ends(text, token_ids, offsets), prepend=0)
            bytes_per_token = np.concatenate([[0] * len(before), bytes_per_token, [0] * len(after)]).astype(
                np.int64
            )
            token_ids = np.concatenate([before, token_ids, after]).astype(np.int64)
            self.counts["documents_split"] += part.begins and (
                len(token_ids) > self.max_length or not part.ends
            )
            for first in range(0, max(1, len(token_ids) - 1), self.max_length - 1):
                tokens, of_tokens = (
                    each[first : first + self.max_length] for each in (token_ids, bytes_per_token)
                )
                self.add_sample(tokens, np.ones(len(tokens), dtype=bool), of_tokens, line)
        else:
            self.counts["empty_documents"] += 1


class Labelled(NamedTuple):
    """A conversation of T tokens."""

    tokens: np.ndarray  # int64 [T]
    loss_mask: np.ndarray  # bool [T]
    bytes_per_token: np.ndarray  # int64 [T]: UTF-8 bytes of the text that each target spells
    turns: list[tuple[int, int]]  # [first, last) tokens of each turn of the assistant


class ChatTokenizer(BlockTokenizer):
    """Conversations of SFT."""

    def __init__(self, spec: TokenizerSpec, max_length: int, split: Split = ALL):
        super().__init__(spec, max_length, split)
        if not isinstance(spec.chat_template, str):
            has = (
                "several chat templates; keep the one" if spec.chat_template else "no chat template; add one"
            )
            raise UserError(f"--tokenizer_path: this tokenizer has {has} for SFT")
        self.template = ChatTemplate(spec.chat_template, spec.special_tokens)
        self.special = SpecialTexts(self.backend)
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = [token_id for token_id, token in added.items() if token.special]

    def split_key(self, record: dict) -> str:
        return first_question(to_chat(record).messages)

    def add(self, record: dict, line: int) -> None:
        """Add a conversation, cut at a turn if it is too long."""
        chat = to_chat(record)
        self.unused.update(unread_fields(record, conversation_fields(record)))
        tokens, loss_mask, bytes_per_token, turns = self.labelled(chat)
        self.counts["conversations"] += 1
        self.counts["masked_turns"] += len(chat.masked)
        kept = len(tokens)
        if kept > self.max_length:
            boundary = cut_at_turn(turns, self.max_length)
            kept = boundary or self.max_length
            self.counts["cut_at_turn" if boundary else "cut_inside_turn"] += bool(loss_mask[1:kept].any())
        self.add_sample(tokens[:kept], loss_mask[:kept], bytes_per_token[:kept], line)

    def labelled(self, chat: Chat) -> Labelled:
        """The tokens of a conversation with their labels."""
        hidden = chat._replace(messages=self.special.hide(chat.messages), tools=self.special.hide(chat.tools))
        rendered, spans = self.template.render(hidden)
        pieces = self.special.pieces(rendered)
        self.counts["special_texts"] += len(pieces) > 1
        text = "".join(piece.text for piece in pieces)
        token_ids, offsets = self.encode(pieces)
        starts, ends = (np.maximum.accumulate(offsets[:, column]) for column in (0, 1))
        turns = token_ranges(starts, ends, spans)
        reached = self.byte_ends(text, token_ids, offsets)
        loss_mask = np.zeros(len(token_ids), dtype=bool)
        bytes_per_token = np.zeros(len(token_ids), dtype=np.int64)
        for (start, end), (first, last) in zip(spans, turns, strict=True):
            begin, limit = (len(text[:place].encode()) for place in (start, end))
            loss_mask[first:last] = True
            bytes_per_token[first:last] = np.diff(np.clip(reached[first:last], begin, limit), prepend=begin)
        bytes_per_token[np.isin(token_ids, self.special_ids)] = 0
        return Labelled(token_ids, loss_mask, bytes_per_token, turns)


class PairTokenizer(ChatTokenizer):
    """Preferences of DPO: a chosen and a rejected answer."""

    def split_key(self, record: dict) -> str:
        chosen, _ = to_pair(record)
        return first_question(chosen.messages)

    def add(self, record: dict, line: int) -> None:
        """Add both conversations, the chosen one first, or neither."""
        whole = [self.labelled(chat) for chat in to_pair(record)]
        self.unused.update(unread_fields(record, conversation_fields(record)))
        self.counts["pairs"] += 1
        cut = [[part[: self.max_length] for part in each[:3]] for each in whole]
        if not all(loss_mask[1:].any() for _, loss_mask, _ in cut):
            self.counts["dropped_without_label"] += 1
        elif np.array_equal(cut[0][0], cut[1][0]):
            self.counts["dropped_alike"] += 1
        else:
            self.counts["pairs_cut"] += any(len(each.tokens) > self.max_length for each in whole)
            for tokens, loss_mask, bytes_per_token in cut:
                self.add_sample(tokens, loss_mask, bytes_per_token, line)


TOKENIZERS: dict[str, type[BlockTokenizer]] = {
    "pretrain": DocumentTokenizer,
    "sft": ChatTokenizer,
    "dpo": PairTokenizer,
}
KINDS = tuple(TOKENIZERS)


def bytes_before(text: str) -> np.ndarray:
    """int64 [len(text) + 1]: UTF-8 bytes before each character, and of the full text."""
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = np.ones(len(text) + 1, dtype=np.int64)
    widths[0] = 0
    for limit in (0x80, 0x800, 0x10000):
        widths[1:] += code_points >= limit
    return np.cumsum(widths)
