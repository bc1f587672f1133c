"""A user's code in the main thread and in another: what it raises becomes one line."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import UserError
from common.plugins import user_code


def fail() -> None:
    with user_code("reward mine", "rl.jsonl:3", limit=10):
        raise SystemExit("no")


def take_long() -> str:
    with user_code("reward mine", "rl.jsonl:3", limit=0.05):
        time.sleep(0.2)
    return "ended"


def test_what_it_raises_is_one_line_in_any_thread():
    expected = r"rl.jsonl:3: reward mine failed \(SystemExit: no\)"
    with pytest.raises(UserError, match=expected):
        fail()
    with ThreadPoolExecutor(1) as threads, pytest.raises(UserError, match=expected):
        threads.submit(fail).result()


def test_it_is_interrupted_in_the_main_thread_which_alone_gets_signals():
    with pytest.raises(UserError, match=r"rl.jsonl:3: reward mine took longer than --reward_timeout 0.05 s"):
        take_long()
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(take_long).result() == "ended"
