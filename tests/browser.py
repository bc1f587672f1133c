"""A real browser for the tests of web pages: Chromium without a window. Conftests import the fixtures."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

# Debian's headless shell itself: its command is a script, whose end leaves the browser running
HEADLESS_SHELL = "/usr/lib/chromium/chromium-headless-shell"
BROWSERS = (HEADLESS_SHELL, "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run
    --disable-background-networking --disable-component-update --disable-sync --disable-default-apps
    --force-prefers-reduced-motion --renderer-process-limit=1 --disable-features=Translate,OptimizationHints"""
IS_SHOWN = "(e) => e.checkVisibility({visibilityProperty: true}) && e.getClientRects().length > 0"
# What a person sees misplaced: text and controls (or the parts of them that are not scrolled away) that reach beyond
# the page, that are cut, or that cover one another. If a dialog is open, it alone is looked at.
MISPLACED = """
const [width] = arguments, faults = [], boxes = [];
const shown = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && e.getClientRects().length;
const root = document.querySelector("dialog[open]") ?? document.body;
const said = (e) => `${e.tagName.toLowerCase()}.${e.className || e.id}: ${(e.innerText || e.value || "").slice(0, 60)}`;
const isScrolled = (e) => e.matches(".table, .code pre, .katex-display, .entry > .name, td[title]"); // or has an ellipsis
const known = new Map(); // most texts have the same elements around them
function measure(e) {
  if (!known.has(e)) {
    const { overflowX, overflowY, position } = getComputedStyle(e);
    known.set(e, [e.getBoundingClientRect(), overflowX !== "visible", overflowY !== "visible", overflowY === "hidden", position]);
  }
  return known.get(e);
}
function add(owner, rect, what) {
  let { left, right, top, bottom } = rect;
  if (right - left < 1 || bottom - top < 1) return;
  for (let e = owner; e && e !== root.parentElement; e = e.parentElement) {
    const [box, clipsX, clipsY, hidesY, position] = measure(e);
    if (e !== owner || what === "text") {
      const isCut = left < box.left - 1 || right > box.right + 1;
      if (clipsX && isCut && !isScrolled(e)) faults.push(`cut: ${said(owner)} by ${said(e)}`);
      if (hidesY && bottom > box.bottom + 1 && e !== document.body) faults.push(`cut: ${said(owner)}`);
      if (clipsX) [left, right] = [Math.max(left, box.left), Math.min(right, box.right)];
      if (clipsY) [top, bottom] = [Math.max(top, box.top), Math.min(bottom, box.bottom)];
    }
    if (position === "fixed") break;
  }
  if (right - left < 1 || bottom - top < 1) return;
  if (left < -1 || right > width + 1) faults.push(`beyond the page: ${said(owner)}`);
  boxes.push({ owner, left, right, top, bottom });
}
const isLeftOut = (e) => !e || e.closest(".visually-hidden, option, script, style, .u-over, .u-axis") || !shown(e);
const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
for (let node; (node = texts.nextNode()); ) {
  if (!node.data.trim() || isLeftOut(node.parentElement)) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const rect of range.getClientRects()) add(node.parentElement, rect, "text");
}
for (const e of root.querySelectorAll("button, input, select, textarea, svg, summary, [role=progressbar]")) {
  if (isLeftOut(e)) continue;
  add(e, e.getBoundingClientRect(), "control");
  if (e.matches("button:not(.entry > .name)") && e.scrollWidth > e.clientWidth + 1) faults.push(`cut: ${said(e)}`);
  if (e.matches("#training select")) {
    const pen = document.createElement("canvas").getContext("2d"), style = getComputedStyle(e);
    pen.font = style.font;
    const room = e.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    const text = e.selectedOptions[0]?.text ?? "";
    if (pen.measureText(text).width > room + 1 && text.length < 30) faults.push(`cut: select ${text}`);
  }
}
if (document.scrollingElement.scrollWidth > width) faults.push(`wider than ${width}`);
const isInside = (a, b) => a === b || a.contains(b) || b.contains(a);
const isAbove = (e) => e.closest(".notice, .sidebar, #veil");
boxes.forEach((a, i) => {
  for (const b of boxes.slice(i + 1)) {
    const [x, y] = [Math.min(a.right, b.right) - Math.max(a.left, b.left), Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)];
    if (x > 2 && y > 2 && !isInside(a.owner, b.owner) && isAbove(a.owner) === isAbove(b.owner))
      faults.push(`overlap: ${said(a.owner)} and ${said(b.owner)}`);
  }
});
return [...new Set(faults)];
"""
# The page looks at the server every two seconds, and for one that is gone every three. Here it looks more often; still,
# a look takes a small part of the time
OFTEN = """const later = window.setTimeout;
window.setTimeout = (run, ms) => later(run, ms === 2000 || ms === 3000 ? 200 : ms);"""
EXPECTED = re.compile(r"favicon|Failed to load resource.*status of 4")


class Page:
    """The web page in the browser, with what the tests do on it."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver

    def forget(self, address: str, language: str = "en-US") -> None:
        """The next visitor was never here."""
        self.devtools(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}]
        )
        self.devtools("Emulation.setUserAgentOverride", userAgent="test", acceptLanguage=language)
        self.size(1200, 800)
        self.driver.get(address + "page/icon.svg")
        self.devtools("Storage.clearDataForOrigin", origin=address.rstrip("/"), storageTypes="all")
        self.run("sessionStorage.clear()")

    def open(self, address: str, language: str = "en-US") -> None:
        """As a visitor who was never here."""
        self.forget(address, language)
        self.driver.get(address)
        self.ready()

    def ready(self) -> None:
        self.wait(lambda: self.run("return document.documentElement.dataset.ready"))
        self.wait(lambda: self.all("#model option, #runs .run") or self.shown("#key-dialog"))

    def reload(self) -> None:
        self.driver.refresh()
        self.ready()

    def devtools(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)

    def misplaced(self, width: int) -> list[str]:
        """What does not fit, is cut or covered on a screen of this width."""
        self.size(width, 800)
        # by then the page has drawn its curves anew
        later = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => done(look()), 50)))"
        return self.driver.execute_async_script(
            f"const done = arguments[1], look = () => {{{MISPLACED}}};{later}", width
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        """The text of the last element that fits, as the page shows it."""
        last = "return [...document.querySelectorAll(arguments[0])].at(-1)?.innerText ?? ''"
        return self.run(last, css).strip()

    def texts(self, css: str) -> list[str]:
        """The texts of all elements that fit, at one moment: what is drawn anew meanwhile does not matter."""
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)", css)

    def shown(self, css: str) -> bool:
        return self.run(f"return [...document.querySelectorAll(arguments[0])].some({IS_SHOWN})", css)

    def click(self, css: str) -> None:
        """The last element that fits; also one that only shows under the pointer."""
        self.run("[...document.querySelectorAll(arguments[0])].at(-1).click()", css)

    def keys(self, *keys: str) -> None:
        """To whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def say(self, text: str) -> None:
        """Put it in, at once as if it was pasted, and press Enter."""
        field = self.one("#input")
        self.run("arguments[0].focus(); document.execCommand('insertText', false, arguments[1])", field, text)
        field.send_keys(Keys.ENTER)

    def ask(self, text: str) -> str:
        """Say something and wait for the whole answer; returns its text."""
        self.say(text)
        self.answered()
        return self.text(".message.assistant .prose")

    def answered(self) -> None:
        self.wait(lambda: not self.all(".writing") and not self.shown("#stop"))

    def wait(self, condition: Callable[[], Any], seconds: float = 40) -> Any:
        end, pause = time.monotonic() + seconds, 0.01
        while time.monotonic() < end:
            try:
                if found := condition():
                    return found
            except StaleElementReferenceException:
                pass
            time.sleep(pause)
            pause = min(1.5 * pause, 0.2)  # each look takes some CPU time of what is waited for
        raise AssertionError(f"waited for {seconds} s; the page shows: {self.text('body')[:2000]}")


def start_browser(folder: Path, *logs: str) -> webdriver.Chrome:
    """A browser that writes downloads into a folder, and keeps these logs beside its own."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    chromedriver = shutil.which("chromedriver")
    if not browser or not chromedriver:
        pytest.skip("needs Chromium and chromedriver: bash tools/install_chromium.sh")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", dict.fromkeys(("browser", *logs), "ALL"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SE_OFFLINE", "true")  # selenium looks for no driver of its own
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            patch.delenv(name, raising=False)
        # the headless shell writes them where it was started
        service = webdriver.ChromeService(chromedriver, env={**os.environ}, popen_kw={"cwd": folder})
        return webdriver.Chrome(options=options, service=service)


@pytest.fixture(scope="session")
def driver(tmp_path_factory) -> Iterator[webdriver.Chrome]:
    found = start_browser(tmp_path_factory.mktemp("downloads"))
    yield found
    found.quit()


@pytest.fixture
def page(driver) -> Iterator[Page]:
    """The browser; a test fails if the page's own code did."""
    driver.get_log("browser")
    found = Page(driver)
    added = found.devtools("Page.addScriptToEvaluateOnNewDocument", source=OFTEN)
    yield found
    found.devtools("Page.removeScriptToEvaluateOnNewDocument", **added)
    logged = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in logged if not EXPECTED.search(message)] == []
