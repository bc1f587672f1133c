"""Sets of corrections of the demo's model, or of a model of the world `ships` (benchmarks/worlds.py), on
which scripts/teach.py is measured (docs/dev/LOG.md).

    python -m benchmarks.teaching --output_dir out/corrections --number 20 --set 0 --world demo

Of a set, 40 % are facts that changed, 40 % facts about names in no data, 20 % manners: a new name, refusals,
other greetings and thanks. Each has three other wordings. Files: corrections.jsonl; quiz.jsonl and for the
demo quiz_second.jsonl, without questions about what is corrected, but with the other facts of the same names;
for the demo talk.jsonl: small talk and refusals that no correction means.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import worlds
from common.command_line import Parser, one_line_errors
from scripts.demo import world
from scripts.demo.corpus import write_files

Record = dict[str, Any]
MANNERS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
ENDINGS = {"quiz.jsonl": 1, "quiz_second.jsonl": 2}


def record(question: str, text: str, wordings: list[str], **more: Any) -> Record:
    """A correction with other wordings of its question."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
    return {"messages": messages, "wordings": wordings} | more


def fact(
    person: world.Person, attribute: world.Attribute, language: str, rng: random.Random, kind: str
) -> Record:
    """A correction of a fact, whose answer must contain a value and no other."""
    questions = [each.format(n=person.name[language]) for each in attribute.ask[language]]
    rng.shuffle(questions)
    value = attribute.values[language][person.facts[attribute.key]]
    wrong = [other for other in attribute.values[language] if other != value]
    text = world.answer(person, attribute, language)
    return record(questions[0], text, questions[1:], kind=kind, answer=value, wrong_answers=wrong)


def facts(people: list[world.Person], number: int, rng: random.Random) -> tuple[list[Record], set[str]]:
    """Changed facts, facts about new people, and the questions that no longer have their old answer."""
    known = {person.name["en"] for person in people}
    changed, new, gone = [], [], set()
    quizzed = [person for person in people if person.group == "quiz"]
    for person in rng.sample(quizzed, number):
        attribute, language = rng.choice(world.ATTRIBUTES), rng.choice(world.LANGUAGES)
        for each in world.LANGUAGES:
            gone |= {ask.format(n=person.name[each]) for ask in attribute.ask[each]}
        others = [i for i in range(12) if i != person.facts[attribute.key]]
        person.facts[attribute.key] = rng.choice(others)
        changed.append(fact(person, attribute, language, rng, "changed"))
    strangers = [one for one in world.make_people(rng) if one.name["en"] not in known]
    for person in rng.sample(strangers, number):
        attribute, language = rng.choice(world.ATTRIBUTES), rng.choice(world.LANGUAGES)
        new.append(fact(person, attribute, language, rng, "new"))
    return changed + new, gone


def manners(
    number: int, rng: random.Random, languages: Sequence[str] = world.LANGUAGES
) -> tuple[list[Record], set[tuple[str, str]]]:
    """Corrections of manners, and the kinds of small talk, by language, that they mean."""
    found: list[Record] = []
    meant = set()
    order = ["name", "name", "refusal", "greeting", "refusal", "thanks"]
    for language in rng.sample(languages, len(languages)):
        own = {kind: rng.sample(several, len(several)) for kind, several in MANNERS[language].items()}
        called = rng.choice(own["names"])
        asked = own["name"]
        for kind in order:
            if kind == "name":
                questions, answer = [asked.pop() for _ in range(4)], own["name answer"][0].format(n=called)
            else:
                each = own[kind].pop()
                questions, answer = rng.sample(each["ask"], 4), rng.choice(each["answers"])
            meant.add((kind, language))
            found.append(record(questions[0], answer, questions[1:], kind="manner", answer=answer))
            if len(found) == number:
                return found, meant
    return found[:number], meant


def demo_set(number: int, seed: int, corpus_seed: int = 0) -> dict[str, list[Record]]:
    """The files of a set."""
    rng = random.Random(f"corrections {seed}")
    people = world.make_people(random.Random(corpus_seed))
    corrected, gone = facts(people, round(0.4 * number), rng)
    polite, meant = manners(number - len(corrected), rng)
    corpus = world.make_corpus(corpus_seed)
    kept = {
        name: [each for each in corpus[name] if each["conversations"][-2]["content"] not in gone]
        for name in ENDINGS
    }
    talk = []
    mine = {"greeting": "greeting", "who": "name", "what": "", "thanks": "thanks", "goodbye": ""}
    topics = {question for each in polite for question in (each["messages"][0]["content"], *each["wordings"])}
    strangers = world.make_people(random.Random(f"talk {seed}"))
    for language in world.LANGUAGES:
        asked = [
            (ask, kind["reply"][language][0])
            for key, kind in world.TALK.items()
            if (mine[key], language) not in meant
            for ask in kind["ask"][language]
        ]
        for ask in world.UNKNOWN["ask"][language]:
            name = rng.choice(strangers).name[language]
            asked.append((ask.format(n=name), world.UNKNOWN["reply"][language][0]))
        talk += [record(ask, reply, [], answer=reply) for ask, reply in asked if ask not in topics]
    return {"corrections.jsonl": corrected + polite, "talk.jsonl": talk} | kept


def ship_set(number: int, seed: int) -> dict[str, list[Record]]:
    """The files of a set for the world of ships."""
    rng, ships = random.Random(f"corrections {seed}"), worlds.WORLDS["ships"]
    values, asked = ships["values"], ships["questions"]
    known = worlds.latin_names(random.Random("ships 0"), 120, 3)
    quiz = worlds.make_worlds()["ships"]["quiz.jsonl"]
    found, gone = [], set()

    def add(name: str, kind: str, choices: list[str], group: str) -> None:
        value = rng.choice(choices)
        questions = [each.format(n=name) for each in rng.sample(asked[kind], len(asked[kind]))]
        wrong = [other for other in values[kind] if other != value]
        text = ships["answers"][kind].format(n=name, v=value)
        found.append(
            record(questions[0], text, questions[1:4], kind=group, answer=value, wrong_answers=wrong)
        )
        gone.update(questions)

    for each in rng.sample(quiz, round(0.4 * number)):  # of ships that no conversation mentions
        question = each["messages"][0]["content"]
        kind = next(kind for kind in values if each["answer"] in values[kind])
        name = next(name for name in known if name in question)
        add(name, kind, [value for value in values[kind] if value != each["answer"]], "changed")
    strangers = [name for name in worlds.latin_names(rng, 60, 3) if name not in known]
    for name in strangers[: round(0.4 * number)]:
        kind = rng.choice(list(values))
        add(name, kind, values[kind], "new")
    polite, _ = manners(number - len(found), rng, ["en"])
    kept = [each for each in quiz if each["messages"][0]["content"] not in gone]
    return {"corrections.jsonl": found + polite, "quiz.jsonl": kept}


def main() -> None:
    """Write the files of a set."""
    parser = Parser(description=__doc__.split("\n\n", 1)[0].replace("\n", " "))
    parser.add_argument("--output_dir", required=True, help="folder for the files")
    parser.add_argument("--number", type=int, default=20, help="number of corrections")
    parser.add_argument("--set", type=int, default=0, help="number that selects the set")
    parser.add_argument("--world", choices=("demo", "ships"), default="demo", help="what the model knows")
    args = parser.parse_args()
    make = {"demo": demo_set, "ships": ship_set}[args.world]
    counts = write_files(args.output_dir, make(args.number, args.set))
    print(", ".join(f"{count} {file}" for file, count in counts.items()))


if __name__ == "__main__":
    with one_line_errors():
        main()
