"""A plugin of pytest: tells run_checks.py of each check as it begins and as it ends, a JSON object per line in
the file that GPU_CHECK_RESULTS names. Under xdist only the process that hands out the checks does."""

import json
import os

import pytest


def tell(**what) -> None:
    """Append a line."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["GPU_CHECK_RESULTS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(what, default=str) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """A check begins."""
    tell(id=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A check ended, or its fixtures did without success, or its process crashed."""
    if report.when != "call" and report.outcome == "passed":
        return
    reason = ""
    if isinstance(report.longrepr, tuple):  # where a skip stands, and why
        reason = report.longrepr[2].removeprefix("Skipped: ")
    elif report.longrepr is not None:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = (crash.message if crash else str(report.longrepr)).partition("\n")[0]
    if report.when not in ("setup", "call", "teardown"):
        reason = "its process crashed"
    tell(id=report.nodeid, result=report.outcome, reason=reason, figures=report.user_properties)
