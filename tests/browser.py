"""A real browser for the tests of web pages: Chromium without a window. Conftests import the fixtures."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
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
EXPECTED = re.compile(r"favicon|Failed to load resource.*status of 4")


class Page:
    """The web page in the browser, with what the tests do on it."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver

    def open(self, address: str, language: str = "en-US") -> None:
        """As a visitor who was never here."""
        self.devtools(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}]
        )
        self.devtools("Emulation.setUserAgentOverride", userAgent="test", acceptLanguage=language)
        self.size(1200, 800)
        self.driver.get(address + "page/icon.svg")
        self.devtools("Storage.clearDataForOrigin", origin=address.rstrip("/"), storageTypes="all")
        self.run("sessionStorage.clear()")
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
        self.one("#input").send_keys(text, Keys.ENTER)

    def ask(self, text: str) -> str:
        """Say something and wait for the whole answer; returns its text."""
        self.say(text)
        self.answered()
        return self.text(".message.assistant .prose")

    def answered(self) -> None:
        self.wait(lambda: not self.all(".writing") and not self.shown("#stop"))

    def wait(self, condition: Callable[[], Any], seconds: float = 40) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if found := condition():
                    return found
            except StaleElementReferenceException:
                pass
            time.sleep(0.05)
        raise AssertionError(f"waited for {seconds} s; the page shows: {self.text('body')[:2000]}")


@pytest.fixture(scope="session")
def driver(tmp_path_factory) -> Iterator[webdriver.Chrome]:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    chromedriver = shutil.which("chromedriver")
    if not browser or not chromedriver:
        pytest.skip("needs Chromium and chromedriver: bash tools/install_chromium.sh")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SE_OFFLINE", "true")  # selenium looks for no driver of its own
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            patch.delenv(name, raising=False)
        service = webdriver.ChromeService(chromedriver, env={**os.environ})
        found = webdriver.Chrome(options=options, service=service)
    yield found
    found.quit()


@pytest.fixture
def page(driver) -> Iterator[Page]:
    """The browser; a test fails if the page's own code did."""
    driver.get_log("browser")
    yield Page(driver)
    logged = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in logged if not EXPECTED.search(message)] == []
