"""The old questions of a model: chosen once, asked before and after each teaching."""

import hashlib
from collections.abc import Iterable
from typing import Any

from dataset.held_out import normal_form
from dataset.records import Chat, assistant_turns
from scripts.teaching.changes import shared_answers
from scripts.teaching.material import Material

QUESTIONS = 100
SHARED = 30  # of them, at most, that share their answer with others: small talk and refusals
LONGEST = 4000  # characters of a conversation that is asked


def choose_questions(material: Material) -> list[dict[str, Any]]:
    """Up to QUESTIONS old questions as {messages, tools, reference}: of held-out conversations, or where
    there are few of all; among them some whose answer is that of several questions. A hash of the question
    decides, so that the order of the data does not matter."""
    held_out = [each for chat in material.held_out for each in questions_of(chat)]
    trained = [each for chat in material.conversations for each in questions_of(chat)]
    known = shared_answers([(last(each), each["reference"]) for each in trained])
    shared = [each for each in trained if last(each) in known]
    alone = [each for each in shared if len(each["messages"]) == 1] or shared
    chosen = in_order(alone)[:SHARED]
    for source in (held_out, trained):
        taken = {normal_form(last(each)) for each in chosen}
        more = [each for each in in_order(source) if normal_form(last(each)) not in taken]
        chosen += more[: QUESTIONS - len(chosen)]
    return chosen


def questions_of(chat: Chat) -> list[dict[str, Any]]:
    """The questions of a conversation, each with what is said before and with its answer. Calls of tools are
    left out."""
    found = []
    for index in assistant_turns(chat):
        message, before = chat.messages[index], chat.messages[:index]
        is_answer = index and before[-1]["role"] == "user" and not message.get("tool_calls")
        if (
            is_answer
            and message["content"].strip()
            and sum(len(each["content"]) for each in before) <= LONGEST
        ):
            found.append({"messages": before, "tools": chat.tools, "reference": message["content"]})
    return found


def last(asked: dict[str, Any]) -> str:
    """The question itself."""
    return asked["messages"][-1]["content"]


def in_order(asked: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each question once, in the order of their hashes."""
    unique = {normal_form(last(each)): each for each in asked}
    return [unique[key] for key in sorted(unique, key=lambda key: hashlib.sha256(key.encode()).digest())]
