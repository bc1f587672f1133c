"""The text of tokens for people: what each one spells, without anything that a terminal or a browser would obey."""

from dataset.token_cache import TokenCache

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for an incomplete character


def printable(text: str) -> str:
    """The text with escapes for what cannot be seen, except for blanks and line ends."""
    return "".join(c if c.isprintable() or c in "\n\t\u00a0\u3000" else ascii(c)[1:-1] for c in text)


def token_texts(tokenizer, token_ids: list[int]) -> list[str]:
    """The printable text of each token; a token that is only part of a character is shown by its vocabulary entry."""
    entries = tokenizer.convert_ids_to_tokens(token_ids)
    texts = [tokenizer.decode([token_id], clean_up_tokenization_spaces=False) for token_id in token_ids]
    return [
        f"<part {entry}>" if UNKNOWN in text else repr(text)[1:-1] for entry, text in zip(entries, texts, strict=True)
    ]


def whole_characters(tokenizer, token_ids: list[int]) -> list[tuple[int, int, str]]:
    """[first, last) and text of the shortest runs of tokens that spell whole characters (of at most 4 bytes)."""
    runs, first = [], 0
    while first < len(token_ids):
        for last in range(first + 1, min(first + 5, len(token_ids) + 1)):
            text = tokenizer.decode(token_ids[first:last], clean_up_tokenization_spaces=False)
            if UNKNOWN not in text:
                break
        else:  # cut off, or the character itself
            last, text = first + 1, tokenizer.decode(token_ids[first : first + 1], clean_up_tokenization_spaces=False)
        runs.append((first, last, text))
        first = last
    return runs


def describe_sample(cache: TokenCache, sample: dict) -> str:
    """Where a sample comes from and how much of it is trained, in a line."""
    targets = int(sample["loss_mask"].sum())
    size = f"{len(sample['input_ids'])} tokens, {targets} targets of {sample['target_bytes']} bytes"
    return f"sample {sample['sample_id']} from {cache.source(sample['sample_id'])}: {size}"
