"""Train a byte-level BPE vocabulary, and evaluate it on held-out text.

python scripts/train_tokenizer.py --data_path my_corpus.jsonl notes.txt --vocab_size 8000

Input: every kind of file and record that training takes; ten million characters are plenty. Output:
tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers loads them, for
`--tokenizer_path out/tokenizer` of the other scripts.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.arguments import add_flag
from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from common.errors import UserError
from common.hub import local_path
from common.settings import ROOT, StageArgs
from dataset.files import expand_paths, format_source, read_records
from dataset.held_out import Split
from dataset.messages import BadRecord
from dataset.records import PAIR_NAMES, find_format, parse
from dataset.report import describe_error

COPIED_FILES = ("tokenizer_config.json", "chat_template.jinja")  # from model/

# In the order of their ids. Control tokens are `special`: decode(skip_special_tokens=True) drops them. Tags
# are part of the assistant's text, so each is one ordinary token.
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAG_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
RESERVED_TOKENS = [f"<|reserved_{i}|>" for i in range(16)]

# BPE merges only within the pieces that this pattern matches; they cover every string. It is Qwen2's,
# character for character: llama.cpp knows patterns by name only, and calls this one "qwen2".
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# At most 4 Chinese or 14 English characters: a phrase that one source repeats is not worth an id.
MAX_TOKEN_BYTES = 14

HOLD_OUT_EVERY = 20  # of so many records one is kept for the evaluation

# Text of every chat and tool call that is rare in plain text; see `with_protocol`.
PROTOCOL = [
    "system",
    "user",
    "assistant",
    "tool",
    '{"type": "function", "function": {"name": "a", "description": "b", "parameters": {"type": "object", '
    '"properties": {"c": {"type": "string", "description": "d"}}, "required": ["c"]}}}\n',
    '{"name": "a", "arguments": {"c": "d"}}\n',
]

ZH_CHARACTER = re.compile(r"[\u3400-\u9fff]")


def read_texts(
    path: str, separator: str = "", skip_bad: bool = False, split: Split | None = None
) -> Iterator[str]:
    """Yield the text of each record that is not blank. separator: the line between documents of plain text.
    split: the records to read; None: all. Raises UserError for a missing file and, unless `skip_bad`, for a
    record that no stage can read."""
    paths = expand_paths(path)
    records = read_records(paths, separator)
    for source, record in records if split is None else split.choose(records, paths, is_document=True):
        try:
            if isinstance(record, BadRecord):
                raise record
            text = all_text(record)
        except Exception as error:  # data may hold anything
            if skip_bad:
                continue
            raise UserError(
                f"{format_source(paths[source.file], source.line)}: {describe_error(error)}"
            ) from error
        if text.strip():
            yield text


def all_text(record: dict) -> str:
    """All text of a record of any stage. Raises BadRecord."""
    is_pair = any(record.get(name) is not None for names in PAIR_NAMES for name in names)
    kind = "dpo" if is_pair else "prompt"  # whose answer may be missing
    if find_format(record, is_document=True).document or "text" in record:
        kind = "pretrain"
    parsed = parse(record, kind)
    texts = strings_in([[[chat.messages, chat.tools] for chat in parsed.chats], parsed.reference])
    return "\n".join(texts) if parsed.document is None else parsed.document


def strings_in(value: object) -> Iterator[str]:
    """Yield every text inside a JSON value, depth first, except the speakers."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "role":
                yield from strings_in(item)


def with_protocol(texts: Iterable[str]) -> Iterator[str]:
    """Add the PROTOCOL lines after every 20th text, so that role names and JSON keys become single tokens."""
    for i, text in enumerate(texts):
        yield text
        if i % 20 == 0:
            yield from PROTOCOL


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE, lossless for any text: no normaliser, and an id for every byte. Raises
    UserError if `vocab_size` is too small for bytes and special tokens."""
    least = 256 + len(CONTROL_TOKENS + TAG_TOKENS + RESERVED_TOKENS)
    if vocab_size < least:
        raise UserError(
            f"--vocab_size {vocab_size} is too small: bytes and special tokens alone take {least} ids"
        )
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    # All added tokens are special here, so that the trainer gives them the first ids.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=CONTROL_TOKENS + TAG_TOKENS + RESERVED_TOKENS,
        max_token_length=MAX_TOKEN_BYTES + 1,  # the trainer's limit is exclusive
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(with_protocol(texts), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAG_TOKENS])
    return tokenizer


def save(tokenizer: Tokenizer, output_dir: Path) -> None:
    """Write the folder that `AutoTokenizer.from_pretrained` loads: vocabulary, settings and our chat
    template. Raises UserError if the folder cannot be written."""
    files = {"tokenizer.json": tokenizer.to_str(pretty=True)}
    files |= {name: (ROOT / "model" / name).read_text(encoding="utf-8") for name in COPIED_FILES}
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (output_dir / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output_dir} cannot be written: {error}") from error


def characters_per_token(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, float]:
    """{"zh": characters / tokens, "en": ...} over the texts of each language that occurs. A text counts as
    "zh" with at least 30 % Chinese characters, as "en" below 5 %; others are left out."""
    characters, tokens = Counter(), Counter()
    for text in texts:
        chinese = len(ZH_CHARACTER.findall(text)) / max(1, len(text))
        if 0.05 <= chinese < 0.3:
            continue
        language = "zh" if chinese >= 0.3 else "en"
        characters[language] += len(text)
        tokens[language] += len(tokenizer.encode(text))
    return {language: count / tokens[language] for language, count in characters.items()}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    text = "files to learn from; may be given repeatedly"
    flag("--data_path", nargs="+", action="extend", required=True, help=text)
    flag("--vocab_size", type=int, default=6400, help="number of ids, including special tokens")
    flag("--output_dir", type=Path, default=ROOT / "out" / "tokenizer", help="folder for the tokenizer")
    add_flag(parser, StageArgs, "text_separator")
    return parser.parse_args()


def main() -> None:
    """Train on all records except every 20th, save, and evaluate on the rest."""
    args = parse_args()
    paths = [local_path(path) for path in args.data_path]

    def texts(held_out: bool) -> Iterator[str]:
        for path in paths:
            for number, text in enumerate(read_texts(path, args.text_separator), start=1):
                if (number % HOLD_OUT_EVERY == 0) is held_out:
                    yield text

    if next(texts(held_out=False), None) is None:
        raise UserError(f"{paths[0]} contains no text; give --data_path a file with at least one record")
    tokenizer = train(texts(held_out=False), args.vocab_size)
    save(tokenizer, args.output_dir)
    print(f"{tokenizer.get_vocab_size()} tokens -> {args.output_dir}")
    for language, figure in sorted(characters_per_token(tokenizer, texts(held_out=True)).items()):
        print(f"held out, {language}: {figure:.3f} characters per token")


if __name__ == "__main__":
    with one_line_errors():
        main()
