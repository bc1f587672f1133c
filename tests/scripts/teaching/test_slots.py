"""Names and wordings of questions in both languages, found without being told, and names that only texts
mention."""

from scripts.teaching.slots import MIN_FILLERS, Wording, find_names, find_wordings, split_name

NAMES = {
    "zh": ["阿本", "内丹", "达雅", "佩帕", "塔文", "洛莎"],
    "en": ["Belin", "Kado", "Samo", "Vira", "Zopa", "Nemi"],
}
ASK = {
    "zh": ("{}住在哪里？", "请问{}住在什么地方？", "{}是做什么的？"),
    "en": ("Where does {} live?", "Where is the home of {}?", "What does {} do?"),
}
TELL = {
    "zh": ("{}住在盐港。", "{}的帽子是红色的。"),
    "en": ("{} lives in Saltport.", "The hat of {} is red."),
}
QUESTIONS = [ask.format(name) for each in NAMES for name in NAMES[each] for ask in ASK[each]]


def test_names_are_split_from_wordings():
    wordings = find_wordings(QUESTIONS)
    for language, names in NAMES.items():
        for ask in ASK[language]:
            before, after = ask.split("{}")
            for name in (*names, "Pelo" if language == "en" else "古米"):  # a name that no data have
                assert split_name(ask.format(name), wordings) == (Wording(before, after), name)
    assert split_name("Tell me a joke.", wordings) is None and split_name("你好", wordings) is None


def test_a_wording_needs_several_names():
    few = [ASK["en"][0].format(name) for name in NAMES["en"][: MIN_FILLERS - 1]]
    assert find_wordings(few) == {}
    assert Wording("Where does ", " live?") in find_wordings([*few, "Where does Nemi live?"])


def test_names_in_texts_are_found_by_the_sentences_that_they_share():
    told = {"en": [*NAMES["en"], "Quilo"], "zh": [*NAMES["zh"], "古米"]}
    texts = [" ".join(tell.format(name) for tell in TELL[each]) for each in NAMES for name in told[each]]
    texts += ["The road to Zundel is long.", "Zundel lies by the sea."]
    names = find_names(QUESTIONS, texts)
    assert set(names.more) == {"Quilo", "古米"}
    assert {wording.about("Quilo") for wording in names.wordings_for("Quilo")} == {
        ask.format("Quilo") for ask in ASK["en"]
    }
    assert names.wordings_for("Zundel") == []
