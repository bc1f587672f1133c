"""The card "New model" in a real browser, over the stand-ins of trainings.py: from a file to a chat, stopped, killed,
cut, in both languages, on narrow screens, by keyboard."""

import fcntl
import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from scripts.serve import sending, training, uploads
from scripts.serve.api import Access
from scripts.serve.page import PAGE
from tests.browser import Page
from tests.dataset.test_chat_exports import CHATGPT, IPHONE
from tests.dataset.test_documents import partly_scanned, word_document
from tests.scripts.serve import trainings
from tests.scripts.serve.test_training import QUICK, TEXT, Client, end_all, flags_of, make_client
from tests.scripts.test_serve_openai_api import wait_for_line
from tests.stage_process import Faults, StageProcess

BODY = "#train-body"
CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'
# of names, files, commands and what the stand-in's model writes
NOT_ENGLISH = {"novel", "txt", "jsonl", "json", "csv", "parquet", "utf", "bash", "out", "run", "min"}
NOT_ENGLISH |= {
    "whatsapp",
    "chatgpt",
    "anna",
    "ben",
    "there",
    "are",
    "you",
    "yes",
    "see",
    "org",
    "two",
    "lines",
}
NOT_ENGLISH |= {"good", "morning", "second"}
NOT_ENGLISH |= {"docx", "epub", "pdf", "html", "srt", "once", "script", "hacked", "there", "was"}
RAW = re.compile(r"--[a-z]|eval_|_loss|\w+Error|error:|Traceback|\d M\b|tokens/s")  # words of a log
FORM, PRIMARY = f"{BODY} form", f"{BODY} .buttons .primary"
PRIMARY_OF_FORM = f"{FORM} > .buttons .primary"
SHOWN = "#train-card, dialog[open]"  # the last one that is there
WIDTHS = (320, 1280)  # on either side of the only width at which the stylesheet changes


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(training, "PLAN", Path(trainings.__file__))


@pytest.fixture
def client(tmp_path) -> Iterator[Client]:
    with ExitStack() as stack:
        access = Access("key", codes={"once"})
        yield make_client(stack, tmp_path / "out", QUICK, given=None, access=access)
        end_all(tmp_path / "out")


@pytest.fixture
def card(page, client) -> Iterator[Page]:
    page.forget(client.address)
    page.driver.get(f"{client.address}#code=once")
    ready_in_training(page)
    yield page
    page.driver.get("about:blank")  # it asks the server no more


def ready_in_training(page) -> None:
    page.wait(lambda: page.run("return document.documentElement.dataset.ready"))
    page.wait(lambda: page.shown("#train-card"))


def let_write(client: Client, name: str, records: int) -> None:
    """How many records a training may write, over all its stages."""
    (client.folder / name / "until").write_text(str(records))


def give(page, folder: Path, **files: str | bytes) -> None:
    """Choose files, by their names without a dot."""
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        page.one("#train-files").send_keys(str(path))


def check_layout(page) -> None:
    """What is shown fits narrow and wide screens in both languages."""
    for _ in ("the present language", "the other one"):
        for width in WIDTHS:
            assert page.misplaced(width) == [], width
        page.click("#language")
    page.size(1200, 800)


def check_screen(page, *data: str, widths: tuple[int, ...] = WIDTHS) -> None:
    """`check_layout`; without a word of a log, and in Chinese without English. data: English words that are data."""
    for language in ("en", "zh"):
        assert page.run("return document.documentElement.lang")[:2] == language
        shown = page.text(SHOWN)
        assert not RAW.search(shown), shown
        words = {word.lower() for word in re.findall("[A-Za-z]{3,}", shown)}
        assert language == "en" or words <= NOT_ENGLISH | {*data}, words - NOT_ENGLISH
        for width in widths:
            assert page.misplaced(width) == [], width
        page.size(1200, 800)
        page.click("#language")


def check_everywhere(page, title: str, *data: str) -> None:
    """In this state the page is the same after a reload, and `check_screen` holds on a narrow screen. The tests of
    screens look at the main states on a wide one."""
    state = lambda: (page.text("#train-title"), page.texts(f"{BODY} button"))  # noqa: E731
    before = state()
    assert before[0] == title
    page.driver.refresh()
    ready_in_training(page)
    page.wait(lambda: state() == before)
    check_screen(page, *data, widths=WIDTHS[:1])


def test_from_an_empty_folder_to_a_model_of_ones_own_text_by_clicks(card, client, tmp_path):
    """Each state is the same after a reload, in both languages and on narrow screens."""
    assert "key" not in card.driver.current_url
    card.click("#tab-chat")
    card.wait(lambda: "No model yet." in card.text(".welcome"))
    card.click(".welcome .primary")
    assert card.shown(FORM) and not card.one(PRIMARY).is_enabled()
    check_everywhere(card, "New model")
    give(card, tmp_path, a_txt=TEXT)
    card.wait(lambda: "a.txt: text to read, 390 B" in card.text(".files"))
    assert "It will continue texts" in card.text(FORM)
    card.one("#train-name").send_keys(Keys.CONTROL, "a")
    card.one("#train-name").send_keys("novel")
    check_everywhere(card, "New model")
    card.click(PRIMARY)
    card.wait(
        lambda: (
            "A small model of 1.2 million weights (1 layer, 64 wide). It reads the text 3 times."
            in card.text(BODY)
        )
    )
    assert "Reading: only 12 updates, which teach little. Add more text or conversations." in card.text(BODY)
    check_everywhere(card, "novel")
    let_write(client, "novel", 6)
    card.click(PRIMARY)
    card.wait(lambda: re.search(r"6 of 12 updates · about \d+ seconds left", card.text(BODY)))
    check_everywhere(card, "novel")
    assert "<script>" in card.text(BODY) and card.run("return window.hacked") is None
    card.click(f"{BODY} .buttons button")
    card.wait(lambda: "Stopped at update 7 of 12" in card.text(BODY))
    check_everywhere(card, "novel")
    let_write(client, "novel", 12)
    card.click(PRIMARY)
    card.wait(lambda: "Ready." in card.text(BODY))
    buttons = ["Chat with it", "Save as a page to send", "Download the report", "Teach it more", "New model"]
    assert card.texts(f"{BODY} .buttons button") == buttons
    check_everywhere(card, "novel")
    card.wait(lambda: card.texts("#plots .plot:first-child .u-label") == ["Updates", "novel/pretrain_64"])
    assert card.text("#table") == "In figures"  # names of settings are folded
    card.click(PRIMARY)
    card.wait(lambda: card.text("#model option:checked") == "novel/pretrain_64")
    assert card.ask("Once upon") == "You said: Once upon"


def test_a_plan_that_was_not_finished_is_made_again(card, client):
    client.put("a.txt")
    (client.folder / "novel").mkdir()
    asked = {"name": "novel", "files": ["a.txt"], "hours": 1.0, "depth": 2, "skip_bad": False}
    (client.folder / "novel/job.json").write_text(json.dumps(asked))
    card.wait(lambda: "The plan of “novel” was not finished. Make it again." in card.text(FORM))
    check_everywhere(card, "novel")
    assert card.one("#train-name").get_attribute("value") == "novel"
    assert card.one("#train-size").get_attribute("value") == "2"
    card.click(PRIMARY)
    card.wait(lambda: "weights (" in card.text(BODY))


def test_states_that_pass_are_the_same_after_a_reload_and_in_both_languages(card, client):
    client.planned()
    folder = client.folder / "novel"
    card.wait(lambda: "weights (" in card.text(BODY))

    def becomes(sentence: str, log: str = "") -> None:
        with open(folder / "job.log", "a") as file:
            file.write(log)
        card.wait(lambda: sentence in card.text(BODY))
        check_everywhere(card, "novel")

    with open(client.folder / ".train.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for plans, sentence in ((True, "Looking at the data"), (False, "Starting; the first figures")):
            lock.seek(0)
            lock.truncate()
            lock.write(json.dumps({"folder": "novel", "plans": plans}) + "\n1\n")
            lock.flush()
            becomes(sentence, f"== started {'plan.py' if plans else 'run.sh'} 2026-11-28 08:16:01\n")
        (folder / "pretrain_64_metrics.jsonl").write_text('{"update": 2, "tokens": 1, "seconds": 1}\n')
        becomes("Finishing this update and saving", "SIGTERM: finishing this update, then saving\n")
        card.run("const now = Date.now; Date.now = () => now() + 61_000")
        card.wait(lambda: "This takes longer than usual." in card.text(BODY))
        card.click("#language")
        assert "用时比平时长。" in card.text(BODY)
        card.click("#language")
    becomes("Stopped. Nothing is lost.")
    becomes(
        "Stopped at update 3 of 12. Nothing is lost.",
        "stopped: by SIGTERM after update 3 of 12, which is saved\n",
    )
    becomes("It ended without saying why", "== started run.sh 2026-11-28 08:17:01\n")
    becomes("The disk is full", "error: out/x cannot be written (No space left on device)\n")


def test_several_files_have_a_share_each_and_the_name_follows_them(card, client, tmp_path):
    give(card, tmp_path, a_txt=TEXT, b_txt=TEXT * 3, c_jsonl=CHAT * 3)
    name = lambda: card.one("#train-name").get_attribute("value")  # noqa: E731
    card.wait(lambda: "c.jsonl: 3 conversations" in card.text(".files") and "75 %" in card.text(".files"))
    assert "a.txt: text to read, 390 B · 25 % of the text" in card.text(".files")
    assert "b.txt: text to read, 1.17 KB · 75 % of the text" in card.text(".files") and name() == "a"
    boxes = {box.get_attribute("id"): box for box in card.all(".files input")}
    boxes["file-a.txt"].click()
    card.wait(lambda: name() == "b")
    assert "%" not in card.text(".files")
    card.click("[id='file-a.txt']")
    card.wait(lambda: "25 % of the text" in card.text(".files"))
    assert name() == "b"  # it is the first one now
    hours = card.one("[aria-label='other, in hours:']")
    for typed in ("500", "0.001", "-1"):
        hours.send_keys(Keys.CONTROL, "a")
        hours.send_keys(typed)
        card.click(PRIMARY)
        card.wait(lambda: card.text(f"{BODY} .error") == "Between 0.02 and 168 hours (a week).")
    hours.send_keys(Keys.CONTROL, "a")
    hours.send_keys("1")
    card.click(PRIMARY)
    card.wait(lambda: "weights (" in card.text(BODY))
    assert json.loads((client.folder / "b/job.json").read_text())["files"] == ["b.txt", "c.jsonl", "a.txt"]
    for file in ("a.txt", "c.jsonl"):
        assert client.http.delete(f"/files/{file}").status_code == 409  # the plan needs it
    card.run("[...document.querySelectorAll('#train-choice option')][0].selected = true")
    card.run("document.querySelector('#train-choice').dispatchEvent(new Event('change'))")
    card.wait(lambda: card.shown(FORM) and name() == "b 2")


def test_a_model_has_a_card_and_goes_on_with_a_second_text_by_clicks(card, client, tmp_path):
    client.put("b.jsonl", CHAT * 3)
    client.planned(files=["a.txt", "b.jsonl"], depth=4)
    client.post("/novel/start", {})
    client.until("ready")
    card.wait(lambda: "Ready." in card.text(BODY))
    facts = re.compile(r"[A-Z][a-z]+ \d+, \d{4} · 1.2 million weights · [\d.]+ KB")
    assert facts.search(card.text(BODY)) and not card.shown("#models")
    card.run("[...document.querySelectorAll('#train-body .buttons button')].at(-1).click()")  # New model
    card.wait(lambda: card.shown(FORM) and card.shown("#models"))
    shown = card.text("#models")
    assert facts.search(shown) and "It answers 3 of 4 questions right that it had not seen." in shown
    ways = ["Chat with it", "Save as a page to send", "Download the report", "Teach it more"]
    assert card.texts("#models .buttons button") == ways
    card.click("#language")
    words = {word.lower() for word in re.findall("[A-Za-z]{3,}", card.text("#models"))}
    assert words <= {"novel"} and "120 万个权重" in card.text("#models")
    card.click("#language")
    check_screen(card)
    assert card.one("#train-start").get_attribute("value") == "" and card.shown("#train-size")
    card.click("#models .buttons button")  # Teach it more
    assert card.one("#train-start").get_attribute("value") == "novel" and not card.shown("#train-size")
    assert not card.one(PRIMARY).is_enabled()  # what it has read is not chosen again
    assert "“novel” learns more. It reads a part of its earlier texts again" in card.text(FORM)
    give(card, tmp_path, second_txt=TEXT * 2)
    card.wait(
        lambda: (
            "“novel” learns more. It will continue texts. To chat, add conversations. It reads"
            in card.text(FORM)
        )
    )
    check_everywhere(card, "New model")
    card.click(PRIMARY)
    card.wait(lambda: "It continued from “novel”." in card.text(BODY) and "weights (" in card.text(BODY))
    assert card.text("#train-title") == "second" and not card.shown("#models")
    assert flags_of(client.folder / "second")["--from_weight"].endswith("novel/pretrain_64.pth")
    card.click(f"{BODY} .buttons .quiet")  # Change
    card.wait(lambda: card.shown(FORM))
    assert card.one("#train-start").get_attribute("value") == "novel"
    card.run(
        "const start = document.querySelector('#train-start'); start.value = ''; start.dispatchEvent(new Event('change'))"
    )
    assert card.shown("#train-size")
    card.click(PRIMARY)
    card.wait(lambda: "weights (" in card.text(BODY) and "continued from" not in card.text(BODY))
    assert "--from_weight" not in flags_of(client.folder / "second")


def test_a_model_that_is_opened_from_its_card_is_shown(card, client):
    client.planned()
    client.post("/novel/start", {})
    client.until("ready")
    card.wait(lambda: "Ready." in card.text(BODY))
    card.run("[...document.querySelectorAll('#train-body .buttons button')].at(-1).click()")
    card.wait(lambda: card.shown("#models"))
    card.click("#models h3 button")
    card.wait(lambda: card.text("#train-title") == "novel" and not card.shown("#models"))


def test_too_many_files_and_archives_are_refused_before_they_are_sent(card, client, tmp_path):
    many = "const data = new DataTransfer(); for (let i = 0; i < 201; i++) data.items.add(new File(['x'], `${i}.txt`));"
    card.run(
        many
        + "const input = document.querySelector('#train-files'); input.files = data.files; input.dispatchEvent(new Event('change'));"
    )
    card.wait(lambda: "201 files are too many: at most 200 are read." in card.text(FORM))
    card.click("#language")
    assert "201 个文件太多：最多读取 200 个。" in card.text(FORM)
    card.click("#language")
    give(card, tmp_path, a_zip=b"PK")
    card.wait(lambda: "a.zip: unpack it first" in card.text(FORM))
    assert list((client.folder / ".uploads").iterdir()) == [] and not card.text(".files")


def test_pages_without_text_are_said_and_shares_are_those_of_the_texts(card, client, tmp_path):
    text = "A river ran. It was long, and the boats on it were small."
    give(card, tmp_path, a_pdf=partly_scanned(text, None, "It was long."), b_txt=text + "x" * 12)
    card.wait(lambda: "50 % of the text" in card.text(".files") and "b.txt" in card.text(".files"))
    assert "Pages without text (pictures, scans): 2 of 3. Only the others are read." in card.text(".files")
    card.click("#language")
    assert "共 3 页，其中第 2 页没有文字（图片、扫描件），只读取其余各页。" in card.text(".files")
    card.click("#language")


def test_the_layout_changes_between_the_widths_alone():
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    assert {*re.findall(r"@media \((?:min|max)-width: (\d+)px", style)} == {"800"}
    assert WIDTHS[0] < 800 < WIDTHS[1]


def test_every_code_of_an_error_is_a_sentence_of_the_page():
    """Of the routes that train: those that a click can meet."""
    codes = set()
    for name in ("training.py", "teaching.py", "jobs.py", "uploads.py", "look_at_file.py"):
        source = (PAGE.parent / name).read_text(encoding="utf-8")
        codes |= set(re.findall(r'code(?:=|": )"(\w+)"', source))
        codes |= set(
            re.findall(r'ApiError\([^()]*(?:\([^()]*\)[^()]*)*, \d{3}, (?:None|"\w+"), "(\w+)"', source)
        )
    text = (PAGE / "text.js").read_text(encoding="utf-8")
    said = set(re.findall(r"error_(\w+):", text))
    assert codes - said == {"length"} and "comma" in codes  # no browser leaves the length out


DROP_A_FOLDER = """
const file = (name, text) => ({ isFile: true, name, file: (resolve) => resolve(new File([text], name)) });
const folder = (name, entries) => ({ name, createReader: () => ({ readEntries: (resolve) => resolve(entries.splice(0, 2)) }) });
const dropped = folder("mine", [file("b.txt", "Bees."), file(".DS_Store", "x"), folder("more", [file("a.txt", "Ants.")])]);
const event = new Event("drop", { cancelable: true });
event.dataTransfer = { items: [{ webkitGetAsEntry: () => dropped }], files: [] };
document.querySelector(".drop").dispatchEvent(event);"""


def test_a_folder_is_the_files_in_it(card, client):
    card.run(DROP_A_FOLDER)
    card.wait(lambda: card.text(".files").count("text to read") == 2 and len(card.all(".files li")) == 2)
    assert not card.shown(f"{BODY} .error")
    contents = {path.name: path.read_text() for path in (client.folder / ".uploads").glob("*.txt")}
    assert contents == {"a.txt": "Ants.", "b.txt": "Bees."}


def test_an_exported_chat_is_shown_and_becomes_conversations_by_clicks(card, client, tmp_path):
    """Whom the model answers like is chosen; a text that only looks like a chat can be read as a text."""
    both = IPHONE + "[01.01.21, 09:00:19] Anna: Good!\n"
    give(card, tmp_path, a_txt=both, b_json=json.dumps(CHATGPT))
    row = lambda: card.texts(".files .export")  # noqa: E731
    card.wait(lambda: len(row()) == 2)
    assert "a.txt: looks like a WhatsApp chat, 5 messages" in row()[0]
    assert "Anna (3 messages)" in row()[0] and "Question: 早上好\n\nAnswer: Good!" in row()[0]  # Anna answers
    assert "b.json: chats with ChatGPT, 2 messages" in row()[1]
    assert "Question: see a.org\n" in row()[1] and "Answer: Yes." in row()[1]  # who answers is known
    assert not card.one(PRIMARY_OF_FORM).is_enabled()  # nothing is read before it was looked at
    assert "Not used yet: a.txt, b.json. Say above what it shall become." in card.text(FORM)
    check_everywhere(card, "New model")
    card.run("document.querySelectorAll('.export')[0].querySelectorAll('input')[1].click()")
    assert "Question: Are you there?" in row()[0] and "Answer: Yes: I am.\nTwo lines." in row()[0]  # Ben
    card.run("document.querySelector('.export .primary').click()")
    card.wait(lambda: "a Ben.jsonl: 2 conversations" in card.text(".files"))
    assert card.one("#train-name").get_attribute("value") == "a Ben"
    assert not card.run("return document.querySelector('.export details').open")
    card.run(
        "const real = window.fetch; window.fetch = (to, how) => String(to).endsWith('/conversations')"
        " ? new Promise((done) => (window.proceed = () => done(real(to, how)))) : real(to, how)"
    )
    assert card.one(PRIMARY_OF_FORM).is_enabled()
    card.run("document.querySelectorAll('.export')[1].querySelector('.primary').click()")
    card.wait(lambda: card.run("return Boolean(window.proceed)"))
    assert not card.one(PRIMARY_OF_FORM).is_enabled()  # a plan would leave these conversations out
    card.run("window.proceed()")
    card.wait(lambda: "b assistant.jsonl: one conversation" in card.text(".files"))
    card.run("document.querySelector('.export details').open = true")
    card.run("document.querySelectorAll('.export .buttons .quiet')[0].click()")
    card.wait(lambda: "a.txt: text to read" in card.text(".files"))
    card.wait(lambda: card.one(PRIMARY_OF_FORM).is_enabled() and "Not used yet" not in card.text(FORM))
    card.click(PRIMARY_OF_FORM)
    card.wait(lambda: "weights (" in card.text(BODY))
    asked = json.loads((client.folder / "a Ben/job.json").read_text())
    assert asked["files"] == ["a Ben.jsonl", "b assistant.jsonl", "a.txt"]


def test_below_a_form_there_are_no_curves_of_other_models(card, client):
    client.planned()
    let_write(client, "novel", 12)
    card.wait(lambda: "Start" in card.texts(f"{BODY} button"))
    card.click(PRIMARY)
    card.wait(lambda: "Ready." in card.text(BODY))
    assert "It continues texts." in card.text(BODY) and "eval_loss" not in card.text(BODY)
    card.wait(lambda: card.texts("#plots .plot:first-child .u-label") == ["Updates", "novel/pretrain_64"])
    card.run("[...document.querySelectorAll('#train-body .buttons button')].at(-1).click()")  # New model
    card.wait(lambda: card.shown(FORM) and not card.all("#plots .plot"))


def test_an_example_is_trained_renamed_and_deleted_by_clicks(card, client):
    card.click(f"{FORM} > button")
    card.wait(lambda: "valley questions.jsonl" in card.text(".files") and card.one(PRIMARY).is_enabled())
    assert not card.shown(f"{FORM} > button") and card.one("#train-name").get_attribute("value") == "valley"
    card.click(PRIMARY)
    card.wait(lambda: "then the conversations" in card.text(BODY))
    card.click(PRIMARY)
    card.wait(lambda: "Ready." in card.text(BODY))
    rename, _ = card.all(f"{BODY} .manage button")
    rename.click()
    card.driver.switch_to.alert.send_keys("people")
    card.driver.switch_to.alert.accept()
    card.wait(lambda: card.text("#train-title") == "people" and "Ready." in card.text(BODY))
    card.all(f"{BODY} .manage button")[1].click()
    card.driver.switch_to.alert.dismiss()
    assert (client.folder / "people").is_dir()
    card.all(f"{BODY} .manage button")[1].click()
    card.driver.switch_to.alert.accept()
    card.wait(lambda: card.shown(FORM))
    assert (client.folder / ".deleted/people/report.html").exists()


def test_both_languages_have_the_same_texts():
    source = re.sub(r'"[^"\n]*"', '""', (PAGE / "text.js").read_text(encoding="utf-8"))
    english, chinese = (source.partition(f"\n  {lang}: {{")[2].partition("\n  }")[0] for lang in ("en", "zh"))
    keys = [sorted(re.findall(r"(\w+):", part)) for part in (english, chinese)]
    assert keys[0] == keys[1] and len(keys[0]) > 150


def test_text_and_conversations_are_two_stages_then_it_answers(card, client, tmp_path):
    give(card, tmp_path, a_txt=TEXT, b_jsonl=CHAT * 3)
    card.wait(lambda: "b.jsonl: 3 conversations" in card.text(".files") and "a.txt" in card.text(".files"))
    card.wait(lambda: "then learns from the conversations how to answer" in card.text(FORM))
    card.click(PRIMARY)
    card.wait(lambda: ", then the conversations 3 times." in card.text(BODY))
    name = card.text("#train-title")
    let_write(client, name, 6)
    card.click(PRIMARY)
    card.wait(lambda: "Reading the text, 1 of 2" in card.text(BODY))
    first = card.driver.current_window_handle
    card.driver.switch_to.new_window("tab")
    try:
        card.driver.get(f"{client.address}#training")  # the other tab gives it
        ready_in_training(card)
        let_write(client, name, 18)
        card.wait(lambda: "Learning to answer, 2 of 2" in card.text(BODY))
        assert re.match(r"\d+ % MiniMind", card.driver.title)
        let_write(client, name, 24)
        card.wait(lambda: "Ready." in card.text(BODY))
    finally:
        card.driver.close()
        card.driver.switch_to.window(first)
    card.wait(lambda: "Ready. It answers 3 of 4 questions right that it had not seen." in card.text(BODY))
    check_everywhere(card, name)
    card.click(PRIMARY)
    card.wait(lambda: card.text("#model option:checked").endswith("/full_sft_64"))
    assert card.ask("hello") == "You said: hello"


def test_a_killed_server_is_followed_by_one_that_adopts_its_training(page, tmp_path):
    script = "import scripts.serve.training as t; from pathlib import Path; import tests.scripts.serve.trainings as s; "
    faults = Faults(script=script + "t.PLAN = Path(s.__file__)")
    argv = ["--train", "1", "--save_dir", str(tmp_path), "--port", "0", "--api_key", "key"]

    def start(port: int = 0) -> tuple[StageProcess, str]:
        process = StageProcess(
            "scripts.serve_openai_api", [*argv[:-3], str(port), *argv[-2:]], faults, **QUICK
        )
        link = wait_for_line(process, "train and chat at ").split()[4].rstrip(",")
        wait_for_line(process, "serving the weights in ")
        return process, link

    process, link = start()
    address = link.partition("#")[0]
    port = int(address.rsplit(":", 1)[1].strip("/"))
    try:
        page.forget(address)
        page.driver.get(link)
        ready_in_training(page)
        give(page, tmp_path, a_txt=TEXT)
        page.wait(lambda: page.one(PRIMARY).is_enabled())
        page.click(PRIMARY)
        page.wait(lambda: "weights (" in page.text(BODY))
        until = tmp_path / "a" / "until"
        until.write_text("4")
        page.click(PRIMARY)
        page.wait(lambda: "4 of 12 updates" in page.text(BODY))
        process.send(signal.SIGKILL)
        process.wait()
        page.wait(lambda: "does not answer" in page.text("#curves-error"))
        process, _ = start(port)
        until.write_text("8")
        page.wait(lambda: "8 of 12 updates" in page.text(BODY))
        page.click(f"{BODY} .buttons button")
        page.wait(lambda: "Stopped at update 9 of 12" in page.text(BODY))
    finally:
        end_all(tmp_path)
        process.send(signal.SIGKILL)
        page.driver.get("about:blank")
        page.driver.get_log("browser")  # of requests that found no server


def test_the_key_is_in_no_address_and_comes_to_a_new_tab_and_after_a_restart(page, tmp_path):
    """A code in the address is exchanged once. Another tab gives the key; a server with a new key is opened by
    its own link, in whichever tab, and a tab that waits for the key goes on."""

    def asks() -> None:
        page.wait(lambda: page.shown("#key-dialog"))

    def given(address: str) -> None:
        page.driver.get(address)
        ready_in_training(page)
        assert "code" not in page.driver.current_url and not page.shown("#key-dialog")

    with ExitStack() as stack:
        start = lambda key, *codes: make_client(  # noqa: E731
            stack, tmp_path / "out", given=None, access=Access(key, codes=set(codes)), port=port
        )
        port = 0
        client = start("first key", "once")
        port = int(client.address.rsplit(":", 1)[1].strip("/"))
        page.open(client.address)
        asks()
        page.driver.get("about:blank")
        given(f"{client.address}#code=once")
        history = page.devtools("Page.getNavigationHistory")["entries"]
        assert not any("first key" in entry["url"] for entry in history)
        page.driver.refresh()
        ready_in_training(page)
        first = page.driver.current_window_handle
        page.driver.switch_to.new_window("tab")
        given(f"{client.address}#code=once")  # used: the other tab gives the key
        second = page.driver.current_window_handle
        page.driver.switch_to.window(first)
        page.driver.get("about:blank")
        page.driver.switch_to.window(second)
        page.run("sessionStorage.clear()")
        page.driver.refresh()
        asks()  # no tab has it any more
        stack.close()
    with ExitStack() as stack:
        client = start("second key", "twice")
        page.driver.switch_to.window(first)
        given(f"{client.address}#code=twice")
        page.driver.switch_to.window(second)
        page.wait(lambda: not page.shown("#key-dialog") and page.shown("#train-card"))
        page.driver.close()
        page.driver.switch_to.window(first)
        page.driver.get("about:blank")
        page.driver.get_log("browser")  # of requests that found no server


def test_an_upload_grows_is_cancelled_and_cut(card, client, tmp_path):
    card.devtools("Network.enable")
    slow = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": 800_000}
    card.devtools("Network.emulateNetworkConditions", offline=False, **slow)
    try:
        give(card, tmp_path, a_txt=TEXT * 5000)
        percent = lambda: int((re.search(r"a.txt: (\d+) % of 1.95 MB", card.text(".files")) or [0, 0])[1])  # noqa: E731
        card.wait(lambda: percent() > 20)
        card.wait(lambda: percent() > 40)
        card.click(".files button")
        card.wait(lambda: not card.text(".files"))
        assert not card.shown(f"{BODY} .error")
        card.wait(lambda: not list((client.folder / ".uploads").iterdir()))
        give(card, tmp_path, a_txt=TEXT * 5000)
        card.wait(lambda: percent() > 20)
        card.driver.refresh()
        ready_in_training(card)
        card.wait(lambda: "The upload was interrupted. Choose the file again." in card.text(BODY))
        card.wait(lambda: not list((client.folder / ".uploads").iterdir()))
    finally:
        card.devtools("Network.emulateNetworkConditions", offline=False, **slow | {"uploadThroughput": -1})


def test_what_is_wrong_with_a_file_is_a_sentence_in_both_languages_and_the_form_stays(
    card, client, tmp_path, monkeypatch
):
    bad = CHAT * 16 + "{\n" + CHAT * 9
    wrong = {
        "a_txt": ("中文".encode("gb18030"), "Not UTF-8. Save the file as UTF-8", "不是 UTF-8"),
        "a_odt": ("x", "a.odt: save it as plain text (.txt, UTF-8) first.", "请先另存为纯文本"),
        "a_docx": ("x", "a.docx cannot be read: it is damaged, locked", "a.docx 无法读取"),
        "a_jpg": ("x", "a.jpg: this is not text.", "a.jpg：这不是文本"),
        "b_txt": ("", "b.txt contains nothing to read.", "没有可读的内容"),
        "c_jsonl": (bad, "c.jsonl, line 17: it is not complete JSON", "c.jsonl 第 17 行"),
    }
    card.one("#train-name").send_keys("kept")
    for name, (content, english, chinese) in wrong.items():
        give(card, tmp_path, **{name: content})
        card.wait(lambda english=english: english in card.text(FORM))
        card.click("#language")
        assert chinese in card.text(FORM)
        card.click("#language")
        for button in card.all(".files button"):
            button.click()
            card.wait(lambda: not card.all(".files li"))
    assert card.one("#train-name").get_attribute("value") == "kept"
    with monkeypatch.context() as patch:
        for module in (uploads, training):
            patch.setattr(module, "disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
        card.wait(lambda: client.overview()["room"] < 0)
        card.driver.refresh()
        ready_in_training(card)
        give(card, tmp_path, a_txt=TEXT)
        card.wait(lambda: "2.15 GB of disk are needed, 1.07 GB are free." in card.text(FORM))
    card.driver.refresh()
    ready_in_training(card)
    refusals = {
        ":3: no 'text' (its keys: 'x')": (
            "a.txt, line 3: no field has a name that is known here; its fields are 'x'",
            "a.txt 第 3 行：没有这里认得的字段名，它的字段是 'x'。",
        ),
        ": --eval_share 0.02 holds out none of the records": ("Too little text", "文本太少"),
        ": --hours 0.17: fewer than 100 updates, which teach little": (
            "The model would learn nothing",
            "这点时间学不到",
        ),
    }
    for said, (english, chinese) in refusals.items():
        give(card, tmp_path, a_txt=f"refuse {said}")
        card.wait(lambda: card.text(".files") and card.one(PRIMARY).is_enabled())
        card.click(PRIMARY)
        card.wait(lambda english=english: english in card.text(f"{BODY} .error"))
        assert not RAW.search(card.text(BODY))
        card.click("#language")
        assert chinese in card.text(f"{BODY} .error")
        card.click("#language")
        client.http.delete("/files/a.txt")
        card.run("[...document.querySelectorAll('#train-body .buttons button')].at(-1).click()")
        card.wait(lambda: card.shown(FORM) and not card.text(".files"))
        assert card.one("#train-name").get_attribute("value") == "kept"


def test_by_keyboard_alone_and_read_out_at_changes_and_each_tenth(card, client, tmp_path):
    give(card, tmp_path, a_txt=TEXT)
    card.run("""window.said = []; new MutationObserver(() => {
        const text = document.querySelector('#announcer').textContent;
        if (text) window.said.push(text);
    }).observe(document.querySelector('#announcer'), {childList: true});""")
    card.wait(lambda: card.one(PRIMARY).is_enabled())
    focused = lambda: card.run("return document.activeElement.textContent || document.activeElement.id")  # noqa: E731

    def press(label: str) -> None:
        for _ in range(40):
            if focused() == label:
                break
            card.keys(Keys.TAB)
        assert focused() == label
        card.keys(Keys.ENTER)

    card.one("#train-name").send_keys(Keys.ENTER)  # a form
    card.wait(lambda: card.text("#train-title") == "a" and "Start" in card.texts(f"{BODY} button"))
    assert focused() == "a"  # the heading
    let_write(client, "a", 3)
    press("Start")
    card.wait(lambda: "3 of 12 updates" in card.text(BODY))
    let_write(client, "a", 6)
    card.wait(lambda: "50 %" in card.run("return window.said"))
    let_write(client, "a", 12)
    card.wait(lambda: "Ready." in card.text(BODY))
    press("Chat with it")
    card.wait(lambda: focused() == "input")
    card.keys("Once", Keys.ENTER)
    card.answered()
    said = card.run("return window.said")
    tens = [text for text in said if text.endswith(" %")]
    states = [text for text in said if text.startswith("a: ")]
    assert states[-3:] == ["a: the plan is made", "a: training", "a: ready"] and len(states) <= 4
    assert 1 <= len(tens) <= 10 and len(set(tens)) == len(tens)


# --- each screen, with the longest words that it can have

LONG_NAME = "W_name_without_blanks_as_long_as_allowed"  # 40 characters
LONG_WORD = "x" * 400
DATA = {*LONG_NAME.lower().split("_"), LONG_WORD, "docx", "jpg", "river", "ran", "user", "assistant"}
ADVICE: list[dict[str, Any]] = [
    {"key": "more time", "stage": "pretrain", "updates": 12345},
    {"key": "more data", "stage": "full_sft", "updates": 12},
    {"key": "few tokens", "tokens": 12345},
    {"key": "short tokens", "bytes": 1.5},
    {"key": "few conversations", "conversations": 300, "command": "python trainer/train_lora.py --x 1"},
    {"key": "leaks", "leaked": 3, "questions": 50},
    {"key": "disk", "need": 12.345, "free": 1.234},
]


def open_all(page, css: str = "#train-body details:not(:has(.log))") -> None:
    """Unfold."""
    page.run("document.querySelectorAll(arguments[0]).forEach((e) => { e.open = true; })", css)


def choose(page, name: str) -> None:
    """Have the card show a training, or the form ("")."""
    page.run(
        "const choice = document.querySelector('#train-choice'); choice.value = arguments[0];"
        "choice.dispatchEvent(new Event('change'))",
        name,
    )
    page.wait(lambda: page.text("#train-title") == (name or "New model"))


def test_screen_of_files_of_five_kinds_and_of_one_that_is_refused(card, client, tmp_path):
    bad = CHAT * 16 + "{\n" + CHAT * 9
    give(card, tmp_path, a_txt=TEXT, b_jsonl=bad, c_csv="question,answer\nhi,ho\n", d_docx=word_document())
    give(card, tmp_path, e_pdf=partly_scanned("A river ran." * 30, None), **{f"{LONG_NAME}_txt": LONG_WORD})
    card.wait(lambda: card.text(".files").count("% of the text") == 4 and "line 17" in card.text(".files"))
    give(card, tmp_path, f_jpg="x")
    card.wait(lambda: card.text(f"{FORM} .error") == "f.jpg: this is not text.")
    assert len(card.all(".files li")) == 6
    card.run("window.scrollBy(0, 0)")
    open_all(card)
    check_screen(card, *DATA)
    other = card.one("[aria-label='other, in hours:']")
    other.send_keys("500")
    card.click(PRIMARY_OF_FORM)
    card.wait(lambda: card.text(f"{FORM} .error") == "Between 0.02 and 168 hours (a week).")
    assert {"Show it", "Show the first 3"} == {*card.texts(".files summary")}
    check_screen(card, *DATA)
    card.click("#language")
    assert card.text(f"{FORM} .error") == "请输入 0.02 到 168 小时（一周）。"
    assert {"查看内容", "查看前 3 条"} == {*card.texts(".files summary")}
    card.click("#language")


def test_screen_of_a_file_that_arrives(card, client, tmp_path):
    card.devtools("Network.enable")
    slow = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": 20_000}
    card.devtools("Network.emulateNetworkConditions", offline=False, **slow)
    try:
        give(card, tmp_path, **{f"{LONG_NAME}_txt": TEXT * 5000})
        card.wait(lambda: "% of 1.95 MB" in card.text(".files"))
        check_screen(card, *DATA)
        card.click(".files button")
    finally:
        card.devtools("Network.emulateNetworkConditions", offline=False, **slow | {"uploadThroughput": -1})


def test_screens_from_a_plan_with_all_advice_to_a_model(card, client):
    """Names are as long as allowed, numbers are large, what the model writes has no blanks."""
    client.put(f"{LONG_NAME}.jsonl", CHAT * 3)
    client.planned(LONG_NAME, files=["a.txt", f"{LONG_NAME}.jsonl"])
    folder = client.folder / LONG_NAME
    facts = json.loads((folder / "plan_facts.json").read_text())
    large = {"parameters": 123_456_789, "width": 1024, "depth": 16, "memory": 123.4e9, "memory_free": 1e12}
    (folder / "plan_facts.json").write_text(json.dumps(facts | large | {"unwise": ADVICE, "limit": "memory"}))
    card.driver.refresh()
    ready_in_training(card)
    card.wait(lambda: "A model of 120 million weights (16 layers, 1024 wide)." in card.text(BODY))
    assert len(card.all(".unwise li")) == 6  # one is for a terminal
    assert "Before you start:" in card.text(BODY) and "12,345 pieces of words" in card.text(BODY)
    open_all(card)
    check_screen(card, *DATA)
    (folder / "answer").write_text(LONG_WORD)
    let_write(client, LONG_NAME, 12)
    card.click(PRIMARY)
    card.wait(lambda: "12 of 12 updates" in card.text(BODY) and LONG_WORD in card.text(BODY))
    check_screen(card, *DATA)
    open_all(card, "#train-body details")
    card.wait(lambda: "== started" in card.text(".log"))
    check_layout(card)
    choose(card, "")
    card.wait(lambda: f"“{LONG_NAME}” is being trained" in card.text(FORM))
    check_screen(card, *DATA)
    choose(card, LONG_NAME)
    card.click(f"{BODY} .buttons button")
    let_write(client, LONG_NAME, 13)
    card.wait(lambda: "Stopped" in card.text(BODY))
    check_screen(card, *DATA)
    let_write(client, LONG_NAME, 24)
    card.click(PRIMARY)
    card.wait(lambda: "Ready." in card.text(BODY))
    check_screen(card, *DATA)
    open_all(card, "#training details")
    card.wait(lambda: card.all("#plots .u-label") and LONG_WORD in card.text("#samples"))
    check_layout(card)
    choose(card, "")
    check_screen(card, *DATA)
    card.run("[...document.querySelectorAll('#models .buttons button')].at(-1).click()")  # Teach it more
    card.wait(lambda: "learns more" in card.text(FORM))
    check_screen(card, *DATA)


def test_the_words_of_a_small_plan(card, client):
    client.planned()
    path = client.folder / "novel/plan_facts.json"
    small = json.loads(path.read_text()) | {"parameters": 98_600, "disk": 5.1e6, "seconds": 65.0}
    small["unwise"] = [{"key": "few tokens", "tokens": 45_599}]
    limits = {
        "data": ("More time would not help: the text is short.", "更多时间没有用：文本不够长。"),
        "hours": ("More time would make it better.", "时间更长，效果会更好。"),
    }
    for limit, sentences in limits.items():
        path.write_text(json.dumps(small | {"limit": limit}))
        card.driver.refresh()
        ready_in_training(card)
        card.wait(lambda sentences=sentences: sentences[0] in card.text(BODY))
        shown = card.text(BODY)
        assert (
            "A very small model of 99 thousand weights (1 layer, 64 wide). It reads the text 3 times."
            in shown
        )
        assert "It takes about a minute and is done at " in shown and "and 5.1 MB of disk" in shown
        assert "The text is short (45,599 pieces of words)" in shown
        card.click("#language")
        shown = card.text(BODY)
        assert "很小的模型，9.9 万个权重（1 层，宽 64）。文本读 3 遍。" in shown and sentences[1] in shown
        assert "大约需要 1 分钟，" in shown and "磁盘 5.1 MB" in shown and "开始之前：" in shown
        assert "在终端里做同样的事" in shown and "文本很短（45,599 个词片）" in shown
        card.click("#language")


def test_stopped_between_reading_and_answering(card, client):
    client.put("b.jsonl", CHAT * 3)
    client.planned(files=["a.txt", "b.jsonl"])
    folder = client.folder / "novel"
    record = {"update": 12, "tokens": 1, "seconds": 1, "loss": 1}
    (folder / "pretrain_64_metrics.jsonl").write_text(json.dumps(record) + "\n")
    with open(folder / "job.log", "a") as file:
        file.write("== started run.sh 2026-11-28 08:16:01\n== asked to stop 2026-11-28 08:17:01\n")
    card.wait(lambda: "Stopped between reading and answering. Nothing is lost." in card.text(BODY))
    check_everywhere(card, "novel")
    card.click("#language")
    assert "已在阅读与学习回答之间停止，没有丢失任何进度。" in card.text(BODY)
    card.click("#language")


FAILURES = {
    "out of memory (torch.OutOfMemoryError: tried to allocate 2.00 GiB)": "Out of memory. Close other programs",
    "out/x cannot be written (No space left on device)": "The disk is full: ",
    f"out/.uploads/{LONG_NAME}.jsonl:17: 'content' is null": f"{LONG_NAME}.jsonl, line 17: a text in it is empty.",
    "out/.uploads/a.json[16]: 'content' is null": "a.json, record 17: a text in it is empty.",
    "x.txt is not UTF-8": "Not UTF-8. Save the file as UTF-8",
    "something new --flag": "It cannot continue. The reason is in the log.",
}


def test_each_failure_has_a_sentence_and_the_buttons_that_help(card, client):
    client.planned(LONG_NAME)
    for line, sentence in FAILURES.items():
        with open(client.folder / LONG_NAME / "job.log", "a") as file:
            file.write(f"== started run.sh 2026-11-28 08:16:01\nerror: {line}\n")
        card.wait(lambda sentence=sentence: sentence in card.text(f"{BODY} .error"))
        buttons = card.texts(f"{BODY} button")
        assert ("Skip records that cannot be used (at most 10 %)" in buttons) == (" 17: " in sentence)
        assert {"Continue", "Change", "New model", "Delete"} <= {*buttons}
        check_screen(card, *DATA)


def test_screens_of_dialogs_and_notices(card, client, monkeypatch, tmp_path):
    """Settings, corrections, the question for the key, the menu with runs, a page to send."""
    client.put("b.jsonl", CHAT * 3)
    client.planned(LONG_NAME, files=["a.txt", "b.jsonl"])
    client.post(f"/{LONG_NAME}/start", {})
    client.until("ready", name=LONG_NAME)
    card.wait(lambda: "Ready." in card.text(BODY))
    stand_in = tmp_path / "convert.py"
    wait = f"while not Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.05)"
    stand_in.write_text(f"""import sys, time; from pathlib import Path
{wait}
sys.exit('error: {LONG_WORD}')""")
    monkeypatch.setattr(sending, "CONVERT", stand_in)
    # notices stay
    card.run(
        "const later = window.setTimeout; window.setTimeout = (run, ms) => (ms === 5000 ? 0 : later(run, ms))"
    )
    card.run("[...document.querySelectorAll('#train-body .buttons button')][1].click()")
    card.wait(lambda: "Making a page of" in card.text("#notice"))
    check_layout(card)
    (tmp_path / "go").touch()
    card.wait(lambda: "The page could not be made" in card.text("#notice"))
    check_layout(card)
    card.size(390, 800)
    card.click("#open-menu")
    card.wait(lambda: card.shown("#runs .run"))
    check_layout(card)
    card.click("#close-menu")
    card.click("#tab-chat")
    card.ask(f"hello {LONG_WORD}")
    check_layout(card)
    for _ in ("en", "zh"):
        card.click("#open-settings")
        for width in WIDTHS:
            assert card.misplaced(width) == []
        card.click("#close-settings")
        card.click("#language")
    card.click("[aria-label='Correct this answer']")
    for width in WIDTHS:
        assert card.misplaced(width) == []
    card.one(".correcting textarea").send_keys(LONG_WORD)
    card.click(".correcting .primary")
    card.click("#open-corrections")
    card.wait(lambda: card.shown("#corrections"))
    check_layout(card)
    card.click("#close-corrections")
    card.run("sessionStorage.clear()")
    card.driver.refresh()
    card.wait(lambda: card.shown("#key-dialog"))
    card.keys("wrong", Keys.ENTER)
    card.wait(lambda: card.shown("#key-wrong"))
    assert "Open the link that the server printed in its window: it holds the key." in card.text(
        "#key-dialog"
    )
    check_screen(card, *DATA, "api")
