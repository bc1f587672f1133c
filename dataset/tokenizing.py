"""Turns a block of raw records into training samples. Runs in worker processes, so nothing here imports torch.

pretrain: BOS + document + EOS. A document longer than `max_length` becomes consecutive samples, each of which begins
with the last token of the previous one, so that every token but the first is a target exactly once. (A document of
plain text may arrive in parts, one block each; see dataset/text_files.py.) If the tokenizer
has no BOS, documents begin with its EOS, as in GPT-2; if it has no EOS, they end with the padding token; if it has none
of the three, documents are not delimited and their first token is not a target.

SFT: the conversation as the chat template renders it, labels by `chat_labels`. If too long, it is cut after the last
assistant turn that fits, or inside the first one if not even that fits; without any label left it is dropped. An answer
that its label calls a bad one (KTO) is left out. All of this is counted.

DPO: the conversations with the chosen and the rejected answer, as two samples in this order; their labels are what
follows the common beginning. Both are cut off at `max_length`; a pair of which one has no label left, or whose samples
are then the same, is dropped and counted.

In a conversation only the chat template writes special tokens: the text of one in the data (`<|im_end|>`) is text, as
for the server (model/prompts.py). A document of pretraining has no template: there it becomes that token.
Target bytes: in pretraining those of the text, so that a document's pieces add up to the document, and none for BOS and
EOS; in SFT those of the assistant's text, and none for special tokens.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from common.errors import UserError
from dataset.blocks import Block
from dataset.chat_labels import ChatTemplate, cut_at_turn, token_ranges
from dataset.data_files import parse_block
from dataset.formats import Chat, to_chat, to_pair, to_text
from dataset.json_records import TOO_DEEP, BadRecord
from dataset.text_files import DocumentPart
from model.prompts import Piece, SpecialTexts, plain_backend

Pieces = list[Piece]
SPECIAL_TEXTS = "+special_texts"  # ends the hash of data with such text: early versions made special tokens of it
WINDOW = 1 << 17  # characters tokenised at once
OVERLAP = 1 << 10  # characters shared by consecutive windows


@dataclass(frozen=True)
class TokenizerSpec:
    """Everything of a tokenizer that determines tokens and labels, in a picklable form for worker processes."""

    backend: str  # JSON of the `tokenizers` backend
    chat_template: str | dict | None
    special_tokens: dict  # variables of the template, such as bos_token
    start: int | None  # token id before a document
    end: int | None  # token id after a document

    @classmethod
    def of(cls, tokenizer) -> "TokenizerSpec":
        """The spec of a transformers tokenizer. Raises UserError for one that is not backed by `tokenizers`."""
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


class Text(NamedTuple):
    """The text of a sample, or of several, before it is tokenised."""

    pieces: Pieces
    line: int
    spans: Sequence[tuple[int, int]] = ()  # of a conversation: the characters [start, end) of the turns to train
    part: DocumentPart | None = None  # of a document


class BlockTokenizer(ABC):
    """Turns blocks into samples for one kind of training, tokenizer and length."""

    def __init__(self, spec: TokenizerSpec, max_length: int):
        self.spec, self.max_length = spec, max_length
        self.backend = Tokenizer.from_str(spec.backend)
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        size = 1 + max(vocabulary.values(), default=0)
        self.dtype = np.min_scalar_type(size - 1)  # the smallest unsigned type that holds every id
        self.is_special = np.zeros(size, dtype=bool)
        for token_id, token in self.backend.get_added_tokens_decoder().items():
            self.is_special[token_id] = token.special
        self.is_byte_level = '"ByteLevel"' in json.dumps(json.loads(spec.backend)["decoder"])
        self.token_bytes = np.zeros(size, dtype=np.int64)  # a byte-level entry has a character for each byte
        self.token_bytes[list(vocabulary.values())] = [len(entry) for entry in vocabulary]

    @abstractmethod
    def texts(self, record: dict, line: int, counts: Counter) -> tuple[list[Text], Sequence[str]]:
        """The texts of a record, and the names of the fields that nothing reads. Raises BadRecord."""

    @abstractmethod
    def add_samples(self, text: Text, token_ids: np.ndarray, offsets: np.ndarray, counts: Counter) -> None:
        """Add the samples of a text. token_ids: int64 [T]. offsets: int64 [T, 2], their [start, end) characters."""

    def __call__(self, block: Block, check_only: bool = False) -> Samples:
        """The samples of a block; with `check_only` only its bad records.

        Raises UserError for problems of the tokenizer rather than of a record.
        """
        self.samples: list[tuple[np.ndarray, np.ndarray, int, int]] = []  # tokens, loss_mask, target bytes, line
        counts, unused, bad = Counter(), Counter(), []
        texts: list[Text] = []
        for line, record in parse_block(block):
            counts["records"] += 1
            try:
                if isinstance(record, BadRecord):
                    raise record
                found, names = self.texts(record, line, counts)
            except (BadRecord, RecursionError) as error:
                bad.append((line, str(error) if isinstance(error, BadRecord) else TOO_DEEP))
            except UserError as error:
                raise UserError(f"{block.path}:{line}: {error}") from None
            else:
                texts += found
                unused.update(names)
        encoded = [] if check_only else self._encode([text.pieces for text in texts])
        for text, (token_ids, offsets) in zip(texts, encoded, strict=not check_only):
            self.add_samples(text, token_ids, offsets, counts)
        unused.update(dict.fromkeys(block.unread, counts["records"]))
        return self._collected(counts, unused, bad)

    def _encode(self, texts: list[Pieces]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Token ids int64 [T] and their [start, end) characters int64 [T, 2], for each text."""
        whole = [len(pieces) == 1 and len(pieces[0].text) <= WINDOW for pieces in texts]
        short = iter(
            encode_batch(self.backend, [text[0].text for text, at_once in zip(texts, whole, strict=True) if at_once])
        )
        for pieces, at_once in zip(texts, whole, strict=True):
            yield next(short) if at_once else self._encode_pieces(pieces)

    @cached_property
    def _plain_backend(self) -> Tokenizer:
        return plain_backend(self.backend)

    def _encode_pieces(self, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
        encoded, begin = [], 0
        for text, is_plain in pieces:
            token_ids, offsets = encode_long(self._plain_backend if is_plain else self.backend, text)
            encoded.append((token_ids, offsets + begin))
            begin += len(text)
        return np.concatenate([ids for ids, _ in encoded]), np.concatenate([places for _, places in encoded])

    def _bytes_reached(self, edges: np.ndarray, token_ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """int64 [T]: UTF-8 bytes of the text up to the end of each token; `edges`: `bytes_before`.

        The entries of a byte-level vocabulary say how many bytes they spell; if the sum is that of the text, no
        normaliser has changed it. Otherwise the offsets say it, in characters: a character that several tokens share
        counts for the first one.

        Example: "a河" is 4 bytes, so `edges` is [0, 1, 4]. Of the tokens "a", "河"'s first two bytes, and its last one,
        with the offsets [0, 1], [1, 2], [1, 2], a byte-level vocabulary reaches [1, 3, 4], the offsets [1, 4, 4].
        """
        if len(token_ids) == 0:
            return np.zeros(0, dtype=np.int64)
        reached = np.cumsum(self.token_bytes[token_ids])
        if not (self.is_byte_level and reached[-1] == edges[-1]):
            reached = edges[np.maximum.accumulate(offsets[:, 1])]
            reached[-1] = edges[-1]  # text after the last token counts as part of it
        return reached

    def _add_sample(self, tokens, mask, spelled, line: int, counts: Counter) -> None:
        """Add a sample, unless it has no target. tokens: [T]. mask: bool [T]. spelled: bytes of each token [T]."""
        mask[:1] = False  # the first token has no context to be predicted from
        if mask.any():
            self.samples.append((tokens.astype(self.dtype), mask, int(spelled[mask].sum()), line))
        else:
            counts["dropped_without_label"] += 1

    def _collected(self, counts: Counter, unused: Counter, bad: list[tuple[int, str]]) -> Samples:
        tokens, masks, spelled, lines = zip(*self.samples, strict=True) if self.samples else ([], [], [], [])
        return Samples(
            tokens=np.concatenate([np.empty(0, dtype=self.dtype), *tokens]),
            lengths=np.array([len(each) for each in tokens], dtype=np.int64),
            loss_mask=np.concatenate([np.empty(0, dtype=bool), *masks]),
            num_targets=np.array([mask.sum() for mask in masks], dtype=np.int64),
            target_bytes=np.array(spelled, dtype=np.int64),
            lines=np.array(lines, dtype=np.int64),
            counts=counts,
            unused_fields=unused,
            bad=bad,
        )


class DocumentTokenizer(BlockTokenizer):
    """Documents of pretraining."""

    def texts(self, record: dict, line: int, counts: Counter) -> tuple[list[Text], Sequence[str]]:
        """The text of a document or of a part of one."""
        unused = [key for key, value in record.items() if key != "text" and value is not None]
        part = record if isinstance(record, DocumentPart) else DocumentPart()
        counts["records"] -= not part.begins  # it was counted when it began
        return [Text([Piece(to_text(record), False)], line, part=part)], unused

    def add_samples(self, text: Text, token_ids: np.ndarray, offsets: np.ndarray, counts: Counter) -> None:
        """Split a document into samples of at most L tokens; each begins with the last token of the one before."""
        part = text.part or DocumentPart()
        counts["documents"] += part.begins
        if len(token_ids) == 0 and part.begins:
            counts["empty_documents"] += 1
            return
        before, after = ([] if token_id is None else [token_id] for token_id in (self.spec.start, self.spec.end))
        if not part.begins:
            before = self.backend.encode(part.context, add_special_tokens=False).ids[-1:]
        after = after if part.ends else []
        reached = self._bytes_reached(bytes_before(text.pieces[0].text), token_ids, offsets)
        spelled = np.concatenate([[0] * len(before), np.diff(reached, prepend=0), [0] * len(after)]).astype(np.int64)
        token_ids = np.concatenate([before, token_ids, after]).astype(np.int64)
        counts["documents_split"] += part.begins and (len(token_ids) > self.max_length or not part.ends)
        for first in range(0, max(1, len(token_ids) - 1), self.max_length - 1):
            tokens, of_tokens = (each[first : first + self.max_length] for each in (token_ids, spelled))
            self._add_sample(tokens, np.ones(len(tokens), dtype=bool), of_tokens, text.line, counts)


class ChatTokenizer(BlockTokenizer):
    """Conversations of SFT."""

    def __init__(self, spec: TokenizerSpec, max_length: int):
        super().__init__(spec, max_length)
        if not spec.chat_template:
            raise UserError("--tokenizer_path: this tokenizer has no chat template, which SFT needs; add one to it")
        self.template = ChatTemplate(spec.chat_template, spec.special_tokens)
        self.special = SpecialTexts(self.backend)

    def texts(self, record: dict, line: int, counts: Counter) -> tuple[list[Text], Sequence[str]]:
        """The text of a conversation; none for an answer that must not be trained."""
        chat = to_chat(record)
        text = self._rendered(chat, line)
        counts["conversations"] += 1
        counts["special_texts"] += len(text.pieces) > 1
        counts["masked_turns"] += len(chat.masked)
        if chat.is_good is not None:
            counts["labelled_good" if chat.is_good else "labelled_bad"] += 1
        return [] if chat.is_good is False else [text], chat.unused

    def _rendered(self, chat: Chat, line: int) -> Text:
        hidden = chat._replace(messages=self.special.hide(chat.messages), tools=self.special.hide(chat.tools))
        text, spans = self.template.render(hidden)
        return Text(self.special.pieces(text), line, spans)

    def labels(self, text: Text, token_ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, list]:
        """Of a conversation: the loss mask [T], the bytes that each target spells [T], the tokens of each turn."""
        starts, ends = (np.maximum.accumulate(offsets[:, column]) for column in (0, 1))
        edges = bytes_before("".join(piece.text for piece in text.pieces))
        reached = self._bytes_reached(edges, token_ids, offsets)
        ranges = token_ranges(starts, ends, text.spans)
        loss_mask = np.zeros(len(token_ids), dtype=bool)
        spelled = np.zeros(len(token_ids), dtype=np.int64)
        for (start, end), (first, last) in zip(text.spans, ranges, strict=True):
            loss_mask[first:last] = True
            spelled[first:last] = np.diff(np.clip(reached[first:last], edges[start], edges[end]), prepend=edges[start])
        spelled[self.is_special[token_ids]] = 0
        return loss_mask, spelled, ranges

    def add_samples(self, text: Text, token_ids: np.ndarray, offsets: np.ndarray, counts: Counter) -> None:
        """Add a conversation, cut at a turn if it is too long."""
        loss_mask, spelled, ranges = self.labels(text, token_ids, offsets)
        kept = len(token_ids)
        if kept > self.max_length:
            boundary = cut_at_turn(ranges, self.max_length)
            kept = boundary or self.max_length
            counts["cut_at_turn" if boundary else "cut_inside_turn"] += bool(loss_mask[1:kept].any())
        self._add_sample(token_ids[:kept], loss_mask[:kept], spelled[:kept], text.line, counts)


class PairTokenizer(ChatTokenizer):
    """Preferences of DPO: a chosen and a rejected answer."""

    chosen: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # waits for the rejected one

    def texts(self, record: dict, line: int, counts: Counter) -> tuple[list[Text], Sequence[str]]:
        """The texts of both conversations."""
        pair = to_pair(record)
        texts = [self._rendered(chat, line) for chat in pair]
        counts["pairs"] += 1
        counts["special_texts"] += sum(len(text.pieces) > 1 for text in texts)
        return texts, pair[0].unused

    def add_samples(self, text: Text, token_ids: np.ndarray, offsets: np.ndarray, counts: Counter) -> None:
        """Keep a chosen answer until its rejected one comes, then add both or neither."""
        loss_mask, spelled, _ = self.labels(text, token_ids, offsets)
        if self.chosen is None:
            self.chosen = token_ids, loss_mask, spelled
            return
        answers, self.chosen = (self.chosen, (token_ids, loss_mask, spelled)), None
        cut = [tuple(part[: self.max_length] for part in answer) for answer in answers]
        if not all(loss_mask[1:].any() for _, loss_mask, _ in cut):
            counts["dropped_without_label"] += 1
        elif np.array_equal(cut[0][0], cut[1][0]):
            counts["dropped_alike"] += 1
        else:
            counts["pairs_cut"] += any(len(tokens) > self.max_length for tokens, *_ in answers)
            for tokens, loss_mask, spelled in cut:
                self._add_sample(tokens, loss_mask, spelled, text.line, counts)


TOKENIZERS: dict[str, type[BlockTokenizer]] = {
    "pretrain": DocumentTokenizer,
    "sft": ChatTokenizer,
    "dpo": PairTokenizer,
}
KINDS = tuple(TOKENIZERS)


def encode_batch(backend: Tokenizer, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids int64 [T] and their [start, end) characters int64 [T, 2], for each text."""
    return [
        (np.array(encoding.ids, dtype=np.int64), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2))
        for encoding in backend.encode_batch(texts, add_special_tokens=False)
    ]


def encode_long(backend: Tokenizer, text: str, window: int = WINDOW, overlap: int = OVERLAP):
    """`encode_batch` of one text, in windows: the backend needs about 300 bytes of memory per character.

    Consecutive windows are joined near the middle of their overlap, where both begin a token at the same character. The
    tokens are those of the full text (except for a word longer than the overlap, where they may differ).
    """
    (token_ids, offsets), end = encode_batch(backend, [text[:window]])[0], window
    parts = []
    while end < len(text):
        begin = end - overlap
        ((next_ids, next_offsets),) = encode_batch(backend, [text[begin : begin + window]])
        next_offsets += begin
        shared = np.intersect1d(_clean_starts(offsets), _clean_starts(next_offsets))
        joint = shared[len(shared) // 2] if len(shared) else end
        if not len(shared):
            ((next_ids, next_offsets),) = encode_batch(backend, [text[end : end + window - overlap]])
            next_offsets += end
        kept = np.searchsorted(offsets[:, 0], joint)
        parts.append((token_ids[:kept], offsets[:kept]))
        first = np.searchsorted(next_offsets[:, 0], joint)
        token_ids, offsets, end = next_ids[first:], next_offsets[first:], begin + window
    parts.append((token_ids, offsets))
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([places for _, places in parts])


def _clean_starts(offsets: np.ndarray) -> np.ndarray:
    """Where a token begins after the previous one has ended; tokens that share a character are not separable."""
    return offsets[1:, 0][offsets[1:, 0] >= offsets[:-1, 1]]


def bytes_before(text: str) -> np.ndarray:
    """int64 [len(text) + 1]: UTF-8 bytes before each character, and of the full text."""
    if text.isascii():
        return np.arange(len(text) + 1, dtype=np.int64)
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = np.ones(len(text), dtype=np.int8)
    for limit in (0x80, 0x800, 0x10000):
        widths += code_points >= limit
    edges = np.zeros(len(text) + 1, dtype=np.int64)
    np.cumsum(widths, out=edges[1:])
    return edges
