"""One block of raw records in, its training samples out. Runs in worker processes, so nothing here imports torch.

pretrain: BOS + document + EOS. A document longer than `max_length` becomes consecutive samples, each of which begins
with the last token of the one before, so that every token but the first is a target exactly once. A tokenizer without
BOS begins documents with its EOS, as GPT-2 did; without EOS they end with the padding token; without all three,
documents have no marks and their first token is no target.

SFT: the conversation as the chat template renders it, labels by `chat_labels`. Too long: cut behind the last assistant
turn that fits; if not even the first fits, cut inside it; without a label left, dropped. All of it is counted.

A special token that stands literally in a text (`<|im_end|>`) becomes that token, as everywhere in transformers.
Bytes that targets spell: in pretraining those of the text, so that a document's pieces add up to the document, and none
for BOS and EOS; in SFT those of the text that the assistant says, and none for special tokens.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from dataset.chat_labels import ChatTemplate, cut_at_turn, token_ranges
from dataset.data_files import Block
from dataset.errors import UserError
from dataset.formats import BadRecord, parse_block, to_chat, to_text

KINDS = ("pretrain", "sft")
WINDOW = 1 << 17  # characters that are tokenised at once
OVERLAP = 1 << 10


@dataclass(frozen=True)
class TokenizerSpec:
    """All of a tokenizer that decides about tokens and labels, in a form that travels to worker processes."""

    backend: str  # JSON of the `tokenizers` backend
    chat_template: str | dict | None
    special_tokens: dict  # names that a template may use, such as bos_token
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
        # Padding and truncation only mirror the latest call of the tokenizer: they must not change the key.
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
        """SHA-256 of everything in it."""
        fields = [self.backend, self.chat_template, self.special_tokens, self.start, self.end]
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


@dataclass
class Samples:
    """Samples of one block, laid end to end: N tokens, S samples."""

    tokens: np.ndarray  # [N]
    lengths: np.ndarray  # int64 [S]
    trained: np.ndarray  # bool [N]: this token is a target
    target_bytes: np.ndarray  # int64 [S]: UTF-8 bytes of the text that the targets spell
    lines: np.ndarray  # int64 [S]: line or row of the record it comes from
    counts: Counter = field(default_factory=Counter)
    bad: list[tuple[int, str]] = field(default_factory=list)  # (line, reason) of the records that cannot be used


class BlockTokenizer:
    """Turns blocks into samples for one kind of training, tokenizer and length."""

    def __init__(self, spec: TokenizerSpec, kind: str, max_length: int):
        self.spec, self.kind, self.max_length = spec, kind, max_length
        self.backend = Tokenizer.from_str(spec.backend)
        added = self.backend.get_added_tokens_decoder()
        vocabulary = 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=0)
        self.dtype = np.min_scalar_type(vocabulary - 1)  # the smallest unsigned type that holds every id
        self.is_special = np.zeros(vocabulary, dtype=bool)
        self.is_special[[token_id for token_id, token in added.items() if token.special]] = True
        if kind == "sft":
            if not spec.chat_template:
                raise UserError("--tokenizer_path: this tokenizer has no chat template, which SFT needs; add one to it")
            self.template = ChatTemplate(spec.chat_template, spec.special_tokens)

    def __call__(self, block: Block, check_only: bool = False) -> Samples:
        """Samples of the block; with `check_only` only the bad records are looked for.

        Raises UserError for what is wrong with the tokenizer rather than with a record.
        """
        self.pieces: list[tuple[np.ndarray, np.ndarray, int, int]] = []  # tokens, trained, bytes, line
        counts, bad = Counter(), []
        texts, spans, lines = [], [], []
        for line, record in parse_block(block):
            counts["records"] += 1
            try:
                if isinstance(record, BadRecord):
                    raise record
                text, span = (to_text(record), []) if self.kind == "pretrain" else self._render(block, line, record)
            except BadRecord as error:
                bad.append((line, str(error)))
                continue
            texts.append(text)
            spans.append(span)
            lines.append(line)
        encoded = [] if check_only else self._encode(texts)
        for text, span, line, (token_ids, offsets) in zip(texts, spans, lines, encoded, strict=not check_only):
            if self.kind == "pretrain":
                self._add_document(text, token_ids, offsets, line, counts)
            else:
                self._add_chat(text, token_ids, offsets, span, line, counts)
        return self._collected(counts, bad)

    def _render(self, block: Block, line: int, record: dict) -> tuple[str, list[tuple[int, int]]]:
        try:
            return self.template.render(to_chat(record))
        except UserError as error:
            raise UserError(f"{block.path}:{line}: {error}") from None

    def _encode(self, texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Token ids int64 [T] and their [start, end) characters int64 [T, 2], for each text."""
        short = iter(encode_batch(self.backend, [text for text in texts if len(text) <= WINDOW]))
        for text in texts:
            yield next(short) if len(text) <= WINDOW else encode_long(self.backend, text)

    def _add_document(self, text: str, token_ids, offsets, line: int, counts: Counter) -> None:
        counts["documents"] += 1
        if len(token_ids) == 0:
            counts["empty_documents"] += 1
            return
        edges = bytes_before(text)
        reached = edges[np.maximum.accumulate(offsets[:, 1])]
        reached[-1] = edges[-1]  # what the tokenizer leaves out at the end belongs to the last token
        spelled = np.diff(reached, prepend=0)
        start = [] if self.spec.start is None else [self.spec.start]
        end = [] if self.spec.end is None else [self.spec.end]
        token_ids = np.concatenate([start, token_ids, end]).astype(self.dtype)
        spelled = np.concatenate([[0] * len(start), spelled, [0] * len(end)]).astype(np.int64)
        step = self.max_length - 1
        counts["documents_split"] += len(token_ids) > self.max_length
        for first in range(0, max(1, len(token_ids) - 1), step):
            tokens = token_ids[first : first + self.max_length]
            trained = np.ones(len(tokens), dtype=bool)
            self._add_sample(tokens, trained, spelled[first : first + self.max_length], line, counts)

    def _add_chat(self, text: str, token_ids, offsets, spans, line: int, counts: Counter) -> None:
        counts["conversations"] += 1
        starts, ends = (np.maximum.accumulate(offsets[:, column]) for column in (0, 1))
        edges = bytes_before(text)
        ranges = token_ranges(starts, ends, spans)
        trained = np.zeros(len(token_ids), dtype=bool)
        spelled = np.zeros(len(token_ids), dtype=np.int64)
        for (start, end), (first, last) in zip(spans, ranges, strict=True):
            trained[first:last] = True
            spelled[first:last] = np.diff(edges[np.clip(ends[first:last], start, end)], prepend=edges[start])
        spelled[self.is_special[token_ids]] = 0
        kept = len(token_ids)
        if kept > self.max_length:
            boundary = cut_at_turn(ranges, self.max_length)
            kept = boundary or self.max_length
            counts["cut_at_turn" if boundary else "cut_inside_turn"] += bool(trained[1:kept].any())
        self._add_sample(token_ids[:kept].astype(self.dtype), trained[:kept], spelled[:kept], line, counts)

    def _add_sample(self, tokens, trained, spelled, line: int, counts: Counter) -> None:
        trained[:1] = False  # nothing comes before the first token that could predict it
        if trained.any():
            self.pieces.append((tokens, trained, int(spelled[trained].sum()), line))
        else:
            counts["dropped_without_label"] += 1

    def _collected(self, counts: Counter, bad: list[tuple[int, str]]) -> Samples:
        tokens, trained, spelled, lines = zip(*self.pieces, strict=True) if self.pieces else ([], [], [], [])
        return Samples(
            tokens=np.concatenate([np.empty(0, dtype=self.dtype), *tokens]),
            lengths=np.array([len(piece) for piece in tokens], dtype=np.int64),
            trained=np.concatenate([np.empty(0, dtype=bool), *trained]),
            target_bytes=np.array(spelled, dtype=np.int64),
            lines=np.array(lines, dtype=np.int64),
            counts=counts,
            bad=bad,
        )


def encode_batch(backend: Tokenizer, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids int64 [T] and their [start, end) characters int64 [T, 2], for each text."""
    return [
        (np.array(encoding.ids, dtype=np.int64), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2))
        for encoding in backend.encode_batch(texts, add_special_tokens=False)
    ]


def encode_long(backend: Tokenizer, text: str, window: int = WINDOW, overlap: int = OVERLAP):
    """As `encode_batch`, for one text, in windows: the backend needs some 300 bytes of memory a character.

    Two windows overlap and are joined in the middle of the overlap, where both begin a token at the same character, so
    that the tokens are those of the whole text (but for a word longer than the overlap, where they may differ).
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
    """Where a token begins and the one before has ended; the bytes of one character may belong to several tokens."""
    return offsets[1:, 0][offsets[1:, 0] >= offsets[:-1, 1]]


def bytes_before(text: str) -> np.ndarray:
    """int64 [len(text) + 1]: UTF-8 bytes before each character, and of the whole text."""
    if text.isascii():
        return np.arange(len(text) + 1, dtype=np.int64)
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = np.ones(len(text), dtype=np.int8)
    for limit in (0x80, 0x800, 0x10000):
        widths += code_points >= limit
    edges = np.zeros(len(text) + 1, dtype=np.int64)
    np.cumsum(widths, out=edges[1:])
    return edges
