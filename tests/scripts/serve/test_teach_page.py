"""Teaching by clicks in a real browser, over the stand-in of teachings.py: from corrected answers to a version that is
kept or discarded; in both languages, on narrow screens, after a reload, killed, and refused."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.serve import teaching, training
from scripts.serve.api import Access
from scripts.serve.jobs import Jobs
from tests.browser import Page
from tests.scripts.serve import teachings, trainings
from tests.scripts.serve.servers import wait_for
from tests.scripts.serve.test_teaching import MODEL, NAME, add_model, kept_corrections
from tests.scripts.serve.test_train_page import (
    BODY,
    NOT_ENGLISH,
    PRIMARY,
    WIDTHS,
    check_everywhere,
    let_write,
)
from tests.scripts.serve.test_training import QUICK, Client, end_all, make_client

TEACH = "#teach-it"
# of names, and of what the user and the stand-in's model say
NOT_ENGLISH |= {"samo", "live", "lives", "redcliff", "saltport", "does", "where", "rained", "taught", "sft"}
NOT_ENGLISH |= {"deleted", "full", "lumen", "who", "what", "name", "your", "bye", "farewell"}
SIDEWAYS = """return [...document.querySelectorAll('#corrections, #corrections *')].filter((e) =>
    e.getClientRects().length && e.getBoundingClientRect().right > arguments[0] + 1).map((e) => e.outerHTML.slice(0, 200))"""


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch) -> None:
    monkeypatch.setattr(teaching, "TEACH", Path(teachings.__file__))
    monkeypatch.setattr(training, "PLAN", Path(trainings.__file__))


@pytest.fixture
def client(tmp_path) -> Iterator[Client]:
    add_model(tmp_path / "out")
    with ExitStack() as stack:
        access = Access("key", codes={"once"})
        yield make_client(stack, tmp_path / "out", QUICK, given=None, access=access)
        end_all(tmp_path / "out")


@pytest.fixture
def chat(page, client) -> Iterator[Page]:
    page.forget(client.address)
    page.driver.get(f"{client.address}#code=once")
    page.wait(lambda: page.run("return document.documentElement.dataset.ready"))
    page.click("#tab-chat")
    page.wait(lambda: page.all("#model option"))
    yield page
    page.driver.get("about:blank")


def correct(page: Page, question: str, answer: str) -> None:
    """Ask, and write what the answer should have been."""
    page.ask(question)
    page.click("[aria-label='Correct this answer']")
    area = page.wait(lambda: page.one(".correcting textarea"))
    page.run("arguments[0].value = arguments[1]", area, answer)
    page.click(".correcting .primary")
    page.wait(lambda: page.text(".correction").endswith(answer))


def correct_three(page: Page) -> None:
    for question, answer in (
        ("Who are you?", "I am Lumen."),
        ("你叫什么？", "我叫 Lumen。🙂"),
        ("Bye", "Farewell."),
    ):
        correct(page, question, answer)


def open_list(page: Page) -> None:
    page.click("#open-corrections")
    page.wait(lambda: page.shown(TEACH))


def choose(page: Page, model: str) -> None:
    page.run(
        "const s = document.querySelector('#model'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))",
        model,
    )


def test_three_corrected_answers_are_taught_and_the_version_is_kept_by_clicks(chat, client):
    """Each state is the same after a reload, in both languages and on narrow screens."""
    correct(chat, "Who are you?", "I am Lumen.")
    open_list(chat)
    assert f"Three corrections of “{MODEL}” are enough to teach it here. So far there are 1." in chat.text(
        "#teach"
    )
    assert not chat.one(TEACH).is_enabled()
    chat.click("#close-corrections")
    correct(chat, "你叫什么？", "我叫 Lumen。🙂")
    correct(chat, "Bye", "Farewell.")
    open_list(chat)
    assert f"“{MODEL}” can learn the 3 corrections in some minutes." in chat.text("#teach")
    for width in WIDTHS:
        chat.size(width, 800)
        assert chat.run(SIDEWAYS, width) == []
    chat.run("document.querySelector('#language').click()")
    words = {word.lower() for word in re.findall("[A-Za-z]{3,}", chat.text("#corrections"))}
    assert words <= NOT_ENGLISH | {"novel", "said", "dpo"}, words
    chat.run("document.querySelector('#language').click()")
    (client.folder / NAME).mkdir()
    let_write(client, NAME, 6)
    chat.click(TEACH)
    chat.wait(lambda: re.search(r"6 of 12 updates · about \d+ seconds left, done at", chat.text(BODY)))
    assert "Learning 3 corrections" in chat.text(BODY) and not chat.shown("#corrections")
    assert chat.driver.title.startswith("50 %")
    check_everywhere(chat, NAME)
    let_write(client, NAME, 12)
    chat.wait(lambda: "2 of 3 learned; 1 of 2 old answers kept." in chat.text(BODY))
    assert chat.texts(f"{BODY} .buttons button") == ["Keep it", "Discard it"]
    shown = chat.texts(f"{BODY} .answers li")
    # "Kept" are as they were; nothing that a model writes is HTML
    assert shown[0].split("\n") == ["Bye", "should be", "", "Farewell.", "", "now", "", "It <b>rained</b>."]
    assert "before\n\nSamo lives in Redcliff.\n\nnow\n\nSamo lives in Saltport." in shown[1]
    check_everywhere(chat, NAME)
    chat.click(PRIMARY)
    chat.wait(lambda: f"The chat offers it as “{NAME}”. It was taught from “{MODEL}”" in chat.text(BODY))
    check_everywhere(chat, NAME)
    chat.click(PRIMARY)
    chat.wait(lambda: chat.text("#model option:checked") == NAME)
    assert chat.ask("Once upon") == "You said: Once upon"
    open_list(chat)  # the corrections stay, and those of the version are taught with those of its original
    assert f"“{NAME}” can learn the 3 corrections" in chat.text("#teach")
    assert kept_corrections(client) == ["I am Lumen.", "我叫 Lumen。🙂", "Farewell."]


def test_a_version_is_discarded_and_the_corrections_stay(chat, client):
    correct_three(chat)
    open_list(chat)
    chat.click(TEACH)
    chat.wait(lambda: "old answers kept" in chat.text(BODY))
    chat.click(f"{BODY} .buttons .quiet")
    chat.wait(lambda: "The new version was discarded." in chat.text("#notice"))
    chat.wait(lambda: chat.shown(f"{BODY} form"))
    assert (client.folder / ".deleted" / f"{NAME} 1").is_dir()
    chat.click("#tab-chat")
    assert chat.text("#open-corrections") == "Corrections (3)"
    chat.wait(lambda: chat.texts("#model option") == [MODEL])
    chat.click("#open-corrections")
    chat.click("#correction-list button")  # one is taken back: the next teaching forgets it
    chat.click("#close-corrections")
    correct(chat, "What is your name?", "Lumen.")
    open_list(chat)
    chat.click(TEACH)
    chat.wait(lambda: "of 3 learned" in chat.text(BODY))
    assert kept_corrections(client)[-1] == "Lumen."


def test_only_the_corrections_of_the_model_that_answers_are_taught(chat, client):
    add_model(client.folder, "other/full_sft_64")
    correct_three(chat)
    chat.driver.refresh()
    chat.wait(lambda: len(chat.all("#model option")) == 2)
    choose(chat, "other/full_sft_64")
    open_list(chat)
    text = chat.text("#teach")
    assert (
        "So far there are 0." in text and "3 more are about answers of other models and are left out." in text
    )
    assert not chat.one(TEACH).is_enabled()


def test_killed_it_goes_on_from_the_card(chat, client):
    correct_three(chat)
    (client.folder / NAME).mkdir()
    let_write(client, NAME, 3)
    open_list(chat)
    chat.click(TEACH)
    chat.wait(lambda: "3 of 12 updates" in chat.text(BODY))
    os.killpg(Jobs(client.folder).group(NAME), signal.SIGKILL)
    chat.wait(lambda: "It ended without saying why" in chat.text(BODY))
    check_everywhere(chat, NAME)
    let_write(client, NAME, 5)
    chat.click(PRIMARY)
    chat.wait(lambda: "5 of 12 updates" in chat.text(BODY))
    chat.click(f"{BODY} .buttons button")  # stop
    chat.wait(lambda: "Stopped. Nothing is lost." in chat.text(BODY))
    check_everywhere(chat, NAME)
    let_write(client, NAME, 12)
    chat.click(PRIMARY)
    chat.wait(lambda: "2 of 3 learned" in chat.text(BODY))


def test_what_is_refused_is_a_sentence_in_both_languages(chat, client):
    def refused(english: str, chinese: str) -> None:
        open_list(chat)
        for sentence in (english, chinese):
            chat.click(TEACH)
            chat.wait(lambda sentence=sentence: sentence in chat.text("#teach-error"))
            chat.run("document.querySelector('#language').click()")
        chat.click("#close-corrections")

    correct_three(chat)
    described = client.folder / "novel/full_sft_64_run.json"
    described.rename(described.with_suffix(".away"))
    refused("The description of its training is not beside", "没有训练记录")
    described.with_suffix(".away").rename(described)
    client.planned("book")
    let_write(client, "book", 2)
    client.post("/book/start", {})
    wait_for(lambda: client.job("book").get("update") == 2)
    chat.click("#tab-training")
    chat.wait(lambda: "2 of 12 updates" in chat.text(BODY))
    chat.click("#tab-chat")
    refused("“book” is being trained, about 10 seconds left.", "“book”正在训练，约剩 10 秒。")
    client.post("/book/stop", {"now": True})
    wait_for(lambda: Jobs(client.folder).living() is None)
    chat.click("#new-chat")
    correct(chat, "Who are you?", "I am somebody else.")
    refused(
        "Two corrections answer “Who are you?” in different ways. Remove one of them.",
        "有两条更正对“Who are you?”的回答不同",
    )
    chat.click("#open-corrections")
    chat.click("#correction-list button")
    chat.click("#close-corrections")
    shutil.move(client.folder / "novel", client.folder / "moved")
    refused("This model no longer exists.", "这个模型已经不在了。")


def test_missing_old_data_are_a_sentence_with_a_button(chat, client):
    said = "refuse a.pth: the data of its run are not found; or accept that with --without_old_data"
    correct_three(chat)
    correct(chat, "What is your name?", said)
    open_list(chat)
    chat.click(TEACH)
    chat.wait(lambda: "so it would forget much" in chat.text(f"{BODY} .error"))
    assert "--without" not in chat.text(BODY)
    chat.click("#language")
    assert "学过的数据不在原处" in chat.text(f"{BODY} .error")
    chat.click("#language")
    chat.click(PRIMARY)
    chat.wait(lambda: "of 4 learned" in chat.text(BODY))
    assert json.loads((client.folder / NAME / "job.json").read_text())["without_old_data"] is True


def test_in_two_tabs_one_decides_and_both_show_it(chat, client):
    correct_three(chat)
    open_list(chat)
    chat.click(TEACH)
    chat.wait(lambda: "of 3 learned" in chat.text(BODY))
    first = chat.driver.current_window_handle
    chat.driver.switch_to.new_window("tab")
    chat.driver.get(f"{client.address}#training")
    chat.wait(lambda: "of 3 learned" in chat.text(BODY))
    chat.run("window.fetch = () => new Promise(() => {})")  # this tab learns nothing more
    second = chat.driver.current_window_handle
    chat.driver.switch_to.window(first)
    chat.click(PRIMARY)
    chat.wait(lambda: "The chat offers it as" in chat.text(BODY))
    chat.driver.switch_to.window(second)
    chat.driver.refresh()
    chat.wait(lambda: "The chat offers it as" in chat.text(BODY))
    chat.driver.close()
    chat.driver.switch_to.window(first)


def test_a_server_that_does_not_train_has_no_such_button(page, tmp_path):
    from tests.scripts.serve.servers import Script, scripted

    add_model(tmp_path)
    with scripted(Script(), save_dir=tmp_path, given=None) as server:
        page.open(server.address)
        correct_three(page)
        page.click("#open-corrections")
        assert page.shown("#save-corrections") and not page.shown("#teach")
        page.driver.get("about:blank")


def test_before_its_first_figures_the_card_says_what_it_does(chat, client):
    """It asks the model; then its training has begun, but has written no record yet."""
    (client.folder / NAME).mkdir()
    let_write(client, NAME, 0)
    correct_three(chat)
    open_list(chat)
    chat.click(TEACH)
    chat.wait(lambda: "Learning 3 corrections" in chat.text(BODY))
    assert "Starting; the first figures come within a minute." in chat.text(BODY)
    check_everywhere(chat, NAME)
    version = client.folder / NAME / "1"
    version.rename(version.with_name("away"))
    chat.wait(lambda: "Asking it, before it learns" in chat.text(BODY))
    check_everywhere(chat, NAME)
    version.with_name("away").rename(version)
    let_write(client, NAME, 12)
    chat.wait(lambda: "of 3 learned" in chat.text(BODY))
