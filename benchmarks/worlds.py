"""Small invented worlds, on which rules for little data are measured (docs/dev/LOG.md): a text, conversations
about a part of what it says, and questions about the rest.

    python -m benchmarks.worlds --output_dir dataset/worlds

ships      English: a dozen documents about each of 120 ships, each with all four facts in other words
herbs      the same in Chinese
scattered  the facts of ships, but each document has five sentences about as many ships
dishes     English: answers of four sentences, with four facts each
manners    English: a text without facts; a name, refusals and greetings that only the conversations show
handbook   English, less regular: names share parts, a fact is said 3 to 30 times, documents mix names, some
           kinds of question are rare, and the conversations mention most names, but a part of their facts

Files of a world: text.jsonl; sft_50.jsonl, sft_300.jsonl, sft_1000.jsonl; quiz.jsonl: questions about what no
conversation mentions (manners: new wordings, and topics that are new); reworded.jsonl: questions that the
conversations answer, in a wording that they never use. A seed gives the same bytes everywhere.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors
from scripts.demo.corpus import write_files

Record = dict[str, Any]
Files = dict[str, list[Record]]
SIZES = (50, 300, 1000)
MENTIONS = 12  # of each fact
SYLLABLES = "ba be bi bo da de do ka ke ki ko la le li lo ma me mi mo na ne pa pe ra re sa se ta te va vi"
WORLDS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def conversation(*turns: str) -> Record:
    """A record of turns of user and assistant."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def latin_names(rng: random.Random, count: int, syllables: int) -> list[str]:
    """So many different names."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(SYLLABLES.split(), k=syllables)).capitalize()] = None
    return list(names)


def herb_names(rng: random.Random, count: int) -> list[str]:
    """So many different names of three characters."""
    names: dict[str, None] = {}
    while len(names) < count:
        first = "".join(rng.choices("青白云石松竹梅兰江东西南北长安永宁望春", k=2))
        names[first + rng.choice("草花根叶子参藤菇")] = None
    return list(names)


def of_sizes(conversations: list[Record], rng: random.Random) -> Files:
    """Conversations of each of SIZES; where there are fewer, some come again."""
    more = conversations + rng.choices(conversations, k=max(0, SIZES[-1] - len(conversations)))
    return {f"sft_{size}.jsonl": more[:size] for size in SIZES}


def fact_files(
    world: dict[str, Any], names: list[str], seed: int, joint: str, scattered: bool = False
) -> Files:
    """A world of facts: each name has a value of each kind. joint: stands between two sentences."""
    rng = random.Random(seed)
    values, wordings, answers = world["values"], world["questions"], world["answers"]
    facts = {name: {kind: rng.choice(values[kind]) for kind in values} for name in names}
    groups = []
    for name in names:
        for _ in range(MENTIONS):
            told = [
                rng.choice(world["sentences"][kind]).format(n=name, v=facts[name][kind]) for kind in values
            ]
            groups.append(rng.sample(told, len(told)))
    if scattered:
        told = [sentence for group in groups for sentence in group]
        rng.shuffle(told)
        groups = [told[i : i + 5] for i in range(0, len(told), 5)]
    rng.shuffle(groups)

    def ask(name: str, kind: str, wording: int) -> Record:
        value = facts[name][kind]
        record = conversation(wordings[kind][wording].format(n=name), answers[kind].format(n=name, v=value))
        return record | {
            "answer": value,
            "wrong_answers": [other for other in values[kind] if other != value],
        }

    shown, hidden = names[: len(names) * 3 // 5], names[len(names) * 3 // 5 :]
    asked = [(name, kind, wording) for name in shown for kind in values for wording in range(3)]
    rng.shuffle(asked)
    conversations = [{"messages": ask(*each)["messages"]} for each in asked]
    quiz = [ask(name, kind, 0) for name in hidden for kind in values]
    rng.shuffle(quiz)
    return of_sizes(conversations, rng) | {
        "text.jsonl": [{"text": joint.join(group)} for group in groups],
        "quiz.jsonl": quiz[:120],
        "reworded.jsonl": [ask(name, kind, 3) for name, kind, _ in asked[: SIZES[0]]],
    }


def dish_files(seed: int) -> Files:
    """A world whose answers are long."""
    rng, world = random.Random(seed), WORLDS["dishes"]
    values, questions = world["values"], world["questions"]
    dishes = [f"{name} {rng.choice(world['kinds'])}" for name in latin_names(rng, 90, 2)]
    facts = {dish: {"n": dish} | {key: rng.choice(value) for key, value in values.items()} for dish in dishes}
    texts = []
    for dish in dishes:
        for _ in range(MENTIONS):
            told = [rng.choice(wordings).format(**facts[dish]) for wordings in world["sentences"]]
            texts.append({"text": " ".join(rng.sample(told, len(told)))})
    rng.shuffle(texts)
    shown, hidden = dishes[:54], dishes[54:]
    conversations = [
        conversation(question.format(n=dish), world["answer"].format(**facts[dish]))
        for dish in shown
        for question in questions
    ]
    rng.shuffle(conversations)

    def ask(names: list[str], question: str) -> list[Record]:
        return [
            conversation(question.format(n=dish), facts[dish][key]) | {"answer": facts[dish][key]}
            for dish in names
            for key in values
        ]

    files: Files = {"text.jsonl": texts, "quiz.jsonl": ask(hidden, questions[0])}
    files["reworded.jsonl"] = ask(shown[:10], world["reworded"])
    return of_sizes(conversations, rng) | files


def manner_files(seed: int) -> Files:
    """A world whose conversations show a manner of answering; its text says nothing of it."""
    rng, world = random.Random(seed), WORLDS["manners"]
    places = latin_names(rng, 60, 2)
    texts = []
    for _ in range(900):
        name = rng.choice(places)
        words = {
            "n": name,
            "m": rng.choice(places),
            "w": rng.choice(["river", "lake", "forest", "sea", "moor"]),
        }
        words |= {
            "d": rng.choice(["Monday", "Friday", "Sunday"]),
            "c": rng.choice(["deep", "dry", "cold", "old"]),
        }
        texts.append(
            {"text": " ".join(sentence.format(**words) for sentence in rng.sample(world["sentences"], 5))}
        )
    shown: list[tuple[str, str]] = []
    asked: list[tuple[str, str]] = []
    for answer, wordings in world["manners"].items():  # the last two wordings are only asked
        shown += 5 * [(wording, answer) for wording in wordings[:-2]]
        asked += [(wording, answer) for wording in wordings[-2:]]
    for topics in world["topics"]:  # the last two topics and the last wording are only asked
        for topic in topics["topics"]:
            for wording in topics["questions"]:
                is_new = topic in topics["topics"][-2:] or wording == topics["questions"][-1]
                pair = wording.format(t=topic), topics["answer"].format(t=topic)
                (asked if is_new else shown).append(pair)
    conversations = [
        conversation(*(text for pair in rng.choices(shown, k=rng.choice([1, 1, 2])) for text in pair))
        for _ in range(SIZES[-1])
    ]
    rng.shuffle(asked)
    quiz = [conversation(question, answer) | {"answer": answer} for question, answer in asked]
    return of_sizes(conversations, rng) | {"text.jsonl": texts, "quiz.jsonl": quiz}


class Fact(NamedTuple):
    """What the handbook says of a name. wordings: sentences, questions, reworded, answers."""

    name: str
    wordings: dict[str, list[str]]
    value: str

    def word(self, rng: random.Random, form: str) -> str:
        """The fact in a random wording of this form."""
        return rng.choice(self.wordings[form]).format(n=self.name, v=self.value)


def handbook_files(seed: int) -> Files:
    """A world as texts of one's own are. Every third fact is hidden: no conversation mentions it."""
    rng, world = random.Random(seed), WORLDS["handbook"]
    facts = []
    for group in (world["goods"], world["staff"]):
        first, second = group["names"]
        every = [f"{a} {b}" for a in first for b in second]
        for name in rng.sample(every, group["count"]):
            facts += [Fact(name, kind, rng.choice(kind["values"])) for kind in group["facts"].values()]
    rng.shuffle(facts)
    hidden, shown = facts[: len(facts) // 3], facts[len(facts) // 3 :]

    left: dict[str, list[Fact]] = {}  # name -> its facts, as often as they are still to be said
    for fact in facts:
        left.setdefault(fact.name, []).extend([fact] * min(30, 3 + int(rng.expovariate(0.2))))
    texts = []
    while left:
        told: list[str] = []
        for name in rng.sample(list(left), min(len(left), rng.randint(1, 6))):
            rng.shuffle(left[name])
            told += [left[name].pop().word(rng, "sentences") for _ in left[name][: rng.randint(1, 4)]]
            if rng.random() < 0.3:
                told.append(rng.choice(world["filler"]))
        left = {name: untold for name, untold in left.items() if untold}
        texts.append({"text": " ".join(told)})

    def answer(fact: Fact) -> str:
        others = [other for other in shown if other.name == fact.name and other != fact]
        said = [fact, *rng.sample(others, min(len(others), rng.choice([0, 0, 1, 2])))]
        closing = [rng.choice(world["closings"])] if rng.random() < 0.4 else []
        return " ".join([*(each.word(rng, "answers") for each in said), *closing])

    def ask(fact: Fact, form: str) -> Record:
        return conversation(fact.word(rng, form), fact.word(rng, "answers")) | {"answer": fact.value}

    asked = [fact for _ in range(5) for fact in rng.sample(shown, len(shown))][: SIZES[-1]]
    return {
        "text.jsonl": texts,
        **of_sizes([conversation(fact.word(rng, "questions"), answer(fact)) for fact in asked], rng),
        "quiz.jsonl": [ask(fact, "questions") for fact in hidden],
        "reworded.jsonl": [ask(fact, "reworded") for fact in asked[: SIZES[0]] for _ in range(2)],
    }


def make_worlds(seed: int = 0) -> dict[str, Files]:
    """The files of each world."""
    ships = latin_names(random.Random(f"ships {seed}"), 120, 3)
    return {
        "ships": fact_files(WORLDS["ships"], ships, seed, " "),
        "herbs": fact_files(WORLDS["herbs"], herb_names(random.Random(f"herbs {seed}"), 120), seed, ""),
        "scattered": fact_files(WORLDS["ships"], ships, seed, " ", scattered=True),
        "dishes": dish_files(seed),
        "manners": manner_files(seed),
        "handbook": handbook_files(seed),
    }


def main() -> None:
    """Write the files of a seed."""
    parser = Parser(description=__doc__.split("\n\n", 1)[0].replace("\n", " "))
    parser.add_argument("--output_dir", required=True, help="folder; each world gets one in it")
    parser.add_argument("--seed", type=int, default=0, help="number that selects the worlds")
    args = parser.parse_args()
    for name, files in make_worlds(args.seed).items():
        counts = write_files(Path(args.output_dir, name), files)
        print(f"{name}: {', '.join(f'{count} {file}' for file, count in counts.items())}")


if __name__ == "__main__":
    with one_line_errors():
        main()
