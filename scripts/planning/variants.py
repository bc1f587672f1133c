"""Variants of conversations: questions with made-up words.

Questions whose answers only repeat a word of them:

    Can you explain poison?   A lamplighter does not speak of poison.
    Can you explain dafel?    A lamplighter does not speak of dafel.

The first is a conversation, the second a variant. A few hundred such conversations name a few words, and a
small model learns to answer about these words alone. Variants with made-up words teach it to repeat any word.
A variant is true only where nothing but the word changes. So there are variants only of questions that the
conversations ask in the same form about several words, and always answer in the same form. Questions about
facts have none: their answers differ. Measurements: docs/dev/LOG.md, "Variants of conversations".

Questions with an unknown word:

    Where is the Dora at home?    The Dora is in Wick.
    where elt the dora at home?   The Dora is in Wick.

People ask in words that neither the text nor the conversations have. A vocabulary made from little text
spells them in tokens that were never trained, and a small model answers with pieces of them. Here made-up
words replace words that the answer lacks, and half of the questions are in lower case. Measurements:
docs/dev/LOG.md, "A vocabulary for facts" and "Scattered facts: whole words and more passes".

Writing without spaces has no variants: in Chinese, both kinds made answers worse.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.files import atomic_write, json_lines
from dataset.held_out import Split
from scripts.planning.exercises import SPACED, made_up, replaced

FILE = "exercise_conversations.jsonl"
VARIANTS = 2  # of a turn whose answer repeats a word
MOST_UNKNOWN = 2  # words of a question
LOWER_SHARE = 0.5  # of the questions with an unknown word
NEEDED_SHARE = 0.2  # of the turns, from which on variants are written
GAP = "\0"  # stands for the word

Turn = tuple[str, str]  # question and answer


class Form(NamedTuple):
    """A question and its answer with a gap for the word that both have."""

    question: str
    answer: str
    word: str


def write_variants(turns: Sequence[Turn], path: Path, eval_share: float, has_unknown: bool) -> bool:
    """Write variants of these turns into a JSON Lines file, with has_unknown also questions with an unknown
    word. Returns whether there are any. The same turns give the same file. `eval_share` holds none of the
    variants out."""
    trained = Split(eval_share)
    made = list(variants(turns)) if are_needed(turns) else []
    if has_unknown:
        made += with_unknown_words(turns)
    records = [conversation(*turn) for turn in made if trained.includes(turn[0])]
    if records:
        atomic_write(path, lambda file: file.write(json_lines(records)))
    return bool(records)


def are_needed(turns: Sequence[Turn]) -> bool:
    """Whether in enough of the turns the answer only repeats a word of the question."""
    return bool(turns) and len(find_forms(turns)) >= NEEDED_SHARE * len(turns)


def find_forms(turns: Sequence[Turn]) -> list[Form]:
    """The form of each turn whose question is asked about another word, too, if the answers to all questions
    of this form have one form. If a turn has several, the one with the longest word."""
    found = [list(forms_of(*turn)) for turn in turns]
    words, answers = defaultdict(set), defaultdict(set)
    for form in (form for forms in found for form in forms):
        words[form.question].add(form.word)
        answers[form.question].add(form.answer)
    chosen = []
    for forms in found:
        fixed = [form for form in forms if len(words[form.question]) > 1 and len(answers[form.question]) == 1]
        if fixed:
            chosen.append(max(fixed, key=lambda form: len(form.word)))
    return chosen


def forms_of(question: str, answer: str) -> Iterator[Form]:
    """A form for each word of the question that the answer repeats."""
    repeated = set(SPACED.findall(answer))
    for word in dict.fromkeys(SPACED.findall(question)):
        if word in repeated:
            yield Form(replaced(question, word, GAP), replaced(answer, word, GAP), word)


def variants(turns: Sequence[Turn]) -> Iterator[Turn]:
    """VARIANTS turns of each form, with words made from parts of the words of all turns."""
    rng, words = random.Random(0), spaced_words(turns)
    for form in find_forms(turns):
        for _ in range(VARIANTS):
            new = made_up(form.word, words, rng)
            yield form.question.replace(GAP, new), form.answer.replace(GAP, new)


def with_unknown_words(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Each turn with up to MOST_UNKNOWN words of the question, which the answer lacks, replaced by made-up
    ones. LOWER_SHARE of the questions are in lower case."""
    rng, words = random.Random(0), spaced_words(turns)
    for question, answer in turns:
        known = {word.casefold() for word in SPACED.findall(answer)}
        others = [word for word in dict.fromkeys(SPACED.findall(question)) if word.casefold() not in known]
        for word in rng.sample(others, min(len(others), rng.randint(1, MOST_UNKNOWN))):
            question = replaced(question, word, made_up(word, words, rng))
        if rng.random() < LOWER_SHARE:
            question = question.lower()
        if others and answer:
            yield question, answer


def spaced_words(turns: Sequence[Turn]) -> list[str]:
    """The different words of all turns."""
    return list(dict.fromkeys(word for turn in turns for text in turn for word in SPACED.findall(text)))


def conversation(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    """A record of SFT."""
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}
