"""The browser for the tests of the page to send."""

from tests.browser import driver, page

__all__ = ["driver", "page"]
