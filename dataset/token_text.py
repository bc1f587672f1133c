"""The text of tokens for people: what each one spells, without anything that a terminal would obey."""

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
