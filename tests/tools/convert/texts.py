"""Texts and tokenizers for the tests of token ids."""

import random
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from scripts.train_tokenizer import save, train
from tools.convert.parity import sample_texts

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>"]
RANGES = [(0x20, 0x7F), (0x80, 0x250), (0x370, 0x600), (0x4E00, 0x9FFF), (0x3000, 0x3100), (0xAC00, 0xD7A3)]
RANGES += [(0x1F300, 0x1FAFF), (0x2000, 0x2100), (0, 0x20), (0xD800, 0xE000), (0x10000, 0x10400)]
CODE = "def f(x):\n\tif x != 3.14:\r\n        return {'a': [x**2, \"b\"]}  # don't\n\n\n"


def thousand_texts() -> list[str]:
    """Chinese, English, emoji, code, halves of characters, special tokens, and mixtures of all."""
    rng = random.Random(0)

    def word() -> str:
        low, high = rng.choice(RANGES)
        kinds = [rng.choice(SPECIAL), rng.choice([" ", "\n", "  \n", "\t", "'s", "'LL", "\u3000"])]
        kinds += ["".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 9)))] * 4
        return rng.choice(kinds)

    texts = [
        *sample_texts(),
        CODE,
        *SPECIAL,
        "👩‍👩‍👧🇨🇳 \ud83d half",
        "\ufeffBOM \x85 \xa0x",
        "",
        " ",
        "x" * 3000,
    ]
    texts += ["".join(word() for _ in range(rng.randrange(1, 30))) for _ in range(1000 - len(texts))]
    assert len(texts) == 1000
    return texts


def whole(text: str) -> str:
    """A text without halves of characters: two may be a whole one, others become U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def own_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer of 512 tokens, trained into a folder."""
    save(train(sample_texts(), 512), folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)
