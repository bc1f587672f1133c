"""The web page in a real browser: chat, conversations, languages, keys, narrow screens, training curves."""

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from transformers import AutoTokenizer

from dataset.records import to_chat
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.serve.api import create_app
from scripts.serve.models import Settings
from scripts.serve.web_page import PAGE
from tests.conftest import ROOT
from tests.scripts.serve.scripted_server import ScriptedServer, Serving
from tests.scripts.serve.test_curves import append, record

LONG_WORD = "x" * 300
ANSWER = ".message.assistant .text"
PICTURE = "#plots .plot:first-child svg"
EDIT, AGAIN = '.message.user [aria-label="Edit"]', '[aria-label="Answer again"]'


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def server(folder):
    with ScriptedServer(folder) as server:
        yield server


@pytest.fixture
def chat(page, server):
    server.asked.clear()
    page.open(server.address)
    return page


def curve(page, title: str) -> list[str]:
    """The lines of a picture, as paths."""
    script = """
        const named = [...document.querySelectorAll('.plot')].filter((plot) => plot.innerText.startsWith(arguments[0]));
        const lines = named.flatMap((plot) => [...plot.querySelectorAll('.line:not(.held-out), .thin')]);
        return lines.map((line) => line.getAttribute('d'));"""
    return page.run(script, title)


def look(page) -> None:
    """Have the page look at the folder of the runs, as it does every two seconds."""
    page.run("document.dispatchEvent(new Event('visibilitychange'))")


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path)]


# --- chat


def test_an_answer_streams_and_is_there_after_a_reload(chat, server):
    for stop in (lambda: chat.keys(Keys.ESCAPE), lambda: chat.one("#stop").click()):
        chat.click("#new-chat")
        chat.say("long")
        for part in ("1 2 3", "15 16 17"):  # it grows while it arrives
            chat.wait(lambda part=part: part in chat.text(ANSWER))
            assert chat.all(".writing")
        assert not any(asked is server.asked[-1] for asked in server.hung_up)
        stop()
        chat.wait(lambda: any(asked is server.asked[-1] for asked in server.hung_up))
        chat.answered()
        assert "Stopped" in chat.text(".message.assistant")
    assert chat.ask("and again") == "You said: and again"
    assert "21 tokens" in chat.text(".message.assistant .foot")
    said = [element.text for element in chat.all(".message .body")]
    chat.reload()
    assert [element.text for element in chat.all(".message .body")] == said and len(said) == 4
    assert [one["title"] for one in chat.stored()] == ["long"] * 2
    assert all(one["messages"][1]["note"] == "stopped" for one in chat.stored())
    messages = server.asked[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[-1] == {"role": "user", "content": "and again"}


def test_edit_goes_on_from_there_and_can_be_undone_answer_again_asks_the_same(chat, server):
    for text in ("one", "two", "three"):
        chat.ask(text)
    chat.click(AGAIN)
    chat.wait(lambda: len(server.asked) == 4)
    chat.answered()
    assert server.asked[2] == server.asked[3] and len(chat.all(".message")) == 6
    chat.run("document.querySelectorAll(arguments[0])[1].click()", EDIT)
    chat.keys(Keys.CONTROL, "a")
    chat.keys("deux", Keys.ENTER)
    chat.wait(lambda: chat.text(ANSWER) == "You said: deux")
    chat.answered()
    asked = [message["content"] for message in server.asked[-1]["messages"]]
    assert asked == ["one", "You said: one", "deux"] and len(chat.all(".message")) == 4
    chat.click("#notice button")
    chat.wait(lambda: len(chat.all(".message")) == 6)
    assert chat.text(ANSWER) == "You said: three"
    assert [element.text for element in chat.all(".message.user .body")] == ["one", "two", "three"]


def test_markdown_becomes_elements(chat):
    chat.ask("markdown")
    wanted = {"h4": "Tides", "strong": "moon", "em": "sea", "p code": "g", "ul > li > ol > li": "nested"}
    wanted |= {"blockquote": "quoted", "pre": 'print("<b>1 < 2</b>")', "td": "3.2"}
    assert {css: chat.text(f"{ANSWER} {css}") for css in wanted} == wanted
    assert chat.text(".code-head span") == "python"
    link = chat.one(f"{ANSWER} a")
    assert link.get_attribute("href") == "https://example.org/a?b=c"
    assert {"noopener", "noreferrer"} <= {*link.get_attribute("rel").split()}


DEEP = "$" + 50 * r"\sqrt" + " x$"  # too deep to be a formula
FORMULAS = {
    "so $a^2 + b_i$.": "so [math:[mrow:[msup:[mi:a][mn:2]][mo:+][msub:[mi:b][mi:i]]]].",
    r"\(\frac{1}{\sqrt{2\pi}}\)": "[math:[mfrac:[mn:1][msqrt:[mrow:[mn:2][mi:π]]]]]",
    r"$$\sum_{i=1}^n \log p_i$$": "[math:[mrow:[munderover:[mo:∑][mrow:[mi:i][mo:=][mn:1]][mi:n]][mi:log]"
    "[msub:[mi:p][mi:i]]]]",
    "costs $5 and $6, or 7$ then": "costs $5 and $6, or 7$ then",
    "设$x$为": "设[math:[mi:x]]为",
    DEEP: DEEP,
    r"$\unknown{x}$ $x^$ $}$ $a_b_c$": r"$\unknown{x}$ $x^$ $}$ $a_b_c$",
    r"$\constructor$ `$x$` \$x\$": r"$\constructor$ [CODE:$x$] $x$",
}
MARKDOWN = {
    "**加粗**。和*斜*": "[STRONG:加粗]。和[EM:斜]",
    "**open and *open": "**open and *open",
    "see https://a.example/x_y_z). End": "see [A:https://a.example/x_y_z]). End",
    "[a](https://e.example/x_(y)) [b](ftp://x) [c]": "[A:a] [b](ftp://x) [c]",
    "200000*200 = 40000000, 2*3*4 = 24, (1+2)*x*(y)": "200000*200 = 40000000, 2*3*4 = 24, (1+2)*x*(y)",
    "2**10 and 71**2, 2*-3*-4": "2**10 and 71**2, 2*-3*-4",
    'a*"b"* *(c)* 用**Python**写 **注意：**它': 'a*"b"* [EM:(c)] 用[STRONG:Python]写 [STRONG:注意：]它',
    "<b>&amp;</b>": "<b>&amp;</b>",
}


def test_inline_markdown(chat):
    script = """
        const [texts, done] = arguments;
        const all = (nodes) => [...nodes].map(show).join('');
        const show = (node) => node.nodeType === 3 ? node.data : `[${node.tagName}:${all(node.childNodes)}]`;
        import('/page/markdown.js').then(({ inline }) => done(texts.map((text) => all(inline(text)))));"""
    wanted = MARKDOWN | FORMULAS
    assert chat.driver.execute_async_script(script, [*wanted]) == [*wanted.values()]


def test_no_text_is_too_much_for_the_markdown(chat):
    script = """
        const done = arguments[0];
        const pieces = ['$', '$a_', '\\\\(', '\\\\(x ', '\\\\[x', '$$\\n', '$\\\\frac{', '$\\\\frac{1}{',
          '*', '**a ', '_a', '[', '![', '](', '`', '`` ` ', '> ', '- ', '|a', '|-', '#', '~~', 'http://',
          '\\\\', '\\n', '1. ', '   '];
        import('/page/markdown.js').then(({ render }) => {
          for (const piece of pieces) {
            const element = document.createElement('div');
            try { render(element, piece.repeat(6000)); } catch (error) { return done(piece + error); }
          }
          done('');
        });"""
    chat.driver.set_script_timeout(60)
    assert chat.driver.execute_async_script(script) == ""


def test_nothing_that_a_model_says_runs_or_loads(chat):
    chat.ask("attack")
    chat.reload()  # what is kept is shown again
    text = chat.text(ANSWER)
    assert '<img src=x onerror="window.hacked = 1">' in text and "<script>window.hacked = 2</script>" in text
    assert (
        chat.all(", ".join(f"{ANSWER} {tag}" for tag in ("img", "script", "iframe", "object", "style"))) == []
    )
    links = [link.get_attribute("href") for link in chat.all(f"{ANSWER} a")]
    assert links == ["https://example.org/tracked.png"]
    loaded = chat.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert not [name for name in loaded if "example.org" in name]
    assert chat.run("return window.hacked") is None


def test_reasoning_is_folded_and_a_tool_call_goes_round(chat, server):
    assert chat.ask("think") == "You said: think"
    assert chat.text(".reasoning summary") == "Reasoning"
    assert "First I count." not in chat.text(".message.assistant")
    chat.click(".reasoning summary")
    assert "First I count." in chat.text(".message.assistant")
    chat.say("tool")
    chat.wait(lambda: chat.all(".results textarea"))
    assert chat.text(".reasoning[open] .text") == "First I count."  # what was unfolded stays so
    assert chat.text(".call summary") == "Calls weather"
    assert json.loads(chat.text(".call pre")) == {"city": "Reedmarsh"}
    chat.one(".results textarea").send_keys("rain")
    chat.one(".results button").click()
    chat.wait(lambda: chat.text(ANSWER) == "You said: rain")
    first, (call, result) = server.asked[-1]["messages"][1], server.asked[-1]["messages"][-2:]
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    function = {"name": "weather", "arguments": '{"city": "Reedmarsh"}'}
    assert call["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    said = {"role": "assistant", "content": "You said: think", "reasoning_content": "First I count."}
    assert first == said


def test_settings_are_sent_and_remembered(chat, server):
    def placeholders() -> list[str]:
        names = ("temperature", "top_p", "top_k", "max_tokens")
        return [chat.one(f"#set-{name}").get_attribute("placeholder") for name in names]

    chat.one("#open-settings").click()
    assert placeholders() == ["0.7", "0.9", "50", "default"]  # the model's own
    chat.keys(Keys.ESCAPE)
    Select(chat.one("#model")).select_by_value("small")
    assert placeholders() == ["0.2", "default", "default", "default"]
    chat.one("#open-settings").click()
    values = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 12, "seed": 7}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    for name, value in (values | {"system": "Be brief.", "tools": json.dumps(tools)}).items():
        chat.one(f"#set-{name}").send_keys(str(value))
    chat.one("#set-thinking").click()
    chat.keys(Keys.ESCAPE)
    chat.reload()
    chat.ask("hello")
    asked = server.asked[-1]
    wanted = {"model": "small", "tools": tools, "stream": True} | values
    wanted |= {"chat_template_kwargs": {"enable_thinking": True}}
    assert {name: asked[name] for name in wanted} == wanted
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    chat.one("#open-settings").click()
    chat.one("#set-temperature").send_keys("9")
    assert chat.shown(".fields .error")  # 0.59 was kept, 0.599 is no step of 0.05
    chat.one("#reset").click()
    chat.one("#close-settings").click()
    chat.ask("hello")
    assert {*server.asked[-1]} == {"model", "messages", "stream", "stream_options"}


# --- conversations


def test_conversations_are_renamed_deleted_and_brought_back(chat):
    chat.ask("first")
    chat.click("#new-chat")
    chat.ask("second")
    names = lambda: [element.text for element in chat.all("#conversations .name")]  # noqa: E731
    assert names() == ["second", "first"]
    chat.click('[aria-label="Rename: second"]')
    chat.keys(Keys.CONTROL, "a")
    chat.keys("deuxième", Keys.ENTER)
    assert names() == ["deuxième", "first"]
    chat.click('[aria-label="Delete: first"]')
    assert names() == ["deuxième"]
    chat.click("#notice button")
    assert names() == ["deuxième", "first"] and chat.text(ANSWER) == "You said: first"


def exported(chat) -> str:
    """The text of the file that the export of the open chat gives."""
    chat.run("""window.kept = null;
        URL.createObjectURL = (blob) => { blob.text().then((text) => (window.kept = text)); return '#'; };
        HTMLAnchorElement.prototype.click = () => {};""")
    chat.click("#export-one")
    return chat.wait(lambda: chat.run("return window.kept"))


def test_an_exported_chat_is_training_data_and_comes_back(chat, server, tmp_path):
    """Failed answers are left out with their questions, stopped ones are not trained, the system prompt is
    kept."""
    chat.one("#open-settings").click()
    chat.one("#set-system").send_keys("Be brief.")
    chat.keys(Keys.ESCAPE)
    for text in ("think", "refuse", "tool"):
        chat.say(text)
        chat.answered()
    chat.wait(lambda: chat.all(".results textarea"))[0].send_keys("rain")
    chat.one(".results button").click()
    chat.wait(lambda: chat.text(ANSWER) == "You said: rain")
    chat.answered()
    chat.ask_and_stop("long")
    text = exported(chat)
    (tmp_path / "chats.jsonl").write_text(text, encoding="utf-8")
    record = to_chat(json.loads(text))
    roles = ["system", "user", "assistant", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [message["role"] for message in record.messages] == roles and record.masked == (8,)
    assert record.messages[0]["content"] == "Be brief." and "refuse" not in text and text.count("\n") == 1
    chat.click("#new-chat")
    chat.one("#import-file").send_keys(str(tmp_path / "chats.jsonl"))
    chat.wait(lambda: chat.text("#notice") == "1 chats imported.")
    chat.one("#open-settings").click()
    chat.one("#reset").click()
    chat.keys(Keys.ESCAPE)
    assert len(chat.all(".message")) == 8 and exported(chat) == text
    chat.ask("go on")
    assert server.asked[-1]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_an_import_says_what_it_drops(chat, tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    good = json.dumps({"conversations": [*talk, {"role": "root", "content": "c"}]})
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "root"}]', encoding="utf-8")
    (tmp_path / "some.jsonl").write_text(f"{good}\nnonsense\n\n{good}\n[]\n", encoding="utf-8")
    field = chat.one("#import-file")
    field.send_keys(str(tmp_path / "bad.jsonl"))
    chat.wait(lambda: "no conversations" in chat.text("#notice"))
    field.send_keys(str(tmp_path / "some.jsonl"))
    left_out = "2 lines without a conversation were left out. 2 messages of unknown roles were left out."
    chat.wait(lambda: chat.text("#notice") == f"2 chats imported. {left_out}")
    assert len(chat.stored()) == 2


# --- models


def test_two_models_answer_side_by_side(chat, server):
    def sides() -> list[str]:
        return [cell.text for cell in chat.all(".side-of-two .body > .text")]

    both = ["tiny", "small", "You said: one", "You said: one"]
    chat.ask("who")
    Select(chat.one("#other")).select_by_value("small")
    chat.wait(lambda: sides() == both[:2])
    chat.ask("one")
    assert sides() == both
    assert [element.text for element in chat.all(".side-of-two strong")] == ["tiny", "small"] * 2
    chat.reload()
    assert sides() == both
    chat.run("document.querySelectorAll(arguments[0])[1].click()", EDIT)
    chat.keys(Keys.CONTROL, "a")
    chat.keys("two", Keys.ENTER)
    chat.wait(lambda: sides()[2:] == ["You said: two"] * 2)
    chat.answered()
    assert exported(chat).count('"two"') == 2  # a record for each model
    Select(chat.one("#other")).select_by_value("")
    chat.wait(lambda: len(chat.all(".message")) == 4)
    chat.click("#new-chat")
    chat.click("#notice button")  # of the conversation that was compared
    chat.wait(lambda: len(sides()) == 4)


def test_a_second_model_answers_all_questions_itself(chat, server):
    """Whatever was said before it was chosen: no answer of another model is shown or sent as its own."""

    def second() -> list[str]:
        return [cell.text for cell in chat.all(".side-of-two:nth-child(3n) .body > .text")]

    chat.ask("who")
    chat.ask_and_stop("long")
    Select(chat.one("#other")).select_by_value("small")
    chat.wait(lambda: len(second()) == 2 and "5 6 7" in second()[1])
    assert second()[0] == "small"
    chat.stop_answer()
    asked = [body["messages"] for body in server.asked if body["model"] == "small"]
    said = [[message["content"] for message in messages] for messages in asked]
    assert said == [["who"], ["who", "small", "long"]]
    Select(chat.one("#model")).select_by_value("small")
    Select(chat.one("#other")).select_by_value("tiny")  # another second one
    chat.wait(lambda: len(second()) == 2 and "5 6 7" in second()[1])
    chat.stop_answer()
    assert second()[0] == "tiny" and server.asked[-1]["messages"][1]["content"] == "tiny"
    # who gave each answer
    assert [element.text for element in chat.all(".side-of-two strong")] == ["tiny"] * 4


def test_the_probabilities_of_tokens_are_shown_when_asked_for(chat, server):
    chat.ask("likely")
    assert "logprobs" not in server.asked[-1]
    chat.click("#new-chat")
    chat.one("#open-settings").click()
    chat.one("#set-tokenProbabilities").click()
    chat.keys(Keys.ESCAPE)
    assert chat.ask("likely") == "You said: likely" and server.asked[-1]["logprobs"] is True
    tokens = chat.all(".token-probabilities span")
    shown = [(token.text, token.get_attribute("class"), token.get_attribute("title")) for token in tokens]
    assert shown == [("You", "shade0", '"You" 99.0 %'), (" said", "shade4", '" said" 5.0 %\n"<b>" 95.1 %')]


def test_a_tool_that_is_switched_on_runs_at_the_server_for_some_rounds(chat, server):
    chat.say("sum")
    chat.wait(lambda: chat.all(".results textarea"))  # switched off: its result is asked for
    chat.click("#new-chat")
    chat.one("#open-settings").click()
    chat.one("#set-run_calculator").click()
    chat.one("#set-tools").send_keys('[{"type": "function", "function": {"name": "calculate"}}]')
    chat.keys(Keys.ESCAPE)
    chat.say("sum")
    chat.wait(lambda: chat.all(".results textarea"))  # the user's own tool of that name is not run
    assert server.asked[-1]["tools"] == [{"type": "function", "function": {"name": "calculate"}}]
    chat.click("#new-chat")
    chat.one("#open-settings").click()
    chat.one("#set-tools").send_keys(Keys.CONTROL, "a", Keys.BACKSPACE)
    chat.keys(Keys.ESCAPE)
    server.asked.clear()
    chat.say("sum")
    chat.wait(lambda: chat.text(ANSWER) == "You said: 408")
    assert chat.text(".message.tool .body") == "408" and not chat.all(".results")
    assert [tool["function"]["name"] for tool in server.asked[0]["tools"]] == ["calculate"]
    assert server.asked[1]["messages"][-1] == {"role": "tool", "tool_call_id": "call_1", "content": "408"}
    chat.say("loop")
    chat.wait(lambda: chat.all(".results textarea"))
    assert len(server.asked) == 2 + 9  # after 8 rounds it is asked


def test_what_is_damaged_in_the_storage_does_not_stop_the_page(chat):
    chat.ask("hello")
    damaged = {"chat.a": '{"messages": 5}', "chat.b": "x", "settings": "null", "curves": "[]"}
    damaged["chat.c"] = '{"messages": [null, {"role": "user"}, {"role": "x"}], "title": {"a": 1}}'
    for name, text in damaged.items():
        chat.run("localStorage.setItem(...arguments)", f"minimind.{name}", text)
    chat.reload()
    assert len(chat.all("#conversations .entry")) == 2 and chat.ask("again") == "You said: again"


# --- what goes wrong


def test_errors_are_said_in_plain_words(chat):
    chat.say("refuse")
    chat.wait(lambda: chat.text(".message .error") == "The server refused this: max_tokens must be above 0")
    chat.say("break")
    chat.wait(lambda: "connection was lost" in chat.text(".message .error"))
    assert chat.text(ANSWER) == "You said: break"
    chat.ask("cut")
    assert "length limit" in chat.text(".message.assistant .note")


def test_a_server_with_a_key_is_asked_for_it_once(page, folder):
    with ScriptedServer(folder, key="open sesame") as server:
        page.open(server.address)
        page.wait(lambda: page.shown("#key-dialog"))
        page.keys("wrong", Keys.ENTER)
        page.wait(lambda: page.shown("#key-wrong"))
        page.keys("open sesame", Keys.ENTER)
        page.wait(lambda: page.run("return document.querySelectorAll('#model option').length") == 2)
        assert page.ask("hello") == "You said: hello"
        server.key = "another"
        page.say("more")
        page.wait(lambda: page.shown("#key-dialog"))
        page.keys("another", Keys.ENTER)
        page.wait(lambda: page.text(ANSWER) == "You said: more")
        page.answered()
        assert len(page.all(".message")) == 4
        assert "another" not in json.dumps(page.run("return {...localStorage}"))
    page.say("anybody there?")
    page.wait(lambda: "does not answer" in page.text(".message .error"))
    page.driver.get("about:blank")
    page.driver.get_log("browser")  # of requests that found no server


def test_the_projects_own_server_answers_and_shows_its_runs(page, folder):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=1)).eval()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "model")
    append(folder / "own_64_metrics.jsonl", record(1), record(2))
    settings = Settings("own", slots=2, context=256, max_new_tokens=12, api_key="secret", save_dir=folder)
    with Serving(create_app(model, tokenizer, settings)) as server:
        page.open(server.address)
        page.wait(lambda: page.shown("#key-dialog"))
        page.keys("secret", Keys.ENTER)
        page.wait(lambda: page.text("#model") == "own")
        page.ask("Hello")
        assert re.match(r"\d+ tokens", page.text(".message.assistant .foot"))
        assert not page.shown(".message .error")
        page.say("word " * 300)
        page.wait(lambda: "too long for this model" in page.text(".message .error"))
        page.click("#tab-training")
        page.wait(lambda: "own_64" in page.text("#runs"))
        page.driver.get("about:blank")


# --- languages, screens, keyboard


def test_the_language_is_the_browsers_until_it_is_switched(page, server):
    page.open(server.address, language="zh-CN")
    assert page.text("#tab-training") == "训练曲线"
    assert page.run("return document.documentElement.lang") == "zh-CN"
    page.ask("你好")
    page.click("#language")
    assert page.text("#tab-training") == "Training" and page.text("#language") == "中文"
    page.reload()
    assert page.text("#tab-training") == "Training" and page.text(ANSWER) == "You said: 你好"
    unknown = "import('/page/text.js').then((text) => arguments[0](text.untranslated()))"
    assert page.driver.execute_async_script(unknown) == []


def test_the_buttons_of_the_composer_are_on_the_screen(page, folder):
    """Also with two models of long names, on phones of every width; where they are, and that a tap reaches
    them."""
    names = ["full_sft_on_a_data_set_of_a_long_name_768_moe", "dpo_256"]
    reached = """return arguments[0].map(([css, least]) => {
        const box = document.querySelector(css).getBoundingClientRect();
        const inside = box.left >= 0 && box.right <= innerWidth && box.top >= 0 && box.bottom <= innerHeight;
        const hit = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
        return inside && box.width >= least && Boolean(hit?.closest(css));
      });"""
    with ScriptedServer(folder, models=names) as server:
        for width in (320, 390, 560):
            page.open(server.address)
            page.size(width, 640)
            page.reload()
            Select(page.one("#other")).select_by_value(names[1])
            page.one("#input").send_keys("long")
            controls = [("#model", 80), ("#other", 80), ("#open-settings", 24)]
            assert page.run("return innerWidth") == width
            assert page.run(reached, [*controls, ("#send", 24)]) == [True] * 4, width
            page.click("#send")
            page.wait(lambda: page.shown("#stop"))
            assert page.run(reached, [*controls, ("#stop", 24)]) == [True] * 4, width
            page.one("#stop").click()
            page.answered()
        page.driver.get("about:blank")


def test_a_narrow_screen_never_scrolls_sideways(chat, folder):
    name = f"{'long_' * 12}64_metrics.jsonl"
    append(folder / name, *(record(i, expert_load=[0.5, 0.5]) for i in range(1, 9)))
    chat.size(360, 700)
    for text in ("markdown", "attack", LONG_WORD, f"`{LONG_WORD}` | a |"):
        chat.ask(text)
    wide = """return [document.scrollingElement, ...document.querySelectorAll('.messages-scroll, .training')]
        .some((e) => e.scrollWidth > Math.min(360, e.clientWidth) + 1)"""
    assert not chat.run(wide)
    chat.one("#open-menu").click()
    chat.wait(lambda: chat.shown("#new-chat"))
    chat.keys(Keys.ESCAPE)
    chat.wait(lambda: not chat.shown("#new-chat"))
    chat.one("#open-settings").click()
    assert not chat.run(wide) and chat.one("#settings").rect["width"] <= 360
    chat.keys(Keys.ESCAPE)
    chat.click("#tab-training")
    chat.wait(lambda: curve(chat, "Loss"))
    assert not chat.run(wide)
    right = """return [...document.querySelectorAll('#latest-values th')]
        .find((cell) => cell.innerText === 'Loss').getBoundingClientRect().right"""
    assert chat.run(right) < 360  # a long name of a run leaves room for it


def test_characters_that_reorder_text_are_shown_as_escapes(page, tmp_path):
    """A name must not pass for another one, nor a message for what it is not."""
    turned = "sft_\u202egnp\u200f.exe"
    append(tmp_path / f"{turned}_64_metrics.jsonl", record(1, warnings=[turned]), record(2))
    with ScriptedServer(tmp_path, models=[turned, "small"]) as server:
        page.open(server.address)
        page.run("document.querySelector('#input').value = arguments[0]", f"**{turned}** `{turned}`")
        page.run("document.querySelector('#composer').requestSubmit()")
        page.wait(lambda: page.all(".message.assistant .text code"))
        page.answered()
        assert server.asked[0]["model"] == turned and turned in server.asked[0]["messages"][0]["content"]
        page.click("#tab-training")
        page.wait(lambda: curve(page, "Loss"))
        shown = page.run("return document.body.textContent")
        assert "\u202e" not in shown and shown.count("sft_\\u202egnp\\u200f.exe") >= 8
        page.driver.get("about:blank")


def test_enter_does_not_send_while_chinese_is_being_composed(chat, server):
    chat.one("#input").send_keys("ni")
    chat.run("""document.querySelector('#input').dispatchEvent(
        new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))""")
    assert server.asked == [] and chat.one("#input").get_attribute("value") == "ni"


# --- training curves


@pytest.fixture
def curves(page, server, folder):
    for path in folder.iterdir():
        path.unlink()
    first = (record(i, expert_load=[0.25, 0.75]) for i in range(1, 31))
    append(folder / "first_64_metrics.jsonl", *first)
    second = (record(i, eval_loss=2.0, eval_accuracy=0.5) for i in range(1, 11))
    append(folder / "second_64_metrics.jsonl", *second)
    page.open(server.address)
    page.click("#tab-training")
    page.wait(lambda: len(curve(page, "Loss")) == 2)
    return page


def test_curves_of_all_runs_on_one_picture(curves):
    titles = [element.text for element in curves.all("#plots .plot h2")]
    assert titles == ["Loss", "Learning rate", "Gradient norm", "Experts’ load"]
    assert [len(curve(curves, title)) for title in titles] == [2, 2, 2, 2]
    assert len(curves.all("#plots .held-out")) == 1
    assert "second_64, held-out 2" in curves.one(PICTURE).get_attribute("aria-label")
    curves.click("#more summary")
    curves.wait(lambda: [title.text for title in curves.all("#more-plots h2")] == ["eval accuracy"])
    long, short = sorted(map(points, curve(curves, "Loss")), key=len, reverse=True)
    assert (len(long), len(short)) == (30, 10) and long[9][0] == pytest.approx(short[-1][0], abs=0.2)
    assert "eval" not in curves.text("#latest-values") and "0.1" in curves.text("#latest-values")
    curves.click('[data-run="first_64"]')
    curves.wait(lambda: len(curve(curves, "Loss")) == 1)
    curves.reload()
    curves.wait(lambda: len(curve(curves, "Loss")) == 1 and len(curves.all(".run")) == 2)


def test_the_table_of_runs_and_their_samples(curves, folder):
    attack, path = "<img src=x onerror=alert(1)>", folder / "sampled_64_metrics.jsonl"
    for i in (1, 2):
        sample = {"prompt": attack, "answer": f"answer {i}"}
        append(path, record(i, samples=[sample], eval_loss=3.0 - i))
    append(path, record(3, warnings=[attack]))
    append(folder / "second_64_metrics.jsonl", record(11))
    for name, rate in (("sampled", 0.5), ("second", 0.25)):
        settings = {"data_path": f"data/{name}", "learning_rate": rate, "constructor": attack}
        settings |= {"save_dir": name}
        (folder / f"{name}_64_run.json").write_text(json.dumps({"settings": settings}), encoding="utf-8")
    look(curves)
    curves.wait(lambda: "sampled_64" in curves.text("#runs"))
    curves.click('[data-run="sampled_64"]')
    curves.wait(lambda: "sampled_64" in curves.text("#latest-values"))
    head = curves.texts("#latest-values th")
    results = ["Run", "Loss", "Held-out loss", "Best held-out loss", "at update", "Updates", "Tokens", "Time"]
    assert head == [*results, "learning_rate", "data_path"]
    cells = curves.texts("#latest-values td")
    rows = [cells[at : at + len(head)] for at in range(0, len(cells), len(head))]
    assert [[row[0], *row[2:6], row[8]] for row in rows] == [
        ["sampled_64", "1", "1", "2", "3", "0.5"],
        ["second_64", "2", "2", "1", "11", "0.25"],
        ["first_64", "–", "–", "–", "30", "–"],
    ]
    assert f"sampled_64: update 3: {attack}" in curves.text("#latest-values")
    curves.click("#samples summary")
    curves.wait(lambda: "update 2: answer 2" in curves.text("#sample-texts"))
    append(path, record(4, samples=[{"prompt": attack, "completion": "more"}]))
    look(curves)  # it stays open while the file grows
    curves.wait(lambda: "update 4: more" in curves.text("#sample-texts"))
    assert "update 1: answer 1" in curves.text("#sample-texts") and attack in curves.text("#sample-texts")


def test_curves_move_while_a_file_grows(curves, folder):
    append(folder / "first_64_metrics.jsonl", *(record(i) for i in range(31, 41)))
    curves.wait(lambda: max(len(points(path)) for path in curve(curves, "Loss")) == 40)
    assert curves.shown("#live") and "running" in curves.text("#runs")
    (folder / "new.part").write_text("", encoding="utf-8")
    append(folder / "third_64_metrics.jsonl", record(1, seconds_left=0))
    look(curves)
    curves.wait(lambda: "third_64" in curves.text("#runs"))


def test_axis_log_scale_smoothing_and_values(curves):
    start = curve(curves, "Loss")
    for x in ("seconds", "tokens"):
        curves.click(f'#x-axis [value="{x}"]')
    picture = curves.one(PICTURE)
    assert "2000" in picture.get_attribute("textContent")
    curves.click("#log-scale")
    assert curve(curves, "Loss") != start
    slide = "arguments[0].value = 0.9; arguments[0].dispatchEvent(new Event('input'))"
    curves.run(slide, curves.one("#smoothing"))
    assert len(curves.all(".faint")) == 4 and curves.text("#smoothing-value") == "0.9"
    for line in map(points, curve(curves, "Gradient norm")):
        assert sum(after[1] > before[1] for before, after in pairwise(line)) < 29
    ActionChains(curves.driver).move_to_element(picture).perform()
    curves.wait(lambda: curves.shown(".tip"))
    assert re.search(r"Tokens 1,?\d+|Tokens 1\.\d+k", curves.text("#plots .plot:first-child .tip"))
    assert len(curves.all("#plots .cross")) == len(curves.all("#plots .plot"))
    curves.run("arguments[0].focus()", picture)
    curves.keys(Keys.ARROW_RIGHT)
    curves.wait(lambda: "first_64" in curves.one("#announcer").get_attribute("textContent"))
    assert "first_64" in picture.get_attribute("aria-label")


def test_updates_without_a_finite_loss_are_seen(curves, folder):
    lost = {"loss": None, "mean_loss": None, "grad_norm": None}
    bad = [record(i, **lost, skipped=[{"update": i, "sample_ids": [1]}]) for i in (4, 5)]
    append(folder / "hurt_64_metrics.jsonl", *map(record, (1, 2, 3)), *bad, record(6))
    append(folder / "lost_64_metrics.jsonl", *map(record, (1, 2)), record(3, **lost))
    look(curves)
    for name in ("hurt_64", "lost_64"):
        curves.wait(lambda name=name: name in curves.text("#runs"))
        curves.click(f'[data-run="{name}"]')
    curves.wait(lambda: len(curve(curves, "Loss")) == 4)
    assert len(curves.all("#plots .plot:first-child .bad")) == 3
    troubles = [element.text for element in curves.all(".trouble")]
    assert sorted(troubles) == [
        "2 updates skipped (not finite)",
        "Diverged: the loss is not finite · 1 records without a finite loss",
    ]


def test_metrics_and_runs_may_have_any_name(curves, folder):
    named = {"constructor": 1.5, "__proto__": 2.0, "toString": 3.0}
    append(folder / "constructor_metrics.jsonl", record(1, **named), record(2, **named))
    with open(os.fsencode(folder) + b"/caf\xe9_64_metrics.jsonl", "w", encoding="utf-8") as file:
        file.write(json.dumps(record(1)) + "\n")
    look(curves)
    choose = "[...document.querySelectorAll('.run')].find((e) => e.innerText.includes(arguments[0])).click()"
    for name in ("constructor", "caf\\xe9_64"):
        curves.wait(lambda name=name: name in curves.text("#runs"))
        curves.run(choose, name)
    curves.wait(lambda: len(curve(curves, "Loss")) == 4)
    curves.click("#more summary")
    wanted = {"constructor", "proto", "toString"}
    curves.wait(lambda: wanted <= {element.text for element in curves.all("#more-plots h2")})
    assert not curves.shown("#curves-error")


# --- the files themselves


def test_the_headers_let_only_the_pages_own_files_in(server):
    for name in ("", *(f"page/{path.name}" for path in PAGE.iterdir())):
        with urlopen(server.address + name, timeout=10) as answer:
            headers = answer.headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert not name.endswith(".js") or headers["Content-Type"].startswith("text/javascript")
