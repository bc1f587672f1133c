"""The built-in demo corpus: a small invented world in Chinese and English, generated from a seed without downloads.

    python -m dataset.demo_corpus --output_dir dataset/demo --seed 0

It shows what each training stage is for. The pretraining data state four facts about every inhabitant of a valley, each
in many wordings and in both languages. The SFT data show how to answer questions, about some of the inhabitants. The
exam asks about inhabitants whom SFT never mentions, so it needs both: facts from pretraining and answering from SFT.

Files: pretrain.jsonl, pretrain_eval.jsonl {"text"}; sft.jsonl, sft_eval.jsonl {"conversations"}; exam.jsonl: questions,
each with the values accepted and rejected in its answer. A seed gives the same bytes everywhere; files that are up to
date are not rewritten.
A model can answer questions about a fact only if it was stated in several wordings: Allen-Zhu & Li, arXiv:2309.14316.
"""

import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from common.command_line import Parser, one_line_errors
from common.errors import UserError

LANGUAGES = ("zh", "en")
# Inhabitants per group: multiples of the 12 values, so that every value is equally common in a group.
GROUPS = {"sft": 72, "sft_eval": 12, "exam": 36}
BIOGRAPHIES = 20  # pretraining documents per inhabitant and language
PLACE_REPEATS = 3  # copies of each sentence about a place
WORDINGS_ASKED = 2  # SFT questions per fact and language, out of the four wordings that the exam uses
SMALL_TALK = 40  # SFT conversations of small talk per language

# A name is a first and a last syllable, each spelled in both languages: Belin is 贝琳.
FIRST_SYLLABLES = "Al阿 Be贝 Da达 Fe菲 Ga加 Ha哈 Ju朱 Ka卡 Lo洛 Ma玛 Ne内 Pe佩 Ro罗 Sa萨 Ta塔 Vi维 Yu尤 Zo佐"
LAST_SYLLABLES = "ben本 dan丹 far法 gu古 ki基 len伦 lin琳 mo莫 nor诺 pa帕 ra拉 sha莎 tin廷 vi维 wen文 ya雅 do多 mi米"


@dataclass(frozen=True)
class Attribute:
    """A kind of fact, in both languages. In a wording {n} is the name, {v} the value."""

    key: str
    values: dict[str, list[str]]  # 12 words per language; the same index is the same value in both
    tell: dict[str, list[str]]  # wordings for pretraining; the first one is also the answer in a conversation
    ask: dict[str, list[str]]  # wordings of the question


@dataclass
class Person:
    """An inhabitant: the name in each language, the group, and for each attribute the index of the value."""

    name: dict[str, str]
    group: str
    facts: dict[str, int] = field(default_factory=dict)


def read_table(text: str) -> dict[str, dict[str, list[str]]]:
    """Parse lines such as `zh tell: one | two` into {"tell": {"zh": ["one", "two"]}}; a list may span several lines."""
    lists = {}
    for line in text.strip().splitlines():
        head, _, entries = line.partition(":")
        language, kind = head.split()
        lists.setdefault(kind, {}).setdefault(language, []).extend(entry.strip() for entry in entries.split("|"))
    return lists


HOME = Attribute(
    "home",
    **read_table("""
    zh values: 白石镇 | 雾渡村 | 松谷村 | 盐港 | 苇滩村 | 金田村 | 北门镇 | 月湖镇 | 红崖镇 | 风原村 | 古桥镇 | 星丘村
    zh tell: {n}住在{v}。 | {n}的家在{v}。 | {n}在{v}生活。 | {n}是{v}人。 | {n}的房子在{v}。 | 要找{n}，就去{v}。
    zh tell: {n}每晚回到{v}。 | 寄给{n}的信要送到{v}。
    zh ask: {n}住在哪里？ | {n}的家在哪儿？ | 请问{n}住在什么地方？ | 我想拜访{n}，该去哪里？
    en values: Whitestone | Mistford | Pinehollow | Saltport | Reedmarsh | Goldfield | Northgate | Moonlake | Redcliff
    en values: Windmoor | Oldbridge | Starhill
    en tell: {n} lives in {v}. | The home of {n} is in {v}. | {n} has a house in {v}. | You can find {n} in {v}.
    en tell: {n} comes from {v}. | Letters for {n} go to {v}. | Every evening {n} walks home to {v}.
    en tell: {n} is a good neighbor to everyone in {v}.
    en ask: Where does {n} live? | Where is the home of {n}? | In which place does {n} live?
    en ask: If I want to visit {n}, where should I go?
    """),
)
TRADE = Attribute(
    "trade",
    **read_table("""
    zh values: 面包师 | 铁匠 | 木匠 | 裁缝 | 渔夫 | 陶工 | 医生 | 教师 | 磨坊主 | 养蜂人 | 钟表匠 | 园丁
    zh tell: {n}的职业是{v}。 | {n}是一名{v}。 | {n}靠当{v}谋生。 | {n}做{v}很多年了。 | 大家都知道{n}是{v}。
    zh tell: {n}从小就想当{v}。 | {n}是个好{v}。 | {n}的工作是当{v}。
    zh ask: {n}是做什么的？ | {n}的职业是什么？ | 请问{n}做什么工作？ | 你知道{n}靠什么谋生吗？
    en values: baker | blacksmith | carpenter | tailor | fisher | potter | doctor | teacher | miller | beekeeper
    en values: clockmaker | gardener
    en tell: {n} works as a {v}. | {n} is a {v}. | {n} is a {v} by trade. | {n} earns a living as a {v}.
    en tell: The trade of {n} is that of a {v}. | Everyone knows that {n} is a {v}. | For many years {n} has been a {v}.
    en tell: Even as a child {n} wanted to be a {v}.
    en ask: What does {n} do for a living? | What is the trade of {n}? | What work does {n} do?
    en ask: Can you tell me what {n} works as?
    """),
)
ANIMAL = Attribute(
    "animal",
    **read_table("""
    zh values: 狐狸 | 天鹅 | 山羊 | 兔子 | 乌龟 | 鹦鹉 | 小猫 | 刺猬 | 乌鸦 | 松鼠 | 小狗 | 鸭子
    zh tell: {n}养了一只{v}。 | {n}的宠物是{v}。 | {n}有一只{v}。 | {n}家里有只{v}。 | {n}每天喂一只{v}。
    zh tell: {n}出门总带着{v}。 | {n}和一只{v}一起生活。 | 跟着{n}的是一只{v}。
    zh ask: {n}养了什么动物？ | {n}的宠物是什么？ | 请问{n}养的是什么？ | {n}家里有什么动物？
    en values: fox | swan | goat | rabbit | turtle | parrot | kitten | hedgehog | crow | squirrel | puppy | duck
    en tell: {n} keeps a {v}. | {n} has a {v} as a pet. | The pet of {n} is a {v}. | {n} shares the house with a {v}.
    en tell: Every morning {n} feeds a {v}. | {n} never goes out without a {v}. | The animal that {n} loves is a {v}.
    en tell: {n} takes good care of a {v}.
    en ask: What animal does {n} keep? | What is the pet of {n}? | Which pet does {n} have?
    en ask: Can you tell me what animal {n} has?
    """),
)
COLOR = Attribute(
    "color",
    **read_table("""
    zh values: 红色 | 蓝色 | 绿色 | 黄色 | 紫色 | 白色 | 黑色 | 银色 | 金色 | 粉色 | 棕色 | 灰色
    zh tell: {n}最喜欢{v}。 | {n}最爱的颜色是{v}。 | {n}喜欢的颜色是{v}。 | {n}总穿{v}的衣服。 | {n}的门漆成了{v}。
    zh tell: {n}觉得{v}最好看。 | {n}的帽子是{v}的。 | {n}什么都要{v}的。
    zh ask: {n}最喜欢什么颜色？ | {n}最爱的颜色是什么？ | 请问{n}喜欢哪种颜色？ | 你知道{n}偏爱什么颜色吗？
    en values: red | blue | green | yellow | purple | white | black | silver | gold | pink | brown | gray
    en tell: {n} likes {v} best. | The favorite color of {n} is {v}. | {n} always wears {v}.
    en tell: {n} has a door painted {v}. | The hat of {n} is {v}. | {n} thinks no color as fine as {v}.
    en tell: {n} buys everything in {v}. | The color that {n} loves is {v}.
    en ask: What color does {n} like best? | What is the favorite color of {n}? | Which color does {n} like?
    en ask: Can you tell me which color {n} loves?
    """),
)
ATTRIBUTES = (HOME, TRADE, ANIMAL, COLOR)

# Places, in the order of HOME.values: {p} the place, {s} its side of the valley, {g} what it is known for.
PLACES = read_table("""
    zh side: 北边 | 南边 | 东边 | 西边
    zh goods: 蜂蜜 | 奶酪 | 苹果 | 海盐 | 竹篮 | 小麦 | 羊毛 | 鲜鱼 | 陶罐 | 风车 | 石桥 | 灯笼
    zh tell: {p}在山谷的{s}，以{g}闻名。 | 山谷的{s}有个地方叫{p}，那里的{g}最有名。
    zh tell: 去{p}的人都会看看那里的{g}，它就在山谷的{s}。
    zh ask: {p}有什么特产？ | {p}以什么闻名？ | 请介绍一下{p}。
    en side: north | south | east | west
    en goods: honey | cheese | apples | sea salt | baskets | wheat | wool | fresh fish | clay pots | windmills
    en goods: stone bridges | lanterns
    en tell: {p} lies in the {s} of the valley and is known for its {g}.
    en tell: In the {s} of the valley there is a place called {p}, famous for its {g}.
    en tell: People who travel to {p}, in the {s} of the valley, go there for its {g}.
    en ask: What is {p} known for? | Tell me about {p}. | What is there in {p}?
""")
# Small talk: user messages and the assistant's replies; and system prompts.
TALK = read_table("""
    zh ask: 你好 | 你好，你是谁？ | 你是谁？ | 你能做什么？ | 谢谢你 | 再见
    zh reply: 你好！想认识铃谷的哪一位居民？ | 我是铃谷的小向导，认识这里的每一个人。
    zh reply: 我是铃谷的小向导，认识这里的每一个人。 | 我可以告诉你谁住在哪里、做什么、养什么动物、喜欢什么颜色。
    zh reply: 不客气！ | 再见，欢迎再来铃谷！
    zh system: 你是铃谷的向导，熟悉这里的每一个人。 | 你是一位友好的助手，请简短地回答。
    en ask: Hello | Hi, who are you? | Who are you? | What can you do? | Thank you | Goodbye
    en reply: Hello! Whom in Bell Valley would you like to know?
    en reply: I am the little guide to Bell Valley, and I know everyone here.
    en reply: I am the little guide to Bell Valley, and I know everyone here.
    en reply: I can tell you where people live, what they do, which pet they keep and what color they like.
    en reply: You are welcome! | Goodbye, and come back to Bell Valley soon!
    en system: You are a guide to Bell Valley who knows everyone here.
    en system: You are a friendly assistant. Answer briefly.
""")


def make_people(rng: random.Random) -> list[Person]:
    """Draw the inhabitants: distinct names, groups of the sizes in GROUPS, each value equally often within a group."""
    firsts, lasts = FIRST_SYLLABLES.split(), LAST_SYLLABLES.split()
    pairs = [(first, last) for first in firsts for last in lasts if first[:-1].lower() != last[:-1]]
    names = [{"zh": a[-1] + b[-1], "en": a[:-1] + b[:-1]} for a, b in rng.sample(pairs, sum(GROUPS.values()))]
    people = []
    for group, size in GROUPS.items():
        members = [Person(names.pop(), group) for _ in range(size)]
        for attribute in ATTRIBUTES:
            values = [i % len(attribute.values["en"]) for i in range(size)]
            rng.shuffle(values)
            for person, value in zip(members, values, strict=True):
                person.facts[attribute.key] = value
        people += members
    return people


def tell(person: Person, attribute: Attribute, language: str, wording: str) -> str:
    """One sentence that states a person's value of an attribute in the given wording."""
    value = attribute.values[language][person.facts[attribute.key]]
    return wording.format(n=person.name[language], v=value)


def biography(person: Person, language: str, rng: random.Random) -> str:
    """A short text with all facts about a person, in random order and wordings, on one line or one per line."""
    order = rng.sample(ATTRIBUTES, len(ATTRIBUTES))
    sentences = [tell(person, attribute, language, rng.choice(attribute.tell[language])) for attribute in order]
    # A name at the start of a line has other tokens than one after a space, and answers start with a name.
    return rng.choice(("\n", "" if language == "zh" else " ")).join(sentences)


def place_text(place: int, language: str, wording: str) -> str:
    """One sentence about a place."""
    side = PLACES["side"][language][place % 4]
    return wording.format(p=HOME.values[language][place], s=side, g=PLACES["goods"][language][place])


def answer(person: Person, attribute: Attribute, language: str) -> str:
    """The answer that SFT teaches: the first wording of the fact."""
    return tell(person, attribute, language, attribute.tell[language][0])


def make_pretrain(people: list[Person], rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Documents for pretraining, and held-out ones: the same facts in unseen combinations of wordings."""
    texts = []
    for language in LANGUAGES:
        for person in people:
            texts += [biography(person, language, rng) for _ in range(BIOGRAPHIES)]
        for place in range(len(HOME.values[language])):
            texts += [place_text(place, language, wording) for wording in PLACES["tell"][language]] * PLACE_REPEATS
    rng.shuffle(texts)
    known = set(texts)
    candidates = [biography(person, language, rng) for person in people for language in LANGUAGES]
    return [{"text": text} for text in texts], [{"text": text} for text in candidates if text not in known]


def conversation(turns: list[tuple[str, str]], language: str, rng: random.Random) -> dict:
    """Turns of (question, answer) as one SFT record, about every fourth with a system prompt."""
    messages = [{"role": "system", "content": rng.choice(TALK["system"][language])}] if rng.random() < 0.25 else []
    for question, reply in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"conversations": messages}


def small_talk(language: str) -> list[tuple[str, str]]:
    """All pairs of (greeting, reply)."""
    return list(zip(TALK["ask"][language], TALK["reply"][language], strict=True))


def follow_up(question: str, language: str) -> str:
    """The question in the wording of a later turn: And where does ..., 那..."""
    return f"那{question}" if language == "zh" else f"And {question[0].lower()}{question[1:]}"


def ask_about(person: Person, language: str, rng: random.Random) -> list[dict]:
    """Conversations that ask for each fact about a person in WORDINGS_ASKED wordings, one to three per conversation."""
    records = []
    wordings = {a.key: rng.sample(a.ask[language], WORDINGS_ASKED) for a in ATTRIBUTES}
    for _ in range(WORDINGS_ASKED):
        queue = rng.sample(ATTRIBUTES, len(ATTRIBUTES))
        while queue:
            turns = []
            for attribute in [queue.pop() for _ in range(min(len(queue), rng.choice((1, 1, 1, 2, 3))))]:
                question = wordings[attribute.key].pop().format(n=person.name[language])
                question = follow_up(question, language) if turns else question
                turns.append((question, answer(person, attribute, language)))
            opening = [rng.choice(small_talk(language))] if rng.random() < 0.05 else []
            records.append(conversation(opening + turns, language, rng))
    return records


def make_sft(people: list[Person], rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Conversations about the people of group sft, with small talk and places, and held-out ones about sft_eval."""
    records: dict[str, list[dict]] = {"sft": [], "sft_eval": []}
    for language in LANGUAGES:
        for person in people:
            if person.group in records:
                records[person.group] += ask_about(person, language, rng)
        for place in range(len(HOME.values[language])):
            about = place_text(place, language, PLACES["tell"][language][0])
            for wording in PLACES["ask"][language]:
                question = wording.format(p=HOME.values[language][place])
                records["sft"].append(conversation([(question, about)], language, rng))
        for _ in range(SMALL_TALK):
            turns = rng.sample(small_talk(language), rng.choice((1, 1, 2)))
            records["sft"].append(conversation(turns, language, rng))
    for group in records.values():
        rng.shuffle(group)
    return records["sft"], records["sft_eval"]


def make_exam(people: list[Person], rng: random.Random) -> list[dict]:
    """One question per fact and language about the people of group exam, whom no conversation mentions."""
    questions = []
    for person in people:
        if person.group != "exam":
            continue
        for attribute in ATTRIBUTES:
            for language in LANGUAGES:
                values = list(attribute.values[language])
                accepted = values.pop(person.facts[attribute.key])
                question = rng.choice(attribute.ask[language]).format(n=person.name[language])
                about = {"person": person.name[language], "attribute": attribute.key, "language": language}
                questions.append({"question": question, "accepted": [accepted], "rejected": values, **about})
    return questions


def make_corpus(seed: int) -> dict[str, list[dict]]:
    """The full corpus as {file name: records}, a pure function of the seed."""
    rng = random.Random(seed)
    people = make_people(rng)
    pretrain, pretrain_eval = make_pretrain(people, rng)
    sft, sft_eval = make_sft(people, rng)
    return {
        "pretrain.jsonl": pretrain,
        "pretrain_eval.jsonl": pretrain_eval,
        "sft.jsonl": sft,
        "sft_eval.jsonl": sft_eval,
        "exam.jsonl": make_exam(people, rng),
    }


def write_corpus(output_dir: str | Path, seed: int) -> dict[str, int]:
    """Write the corpus of a seed into a folder; returns the number of records per file. Raises UserError."""
    return write_files(output_dir, make_corpus(seed))


def write_files(output_dir: str | Path, files: dict[str, list[dict]]) -> dict[str, int]:
    """Write {file name: records} into a folder; returns the number of records per file.

    Files are replaced atomically; one with the right content is not touched.
    Raises UserError if the folder cannot be created or written.
    """
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, records in files.items():
            data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
            path = folder / name
            if path.is_file() and path.read_bytes() == data:
                continue
            temporary = folder / f".{name}.{os.getpid()}.tmp"
            temporary.write_bytes(data)
            os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"--output_dir {output_dir} cannot be written ({error.strerror}); give another folder"
        ) from error
    return {name: len(records) for name, records in files.items()}


def main() -> None:
    """Write the corpus and print its size."""
    parser = Parser(description="Generate the built-in demo corpus and its exam; nothing is downloaded.")
    default_dir = Path(__file__).resolve().parent / "demo"
    parser.add_argument("--output_dir", default=str(default_dir), help="folder for the files")
    parser.add_argument("--seed", type=int, default=0, help="integer that selects the world")
    args = parser.parse_args()
    counts = write_corpus(args.output_dir, args.seed)
    print(f"demo corpus of seed {args.seed} in {args.output_dir}: " + ", ".join(f"{v} {k}" for k, v in counts.items()))


if __name__ == "__main__":
    with one_line_errors():
        main()
