"""The web page in a real browser: chat, conversations, languages, keys, narrow screens, training curves."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from dataset.records import parse
from scripts.runs.run import Run
from scripts.serve import decoding
from scripts.serve.page import PAGE, RunFiles
from tests.scripts.serve.servers import Script, scripted
from tests.scripts.serve.test_runs import append, record

ANSWER = ".message.assistant .prose"
EDIT, AGAIN = '.message.user [aria-label="Edit"]', '[aria-label="Answer again"]'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Reedmarsh"}}\n</tool_call>'
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {}}}]'
LONG_WORD = "x" * 300
MARKDOWN = """## Tides

The **moon** pulls, the *sea* follows; `g` is gravity. See [the almanac](https://example.org/a?b=c).

- high water
- low water
  1. nested

> quoted

| day | metres |
|---|---:|
| Monday | 3.2 |

```python
print("<b>1 < 2</b>")
```

So $a^2$ and \\(\\frac{1}{2}\\), but costs $5 and $6.

$$\\sum_i p_i$$
"""
ATTACK = """<img src=x onerror="window.hacked = 1"> <script>window.hacked = 2</script>

<svg onload="window.hacked = 3"></svg>

[press](javascript:window.hacked=4) [data](data:text/html,<script>window.hacked=5</script>)
![](javascript:window.hacked=6) <a href="javascript:window.hacked=7">a</a>
<iframe srcdoc="<script>parent.hacked=8</script>"></iframe>

![picture](https://example.org/tracked.png) <javascript:window.hacked=9> [x]( java\tscript:window.hacked=10)

| <img src=x onerror="window.hacked = 12"> |
|---|
| <script>window.hacked = 13</script> $\\href{javascript:window.hacked=14}{x}$ |
"""
SAYS = {"markdown": MARKDOWN, "attack": ATTACK, "long": " ".join(map(str, range(400)))}
SAYS |= {"think": "<think>\nFirst I count.\n</think>\n\nDone.", "the weather": CALL}
SAYS |= {"<tool_response>\nrain": "It rains."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of the server: a second model, and runs."""
    folder = tmp_path_factory.mktemp("out")
    (folder / "small_32.pth").touch()
    return folder


@pytest.fixture(scope="module")
def server(folder):
    script = Script()
    with scripted(script, save_dir=folder) as server:
        server.script = script
        yield server


@pytest.fixture
def slowly(chat, server):
    """An answer takes its time, and the page draws each token of it."""
    server.script.pause = 0.005


@pytest.fixture
def chat(page, server):
    server.script.__init__()
    server.script.says = dict(SAYS)
    page.open(server.address)
    return page


def sent(server: SimpleNamespace) -> list[str]:
    """The turns of the last prompt."""
    return re.findall(r"<\|im_start\|>\w+\n(.*?)<\|im_end\|>", server.script.prompts[-1], re.DOTALL)


# --- chat


def test_an_answer_streams_is_stopped_and_is_there_after_a_reload(chat, server, slowly):
    chat.say("long")
    for part in ("1 2 3", "15 16 17"):  # it grows while it arrives
        chat.wait(lambda part=part: part in chat.text(ANSWER))
        assert chat.all(".writing")
    chat.keys(Keys.ESCAPE)
    chat.answered()
    chat.wait(lambda: server.decoding.health()["writing"] == 0)
    assert "Stopped" in chat.text(".message.assistant")
    assert chat.ask("and again") == "You said: and again"
    assert re.search(r"\d+ tokens", chat.text(".message.assistant .foot"))
    chat.wait(
        lambda: chat.run("return document.querySelector('#announcer').textContent").endswith("and again")
    )
    shown = chat.texts(".message .body")
    chat.reload()
    assert chat.texts(".message .body") == shown and len(shown) == 4
    assert len(sent(server)) == 3 and sent(server)[-1] == "and again"
    chat.say("long")
    chat.wait(lambda: "1 2 3" in chat.text(ANSWER))
    chat.reload()  # in the middle
    assert "1 2 3" in chat.text(ANSWER) and "Stopped" in chat.text(".message.assistant")


def test_edit_goes_on_from_there_and_can_be_undone_answer_again_asks_the_same(chat, server):
    for text in ("one", "two", "three"):
        chat.ask(text)
    chat.click(AGAIN)
    chat.wait(lambda: len(server.script.prompts) == 4)
    chat.answered()
    assert server.script.prompts[2] == server.script.prompts[3] and len(chat.all(".message")) == 6
    chat.run("document.querySelectorAll(arguments[0])[1].click()", EDIT)
    chat.keys(Keys.CONTROL, "a")
    chat.keys("deux", Keys.ENTER)
    chat.wait(lambda: chat.text(ANSWER) == "You said: deux")
    chat.answered()
    assert sent(server) == ["one", "You said: one", "deux"] and len(chat.all(".message")) == 4
    chat.click("#notice button")
    chat.wait(lambda: len(chat.all(".message")) == 6)
    assert chat.text(ANSWER) == "You said: three"


def test_markdown_and_formulas_become_elements(chat):
    chat.ask("markdown")
    wanted = {"h2": "Tides", "strong": "moon", "em": "sea", "p code": "g", "ul > li > ol > li": "nested"}
    wanted |= {
        "blockquote": "quoted",
        "pre": 'print("<b>1 < 2</b>")',
        "td": "3.2",
        ".code-head span": "python",
    }
    assert {css: chat.text(f"{ANSWER} {css}") for css in wanted} == wanted
    link = chat.one(f"{ANSWER} a")
    assert link.get_attribute("href") == "https://example.org/a?b=c"
    assert {"noopener", "noreferrer"} <= {*link.get_attribute("rel").split()}
    assert len(chat.all(f"{ANSWER} .katex")) == 3 and len(chat.all(f"{ANSWER} .katex-display")) == 1
    assert "costs $5 and $6" in chat.text(ANSWER)


def test_nothing_that_a_model_says_runs_or_loads(chat, server):
    chat.ask("attack")
    chat.reload()  # what is kept is shown again
    text = chat.text(ANSWER)
    assert '<img src=x onerror="window.hacked = 1">' in text and "<script>window.hacked = 2</script>" in text
    assert (
        chat.all(", ".join(f"{ANSWER} {tag}" for tag in ("img", "script", "iframe", "object", "style"))) == []
    )
    links = [link.get_attribute("href") for link in chat.all(f"{ANSWER} a[href]")]
    assert links == ["https://example.org/tracked.png"]
    loaded = chat.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded and all(name.startswith(server.address) for name in loaded)
    assert chat.run("return window.hacked") is None


def test_reasoning_is_folded_and_a_tool_call_goes_round(chat, server):
    assert chat.ask("think") == "Done."
    assert chat.text(".reasoning summary") == "Reasoning"
    assert "First I count." not in chat.text(".message.assistant")
    chat.click(".reasoning summary")
    assert "First I count." in chat.text(".message.assistant")
    chat.one("#open-settings").click()
    chat.one("#set-tools").send_keys(TOOLS)
    chat.keys(Keys.ESCAPE)
    chat.say("the weather")
    chat.wait(lambda: chat.all(".results textarea"))
    assert chat.text(".call summary") == "Calls weather"
    assert json.loads(chat.text(".call pre")) == {"city": "Reedmarsh"}
    chat.one(".results textarea").send_keys("rain")
    chat.one(".results button").click()
    chat.wait(lambda: chat.text(ANSWER) == "It rains.")
    assert CALL in server.script.prompts[-1]


def tiny_model(server) -> Any:
    """The model that the server was started with."""
    loaded = server.decoding.loaded.items()
    return next(model for weights, model in loaded if weights.path == Path("tiny.pth"))


def test_settings_are_sent_and_remembered(chat, server, monkeypatch):
    asked = []
    add = (decoder := tiny_model(server).decoder).add
    monkeypatch.setattr(decoder, "add", lambda *given: asked.append(given) or add(*given))
    chat.one("#open-settings").click()
    names = ("temperature", "top_p", "top_k", "max_tokens")
    shown = [chat.one(f"#set-{name}").get_attribute("placeholder") for name in names]
    assert shown == ["0.7", "0.9", "50", "default"]  # the model's own
    values = {"temperature": 0.5, "top_p": 0.8, "top_k": 3, "max_tokens": 4, "seed": 7}
    for name, value in (values | {"system": "Be brief."}).items():
        chat.one(f"#set-{name}").send_keys(str(value))
    chat.keys(Keys.ESCAPE)
    chat.reload()
    chat.ask("hello to you")
    _, (sampling,), longest = asked[-1]
    given = (sampling.temperature, sampling.top_p, sampling.top_k, longest, sampling.seed)
    assert given == tuple(values.values()) and sent(server)[0] == "Be brief."
    assert "length limit" in chat.text(".message.assistant .note")
    chat.one("#open-settings").click()
    chat.one("#reset").click()
    chat.one("#close-settings").click()
    chat.ask("hello")
    _, (sampling,), longest = asked[-1]
    assert (sampling.temperature, sampling.top_p, longest) == (0.7, 0.9, 400) and "hello" in sent(server)


# --- conversations


def test_conversations_are_renamed_deleted_and_brought_back(chat):
    chat.ask("first")
    chat.click("#new-chat")
    chat.ask("second")
    names = lambda: chat.texts("#conversations .name")  # noqa: E731
    chat.click('[aria-label="Rename: second"]')
    chat.keys(Keys.CONTROL, "a")
    chat.keys("deuxième", Keys.ENTER)
    assert names() == ["deuxième", "first"]
    chat.click('[aria-label="Delete: first"]')
    assert names() == ["deuxième"]
    chat.click("#notice button")
    chat.reload()
    assert names() == ["deuxième", "first"] and chat.text(ANSWER) == "You said: first"


def test_an_exported_chat_is_training_data(chat, slowly):
    """Stopped answers are not trained, the system prompt is kept."""
    chat.one("#open-settings").click()
    chat.one("#set-system").send_keys("Be brief.")
    chat.keys(Keys.ESCAPE)
    chat.ask("think")
    chat.say("long")
    chat.wait(lambda: "5 6 7" in chat.text(ANSWER))
    chat.keys(Keys.ESCAPE)
    chat.answered()
    chat.run("""window.kept = null;
        URL.createObjectURL = (blob) => { blob.text().then((text) => (window.kept = text)); return '#'; };
        HTMLAnchorElement.prototype.click = () => {};""")
    chat.click("#export-one")
    (record,) = parse(json.loads(chat.wait(lambda: chat.run("return window.kept"))), "sft").chats
    roles = [message["role"] for message in record.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"] and record.masked == (4,)
    assert record.messages[2]["reasoning_content"] == "First I count."


def test_corrected_answers_are_listed_kept_and_saved_for_sft_and_dpo(chat):
    chat.ask("first")
    chat.ask("second")
    correct = lambda: chat.all("[aria-label='Correct this answer']")  # noqa: E731
    correct()[1].click()
    area = chat.wait(lambda: chat.one(".correcting textarea"))
    assert area.get_attribute("value") == "You said: second"
    area.send_keys(Keys.CONTROL, "a")
    area.send_keys("<b>Better.</b>")
    chat.click(".correcting .primary")
    chat.wait(lambda: chat.texts(".correction") == ["It should have said: <b>Better.</b>"])
    correct()[0].click()
    chat.wait(lambda: chat.one(".correcting textarea")).send_keys(Keys.ESCAPE)  # nothing is kept
    chat.driver.refresh()
    chat.wait(lambda: chat.text("#open-corrections") == "Corrections (1)")
    chat.click("#open-corrections")
    chat.run("""window.kept = null;
        URL.createObjectURL = (blob) => { blob.text().then((text) => (window.kept = text)); return '#'; };
        HTMLAnchorElement.prototype.click = () => {};""")
    chat.click("#save-corrections")
    (record,) = parse(json.loads(chat.wait(lambda: chat.run("return window.kept"))), "sft").chats
    assert [message["content"] for message in record.messages[1:]] == [
        "You said: first",
        "second",
        "<b>Better.</b>",
    ]
    assert record.masked == (1,)
    chat.run("window.kept = null")
    chat.click("#save-preferences")
    chosen, rejected = parse(json.loads(chat.wait(lambda: chat.run("return window.kept"))), "dpo").chats
    assert chosen.messages[:-1] == rejected.messages[:-1]
    assert [each.messages[-1]["content"] for each in (chosen, rejected)] == [
        "<b>Better.</b>",
        "You said: second",
    ]
    chat.click("#correction-list button")
    chat.wait(lambda: not chat.all(".correction") and not chat.shown("#open-corrections"))
    chat.driver.refresh()
    chat.wait(lambda: len(correct()) == 2)
    assert not chat.all(".correction")


def test_two_models_answer_side_by_side(chat, server):
    """The second one answers every question itself, also those from before it was chosen."""
    sides = lambda: chat.texts(".side-of-two .body > .prose")  # noqa: E731
    chat.ask("who")
    Select(chat.one("#other")).select_by_value("small_32")
    chat.wait(lambda: sides() == ["You said: who"] * 2)
    chat.ask("one")
    chat.wait(lambda: sides() == ["You said: who"] * 2 + ["You said: one"] * 2)
    assert chat.texts(".side-of-two strong") == ["tiny", "small_32"] * 2
    chat.answered()
    chat.reload()
    assert len(sides()) == 4


def test_two_tabs_in_one_conversation_lose_no_turn(chat, server, slowly):
    chat.ask("one")
    first = chat.driver.current_window_handle
    chat.driver.switch_to.new_window("tab")
    try:
        chat.driver.get(server.address)
        chat.ready()
        assert chat.texts(".message.user .body") == ["one"]
        chat.ask("two")
        second = chat.driver.current_window_handle
        chat.driver.switch_to.window(first)
        chat.wait(lambda: chat.texts(".message.user .body") == ["one", "two"])
        chat.say("long")  # and while its answer is written the other tab asks, too
        chat.driver.switch_to.window(second)
        chat.wait(lambda: chat.texts(".message.user .body") == ["one", "two", "long"])
        chat.ask("three")
        chat.driver.switch_to.window(first)
        chat.answered()
        chat.wait(lambda: chat.texts(".message.user .body") == ["one", "two", "long", "three"])
        chat.run("document.querySelectorAll(arguments[0])[1].click()", EDIT)  # removes what follows, for both
        chat.keys(Keys.CONTROL, "a")
        chat.keys("deux", Keys.ENTER)
        chat.wait(lambda: chat.text(ANSWER) == "You said: deux")
        chat.answered()
        chat.driver.switch_to.window(second)
        chat.wait(lambda: chat.texts(".message.user .body") == ["one", "deux"])
        chat.wait(lambda: chat.text(ANSWER) == "You said: deux")
        chat.reload()
        assert chat.texts(".message.user .body") == ["one", "deux"]
    finally:
        chat.driver.close()
        chat.driver.switch_to.window(first)


def test_pretrained_weights_continue_a_text(chat, server, folder):
    (folder / "pretrain_32.pth").touch()
    chat.reload()
    chat.wait(lambda: "pretrain_32" in chat.text("#model"))
    assert not chat.shown("#continues")
    placeholder = lambda: chat.one("#input").get_attribute("placeholder")  # noqa: E731
    assert placeholder() == "Write a message"
    Select(chat.one("#model")).select_by_value("pretrain_32")
    assert "has not learnt to answer" in chat.text("#continues") and "Write a beginning" in placeholder()
    chat.ask("There was a river")
    assert server.script.prompts == ["<|im_start|>There was a river"]  # no chat template
    assert store_of(chat)["messages"][1]["continues"]
    (folder / "pretrain_32.pth").unlink()
    chat.run("document.dispatchEvent(new Event('visibilitychange'))")
    chat.wait(lambda: "pretrain_32" not in chat.text("#model"))
    assert not chat.shown("#continues")


def test_a_long_conversation_leaves_its_oldest_turns_out_and_says_so(chat, server):
    """As the chat in the terminal does; the page itself keeps them all."""
    for text in ("one", "two", "three"):
        chat.ask(f"{text} {'word ' * 40}")
    assert "left out" not in chat.text(".messages")
    chat.ask("four " + "word " * 40)
    turns = sent(server)
    dropped = 7 - len(turns)
    assert turns[-1].startswith("four") and dropped > 0 and turns[0].split()[0] in ("two", "three")
    assert chat.text(".message.assistant .note") == (
        f"The context is full: the oldest {dropped} messages were left out."
    )
    assert len(chat.all(".message")) == 8
    chat.run("document.querySelector('#input').value = 'x'.repeat(8000)")  # of which no token is counted
    chat.one("#input").send_keys("x", Keys.ENTER)
    chat.wait(lambda: "too long for the model" in chat.text(".message .error"))
    assert "left out" in chat.text(".message.assistant .note")


def store_of(chat) -> dict:
    return json.loads(
        chat.run("return localStorage['minimind.chat.' + JSON.parse(localStorage['minimind.current'])]")
    )


def test_a_formula_is_of_bounded_size(chat, server):
    server.script.says["rule"] = "so $\\rule{9999em}{9999em}$"
    chat.ask("rule")
    chat.wait(lambda: chat.all(".katex-rule"))
    assert chat.run("return document.querySelector('.katex-rule').getBoundingClientRect().height") < 500


def test_a_busy_server_says_when_to_try_again(chat, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_WAITING", -8)
    chat.say("hello")
    chat.wait(lambda: "Try again in 5 seconds" in chat.text(".message .error"))


# --- what goes wrong


def test_errors_are_said_in_plain_words(chat, server, monkeypatch, slowly):
    chat.run("document.querySelector('#input').value = 'word '.repeat(900)")
    chat.one("#input").send_keys("x", Keys.ENTER)
    chat.wait(lambda: "too long for the model" in chat.text(".message .error"))
    chat.click("#new-chat")
    chat.say("long")
    chat.wait(lambda: "5 6 7" in chat.text(ANSWER))
    decoder = tiny_model(server).decoder
    monkeypatch.setattr(decoder, "step", lambda: 1 / 0)
    chat.wait(lambda: "The server failed: " in chat.text(".message .error"))
    assert "5 6 7" in chat.text(ANSWER)


def test_a_server_with_a_key_is_asked_for_it_once(page):
    with scripted(Script(), key="open sesame") as server:
        page.open(server.address)
        page.wait(lambda: page.shown("#key-dialog"))
        page.keys("wrong", Keys.ENTER)
        page.wait(lambda: page.shown("#key-wrong"))
        page.keys("open sesame", Keys.ENTER)
        page.wait(lambda: page.text("#model") == "tiny")
        assert page.ask("hello") == "You said: hello"
        assert "sesame" not in json.dumps(page.run("return {...localStorage}"))
        page.click("#tab-training")
        page.wait(lambda: "No training runs" in page.text("#curves-empty"))
        page.click("#tab-chat")
    page.say("anybody there?")
    page.wait(lambda: "does not answer" in page.text(".message .error"))
    page.driver.get("about:blank")
    page.driver.get_log("browser")  # of requests that found no server


# --- languages, screens, keyboard


def test_the_language_is_the_browsers_until_it_is_switched(page, server):
    page.open(server.address, language="zh-CN")
    assert page.text("#tab-training") == "训练"
    assert page.run("return document.documentElement.lang") == "zh-CN"
    page.ask("你好")
    page.click("#language")
    assert page.text("#tab-training") == "Training" and page.text("#language") == "中文"
    page.reload()
    assert page.text("#tab-training") == "Training" and page.text(ANSWER) == "You said: 你好"
    english, chinese = (PAGE / "text.js").read_text(encoding="utf-8").split("  zh: {")
    keys = [re.findall(r"[{,]?\s(\w+): \"", part.partition("\n};")[0]) for part in (english, chinese)]
    assert keys[0] == keys[1] and len(keys[0]) > 80


def test_a_phone_never_scrolls_sideways_and_reaches_every_button(chat, folder):
    width = 360
    append(folder / f"{'long_' * 12}64_metrics.jsonl", *(record(i, eval_loss=2.0) for i in range(1, 9)))
    chat.size(width, 700)
    for text in ("markdown", "attack", LONG_WORD, f"`{LONG_WORD}` | a |"):
        chat.ask(text)
    wide = """return [document.scrollingElement, ...document.querySelectorAll('.messages-scroll, .training')]
        .some((e) => e.scrollWidth > Math.min(arguments[0], e.clientWidth) + 1)"""
    reached = """return arguments[0].filter((css) => {
        const box = document.querySelector(css).getBoundingClientRect();
        const hit = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
        return box.left < 0 || box.right > innerWidth || box.bottom > innerHeight || !hit?.closest(css);
      });"""
    assert not chat.run(wide, width)
    chat.one("#input").send_keys("long")
    assert chat.run(reached, ["#model", "#other", "#open-settings", "#send", "#open-menu"]) == []
    is_expanded = lambda: chat.one("#open-menu").get_attribute("aria-expanded")  # noqa: E731
    assert is_expanded() == "false"
    chat.one("#open-menu").click()
    chat.wait(lambda: chat.shown("#new-chat"))
    assert is_expanded() == "true"
    chat.keys(Keys.ESCAPE)
    assert is_expanded() == "false"
    chat.one("#open-settings").click()
    assert not chat.run(wide, width) and chat.one("#settings").rect["width"] <= width
    chat.keys(Keys.ESCAPE)
    chat.click("#tab-training")
    chat.wait(lambda: chat.all("#plots .plot canvas"))
    assert not chat.run(wide, width)


def test_enter_does_not_send_while_chinese_is_being_composed(chat, server):
    chat.one("#input").send_keys("ni")
    chat.run("""document.querySelector('#input').dispatchEvent(
        new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))""")
    assert server.script.prompts == [] and chat.one("#input").get_attribute("value") == "ni"


# --- training curves


@pytest.fixture
def curves(page, server, folder):
    for path in folder.glob("*_*.json*"):
        path.unlink()
    append(folder / "first_64_metrics.jsonl", *(record(i) for i in range(1, 31)))
    second = [record(i, eval_loss=2.0, seconds_left=0) for i in range(1, 11)]
    append(folder / "second_64_metrics.jsonl", *second, record(11, seconds_left=0, mean_loss=None, loss=None))
    page.open(server.address)
    page.click("#tab-training")
    page.wait(lambda: len(page.all("#plots .plot canvas")) >= 4)
    return page


def test_curves_table_states_and_samples(curves, folder):
    titles = ["Loss", "Held-out loss", "Learning rate", "Gradient norm"]
    assert curves.texts("#plots .plot h2") == titles
    assert curves.texts("#plots .plot:first-child .u-label") == ["Updates", "first_64", "second_64"]
    states = {text.split("\n")[0]: text.split("\n")[1:] for text in curves.texts(".run .name")}
    assert states["first_64"] == ["running · 9 seconds left"]
    assert states["second_64"] == ["finished · 11 updates", "Diverged: the loss is not finite"]
    curves.click('[data-run="first_64"]')
    curves.wait(lambda: len(curves.texts("#plots .plot:first-child .u-label")) == 2)
    attack = "<img src=x onerror=alert(1)>"
    append(folder / "third_64_metrics.jsonl", record(1, samples=[{"prompt": attack, "answer": "an answer"}]))
    for name, rate in (("third", 0.5), ("second", 0.25)):
        settings = {"settings": {"learning_rate": rate, "save_dir": name, "tag": attack}}
        (folder / f"{name}_64_run.json").write_text(json.dumps(settings))
    append(folder / "second_64_metrics.jsonl", record(12, warnings=[attack]))
    curves.wait(lambda: "third_64" in curves.text("#runs"))  # it looks every two seconds
    curves.click('[data-run="third_64"]')
    curves.wait(lambda: "third_64" in curves.text("#table"))
    assert curves.texts("#table th")[-1] == "learning_rate" and "0.25" in curves.text("#table")
    assert f"second_64, Updates 12: {attack}" in curves.text("#table")
    curves.click("#table summary")
    append(folder / "second_64_metrics.jsonl", record(13, seconds_left=0))
    curves.wait(
        lambda: "finished · 13 updates" in curves.text("#runs") and "0.25" not in curves.text("#table")
    )
    curves.click("#table summary")  # it stays as the user left it
    curves.click("#samples summary")
    assert attack in curves.text("#sample-texts") and "an answer" in curves.text("#sample-texts")
    curves.reload()
    curves.wait(lambda: "third_64" in curves.text("#table") and "first_64" not in curves.text("#table"))


def test_axis_log_scale_and_smoothing(curves):
    pixels = "return document.querySelector('#plots canvas').toDataURL()"
    seen = {curves.run(pixels)}
    Select(curves.one("#x-axis")).select_by_value("tokens")
    seen.add(curves.run(pixels))
    curves.click("#log-scale")
    seen.add(curves.run(pixels))
    slide = "arguments[0].value = 0.9; arguments[0].dispatchEvent(new Event('input'))"
    curves.run(slide, curves.one("#smoothing"))
    seen.add(curves.run(pixels))
    curves.click("#theme")
    seen.add(curves.run(pixels))
    assert len(seen) == 5


def test_a_run_that_cannot_be_read_hides_no_other(curves, folder, monkeypatch):
    """Nor does a metric whose name every object of JavaScript has."""
    read = RunFiles.read

    def unreadable(files: RunFiles, path: Path) -> Run:
        if path.name.startswith("first"):
            raise OSError("damaged")
        return read(files, path)

    monkeypatch.setattr(RunFiles, "read", unreadable)
    append(folder / "second_64_metrics.jsonl", record(12, constructor=1.0))
    (folder / "second_64_run.json").write_text(json.dumps({"settings": {"toString": 1}}))
    curves.reload()
    curves.wait(lambda: curves.texts("#plots .plot:first-child .u-label") == ["Updates", "second_64"])
    assert "cannot be read (damaged)" in curves.text('.run:has([data-run="first_64"])')
    monkeypatch.undo()
    append(folder / "first_64_metrics.jsonl", record(31))
    curves.wait(lambda: len(curves.texts("#plots .plot:first-child .u-label")) == 3)
    curves.click("#more summary")
    curves.wait(lambda: "constructor" in curves.texts("#more-plots h2"))
    assert curves.texts("#more-plots .plot:first-child .u-label") == ["Updates", "second_64"]


def test_a_dead_server_is_not_an_empty_folder(page, server):
    page.open(server.address)
    page.devtools("Network.enable")
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.devtools("Network.emulateNetworkConditions", offline=True, **offline)
    try:
        page.click("#tab-training")
        page.wait(lambda: "does not answer" in page.text("#curves-error"))
        assert not page.shown("#curves-empty")
    finally:
        page.devtools("Network.emulateNetworkConditions", offline=False, **offline)
    page.wait(lambda: not page.shown("#curves-error"))
    page.driver.get("about:blank")
    page.driver.get_log("browser")  # of requests that found no server


# --- the files themselves


def test_the_headers_let_only_the_pages_own_files_in(server):
    for name in ("", *(f"page/{path.relative_to(PAGE)}" for path in PAGE.rglob("*") if path.is_file())):
        with urlopen(server.address + name, timeout=10) as answer:
            headers = answer.headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and headers["X-Content-Type-Options"] == "nosniff"
        assert not name.endswith(".js") or headers["Content-Type"].startswith("text/javascript")
