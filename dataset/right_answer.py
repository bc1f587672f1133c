"""Decides whether an answer to a question is right, given the reference answer in the data.

An answer is right if it is the same text, ignoring case, punctuation and white space. It is also right if it
contains what the reference adds to the question: the reference's last number or, if it has none, its last
name (a capitalised word that does not begin a sentence). A number or name from the question does not count:

    Who commands the Dora?   Captain Pike commands the Dora.
    Pike does.                          right: the last name that is not in the question
    The Dora sails under Captain Voss.  wrong

An answer in other words, without a number or name, counts as wrong, even if a person would accept it. The
share of right answers is therefore a lower bound.
"""

import re

from dataset.held_out import normal_form

NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
NAME = re.compile(r"[A-ZÀ-ÖØ-ÞА-Я][\w'’-]*")
SENTENCE_END = frozenset('.!?:;\n"“”')


def is_right(question: str, reference: str, answer: str) -> bool:
    """Whether an answer agrees with the reference answer, by the rule above."""
    if normal_form(answer) == normal_form(reference):
        return True
    key = decisive(question, reference)
    return key is not None and key in NUMBER.findall(answer) + NAME.findall(answer)


def decisive(question: str, reference: str) -> str | None:
    """The last number of the reference answer or, without one, its last name, if it is not in the question;
    else None."""
    numbers = [number for number in NUMBER.findall(reference) if number not in NUMBER.findall(question)]
    if numbers:
        return numbers[-1]
    asked = set(NAME.findall(question))
    names = [
        match[0]
        for match in NAME.finditer(reference)
        if match[0] not in asked and not begins_sentence(reference, match.start())
    ]
    return names[-1] if names else None


def begins_sentence(text: str, at: int) -> bool:
    """Whether this position is at the start of the text or after the end of a sentence."""
    before = text[:at].rstrip(" ")
    return not before or before[-1] in SENTENCE_END
