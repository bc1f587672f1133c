"""Who a client is, and how the server's own page gets the key."""

from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest

from scripts import serve_openai_api
from scripts.serve import api
from scripts.serve.api import Access
from tests.scripts.serve.servers import Script, scripted, web

ASKED = {"messages": [{"role": "user", "content": "hi"}], "model": "tiny"}


def test_a_code_is_exchanged_for_the_key_once_and_by_the_own_page_alone():
    with scripted(Script(), access=Access("secret", origins=("*",), codes={"one", "two"})) as server:

        def exchange(code: str | bytes, **headers: str) -> httpx.Response:
            return web.post(f"{server.address}api/key", content=code, headers=headers)

        for code in (
            "",
            "One",
            "one two",
            "secret",
            "\udce9".encode("utf-8", "surrogateescape"),
            "x" * 100_000,
        ):
            assert exchange(code).status_code in (403, 413)
        for origin in ("http://evil.example", "null"):
            assert exchange("one", Origin=origin).status_code == 403
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: exchange("one", Origin=server.address.strip("/")), range(8)))
        assert sorted(answer.status_code for answer in answers) == [200] + [403] * 7
        given = next(answer for answer in answers if answer.status_code == 200)
        assert given.json() == {"key": "secret"} and given.headers["Cache-Control"] == "no-store"
        assert exchange("two").json() == {"key": "secret"}
        assert web.get(f"{server.address}v1/models").status_code == 401
        assert web.get(f"{server.address}api/key").status_code == 405


@pytest.mark.parametrize(
    ("proxies", "client"),
    [
        ((), "127.0.0.1"),
        (("127.0.0.1",), "8.8.8.8"),
        (("127.0.0.0/8",), "8.8.8.8"),
        (("10.0.0.1",), "127.0.0.1"),
    ],
)
def test_a_header_says_who_a_client_is_only_where_a_proxy_is_named(proxies, client, monkeypatch):
    """Else each request could be that of another client, and take that one's share."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # of uvicorn
    seen, client_of = [], api.client_of
    monkeypatch.setattr(api, "client_of", lambda request: seen.append(client_of(request)) or seen[-1])
    with scripted(Script(), proxies=proxies) as server:
        headers = {"X-Forwarded-For": "8.8.8.8"}
        answer = web.post(f"{server.address}v1/chat/completions", json=ASKED, headers=headers)
    assert answer.status_code == 200 and set(seen) == {client}


def test_a_proxy_is_an_address(weights, error_line):
    line = error_line(serve_openai_api, *weights, "--port", "0", "--proxy", "127.0.0.1", "nginx")
    assert line == "error: --proxy nginx must be an address or a network, such as 127.0.0.1 or 10.0.0.0/8\n"
