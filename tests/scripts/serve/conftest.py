"""The browser for the tests of the web page, and shorter waits."""

import pytest

from scripts.serve import jobs
from tests.browser import driver, page

__all__ = ["driver", "page"]


@pytest.fixture(autouse=True)
def short_wait_for_the_lock(monkeypatch) -> None:
    """Until a server says that another training is running. A training writes its process group meanwhile."""
    monkeypatch.setattr(jobs, "SECONDS_FOR_LOCK", 0.5)
