"""Tokenizers and data files for the tests of dataset/."""

import csv
import io
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset.files import Source, read_records
from dataset.messages import BadRecord
from dataset.report import BadRecords
from dataset.token_cache import CacheOptions, TokenCache, build_token_cache
from dataset.tokenizing import SampleMaker

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REPOSITORY = Path(__file__).resolve().parents[2]

# A ChatML template in one line.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXTS = [
    "The harbour town of Port Ellery lies at the mouth of a slow brown river.",
    "港口城市埃勒里位于一条缓慢的棕色河流的河口。",
    "Emoji 🙂🚀, accents é ü ñ, tabs\tand\n\nblank lines; code: for i in range(10): print(i)",
    "数字 12345 与符号 ←→，以及生僻字 𠮷。",
] * 3


def samples_of(tokenizer, kind: str, records: list[dict], max_length: int = 10_000):
    """The samples of a few records, and what made them. A bad record is a failure."""
    maker = SampleMaker(kind, tokenizer, max_length, BadRecords(["x.jsonl"], "stop"))
    numbered = [(Source(0, line), record) for line, record in enumerate(records, 1)]
    return list(maker.samples(numbered)), maker


def records_of(path: str, separator: str = "") -> list[tuple[int, object]]:
    """(line, record) of each record of a file; of a bad one the reason."""
    found = read_records([path], separator)
    return [(source.line, str(each) if isinstance(each, BadRecord) else each) for source, each in found]


def build(kind: str, path, tokenizer, cache_dir, max_length: int = 64, **options) -> TokenCache:
    """The token cache of a file; further options as in CacheOptions."""
    return build_token_cache(str(path), tokenizer, CacheOptions(kind, max_length, cache_dir, **options))


def contents(cache: TokenCache) -> list[tuple]:
    """Tokens, mask, target bytes and place of each sample of a cache."""
    return [
        (cache.tokens[a:b].tolist(), cache.loss_mask[a:b].tolist(), int(size), cache.source(i))
        for i, (a, b, size) in enumerate(
            zip(cache.offsets[:-1], cache.offsets[1:], cache.target_bytes, strict=True)
        )
    ]


def texts_of(tokenizer, cache: TokenCache) -> list[str]:
    """The text of each sample of a cache."""
    return [tokenizer.decode(tokens) for tokens, *_ in contents(cache)]


def parquet(rows: list[dict]) -> bytes:
    pq.write_table(pa.Table.from_pylist(rows), memory := io.BytesIO(), row_group_size=700)
    return memory.getvalue()


def arrow(rows: list[dict], form=pa.ipc.new_stream) -> bytes:
    table = pa.Table.from_pylist(rows)
    with form(memory := io.BytesIO(), table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    return memory.getvalue()


def csv_of(rows: list[dict], delimiter: str = ",") -> bytes:
    memory = io.StringIO(newline="")
    writer = csv.DictWriter(memory, rows[0].keys(), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return memory.getvalue().encode()


def lines_of(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer that the repository ships."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(REPOSITORY / "model")


@pytest.fixture(scope="session")
def small_tokenizer():
    """small_tokenizer(**roles) trains a byte-level tokenizer of 400 tokens on TEXTS, with the given special
    roles."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def train(**roles):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(TEXTS, trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
        tokenizer.chat_template = MARKED
        return tokenizer

    return train


@pytest.fixture(scope="session")
def other_tokenizer(small_tokenizer):
    """Another tokenizer than the shipped one, for comparisons."""
    return small_tokenizer(bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>")


@pytest.fixture
def write(tmp_path):
    """write(name, records) writes JSON Lines (or bytes as they are) into the test's folder and returns the
    path."""

    def write_file(name: str, records: list | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(records, bytes):
            path.write_bytes(records)
        else:
            path.write_text(
                "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8"
            )
        return str(path)

    return write_file


@pytest.fixture
def cache_dir(tmp_path):
    """A folder of caches of the test's own."""
    return tmp_path / "cache"
