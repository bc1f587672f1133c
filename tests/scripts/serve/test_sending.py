"""Saving a model as a page to send: who may, what it costs, the buttons. The conversion is a stand-in that says
how it was called."""

import json
from pathlib import Path

import httpx2 as httpx
import pytest

from scripts import convert_model
from scripts.serve import sending
from scripts.serve.api import Access
from tests.scripts.serve.servers import Script, scripted

KEY = {"Authorization": "Bearer key"}
STAND_IN = """import json, sys
output = sys.argv[sys.argv.index("--output") + 1]
model = sys.argv[sys.argv.index("--model") + 1]
if "bad" in model:
    sys.exit("something else\\nerror: the page is not the same model")
open(output, "w").write(json.dumps(sys.argv[1:]))
open({made!r}, "a").write("made\\n")
"""
SAVED = """window.saved = []; const make = URL.createObjectURL.bind(URL); URL.createObjectURL = (blob) => {
    blob.text().then((text) => window.saved.push(text)); return make(blob); };"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Of a server, with weights."""
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN.format(made=str(tmp_path / "made")))
    monkeypatch.setattr(sending, "CONVERT", stand_in)
    (tmp_path / "out/my run").mkdir(parents=True)
    for name in ("my run/full_sft_32.pth", "bad_32.pth"):
        (tmp_path / "out" / name).write_bytes(b"weights")
    return tmp_path / "out"


def made(folder: Path) -> int:
    path = folder.parent / "made"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def client(folder):
    with (
        scripted(Script(), "key", given=None, save_dir=folder) as server,
        httpx.Client(base_url=server.address, headers=KEY, timeout=60, verify=False) as client,
    ):
        yield client


def test_a_page_is_made_once_for_each_state_of_the_weights(client, folder):
    wanted = {"model": "my run/full_sft_32"}
    first = client.post("/api/page", json=wanted)
    assert first.status_code == 200 and first.headers["content-security-policy"] == "sandbox"
    assert first.headers["content-disposition"] == "attachment; filename*=utf-8''my%20run%20full_sft_32.html"
    argv = json.loads(first.text)
    assert argv[:4] == ["--to", "page", "--model", str(folder / "my run/full_sft_32.pth")]
    assert client.post("/api/page", json=wanted).text == first.text and made(folder) == 1
    (folder / "my run/full_sft_32.pth").write_bytes(b"other weights")
    assert client.post("/api/page", json=wanted).status_code == 200 and made(folder) == 2


def test_the_command_takes_these_flags(client, monkeypatch):
    argv = json.loads(client.post("/api/page", json={"model": "my run/full_sft_32"}).text)
    monkeypatch.setattr("sys.argv", ["convert_model.py", *argv])
    args = convert_model.parse_args()
    assert (args.to, args.model, args.output.name) == ("page", argv[3], "my run full_sft_32.html")


def test_what_is_refused(client, folder, monkeypatch):
    def error(**options):
        response = client.post("/api/page", **options)
        return response.status_code, response.json()["error"]["message"]

    assert error(json={"model": "bad_32"}) == (409, "the page is not the same model")
    assert error(json={"model": "nothing"})[0] == 404
    assert error(json={"model": "../made"})[0] == 404
    assert error(json={"model": "bad_32", "output": "/tmp/x"})[0] == 400
    assert error(content='{"model": "bad_32"}', headers={"Content-Type": "text/plain"})[0] == 400
    wanted = {"model": "my run/full_sft_32"}
    assert error(json=wanted, headers={"Origin": "http://evil.example"})[0] == 403
    assert error(json=wanted, headers={"Authorization": "Bearer no"})[0] == 401
    assert client.get("/api/page").status_code == 405
    monkeypatch.setattr(sending, "MOST_BYTES", 3)
    assert error(json=wanted) == (409, "my run/full_sft_32 is too large for a page.")
    assert made(folder) == 0


def test_the_button_of_the_chat(page, folder):
    with scripted(Script(), given=None, save_dir=folder, access=Access()) as server:
        page.open(server.address)
        page.run(SAVED)
        for model, said in (
            ("my run/full_sft_32", "open it by a double click"),
            ("bad_32", "not be made: the page is"),
        ):
            page.run(
                "const s = document.querySelector('#model'); s.value = arguments[0];"
                "s.dispatchEvent(new Event('change'))",
                model,
            )
            page.click("#save-page")
            page.wait(lambda said=said: said in page.text("#notice"))
        assert page.wait(lambda: page.run("return window.saved")) and made(folder) == 1
        assert json.loads(page.run("return window.saved[0]"))[1] == "page"
        page.wait(lambda: page.one("#save-page").is_enabled())
