"""The page to send in Chromium, from a file: it makes no request, stays alive while it answers, and shows what
a model or its name says as text."""

import json

import pytest

from tests.browser import start_browser
from tests.tools.convert.pages import shipped_tokenizer, write

NAME = '</title><img src=x onerror="window.hacked=1"><script>window.hacked=2</script> &amp; {{spec}}'
STATE = "return document.documentElement.dataset.state"
CONTENT = ".content"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A browser of its own: to log the network costs all that it does."""
    found = start_browser(tmp_path_factory.mktemp("downloads"), "performance")
    yield found
    found.quit()


@pytest.fixture
def open_page(page):
    """open_page(path, language, scheme) opens a file; returns the browser when the model is read."""

    def run(path, language="en-US", scheme="light"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.devtools("Emulation.setEmulatedMedia", features=[feature])
        page.devtools("Emulation.setUserAgentOverride", userAgent="test", acceptLanguage=language)
        page.size(1200, 800)
        page.driver.get_log("performance")
        page.driver.get(path.as_uri())
        page.wait(lambda: page.run(STATE) == "ready")
        return page

    return run


def network(page, event):
    """What Chromium has logged of its network since the last look."""
    messages = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    return [message for message in messages if message["method"] == f"Network.{event}"]


def requested(page):
    """The schemes of all that was asked for."""
    return {each["params"]["request"]["url"].partition(":")[0] for each in network(page, "requestWillBeSent")}


def answered(page):
    page.wait(lambda: page.run(STATE) == "ready")


def test_a_chat(open_page, tmp_path):
    write(tmp_path / "page.html", hidden_size=256, num_hidden_layers=4)
    page = open_page(tmp_path / "page.html")
    page.run("window.ticks = 0; setInterval(() => window.ticks++, 10)")
    page.say("hello")
    page.wait(lambda: len(page.text(CONTENT)) > 20)  # it streams
    assert page.run(STATE) == "writing" and not page.shown("#send")
    ticks, shown = page.run("return window.ticks"), page.text(CONTENT)
    page.wait(lambda: page.run("return window.ticks") > ticks + 10)  # the page is alive meanwhile
    assert page.run(STATE) == "writing"
    page.click("#stop")
    answered(page)
    assert page.text(CONTENT).startswith(shown) and page.texts(".note")[0] == "stopped"
    assert page.texts(".user") == ["hello"] and "tokens/s" in page.texts(".note")[1]
    page.click("#language")
    assert page.text("#new") == "新对话" and page.texts(".note")[0] == "已停止"
    page.click("#new")
    assert page.texts(".message") == []
    page.one("#input").send_keys("   ")
    assert not page.one("#send").is_enabled()


def test_languages_and_colours(open_page, tmp_path):
    write(tmp_path / "page.html", continues_text=True, name="我的模型")
    ground = "return getComputedStyle(document.body).backgroundColor"
    page = open_page(tmp_path / "page.html", "zh-CN", "dark")
    assert page.text("#send") == "发送" and page.run("return document.documentElement.lang") == "zh-CN"
    assert page.text("h1") == "我的模型" and "只做过预训练" in page.text("#state")
    dark = page.run(ground)
    page = open_page(tmp_path / "page.html")
    assert page.text("#send") == "Send" and "pretrained only" in page.text("#state")
    assert page.run(ground) != dark
    page.size(390, 844)
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    page.one("#input").send_keys("Once", "\n")
    page.wait(lambda: page.all(".message"))
    assert page.text(".begun") == "Once" and not page.all(".user")
    page.keys("\ue00c")  # Escape
    answered(page)


def test_a_full_context_drops_the_oldest_turns_and_says_so(open_page, tmp_path):
    write(tmp_path / "page.html", max_position_embeddings=64)
    page = open_page(tmp_path / "page.html")
    for text in ("one", "two", "three"):
        page.say(text)
        answered(page)
    assert "The context is full: the oldest 2 messages were dropped." in page.texts(".note")
    page.say("word " * 60)
    page.wait(lambda: page.run(STATE) == "ready")
    assert "too long" in page.text(".note") and "32 of the 64" in page.text(".note")
    assert page.run("return document.querySelector('#input').value").startswith("word word")
    assert len(page.all(".user")) == 3


def test_text_of_a_model_and_its_name_stay_text_and_nothing_is_requested(open_page, tmp_path):
    attacks = ["<img src=x onerror='window.hacked=3'>", "<script>window.hacked=4</script></script><!--"]
    tokenizer = shipped_tokenizer()
    tokenizer.add_tokens(attacks)
    size = len(tokenizer)

    def says_only_attacks(model):
        """Their logits are the largest, one or the other, whatever the hidden states are."""
        head = model.lm_head.weight.data
        head[: size - 2] = 0
        head[size - 1] *= 100
        head[size - 2] = -head[size - 1]

    path = tmp_path / "page.html"
    shape = {"tie_word_embeddings": False, "vocab_size": size, "max_position_embeddings": 64}
    write(path, name=NAME, tokenizer=tokenizer, change=says_only_attacks, **shape)
    page = open_page(path)
    page.say(attacks[1])
    answered(page)
    assert requested(page) == {"file", "blob"}
    said = page.text(CONTENT)
    assert attacks[0] in said and attacks[1] in said and said.count("<") > 20
    assert page.texts(".user") == [attacks[1]]
    assert page.text("h1") == NAME and page.driver.title == NAME
    assert page.run("return window.hacked") is None and not page.all("img, main script")
    tried = """const done = arguments[0];
      const image = new Image();
      const loaded = new Promise((resolve) => {
        image.onload = () => resolve("sent");
        image.onerror = () => resolve("refused");
      });
      image.src = "https://example.org/a.png";
      const fetched = (url) => fetch(url).then(() => "sent", () => "refused");
      Promise.all([fetched("https://example.org/"), fetched("data:,x"), loaded]).then(done);"""
    assert page.driver.execute_async_script(tried) == ["refused"] * 3
    blocked = [each["params"].get("blockedReason") for each in network(page, "loadingFailed")]
    assert set(blocked) == {"csp"}
    page.driver.get_log("browser")  # where the policy says so
