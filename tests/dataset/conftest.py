"""Tokenizers and data files for the tests of dataset/."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dataset.files import Block, iter_blocks, parse_block
from dataset.token_cache import CacheOptions, TokenCache, build_token_cache
from dataset.tokenizing import TOKENIZERS, DocumentTokenizer, Samples, TokenizerSpec

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = REPOSITORY.parent / "shared" / "data"

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


def block_of(data: bytes, first: int = 1, path: str = "x.jsonl") -> Block:
    """The block of a file of JSON Lines whose lines are these."""
    return Block(0, path, [(first + i, line) for i, line in enumerate(data.splitlines())], len(data))


def records_of(path: str, separator: str = "") -> list[tuple[int, object]]:
    """(line, record) of each record of a file."""
    return [pair for block in iter_blocks([path], separator) for pair in parse_block(block)]


made: dict = {}  # tokenizer and kind -> what makes samples: making it takes longer than using it


def samples_of(tokenizer, kind: str, records: list[dict], max_length: int = 10_000) -> Samples:
    """The samples of a few records."""
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    if (tokenizer, kind) not in made:
        made[tokenizer, kind] = TOKENIZERS[kind](TokenizerSpec.of(tokenizer), max_length)
    made[tokenizer, kind].max_length = max_length
    return made[tokenizer, kind](block_of(data))


def build(kind: str, path: str, tokenizer, max_length: int, cache_dir, *args, **options) -> TokenCache:
    """The token cache of a file; further options as in CacheOptions."""
    return build_token_cache(
        str(path), tokenizer, CacheOptions(kind, max_length, cache_dir, *args, **options)
    )


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
def fake_backend(monkeypatch):
    """Tokenise without the tokenizer, four characters a token, where its time is not what is measured."""

    def encode(text):
        starts = np.arange(0, len(text), 4)
        offsets = np.stack([starts, np.minimum(starts + 4, len(text))], axis=1)
        return SimpleNamespace(ids=starts % 400, offsets=offsets)

    make = DocumentTokenizer.__init__

    def init(self, *args):
        make(self, *args)
        self.backend = SimpleNamespace(encode=lambda text, **_: encode(text))

    monkeypatch.setattr(DocumentTokenizer, "__init__", init)


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


@pytest.fixture
def shared():
    """shared(name) is the path of a file of real text beside the repository; skips where there is none."""

    def find(name: str) -> str:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"{path} is not on this machine")
        return str(path)

    return find
