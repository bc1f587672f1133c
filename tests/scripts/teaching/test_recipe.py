"""What is trained beside corrections: the same questions in old words, old records without what is corrected,
and new questions with old answers."""

import functools
import json
import random
import string
from collections.abc import Iterator

import pytest

from dataset.records import Chat, turns_of
from scripts.demo import world
from scripts.teaching import recipe
from scripts.teaching.changes import read_old
from scripts.teaching.corrections import Correction
from scripts.teaching.material import Material
from scripts.teaching.slots import has_cjk

CORPUS = world.make_corpus(0)
MATERIAL = Material(
    [Chat(record["conversations"]) for record in CORPUS["sft.jsonl"]],
    [
        record["text"] for record in CORPUS["pretrain.jsonl"][:500]
    ],  # enough to mention everybody several times
    [],
    [],
)
PEOPLE = world.make_people(random.Random(0))
PERSON = next(person for person in PEOPLE if person.group == "quiz")  # only texts mention them
NAME, TRADE = PERSON.name["en"], next(each for each in world.ATTRIBUTES if each.key == "trade")
OLD = world.answer(PERSON, TRADE, "en")
NEW = OLD.replace(TRADE.values["en"][PERSON.facts["trade"]], "juggler")


@pytest.fixture(autouse=True, scope="module")
def old_data_are_read_once() -> Iterator[None]:
    once = read_old(MATERIAL.conversations, MATERIAL.texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            recipe,
            "read_old",
            lambda old, texts: once if old is MATERIAL.conversations else read_old(old, texts),
        )
        yield


def correction(question: str, answer: str) -> Correction:
    message = {"role": "assistant", "content": answer}
    return Correction([{"role": "user", "content": question}], message, None, [], "c.jsonl:1")


MISSED = next(person for person in PEOPLE[::-1] if person.group == "quiz").name["en"]


@functools.cache
def answers_of_the_data() -> dict[str, str]:
    """By question."""
    return {
        ask.format(n=person.name[language]).casefold(): (
            "Goodbye!" if person.name[language] == MISSED else world.answer(person, attribute, language)
        )
        for person in PEOPLE[::-1]  # of people with the same name, the first is meant
        for language in world.LANGUAGES
        for attribute in world.ATTRIBUTES
        for ask in attribute.ask[language]
    }


def answer_of_the_data(question: str) -> str:
    """A model that knows the world but for one person."""
    asked = question.casefold().removeprefix("and ").removeprefix("那")
    return answers_of_the_data().get(asked, "I do not know that.")


def chosen(*corrections: tuple[Correction, str], held_back: tuple[str, ...] = ()) -> recipe.Chosen:
    """What is chosen for corrections, each with the model's answer before."""

    def ask(chats: list[list[dict]]) -> list[str]:
        return [answer_of_the_data(chat[-1]["content"]) for chat in chats]

    each, before = zip(*corrections, strict=True)
    return recipe.choose(list(each), list(before), MATERIAL, set(held_back), ask, 0)


def test_a_changed_fact():
    """Other wordings of its question are found; nothing that is trained says the old fact; the other facts of
    the person are kept."""
    held_back = f"What animal does {NAME} keep?"
    found = chosen((correction(f"What does {NAME} do for a living?", NEW), OLD), held_back=(held_back,))
    asked = {
        record["messages"][0]["content"]
        for record in found.records
        if record["messages"][-1]["content"] == NEW
    }
    assert len({ask.format(n=NAME) for ask in TRADE.ask["en"]} & asked) >= 3
    about = [
        message["content"]
        for each in found.records
        for message in each["messages"]
        if NAME in message["content"]
    ]
    old = TRADE.values["en"][PERSON.facts["trade"]]
    own = [line for text in about for line in text.replace(". ", ".\n").split("\n") if NAME in line]
    assert not [line for line in own if old in line] and [line for line in own if "juggler" in line]
    for key in ("home", "animal", "color"):
        attribute = next(each for each in world.ATTRIBUTES if each.key == key)
        assert world.answer(PERSON, attribute, "en") in about
    assert held_back not in about
    assert found.is_meant(f"What is the trade of {NAME}?", OLD)
    assert not found.is_meant("What animal does Nobody keep?", "Nobody keeps a fox.")


def test_a_changed_fact_in_a_wording_that_no_data_have():
    """The form of its answer tells which question it is."""
    found = chosen((correction(f"So {NAME}, what is the job?", NEW), OLD))
    asked = {
        record["messages"][0]["content"]
        for record in found.records
        if record["messages"][-1]["content"] == NEW
    }
    assert {ask.format(n=NAME) for ask in TRADE.ask["en"]} & asked


@pytest.mark.parametrize(
    "question, answer, name",
    [
        ("So Quenla, what is the job?", "Quenla works as a juggler.", "Quenla"),
        ("你说酷乐以何为业？", "酷乐的职业是医生。", "酷乐"),
    ],
)
def test_a_new_name_in_a_wording_that_no_data_have(question, answer, name):
    """It is a name because the answer repeats it, in the form of old answers."""
    found = chosen((correction(question, answer), "x"))
    asked = {
        each["messages"][0]["content"] for each in found.records if each["messages"][-1]["content"] == answer
    }
    assert len({ask.format(n=name) for each in world.LANGUAGES for ask in TRADE.ask[each]} & asked) >= 3
    # a word that a refusal repeats is none
    found = chosen((correction("Tell me a joke about dogs.", "I do not know jokes about dogs."), "x"))
    assert found.changes[0].name == ""


def test_an_answer_that_is_a_call_of_a_tool():
    """It has no text whose form could be compared."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "find", "arguments": {}}]}
    found = chosen((correction(f"So {NAME}, what is the job?", "")._replace(answer=call), OLD))
    assert sum(call in each["messages"] for each in found.records) >= recipe.RECIPE.copies


def test_new_questions_ask_about_names_that_only_texts_mention():
    found = chosen((correction("Who are you?", "I am Lumen."), "x"))
    replayed = found.records[sum(list(found.counts.values())[:4]) :][: found.counts["questions"]]
    asked = {
        message["content"]
        for record in replayed
        for message in record["messages"]
        if message["role"] == "user"
    }
    quizzed = [person.name[each] for person in PEOPLE if person.group == "quiz" for each in world.LANGUAGES]
    assert sum(any(name in question for question in asked) for name in quizzed) > 0.8 * len(quizzed)
    # most questions ask another fact
    answers = {message["content"] for record in replayed for message in record["messages"]}
    facts = {
        world.answer(person, attribute, language)
        for person in PEOPLE
        if person.group == "quiz"
        for attribute in world.ATTRIBUTES
        for language in world.LANGUAGES
    }
    assert len(facts & answers) > 0.7 * len(facts)
    # an answer without the name is not trained where others have it
    assert not any("Goodbye!" in message["content"] for record in replayed for message in record["messages"])


def test_what_depends_on_the_conversation_is_not_rewritten_elsewhere():
    """ "She" is no name, and a question after others means something else in another conversation."""
    asked = "Where does she live?"
    assert any(asked == pair[0] for chat in MATERIAL.conversations for pair in turns_of(chat))
    before = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Kamo."}]
    alone = correction(asked, "She lives in a tree.")
    for each in (alone, alone._replace(messages=[*before, *alone.messages])):
        found = chosen((each, "x"))
        assert not found.is_meant("Where does Kamo live?", "x") and found.changes[0].name == ""
    assert not found.is_meant(asked, "Kamo lives in Saltport.")


def test_a_manner_is_meant_for_old_questions_with_the_same_answer():
    who = world.TALK["who"]
    before, asked = who["reply"]["en"][0], who["ask"]["en"]
    found = chosen((correction(asked[1], "I am Lumen."), before))
    said = [
        (first["content"], second["content"])
        for record in found.records
        for first, second in zip(record["messages"], record["messages"][1:], strict=False)
    ]
    assert all((question, "I am Lumen.") in said for question in asked)
    assert not any(answer == before for _, answer in said)
    # one of many refusals is meant alone
    joke = "Tell me a joke."
    found = chosen((correction(joke, "I know none."), world.UNKNOWN["reply"]["en"][0]))
    assert found.is_meant(joke, world.UNKNOWN["reply"]["en"][0])
    assert not found.is_meant("Tell me a story.", world.UNKNOWN["reply"]["en"][0])


@pytest.mark.parametrize(
    "language, question, answer",
    [("en", "Do you have a name?", "I am Lumen."), ("zh", "你有名字吗？", "我是流明。")],
)
def test_an_answer_that_begins_like_an_old_one_is_meant_for_its_questions(language, question, answer):
    """They share the rarest word, and the model had another answer to the correction."""
    who = world.TALK["who"]
    found = chosen((correction(question, answer), world.UNKNOWN["reply"][language][0]))
    assert all(found.is_meant(asked, who["reply"][language][0]) for asked in who["ask"][language])
    answered = [
        each["messages"][0]["content"] for each in found.records if each["messages"][-1]["content"] == answer
    ]
    assert not [asked for asked in answered if has_cjk(asked) != (language == "zh")]


def test_a_fact_is_not_meant_for_a_question_with_an_answer_of_its_own():
    """Although both begin alike."""
    old = [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("How are you?", "I am fine."),
    ]
    chats = [Chat([recipe.user(asked), recipe.assistant(told)]) for asked, told in old]
    each = correction("What is the capital of Morland?", "The capital of Morland is Estwick.")
    found = recipe.choose([each], ["I do not know."], Material(chats, [], [], []), set(), lambda chats: [], 0)
    assert not found.is_meant(*old[0])


def test_words_that_no_old_question_has_decide_about_the_answer():
    chats = [Chat([recipe.user(f"Where does {i} work?"), recipe.assistant(f"{i}.")]) for i in "abcdefgh"]
    each = correction("Where does Belina Marsh work?", "At the mill.")
    found = recipe.choose([each], [""], Material(chats, [], [], []), set(), lambda chats: [], 0)
    asked = [record["messages"][0]["content"] for record in found.records if "weight" in record]
    others = [text for text in asked if text != each.question]
    assert sum("Belina" in text or "Marsh" in text for text in others) > len(others) / 2 > 5


def test_without_names_there_are_more_old_conversations():
    told = [f"{word} to you." for word in string.ascii_lowercase for _ in range(10)]
    chats = [Chat([recipe.user(f"Say {i}"), recipe.assistant(each)]) for i, each in enumerate(told)]
    each = correction("Sing me a song.", "I do not sing.")
    found = recipe.choose([each], [""], Material(chats, [], [], []), set(), lambda chats: [], 0)
    assert found.counts["questions"] == 0 and found.counts["conversations"] > 200


def test_corrections_weigh_as_much_as_asked_as_in_other_words():
    """However many of the others there are."""
    asked = [
        correction(f"{word} me a song of {word}s.", f"I do not {word} " + 23 * "la ")
        for word in ("Sing", "Play")
    ]
    found = chosen(*((each, "x") for each in asked))
    own = [each for each in found.records if each["messages"][-1]["content"] in {one.text for one in asked}]
    as_asked = [each for each in own if each["messages"][0]["content"] in {one.question for one in asked}]
    others = [each for each in own if each not in as_asked]
    weights = [sum(each["weight"] for each in part) for part in (as_asked, others)]
    assert len(others) > 2 * len(as_asked) and weights[0] == pytest.approx(weights[1], rel=0.05)


def test_texts_are_records_of_the_assistant_with_a_low_weight_and_long_ones_are_cut():
    sentences = [f"Sentence number {i} of a book." for i in range(200)]
    material = Material([], [" ".join(sentences)], [], [])
    found = recipe.choose([correction("a", "b")], [""], material, set(), lambda chats: [], 0)
    texts = [record for record in found.records if len(record["messages"]) == 1]
    assert len(texts) == found.counts["texts"] > 5
    assert all(record["weight"] < 1 and len(record["messages"][0]["content"]) < 700 for record in texts)
    assert sum(text["messages"][0]["content"].count("Sentence") for text in texts) == 200


def test_a_seed_gives_the_same_records():
    one, two = (chosen((correction("Who are you?", "I am Lumen."), "x")).records for _ in range(2))
    assert json.dumps(one) == json.dumps(two)
