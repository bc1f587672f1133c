"""Turns a block of raw records into training samples. Runs in worker processes, so nothing here imports
torch.

pretrain: BOS + document + EOS. A document longer than `max_length` becomes consecutive samples, each of which
begins with the last token of the previous one, so that every token but the first is a target exactly once. (A
document of plain text may arrive in parts, one block each; see dataset/plain_text.py.) If the tokenizer
has no BOS, documents begin with its EOS, as in GPT-2; if it has no EOS, they end with the padding token; if
it has none of the three, documents are not delimited and their first token is not a target. A conversation
is a document, too: as SFT renders it, each of its tokens a target.

SFT: the conversation as the chat template renders it, labels by `chat_labels`. If too long, it is cut after
the last assistant turn that fits, or inside the first one if not even that fits; without any label left it is
dropped. All of this is counted.

DPO: the conversations with the chosen and the rejected answer, as two samples in this order; their labels are
what follows the common beginning. Both are cut off at `max_length`; a pair of which one has no label left, or
whose samples are then the same, is dropped and counted.

In a conversation only the chat template writes special tokens: the text of one in the data (`<|im_end|>`) is
text, as for the server (model/prompts.py). A document of pretraining has no template: there it becomes that
token. Target bytes: in pretraining those of the text, so that a document's pieces add up to the document, and
none for BOS and EOS; in SFT those that the assistant's tokens spell, and none for special tokens.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from common.errors import UserError
from dataset.chat_labels import ChatTemplate
from dataset.files import Block, parse_block, place
from dataset.held_out import Split, first_question, is_one_passage, question_in
from dataset.json_values import TOO_DEEP, BadRecord
from dataset.plain_text import DocumentPart
from dataset.records import Chat, find_format, to_chat, to_pair, to_text, unread_fields
from model.prompts import SpecialTexts, plain_backend


@dataclass(frozen=True)
class TokenizerSpec:
    """Everything of a tokenizer that determines tokens and labels, in a picklable form for worker
    processes."""

    backend: str  # JSON of the `tokenizers` backend
    chat_template: str | dict | None
    special_tokens: dict  # variables of the template, such as bos_token
    start: int | None  # token id before a document
    end: int | None  # token id after a document
    fingerprint: str = ""  # SHA-256 of the fields above

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
        fields = {
            "backend": json.dumps(described, sort_keys=True),
            "chat_template": tokenizer.chat_template,
            "special_tokens": dict(tokenizer.special_tokens_map),
            "start": bos if bos is not None else eos,
            "end": eos if eos is not None else pad,
        }
        content = json.dumps(fields, sort_keys=True, default=str)
        return cls(**fields, fingerprint=hashlib.sha256(content.encode()).hexdigest())

    def template(self) -> ChatTemplate:
        """The chat template. Raises UserError if there is none, or several."""
        if isinstance(self.chat_template, str):
            return ChatTemplate(self.chat_template, self.special_tokens)
        problem = "no chat template; add one for conversations"
        if self.chat_template:
            problem = "several chat templates; keep the one for conversations"
        raise UserError(f"--tokenizer_path: this tokenizer has {problem}")


@dataclass
class Samples:
    """The samples of one block, concatenated: N tokens, S samples."""

    tokens: np.ndarray  # [N]
    lengths: np.ndarray  # int64 [S]
    loss_mask: np.ndarray  # bool [N]: this token is a target
    target_bytes: np.ndarray  # int64 [S]: UTF-8 bytes of the targets' text
    lines: np.ndarray  # int64 [S]: line of the record
    counts: Counter
    unused_fields: Counter  # records (or messages) in which each field that nothing reads occurs
    bad: list[tuple[int, str]]  # (line, reason) of each bad record


class Sample(NamedTuple):
    """T tokens to train on."""

    tokens: np.ndarray  # int64 [T]
    loss_mask: np.ndarray  # bool [T]
    bytes_per_token: np.ndarray  # int64 [T]: UTF-8 bytes of the text that each target spells

    def cut(self, length: int) -> "Sample":
        """The first `length` tokens."""
        return Sample(self.tokens[:length], self.loss_mask[:length], self.bytes_per_token[:length])


class BlockTokenizer(ABC):
    """Turns blocks into samples for one kind of training, tokenizer, length and split of the records (None:
    all of them)."""

    def __init__(self, spec: TokenizerSpec, max_length: int, split: Split | None = None):
        self.spec, self.max_length, self.split = spec, max_length, split
        self.backend = Tokenizer.from_str(spec.backend)
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        size = 1 + max(vocabulary.values(), default=0)
        self.dtype = np.min_scalar_type(size - 1)  # the smallest unsigned type that holds every id
        self.is_byte_level = '"ByteLevel"' in json.dumps(json.loads(spec.backend)["decoder"])
        # in a byte-level vocabulary, a character for each byte
        self.entry_lengths = np.zeros(size, dtype=np.int64)
        self.entry_lengths[list(vocabulary.values())] = [len(entry) for entry in vocabulary]
        self.special = SpecialTexts(self.backend)
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = [token_id for token_id, token in added.items() if token.special]

    @abstractmethod
    def samples_of(self, record: dict) -> list[Sample]:
        """The samples of a record; counts what became of it. Raises BadRecord."""

    @abstractmethod
    def split_key(self, record: dict) -> str:
        """The text that decides whether a record is held out. Raises BadRecord."""

    def selected(self, block: Block, split: Split) -> Iterator[tuple[int, dict | BadRecord]]:
        """(line, record) of the records of a block, or of the passages of long plain text, in the split."""
        for line, record in parse_block(block):
            if isinstance(record, DocumentPart) and not is_one_passage(record):
                for passage in split.passages(record):
                    yield line, passage
            elif split.includes_record(record, self.split_key):
                yield line, record

    def __call__(self, block: Block) -> Samples:
        """The samples of a block. Raises UserError for problems of the tokenizer rather than of a record."""
        kept: list[Sample] = []
        lines: list[int] = []  # of the record of each
        bad: list[tuple[int, str]] = []
        self.counts: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()
        records = parse_block(block) if self.split is None else self.selected(block, self.split)
        for line, record in records:
            self.counts["records"] += record.num_records if isinstance(record, DocumentPart) else 1
            try:
                if isinstance(record, BadRecord):
                    raise record
                samples = self.samples_of(record)
            except BadRecord as error:
                bad.append((line, str(error)))
                continue
            except RecursionError:
                bad.append((line, TOO_DEEP))
                continue
            except UserError as error:
                raise UserError(f"{place(block.path, line)}: {error}") from None
            for sample in samples:
                sample.loss_mask[:1] = False  # the first token has no context to be predicted from
                if sample.loss_mask.any():
                    kept.append(sample)
                    lines.append(line)
                else:
                    self.counts["dropped_without_label"] += 1
        tokens, masks = [np.empty(0, np.int64)], [np.empty(0, bool)]  # also where nothing is kept
        return Samples(
            tokens=np.concatenate(tokens + [sample.tokens for sample in kept]).astype(self.dtype),
            lengths=np.array([len(sample.tokens) for sample in kept], dtype=np.int64),
            loss_mask=np.concatenate(masks + [sample.loss_mask for sample in kept]),
            target_bytes=np.array([s.bytes_per_token[s.loss_mask].sum() for s in kept], dtype=np.int64),
            lines=np.array(lines, dtype=np.int64),
            counts=self.counts,
            unused_fields=self.unused,
            bad=bad,
        )

    def bytes_of(self, text: str, token_ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """int64 [T]: how many UTF-8 bytes of the text each token spells. ends: int64 [T], the character at
        which each token ends, non-decreasing.

        The entries of a byte-level vocabulary say it; if the sum is that of the text, no normaliser has
        changed it. Otherwise `ends` says it: a character that several tokens share counts for the first one,
        and text after the last token is part of it.

        Example: "a河b" is 1 + 3 + 1 bytes, so `bytes_before` is [0, 1, 4, 5]. The tokens are "a", two bytes
        of "河", its third byte, and "b". A byte-level vocabulary gives [1, 2, 1, 1]. The tokens end at the
        characters 1, 2, 2 and 3, which is at the bytes [1, 4, 4, 5], so without one it is [1, 3, 0, 1].
        """
        sizes = self.entry_lengths[token_ids]
        if len(sizes) == 0 or (self.is_byte_level and sizes.sum() == len(text.encode())):
            return sizes
        characters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        character_bytes = 1 + (characters >= 0x80) + (characters >= 0x800) + (characters >= 0x10000)
        bytes_before = np.concatenate([[0], np.cumsum(character_bytes)])  # each character, and in all
        byte_ends = bytes_before[ends]
        byte_ends[-1] = bytes_before[-1]
        return np.diff(byte_ends, prepend=0)

    @cached_property
    def plain_backend(self) -> Tokenizer:
        """The backend for the text of special tokens, which must stay text."""
        return plain_backend(self.backend)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, without which texts can be tokenised. Raises UserError if there is none."""
        return self.spec.template()

    def labelled(self, chat: Chat) -> tuple[Sample, list[int]]:
        """A conversation with its labels, and where each turn of the assistant ends, behind its last token.
        Targets are these turns."""
        hidden = chat._replace(messages=self.special.hide(chat.messages), tools=self.special.hide(chat.tools))
        rendered, spans = self.template.render(hidden)
        pieces = self.special.pieces(rendered)
        if len(pieces) > 1:
            self.counts["special_texts"] += 1
        ids, offsets, text = [], [np.empty((0, 2), np.int64)], ""
        for piece in pieces:
            backend = self.plain_backend if piece.is_plain else self.backend
            encoding = backend.encode(piece.text, add_special_tokens=False)
            ids += encoding.ids
            offsets.append(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + len(text))
            text += piece.text
        token_ids = np.array(ids, dtype=np.int64)
        characters = np.maximum.accumulate(np.concatenate(offsets))  # [T, 2], [start, end) of each token
        starts, ends = characters[:, 0], characters[:, 1]
        bytes_per_token = self.bytes_of(text, token_ids, ends)
        bytes_per_token[np.isin(token_ids, self.special_ids)] = 0
        loss_mask = np.zeros(len(token_ids), dtype=bool)
        turn_ends = []
        for start, end in spans:  # of characters
            first = int(np.searchsorted(ends, start, side="right"))  # token that ends within
            last = int(np.searchsorted(starts, end, side="left"))  # behind the last one that begins within
            if start < end and first < last:  # else the turn is empty
                loss_mask[first:last] = True
                turn_ends.append(last)
        return Sample(token_ids, loss_mask, bytes_per_token), turn_ends


class DocumentTokenizer(BlockTokenizer):
    """Documents of pretraining: texts, and conversations as the chat template writes them."""

    def samples_of(self, record: dict) -> list[Sample]:
        """A document, or a part of one: each sample begins with the last token of the one before."""
        if record.get("text") is None and find_format(record)[0]:
            tokens, bytes_per_token = self.conversation(record)
        else:
            tokens, bytes_per_token = self.document(record, to_text(record))
        if len(tokens) == 0:
            return []
        samples = []
        for first in range(0, max(1, len(tokens) - 1), self.max_length - 1):
            piece = tokens[first : first + self.max_length]
            spelled = bytes_per_token[first : first + self.max_length]
            samples.append(Sample(piece, np.ones(len(piece), dtype=bool), spelled))
        return samples

    def document(self, record: dict, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a document, or of a part of one, and the bytes that each spells."""
        self.unused.update(key for key, value in record.items() if key != "text" and value is not None)
        begins, ends, context = True, True, ""
        if isinstance(record, DocumentPart):
            begins, ends, context = record.begins, record.ends, record.context
        encoding = self.backend.encode(text, add_special_tokens=False)
        token_ids = np.array(encoding.ids, dtype=np.int64)
        last_characters = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 1]
        sizes = self.bytes_of(text, token_ids, np.maximum.accumulate(last_characters))
        before, after = [], []  # tokens around the text
        if not begins:
            before = self.backend.encode(context, add_special_tokens=False).ids[-1:]
        elif self.spec.start is not None:
            before = [self.spec.start]
        if ends and self.spec.end is not None:
            after = [self.spec.end]
        if begins:
            self.counts["documents"] += 1
            if len(token_ids) == 0:
                self.counts["empty_documents"] += 1
                return token_ids, token_ids
            if not ends or len(before) + len(token_ids) + len(after) > self.max_length:
                self.counts["documents_split"] += 1
        tokens = np.concatenate([before, token_ids, after]).astype(np.int64)
        bytes_per_token = np.concatenate([[0] * len(before), sizes, [0] * len(after)]).astype(np.int64)
        return tokens, bytes_per_token

    def conversation(self, record: dict) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a conversation, as SFT has them, and the bytes that each spells. Raises BadRecord."""
        chat = to_chat(record)
        if chat.masked:
            raise BadRecord(
                "a turn of this conversation is not to be trained, and pretraining trains all of it; "
                "leave the record out"
            )
        self.unused.update(unread_fields(record))
        (tokens, _, bytes_per_token), _ = self.labelled(chat)
        self.counts["conversations"] += 1
        if len(tokens) > self.max_length:
            self.counts["documents_split"] += 1
        return tokens, bytes_per_token

    def split_key(self, record: dict) -> str:
        if record.get("text") is None:
            return first_question(to_chat(record).messages)
        text = to_text(record)
        if not self.special.pattern.search(text):
            return text  # no template made it; do not load what renders one
        question = question_in(text, self.around_question)
        return text if question is None else question

    @cached_property
    def around_question(self) -> tuple[str, str] | None:
        """The text that the chat template, if there is one, writes before and after a user's message."""
        if not isinstance(self.spec.chat_template, str):
            return None
        return self.template.around_question()


class ChatTokenizer(BlockTokenizer):
    """Conversations of SFT."""

    def __init__(self, spec: TokenizerSpec, max_length: int, split: Split | None = None):
        super().__init__(spec, max_length, split)
        self.template = spec.template()  # raises before any record is read

    def samples_of(self, record: dict) -> list[Sample]:
        """The conversation, cut at a turn if it is too long."""
        chat = to_chat(record)
        self.unused.update(unread_fields(record))
        sample, turn_ends = self.labelled(chat)
        self.counts["conversations"] += 1
        self.counts["masked_turns"] += len(chat.masked)
        if len(sample.tokens) <= self.max_length:
            return [sample]
        # after the last assistant turn that fits, else inside the first one
        complete = [end for end in turn_ends if end <= self.max_length]
        sample = sample.cut(max(complete, default=self.max_length))
        if sample.loss_mask[1:].any():
            self.counts["cut_at_turn" if complete else "cut_inside_turn"] += 1
        return [sample]

    def split_key(self, record: dict) -> str:
        return first_question(to_chat(record).messages)


class PairTokenizer(ChatTokenizer):
    """Preferences of DPO: a chosen and a rejected answer."""

    def samples_of(self, record: dict) -> list[Sample]:
        """Both conversations, the chosen one first, or neither."""
        (chosen, _), (rejected, _) = (self.labelled(chat) for chat in to_pair(record))
        self.unused.update(unread_fields(record))
        self.counts["pairs"] += 1
        is_cut = max(len(chosen.tokens), len(rejected.tokens)) > self.max_length
        chosen, rejected = chosen.cut(self.max_length), rejected.cut(self.max_length)
        if not (chosen.loss_mask[1:].any() and rejected.loss_mask[1:].any()):
            self.counts["dropped_without_label"] += 1
        elif np.array_equal(chosen.tokens, rejected.tokens):
            self.counts["dropped_alike"] += 1
        else:
            self.counts["pairs_cut"] += is_cut
            return [chosen, rejected]
        return []

    def split_key(self, record: dict) -> str:
        chosen, _ = to_pair(record)
        return first_question(chosen.messages)


TOKENIZERS: dict[str, type[BlockTokenizer]] = {
    "pretrain": DocumentTokenizer,
    "sft": ChatTokenizer,
    "dpo": PairTokenizer,
}
