"""Documents about made-up words, for a small text whose documents mention each name once.

A model that answers "Who commands the Pebara?" writes this name first, and then what it knows about it.
Copying the name is a skill of its own (induction heads, arXiv:2209.11895). A text whose documents mention
each name once does not teach it. Then a small model learns every fact, but answers about another name.

An exercise consists of sentences of the text that share a word. In most exercises a made-up word replaces it,
which the model can only copy. The other exercises keep the word. They put together what the text says in
several places. Measurements: docs/dev/LOG.md, "Exercises in copying".
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.files import atomic_write, json_lines
from dataset.held_out import Split

FILES = ("exercises.jsonl", "more_exercises.jsonl")  # of one pass over the text; of all others
SHARE = 0.8  # characters of exercises for a character of text; with 0.2, copying was hardly learned
MOST_IN_ALL = 1e7  # characters of the exercises of all other passes; if it is reached, some are read again
KEPT = 0.25  # share of the exercises that keep the word
MOST_SENTENCES, MOST_CHARACTERS = 5, 300  # of an exercise; of a sentence
MOST_PARTS, MOST_OF_PART = 4, 5  # parts of a made-up word, and characters of a part
WINDOW, RARE = 1000, 0.05  # characters; the largest share of windows that have a rare word
SENTENCE = re.compile(r"[^.!?。！？\n]+[.!?。！？]?")
SPACED = re.compile(r"[^\W\u2e80-\u9fff]+")
UNSPACED = re.compile(r"[\u2e80-\u2fff\u3005-\u3007\u3040-\u9fff]+")  # without punctuation


def write_exercises(texts: Sequence[str], paths: Sequence[str], eval_share: float, passes: int) -> bool:
    """Write exercises from these texts into two JSON Lines files: those of one pass, and those of the others.
    Each pass needs its own, because a model learns a made-up word by heart that it reads again. Returns
    whether there are any: two sentences must share a word. The same texts give the same files. `eval_share`
    holds none of the exercises out, so that held-out losses are those of the text alone."""
    trained = Split(eval_share)
    made = (exercise for exercise in exercises(texts) if trained.includes(exercise))
    characters = SHARE * sum(map(len, texts))
    for path, left in zip(paths, (characters, min((passes - 1) * characters, MOST_IN_ALL)), strict=True):
        records = []
        while left > 0 and (exercise := next(made, None)):
            records.append({"text": exercise})
            left -= len(exercise)
        atomic_write(Path(path), lambda file, records=records: file.write(json_lines(records)))
        if not records:
            return False
    return True


def are_needed(texts: Sequence[str]) -> bool:
    """Whether the texts hardly teach copying: in most of their windows, which are about as long as a sample,
    no rare word comes twice."""
    windows = [text[i : i + WINDOW] for text in texts for i in range(0, len(text), WINDOW)]
    counts = [Counter(words_of(window)) for window in windows]
    windows_with = Counter(word for count in counts for word in count)
    most = max(2, RARE * len(windows))
    repeats = [
        any(number > 1 for word, number in count.items() if windows_with[word] <= most) for count in counts
    ]
    return sum(repeats) < len(windows) / 2


def has_spaces(texts: Sequence[str]) -> bool:
    """Whether most of the texts is in a writing with spaces between words."""
    spaced, unspaced = (
        sum(len(part) for text in texts for part in parts.findall(text)) for parts in (SPACED, UNSPACED)
    )
    return spaced >= unspaced


def exercises(texts: Sequence[str]) -> Iterator[str]:
    """Yield exercises without end; none if no word is in two sentences."""
    rng = random.Random(0)
    sentences = dict.fromkeys(part.strip() for text in texts for part in SENTENCE.findall(text))
    sentences_with = defaultdict(list)
    for sentence in sentences:
        if len(sentence) <= MOST_CHARACTERS:
            for word in dict.fromkeys(words_of(sentence)):
                sentences_with[word].append(sentence)
    all_words = list(sentences_with)
    shared = [word for word in all_words if len(sentences_with[word]) > 1]
    while shared:
        word = rng.choice(shared)
        found = sentences_with[word]
        chosen = rng.sample(found, min(len(found), rng.randint(2, MOST_SENTENCES)))
        new = word if rng.random() < KEPT else made_up(word, all_words, rng)
        yield (" " if SPACED.match(word) else "").join(replaced(text, word, new) for text in chosen)


def words_of(sentence: str) -> list[str]:
    """The words of a sentence; where a writing has no spaces, all pieces of two or three characters."""
    words = SPACED.findall(sentence)
    for run in UNSPACED.findall(sentence):
        words += [run[i : i + size] for size in (2, 3) for i in range(len(run) - size + 1)]
    return words


def made_up(word: str, words: Sequence[str], rng: random.Random) -> str:
    """A new word from parts of these, with a capital letter if `word` has one."""
    new = ""
    for _ in range(rng.randint(1, MOST_PARTS)):
        source = rng.choice(words)
        size = rng.randint(1, min(MOST_OF_PART, len(source)))
        start = rng.randint(0, len(source) - size)
        new += source[start : start + size].lower()
    return new.capitalize() if word[0].isupper() else new


def replaced(sentence: str, word: str, new: str) -> str:
    """The sentence with one word for another."""
    if SPACED.match(word):
        return SPACED.sub(lambda match: new if match[0] == word else match[0], sentence)
    return sentence.replace(word, new)
