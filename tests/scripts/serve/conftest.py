"""The browser for the tests of the web page."""

from tests.browser import driver, page

__all__ = ["driver", "page"]
