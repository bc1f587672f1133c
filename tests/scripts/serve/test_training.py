"""Training for the web page: who may, one at a time, what becomes of it, also where it is killed. Plan and run.sh
are stand-ins (trainings.py); with --slow one training is real."""

import errno
import fcntl
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from scripts import convert_chats, serve_openai_api
from scripts.planning.signature import sign
from scripts.runs.run import Run
from scripts.serve import jobs, look_at_file, training, uploads
from scripts.serve.api import Access
from scripts.serve.jobs import LOCK, Jobs, error_of, last_start
from scripts.serve.models import Models
from scripts.serve.page import RUNS_KEPT, RunFiles
from scripts.serve.training import training_routes
from scripts.serve.uploads import Uploads
from tests.conftest import ROOT
from tests.dataset.test_chat_exports import TELEGRAM
from tests.scripts.serve import trainings
from tests.scripts.serve.servers import Script, scripted, wait_for, web
from tests.scripts.serve.test_look_at_file import arrow_of_nulls
from tests.stage_process import Faults, StageProcess

KEY = {"Authorization": "Bearer key"}
TEXT = "A river ran.\n" * 30
QUICK = {"RECORD_SECONDS": "0.02", "PLAN_SECONDS": "0"}


class Client:
    """A client of a server that trains."""

    def __init__(self, server: SimpleNamespace, folder: Path):
        self.folder, self.address = folder, server.address
        # to load certificates takes 20 ms
        self.http = httpx.Client(base_url=f"{server.address}api/train", headers=KEY, timeout=30, verify=False)

    def overview(self) -> dict[str, Any]:
        return self.http.get(f"{self.address}api/train").json()

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.http.post(f"/jobs{path}", json=body, headers=headers)

    def put(self, name: str, content: bytes | str = TEXT) -> httpx.Response:
        return self.http.put(f"/files/{name}", content=content)

    def plan(self, name: str = "novel", **more: Any) -> httpx.Response:
        return self.post("", {"name": name, "files": ["a.txt"], "hours": 1.0} | more)

    def job(self, name: str = "novel") -> dict[str, Any]:
        return next(job for job in self.overview()["jobs"] if job["name"] == name)

    def until(self, *states: str, name: str = "novel") -> dict[str, Any]:
        wait_for(lambda: self.job(name)["state"] in states)
        return self.job(name)

    def planned(self, name: str = "novel", **more: Any) -> None:
        if "a.txt" not in [file["name"] for file in self.overview()["files"]]:
            self.put("a.txt")
        assert self.plan(name, **more).status_code == 202
        self.until("planned", name=name)


@pytest.fixture(autouse=True)
def stand_in(request, monkeypatch):
    if "slow" not in request.keywords:
        monkeypatch.setattr(training, "PLAN", Path(trainings.__file__))


def make_client(
    stack: ExitStack, folder: Path, environment: dict[str, str] = QUICK, **options: Any
) -> Client:
    jobs = Jobs(folder, {**os.environ, **environment})
    models = options.pop("models", None) or Models(None, None, lambda path: (path, path), folder)
    routes = training_routes(jobs, Uploads(folder), models, lambda: None)
    options.setdefault("access", Access("key"))
    return Client(stack.enter_context(scripted(Script(), save_dir=folder, more=[routes], **options)), folder)


@pytest.fixture
def client(tmp_path) -> Iterator[Client]:
    with ExitStack() as stack:
        yield make_client(stack, tmp_path / "out")
        end_all(tmp_path / "out")


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Client]:
    """A server for tests that leave nothing behind that others would meet."""
    with ExitStack() as stack:
        yield make_client(stack, tmp_path_factory.mktemp("shared") / "out")


def end_all(folder: Path) -> None:
    """Nothing that a test started outlives it."""
    living = Jobs(folder).living()
    if living and living["group"]:
        os.killpg(living["group"], signal.SIGKILL)


def processes(folder: Path) -> list[str]:
    """Of this machine, those that work in a folder."""
    listed = subprocess.run(["ps", "-ewwo", "stat,args"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in listed if str(folder) in line and not line.startswith("Z")]


# --- one training


def test_from_a_file_to_a_model(client):
    found = client.put("a.txt").json()
    assert (found["kind"], found["records"], found["bytes"]) == ("text", 1, len(TEXT))
    chats = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"no {i}"}]}
        for i in range(300)
    ]
    found = client.put("b.jsonl", "".join(json.dumps(each) + "\n" for each in chats)).json()
    assert (found["kind"], found["records"], found["more"]) == ("chat", 200, True) and len(
        found["first"]
    ) == 3
    client.planned(files=["a.txt", "b.jsonl"], depth=2, lang="zh")
    job = client.job()
    assert job["plan"]["parameters"] == 1_234_567 and job["asked"]["lang"] == "zh" and job["stages"] == 2
    assert client.post("/novel/start", {}).status_code == 202
    assert client.until("training")["is_own"]
    assert client.http.delete("/files/a.txt").json()["error"]["code"] == "used"
    job = client.until("ready")
    assert (job["stage"], job["update"], job["updates"], job["eval_loss"]) == (1, 12, 12, [6.0, 3.0])
    assert set(job["verdict"]) == {"en", "zh"} and job["sample"][1] == "there was"
    report = client.http.get("/jobs/novel/report")
    assert "attachment" in report.headers["Content-Disposition"] and "a report" in report.text
    assert report.headers["Content-Security-Policy"] == "sandbox"
    log = client.http.get("/jobs/novel/log")
    assert log.text.count("== started ") == 2 and log.headers["Content-Type"].startswith("text/plain")
    assert client.http.delete("/files/a.txt").status_code == 200
    assert processes(client.folder) == []
    assert (client.folder / ".uploads").stat().st_mode & 0o777 == 0o700


def test_stopped_and_gone_on_gives_the_same_weights(client):
    client.planned("whole")
    client.post("/whole/start", {})
    client.until("ready", name="whole")
    client.planned()
    client.post("/novel/start", {})
    wait_for(lambda: client.job().get("update", 0) > 2)
    assert client.post("/novel/stop", {}).status_code == 202
    job = client.until("stopped")
    assert 2 < job["update"] < 12
    assert client.post("/novel/stop", {}).json()["error"]["code"] == "not_running"
    client.post("/novel/start", {})
    client.until("ready")
    weights = [(client.folder / name / "pretrain_64.pth").read_bytes() for name in ("whole", "novel")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("when", ["planning", "training", "saving"])
def test_killed_at_any_moment_it_can_go_on(tmp_path, when):
    with ExitStack() as stack:
        environment = {"PLAN_SECONDS": "5" if when == "planning" else "0", "RECORD_SECONDS": "0.2"}
        client = make_client(stack, tmp_path / "out", environment)
        client.put("a.txt")
        client.plan()
        if when != "planning":
            client.until("planned")
            client.post("/novel/start", {})
            wait_for(lambda: client.job().get("update", 0) > 1)
        if when == "saving":
            client.post("/novel/stop", {})
        client.until(when)
        group = wait_for(lambda: Jobs(client.folder).living()["group"])  # the started shell writes it itself
        os.killpg(group, signal.SIGKILL)
        wait_for(lambda: Jobs(client.folder).living() is None)
        assert client.job()["state"] == {"planning": "new", "training": "cut", "saving": "stopped"}[when]
        assert processes(client.folder) == []
        if when != "planning":
            assert client.post("/novel/start", {}).status_code == 202
            client.until("training")
        end_all(client.folder)


def test_a_restarted_machine_kills_nobody(client):
    """Its lock is free, and the number of the group is another program's."""
    client.planned()
    (client.folder / "novel/pretrain_64_metrics.jsonl").write_text('{"update": 1}\n')
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        (client.folder / LOCK).write_text(json.dumps({"folder": "novel", "group": other.pid, "plans": False}))
        assert client.job()["state"] == "cut"
        assert client.post("/novel/stop", {"now": True}).status_code == 409
        assert other.poll() is None
        other.kill()


def test_killed_before_its_first_record_it_says_so_and_may_still_be_planned_anew(tmp_path):
    with ExitStack() as stack:
        client = make_client(stack, tmp_path / "out", QUICK | {"RECORD_SECONDS": "60"})
        client.planned()
        for state in ("stopped", "cut"):
            client.post("/novel/start", {})
            if state == "stopped":
                assert client.post("/novel/stop", {"now": True}).status_code == 202
            else:
                os.killpg(Jobs(client.folder).group("novel"), signal.SIGKILL)
            wait_for(lambda: Jobs(client.folder).living() is None)
            job = client.job()
            assert (job["state"], "update" in job) == (state, False)
        client.planned()  # another plan: nothing was trained


def test_a_server_that_is_killed_while_it_starts_a_training_leaves_one_that_can_be_stopped(tmp_path):
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel/job.json").write_text("{}")
    die = f"""
import signal, subprocess
from pathlib import Path
from scripts.serve.jobs import Jobs
start = subprocess.Popen
def start_and_die(*argv, **options):
    start(*argv, **options)
    os.kill(os.getpid(), signal.SIGKILL)
subprocess.Popen = start_and_die
Jobs(Path({str(tmp_path)!r})).start("novel", ["sleep", "60"])
"""
    assert StageProcess("pretrain", [], Faults(script=die)).wait() == -signal.SIGKILL
    jobs = Jobs(tmp_path)
    assert jobs.state(tmp_path / "novel").name == "training"
    jobs.stop("novel")
    wait_for(lambda: jobs.living() is None)


def test_a_training_that_starts_while_its_files_are_read_was_not_cut(tmp_path, monkeypatch):
    script = tmp_path / "novel/run.sh"
    script.parent.mkdir()
    script.write_text("sleep 60")
    jobs, seen = Jobs(tmp_path), []

    def start_and_read(folder):
        if not seen:
            jobs.start("novel", ["bash", str(script)])
        seen.append(last_start(folder))
        return seen[-1]

    monkeypatch.setattr("scripts.serve.jobs.last_start", start_and_read)
    assert jobs.state(tmp_path / "novel").name == "training"
    end_all(tmp_path)


def test_only_one_lives_over_two_servers_of_a_folder(tmp_path):
    with ExitStack() as stack:
        clients = [make_client(stack, tmp_path / "out", QUICK | {"RECORD_SECONDS": "0.3"}) for _ in range(2)]
        clients[0].planned()
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda i: clients[i % 2].post("/novel/start", {}), range(20)))
        codes = [answer.status_code for answer in answers]
        assert sorted(codes) == [202] + [409] * 19
        busy = next(answer for answer in answers if answer.status_code == 409).json()["error"]
        assert (busy["code"], busy["values"]) == ("busy", {"name": "novel"})
        alone = {str(tmp_path / "out/novel"), str(tmp_path / "out/novel/run.sh")}
        wait_for(lambda: {line.split()[-1] for line in processes(tmp_path / "out")} == alone)
        assert clients[1].plan("other").json()["error"]["code"] == "busy"
        assert not (tmp_path / "out/other").exists()
        assert clients[1].post("/novel/stop", {"now": True}).status_code == 202
        clients[0].until("stopped")


def test_nobody_reads_its_output(tmp_path):
    """The run ends, however much it prints, after the server has gone."""
    folder = tmp_path / "out"
    (folder / "novel").mkdir(parents=True)
    print_much = "for i in range(100_000): print('x' * 100)\nopen('done', 'w')"
    jobs = Jobs(folder)
    jobs.start("novel", [sys.executable, "-c", print_much.replace("'done'", repr(str(folder / "done")))])
    wait_for(lambda: (folder / "done").exists())
    wait_for(lambda: jobs.living() is None)
    assert (folder / "novel/job.log").stat().st_size > 10**7


# --- the models that there are


def test_a_model_is_renamed_and_a_training_deleted_to_where_it_can_be_found(client):
    client.planned()
    assert client.post("/novel/rename", {"to": "b"}).json()["error"]["code"] == "not_ready"
    client.post("/novel/start", {})
    assert client.post("/novel/delete", {}).json()["error"]["code"] == "busy"
    client.until("ready")
    client.planned("other")
    for to, code in (("other", "exists"), ("../x", "field"), (".deleted", "field"), ("", "field")):
        assert client.post("/novel/rename", {"to": to}).json()["error"]["code"] == code
    assert client.post("/novel/rename", {"to": "小说 2"}).status_code == 202
    job = client.job("小说 2")
    assert job["state"] == "ready" and "novel" not in [each["name"] for each in client.overview()["jobs"]]
    assert not (client.folder / "小说 2/run.sh").exists()  # it would train into the old folder
    assert client.post("/小说 2/start", {}).status_code == 409
    assert client.http.get("/jobs/小说 2/report").status_code == 200
    for name, kept in (("小说 2", "小说 2"), ("other", "other")):
        assert client.post(f"/{name}/delete", {}).status_code == 202
        assert (client.folder / ".deleted" / kept / "job.json").exists()
    client.planned("other")
    assert client.post("/other/delete", {}).status_code == 202
    assert (client.folder / ".deleted/other_2").is_dir() and client.overview()["jobs"] == []
    assert client.post("/other/delete", {}).status_code == 404
    runs = web.get(f"{client.address}api/runs", headers=KEY).json()["runs"]
    assert runs == []


def test_a_model_that_a_terminal_planned_keeps_its_place_in_the_list_when_it_is_renamed(client):
    client.planned()
    client.post("/novel/start", {})
    client.until("ready")
    (client.folder / "novel/job.json").unlink()
    assert client.post("/novel/rename", {"to": "b"}).status_code == 202
    assert client.job("b")["state"] == "ready" and not (client.folder / "b/run.sh").exists()


def flags_of(folder: Path) -> dict[str, str]:
    """The flags with which the last plan was made."""
    line = next(line for line in reversed(last_start(folder)[1]) if line.startswith("flags: "))
    return json.loads(line.removeprefix("flags: "))


def test_a_model_goes_on_with_more_text_or_with_conversations(client):
    """With text from what its pretraining wrote, because SFT follows, else from its last weights."""
    chat = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'
    client.put("b.jsonl", chat)
    client.planned(files=["a.txt", "b.jsonl"])
    no_weights = client.plan("second", start="novel").json()["error"]
    assert (no_weights["code"], no_weights["values"]) == ("no_weights", {"name": "novel"})
    client.post("/novel/start", {})
    client.until("ready")
    for files, run in (
        (["a.txt"], "pretrain_64"),
        (["b.jsonl"], "full_sft_64"),
        (["b.jsonl", "a.txt"], "pretrain_64"),
    ):
        client.planned("second", files=files, start="novel", depth=3)
        flags = flags_of(client.folder / "second")
        assert flags["--from_weight"] == str(client.folder / f"novel/{run}.pth") and "--depth" not in flags
        assert client.job("second")["asked"]["start"] == "novel"
    assert client.plan("third", start="no").status_code == 404
    assert client.plan("third", start="../novel").status_code == 404
    for path, body in (("/novel/rename", {"to": "b"}), ("/novel/delete", {})):  # the plan needs it
        error = client.post(path, body).json()["error"]
        assert (error["code"], error["values"]) == ("used_model", {"name": "second"})
    client.post("/second/start", {})
    client.until("ready", name="second")
    assert client.post("/novel/rename", {"to": "b"}).status_code == 202
    (client.folder / "b/full_sft_64.pth").rename(client.folder / "elsewhere.pth")
    (client.folder / "b/full_sft_64.pth").symlink_to(client.folder / "elsewhere.pth")
    assert client.plan("third", files=["b.jsonl"], start="b").json()["error"]["code"] == "no_weights"
    assert client.job("b")["bytes"] is None


def test_weights_from_elsewhere_that_lie_in_the_folder_are_offered_and_continued(client, tmp_path):
    """Files of this project and folders of Hugging Face; no links, and nothing else."""
    client.planned()
    outside = tmp_path / "outside"
    for folder in (client.folder / "qwen", client.folder / "half", outside):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    for folder in (client.folder / "qwen", client.folder / "novel", outside):
        (folder / "model.safetensors").write_bytes(b"x")
    (client.folder / "novel/config.json").write_text("{}")  # a training stays one
    (client.folder / "link").symlink_to(outside)
    for name in ("full_sft_512.pth", "notes.pth"):
        (client.folder / name).write_bytes(b"x")
    (client.folder / "pretrain_64.pth").symlink_to(outside / "model.safetensors")
    assert client.overview()["weights"] == ["full_sft_512", "qwen"]
    for name, path in (("qwen", "qwen"), ("full_sft_512", "full_sft_512.pth")):
        client.planned("second", start=name)
        assert flags_of(client.folder / "second")["--from_weight"] == str(client.folder / path)
    for name in ("link", "half", "pretrain_64", "notes", "outside", "../outside"):
        assert client.plan("third", start=name).status_code == 404


def test_a_completed_model_says_when_it_was_made_and_how_large_it_is(client):
    client.planned()
    assert "made" not in client.job()
    client.post("/novel/start", {})
    job = client.until("ready")
    report, weights = (client.folder / "novel" / name for name in ("report.html", "pretrain_64.pth"))
    assert (job["made"], job["bytes"]) == (report.stat().st_mtime, weights.stat().st_size)


def test_no_training_starts_in_a_folder_that_is_being_moved(client, monkeypatch):
    """Over two servers of a folder."""
    client.planned()
    other, rename, began = Jobs(client.folder), os.rename, threading.Event()
    started: list[Any] = []

    def start() -> None:
        began.set()
        try:
            other.start("novel", ["bash", str(client.folder / "novel/run.sh")])
        except Exception as error:
            started.append(error.code)
        else:
            started.append("started")

    def slow_rename(*paths: Path) -> None:
        thread = threading.Thread(target=start)
        thread.start()
        began.wait()
        thread.join(0.3)
        assert not started  # it waits
        rename(*paths)

    monkeypatch.setattr(jobs.os, "rename", slow_rename)
    assert client.post("/novel/delete", {}).status_code == 202
    wait_for(lambda: started)
    assert started == ["not_started"] and not (client.folder / "novel").exists()


def test_nothing_is_deleted_to_where_a_link_leads(client, tmp_path):
    client.planned()
    (tmp_path / "elsewhere").mkdir()
    (client.folder / ".deleted").symlink_to(tmp_path / "elsewhere")
    assert client.post("/novel/delete", {}).json()["error"]["code"] == "not_moved"
    assert (client.folder / "novel/job.json").exists() and not list((tmp_path / "elsewhere").iterdir())


def test_the_example_does_not_replace_a_file_of_the_user(client):
    own = client.folder / ".uploads/valley questions.jsonl"
    own.write_text('{"text": "mine"}\n')
    assert client.post("/../example", {}).json()["error"]["code"] == "own_file"
    assert own.read_text() == '{"text": "mine"}\n' and not (client.folder / ".uploads/valley.jsonl").exists()


def test_the_example_is_texts_and_conversations_that_can_be_planned(client):
    for _ in range(2):  # a second time changes nothing
        assert client.post("/../example", {}).status_code == 202
    kinds = {file["name"]: file["kind"] for file in client.overview()["files"]}
    assert kinds == {"valley.jsonl": "text", "valley questions.jsonl": "chat"}
    client.planned(files=list(kinds))
    assert len(client.job()["plan"]["stages"]) == 2


def test_an_exported_chat_becomes_conversations_with_a_chosen_assistant(client, call, tmp_path):
    convert = lambda name, who: client.post(f"/../files/{name}/conversations", {"assistant": who})  # noqa: E731
    client.put("chat.json", json.dumps(TELEGRAM))
    assert client.plan(files=["chat.json"]).json()["error"]["code"] == "export"
    for _ in range(2):  # the same conversations are the same file
        assert convert("chat.json", "Ben").json() == {"name": "chat Ben.jsonl"}
    by_command = tmp_path / "ben.jsonl"
    (tmp_path / "chat.json").write_text(json.dumps(TELEGRAM))
    argv = ["--export", tmp_path / "chat.json", "--assistant", "Ben", "--output", by_command]
    assert call(convert_chats, *argv).returncode == 0
    made = client.folder / ".uploads/chat Ben.jsonl"
    assert made.read_bytes() == by_command.read_bytes()
    made.write_text("mine")
    assert convert("chat.json", "Ben").json() == {"name": "chat Ben_2.jsonl"} and made.read_text() == "mine"
    made.unlink()
    made.symlink_to(client.folder / ".uploads/chat Ben_2.jsonl")  # a link is not replaced
    assert convert("chat.json", "Ben").json() == {"name": "chat Ben_2.jsonl"} and made.is_symlink()
    for who in ("Anna", "Cleo"):
        assert convert("chat.json", who).json()["error"]["code"] == "no_answers"
    assert convert("no.json", "Ben").status_code == 404
    client.put("a.txt")
    assert convert("a.txt", "Ben").json()["error"]["code"] == "no_answers"
    assert not list((client.folder / ".uploads").glob(".part*"))
    listed = {file["name"]: file["kind"] for file in client.overview()["files"]}
    assert listed == {"a.txt": "text", "chat.json": None, "chat Ben_2.jsonl": "chat"}


def test_names_of_speakers_become_names_of_files(client):
    who = "../Ж. O'Neil\u202e " + "x" * 60
    said = [{"type": "message", "from": name, "date_unixtime": "1", "text": "hi"} for name in ("Anna", who)]
    client.put("chat.json", json.dumps({"type": "personal_chat", "messages": said}))
    answer = client.post("/../files/chat.json/conversations", {"assistant": who}).json()
    name = answer["name"]
    assert uploads.NAME.fullmatch(name) and (client.folder / ".uploads" / name).is_file()
    assert name.startswith("chat _Ж_ O_Neil_ xxx") and name.endswith("x.jsonl")


# --- what goes wrong


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (":17: no 'text'; write it; or skip bad records with --on_bad_data skip", {"code": "bad_record", "line": "17", "file": "bad_record.txt"}),
        (":4: no text (with --on_bad_data skip bad records are skipped and listed)", {"code": "bad_record", "line": "4", "why": "no text"}),
        (": --hours 0.02: in this time a model of 64 x 1 makes fewer than 100 updates, which teach little; give more time", {"code": "hours"}),
        (": --eval_share 0.02 holds out none of the records", {"code": "too_little"}),
        (": out of memory: a model of 64 x 1 does not fit into 0.1 GB", {"code": "memory"}),
        (": out of memory (DefaultCPUAllocator: can't allocate memory)", {"code": "memory"}),
        (": out/novel/x cannot be written (No space left on device); make room", {"code": "disk"}),
        (":3: not UTF-8; save the file as UTF-8", {"code": "not_utf8"}),
        (": what nobody expected", {"code": "other"}),
    ],
)  # fmt: skip
def test_a_refusal_is_a_code_and_the_name_can_be_planned_again(shared, said, error):
    name = f"{error['code']} {error.get('line', '')}".strip()
    file = f"{error['code']}.txt"
    shared.put(file, f"refuse {said}")
    shared.plan(name, files=[file])
    found = shared.until("failed", name=name)["error"]
    assert error.items() <= found.items() and "refuse" not in found["text"]
    assert shared.http.delete(f"/files/{file}").status_code == 200
    shared.planned(name)


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("Traceback (most recent call last):\n  File x\nMemoryError\n", {"code": "memory", "text": "MemoryError"}),
        ("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n", {"code": "memory"}),
        ("Traceback (most recent call last):\n  File x\na.b.NewError: what nobody expected\nnot finished; to continue: bash run.sh\n",
         {"code": "other", "text": "a.b.NewError: what nobody expected"}),
        ("warning: few updates\n  'Error' -> 'Error'\nEpoch:[1/1](1/2) 50%, no Error\n", None),
    ],
)  # fmt: skip
def test_what_python_and_cpp_say_at_their_end_is_an_error_too(tmp_path, log, error):
    (tmp_path / "job.log").write_text(f"== started plan.py 2026-11-28 08:16:01\n{log}")
    state, lines, _ = Jobs(tmp_path).state(tmp_path)
    assert state == ("failed" if error else "new")
    assert error is None or error.items() <= error_of(lines).items()


def test_files_that_are_not_taken_leave_nothing(client, monkeypatch):
    code = lambda answer: (answer.status_code, answer.json()["error"]["code"])  # noqa: E731
    assert code(client.put("a.xlsx")) == (415, "kind")
    assert code(client.put("a.docx")) == (422, "other")
    assert code(client.put("a.txt", "中文".encode("gb18030"))) == (422, "not_utf8")
    assert code(client.put("a.txt", "")) == (422, "no_record")
    assert code(client.put("a.jsonl", '{"text": \n{"x": 1}\n')) == (422, "bad_record")
    assert code(client.put("b.txt", iter([b"x"]))) == (411, "length")  # chunked
    good = '{"text": "a"}\n' * 16 + "{\n" + '{"text": "b"}\n' * 9
    assert client.put("some.jsonl", good).json()["bad"]["line"] == 17  # kept: others may do
    array = json.dumps([{"text": "x"}] * 16 + [{"text": None}])
    assert client.put("array.json", array).json()["bad"]["record"] == 17
    assert code(client.put("some.jsonl", good)) == (409, "exists")
    monkeypatch.setattr(uploads, "MAX_BYTES", 10)
    assert code(client.put("a.txt")) == (413, "too_large")
    monkeypatch.undo()
    monkeypatch.setattr(uploads, "disk_usage", lambda folder: SimpleNamespace(free=2 << 30))
    answer = client.put("a.txt")
    assert code(answer) == (507, "room") and answer.json()["error"]["values"]["free"] == 2 << 30
    assert {path.name for path in (client.folder / ".uploads").iterdir()} == {"some.jsonl", "array.json"}


def test_records_are_read_as_the_stages_read_them(client):
    """What a training would refuse, and what it would train."""
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "args": [1]}]}
    twice = answer | {"content": "<think>a</think>b", "thoughts": "c"}
    for record, why in (
        ({"messages": [question, call]}, "'args' of 'f' is [1] instead of an object"),
        ({"messages": [question, twice]}, "the reasoning of message 2 is in its content and in a field"),
        ({"messages": [question, answer], "tools": {"f": {}}}, "'tools' has a schema without a name"),
        ({"prompt": "q", "answer": "a"}, "no 'completion' or 'response'"),
    ):
        error = client.put("a.jsonl", json.dumps(record)).json()["error"]
        assert error["code"] == "bad_record" and f"a.jsonl:1: {why}" in error["message"].replace(
            "'tool_calls' of message 2: ", ""
        )
    twice = '{"instruction": "q", "output": "a", "instruction": "b"}'
    assert "has the key 'instruction' twice" in client.put("a.jsonl", twice).json()["error"]["message"]
    texts = [{"content": "A river."}, {"text": "A river.", "messages": [question]}]
    for number, record in enumerate(texts):
        found = client.put(f"text {number}.jsonl", json.dumps(record)).json()
        assert (found["kind"], found["first"]) == ("text", ["A river."])
    chat = {"text": None, "messages": [question, answer]}
    assert client.put("chat.jsonl", json.dumps(chat)).json()["first"] == ["user: q\nassistant: a"]


def test_of_a_large_file_only_the_first_bytes_are_read(client, tmp_path, monkeypatch):
    chat = {"messages": [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "好" * 20}]}
    line = json.dumps(chat, ensure_ascii=False)
    files = {
        "array.json": f"[{', '.join([line] * 150)}]",
        "pretty.json": json.dumps([chat] * 150, indent=1, ensure_ascii=False),
        "lines.jsonl": f"{line}\n" * 150,
        "table.csv": "text\n" + '"a, b"\n' * 4000,
        "line.txt": "好" * 9000,
        "lines.txt": "好的\n" * 3000,
    }
    read, sizes = look_at_file.read_records, []
    monkeypatch.setattr(
        look_at_file,
        "read_records",
        lambda paths, **more: sizes.append(os.path.getsize(paths[0])) or read(paths, **more),
    )
    for head in range(1000, 1003):  # cut within a record, within a character
        monkeypatch.setattr(look_at_file, "HEAD_BYTES", head)
        for name, content in files.items():
            for packed in (content.encode(), gzip.compress(content.encode())):
                path = tmp_path / (f"{name}.gz" if packed[:1] == b"\x1f" else name)
                path.write_bytes(packed)
                found = look_at_file.look_at(path, path.name, tmp_path)
                assert found["more"] == ("txt" not in name) and "bad" not in found, found
                assert found["kind"] == ("chat" if "json" in name else "text") and sizes.pop() <= head + 1
    assert client.put("array.json", files["array.json"]).json()["records"] == 150
    assert client.put("large.txt", TEXT * 20_000).json()["records"] == 1
    assert client.put("cut.jsonl.gz", gzip.compress(line.encode())[:-9]).status_code == 422
    assert not list((client.folder / ".uploads").glob(".part*"))


def test_others_are_served_while_a_file_is_looked_at_and_a_look_is_made_once(client, tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "LOOK_SECONDS", 2)
    arrow_of_nulls(tmp_path / "nulls.arrow")
    nulls, looked, look_at = (tmp_path / "nulls.arrow").read_bytes(), [], uploads.look_at
    monkeypatch.setattr(uploads, "look_at", lambda path, *name: looked.append(path) or look_at(path, *name))
    with ThreadPoolExecutor(1) as pool:
        uploading, answers = pool.submit(client.put, "nulls.arrow", nulls), 0
        while not uploading.done():
            asked = {"messages": [{"role": "user", "content": "hi"}], "model": "tiny"}
            said = client.http.post(f"{client.address}v1/chat/completions", json=asked).json()
            assert said["choices"][0]["message"]["content"] == "You said: hi"
            answers += 1
    error = uploading.result().json()["error"]
    assert error["code"] == "too_much" and answers > 5  # in the server itself: one, after a minute
    assert list((client.folder / ".uploads").iterdir()) == []
    (client.folder / ".uploads/nulls.arrow").write_bytes(nulls)  # by hand
    client.put("a.txt")
    files = [client.overview()["files"] for _ in range(3)][-1]
    assert [file["name"] for file in files] == ["a.txt", "nulls.arrow"] and len(looked) == 3
    assert files[0]["kind"] == "text" and files[1]["error"] == error["message"]
    answer = client.plan(files=["nulls.arrow"])
    assert (answer.status_code, answer.json()["error"]["message"]) == (422, error["message"])
    assert not (client.folder / "novel").exists()


@pytest.mark.parametrize("who", ["the system", "somebody"])
def test_what_the_system_ends_for_lack_of_memory_says_so(tmp_path, monkeypatch, who):
    """It cannot say so itself; whoever else kills it leaves what there was to be said."""
    with ExitStack() as stack:
        client = make_client(stack, tmp_path / "out", QUICK | {"PLAN_SECONDS": "60"})
        kills = [0]
        monkeypatch.setattr(jobs, "memory_kills", lambda: kills[0])
        client.put("a.txt")
        client.plan()
        group = Jobs(client.folder).group("novel")
        wait_for(lambda: "stand-in" in client.http.get("/jobs/novel/log").text)
        adjust = Path(f"/proc/{group}/oom_score_adj")
        assert not adjust.exists() or int(adjust.read_text()) >= 500  # the first to go
        kills[0] += who == "the system"
        os.killpg(group, signal.SIGKILL)
        job = client.until("failed" if who == "the system" else "new")
        assert who == "somebody" or job["error"]["code"] == "memory"


def test_a_table_that_is_too_large_for_the_memory_of_a_plan_is_a_line():
    line = "error: a.parquet:300: after it the file cannot be read (malloc of size 16777216 failed); repair the file"
    assert error_of([line])["code"] == "memory"


def test_an_upload_that_stops_or_is_cut_leaves_nothing(client, monkeypatch):
    monkeypatch.setattr(uploads, "SILENCE_SECONDS", 0.3)
    head = "PUT /api/train/files/a.txt HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nContent-Length: 900\r\n\r\nabc"
    import socket

    port = int(client.address.rsplit(":", 1)[1].strip("/"))
    with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
        slow.sendall(head.encode())
        assert b" 408 " in slow.recv(1000)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as gone:
        gone.sendall(head.encode())
    wait_for(lambda: not list((client.folder / ".uploads").iterdir()))


def test_the_disk_must_have_room_for_a_start(client, monkeypatch):
    client.planned()
    monkeypatch.setattr(training, "disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
    answer = client.post("/novel/start", {})
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "room")
    assert client.job()["state"] == "planned"
    monkeypatch.undo()
    assert client.post("/novel/start", {}).status_code == 202
    client.until("ready")


NAMES = [
    "../x",
    "a/b",
    "-h",
    "x:3",
    "x,y",
    "*.txt",
    ".hidden",
    "x\0",
    "x" * 300,
    "",
    " x",
    "earlier_1",
    "..%2f",
]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_elsewhere(shared, name):
    shared.put("a.txt")
    before = sorted(shared.folder.parent.rglob("*"))
    assert shared.plan(name).status_code == 400
    assert shared.post(f"/{name.replace(chr(0), '%00')}/start", {}).status_code in (404, 405, 307)
    assert shared.plan(files=[name]).status_code in (400, 404)
    if name != "earlier_1":
        assert shared.put(name.replace(chr(0), "%00") + ".txt").status_code in (404, 405, 415)
    assert sorted(shared.folder.parent.rglob("*")) == before


def test_a_name_that_is_taken_or_a_link_is_refused(client, tmp_path):
    client.put("a.txt")
    (client.folder / "there").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/run.sh").write_text("touch hacked")
    (client.folder / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        assert client.plan(name).json()["error"]["code"] == "exists"
    assert client.post("/link/start", {}).status_code == 404
    client.planned()
    client.planned()  # a plan may be changed
    client.post("/novel/start", {})
    client.until("ready")
    assert client.plan().json()["error"]["code"] == "exists"  # what was trained is not lost
    for field in (
        {"hours": 0.01},
        {"hours": 1000.0},
        {"depth": 5},
        {"lang": "fr"},
        {"flags": "--x"},
        {"text": None},
    ):
        assert client.plan("other", **field).json()["error"]["code"] == "field"
    assert client.plan("other", files=["missing.jsonl"]).json()["error"]["code"] == "no_file"


def test_who_may_not(client, tmp_path):
    """No key, another page, also one that may use the rest, a form: nothing is started."""

    def status(
        path: str = "/jobs", content: str = '{"name": "x", "files": ["a.txt"], "hours": 1.0}', **headers: str
    ) -> int:
        sent = KEY | {"Content-Type": "application/json"} | headers
        return web.post(f"{client.address}api/train{path}", content=content, headers=sent).status_code

    client.put("a.txt")
    assert status(Authorization="") == status(Authorization="Bearer other") == 401
    assert status(Origin="http://evil.example") == status(Origin="null") == 403
    assert status(**{"Content-Type": "text/plain"}) == 400
    with ExitStack() as stack:
        access = Access("key", ("127.0.0.1",), ("*",))
        client = make_client(stack, tmp_path / "out", access=access)
        assert status(Origin="http://evil.example") == status(Origin="null") == 403
        assert status(Host="evil.example") == 400
    assert not (tmp_path / "out/x").exists() and not (tmp_path / "out/.train.lock").exists()
    with scripted(Script(), "key", save_dir=tmp_path) as server:
        answers = [web.get(f"{server.address}api/train{path}", headers=KEY) for path in ("", "/jobs/x/log")]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert web.get(f"{server.address}api/runs", headers=KEY).json()["train"] is False


def test_training_is_for_this_machine_and_always_with_a_key(weights, error_line, call, monkeypatch):
    line = error_line(
        serve_openai_api, *weights, "--train", "1", "--host", "0.0.0.0", "--port", "0", "--api_key", "k"
    )
    assert "--train 1 is for 127.0.0.1 only; from elsewhere: ssh -L " in line
    from scripts.serve import api, connections

    served = []
    monkeypatch.setattr(api, "create_app", lambda *given, trains: served.append((*given[2:], trains)))
    monkeypatch.setattr(connections, "run", lambda app, listener, *rest: listener.close())
    done = call(serve_openai_api, *weights, "--train", "1", "--port", "0")
    ((access, more, trains),) = served
    code, key = re.search(r"/#code=(\S+), .*\n.*: (\S+)\n", done.stdout).groups()
    assert access.codes == {code} and access.api_key == key != code and min(len(key), len(code)) > 20
    assert "*" not in access.hosts and len(more) == 2 and trains  # pages to send, and training


def test_strange_folders_and_files_hide_no_other(client):
    client.planned()
    folder = client.folder / "novel"
    (folder / "pretrain_64_metrics.jsonl").write_text(
        '{"update": 1, "tok\n[1]\n{"update": 2, "tokens": 1, "seconds": 1, "loss": 2}\n'
    )
    with open(folder / "job.log", "a") as log:
        log.seek(100 << 20)
        log.write("the end\n")
    strange = client.folder / os.fsdecode(b"caf\xe9")
    strange.mkdir()
    (strange / "run.sh").write_text("exit 3")
    for name, content in (("list", "[1]"), ("broken", "{"), ("binary", "\0")):
        (client.folder / name).mkdir()
        (client.folder / name / "job.json").write_text(content)
    jobs = {job["name"]: job["state"] for job in client.overview()["jobs"]}
    assert jobs == {"novel": "cut", "caf\\udce9": "planned", "list": "new", "broken": "new", "binary": "new"}
    assert client.http.get("/jobs/novel/log").text.endswith("the end\n")


def test_a_look_costs_what_was_added_since(client, monkeypatch):
    client.planned()
    client.post("/novel/start", {})
    client.until("ready")
    for number in range(RUNS_KEPT + 2):
        shutil.copytree(client.folder / "novel", client.folder / f"copy {number}")
    before, looked = client.overview()["jobs"], []
    assert {job["verdict"]["en"] for job in before} == {client.job()["verdict"]["en"]}
    monkeypatch.setattr(training, "sentences", lambda run, lang: looked.append(run.path) or [])
    monkeypatch.setattr(RunFiles, "read", lambda self, path: looked.append(path) or Run(path))
    after = client.overview()["jobs"]
    for job in (*before, *after):
        for name in ("age", "record_age", "seconds_left"):
            assert job.pop(name) >= 0
    assert (after, looked) == (before, [])


def test_a_lock_that_is_only_looked_at_keeps_nobody_from_starting(client):
    client.planned()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            with open(client.folder / LOCK, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
                time.sleep(0.02)
            time.sleep(0.02)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        assert client.post("/novel/start", {}).status_code == 202
    finally:
        stop.set()
        looking.join()
    client.until("ready")


# --- links, and what no plan wrote


@pytest.mark.parametrize("name", ["report.html", "job.log"])
def test_a_link_in_the_folder_of_a_training_is_neither_read_nor_written(client, tmp_path, name):
    client.planned()
    secret, folder = tmp_path / "secret", client.folder / "novel"
    secret.write_text("a secret\n")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    answers = [client.http.get(f"/jobs/novel/{what}") for what in ("report", "log")]
    assert all("a secret" not in answer.text for answer in answers) and "secret" not in str(client.job())
    assert client.job()["state"] in ("planned", "cut")  # no report makes it ready
    if name == "report.html":
        assert (
            answers[0].status_code == 403
            and "links are not followed" in answers[0].json()["error"]["message"]
        )
        return
    for answer in (client.post("/novel/start", {}), client.plan()):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (409, "not_started") and "symbolic link" in error[
            "message"
        ]
    assert secret.read_text() == "a secret\n" and Jobs(client.folder).living() is None


def test_a_folder_that_becomes_a_link_leads_nowhere(client, tmp_path, monkeypatch):
    """Also between the look at it and the opening of its files."""
    client.planned()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(client.folder / "novel", elsewhere)
    (elsewhere / "report.html").write_text("a secret")
    folders = Jobs.folders

    def exchanged(jobs: Jobs) -> dict[str, Path]:
        found = folders(jobs)
        shutil.rmtree(client.folder / "novel", ignore_errors=True)
        (client.folder / "novel").symlink_to(elsewhere)
        return found

    monkeypatch.setattr(Jobs, "folders", exchanged)
    answer = client.http.get("/jobs/novel/report")
    assert answer.status_code == 403 and "a secret" not in answer.text
    monkeypatch.undo()
    assert client.overview()["jobs"] == [] and client.http.get("/jobs/novel/report").status_code == 404


def test_a_click_runs_only_what_a_plan_wrote_here(client, tmp_path):
    client.planned()
    folder = client.folder / "novel"
    script = (folder / "run.sh").read_text()
    touch = f"touch '{tmp_path / 'hacked'}'\n"
    stranger = client.folder / "stranger"
    stranger.mkdir()
    (stranger / "run.sh").write_text(touch)
    other = client.folder / "other"  # planned elsewhere: another key
    shutil.copytree(folder, other)
    facts = json.loads((folder / "plan_facts.json").read_text())
    facts["signature"] = sign((folder / "run.sh").read_bytes(), tmp_path / "elsewhere" / "novel")
    (other / "plan_facts.json").write_text(json.dumps(facts))
    (folder / "run.sh").write_text(script + touch)
    for name in ("novel", "stranger", "other"):
        error = client.post(f"/{name}/start", {}).json()["error"]
        assert error["code"] == "not_planned_here" and "start it in a terminal" in error["message"]
    (folder / "run.sh").unlink()
    (tmp_path / "script").write_text(script)
    (folder / "run.sh").symlink_to(tmp_path / "script")
    assert client.post("/novel/start", {}).json()["error"]["code"] == "no_plan"
    (folder / "run.sh").unlink()
    (folder / "run.sh").write_text(script)
    assert client.post("/novel/start", {}).status_code == 202
    client.until("ready")
    assert not (tmp_path / "hacked").exists()


def test_on_a_full_disk_a_training_is_stopped_and_none_is_started(client, monkeypatch):
    client.planned()
    client.planned("other")
    (client.folder / "novel/until").write_text("2")
    client.post("/novel/start", {})
    wait_for(lambda: client.job().get("update") == 2)

    def full(folder: Path, what: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jobs, "note", full)
    assert client.post("/novel/stop", {"now": True}).status_code == 202
    wait_for(lambda: Jobs(client.folder).living() is None)
    answer = client.post("/other/start", {}).json()["error"]
    assert answer["message"] == "other cannot be started: [Errno 28] No space left on device."
    assert Jobs(client.folder).living() is None and client.job("other")["state"] == "planned"


def test_a_long_line_of_a_log_costs_no_more_than_its_length(tmp_path):
    """The patterns are tried on lines of which each is far longer than the log that is looked at."""
    lines = [
        "error: " + part * (200_000 // len(part))
        for part in (":1", "a:1 ", "[1", "--hours ", "x.", "--eval_share ", "or skip ")
    ]
    (tmp_path / "job.log").write_text("== started run.sh\n" + "\n".join(line[:60_000] for line in lines[:1]))
    kept = last_start(tmp_path)[1]
    assert [len(line) for line in kept] == [jobs.LINE]
    for line in lines:
        assert error_of([line[: jobs.LINE]])["code"] in ("other", "bad_record")
    # one try for each segment of a path: without a match no start within it is tried
    tried = re.compile(jobs.ERRORS["bad_record"]).search("a" * 300_000 + "/" + "b" * 300_000)
    assert tried is None


@pytest.mark.slow  # the real plan times models for half a minute, and its training takes minutes
def test_a_real_training_that_is_stopped_killed_and_adopted_gives_the_bytes_of_an_uninterrupted_one(tmp_path):
    import random

    from tests.conftest import sentence

    rng = random.Random(3)
    text = "\n".join(json.dumps({"text": sentence(rng, 20, 60)}) for _ in range(800))
    with ExitStack() as stack:
        client = make_client(stack, tmp_path / "out")
        assert client.put("a.jsonl", text).status_code == 200
        for name in ("whole", "novel"):
            assert client.plan(name, files=["a.jsonl"], hours=0.05, depth=1).status_code == 202
            wait_for(lambda name=name: client.job(name)["state"] not in ("planning", "new"), 300)
            assert client.job(name)["state"] == "planned", client.job(name)
        script = (tmp_path / "out/whole/run.sh").read_text()  # the same settings: both plans were measured
        script, facts = script.replace("out/whole", "out/novel"), tmp_path / "out/novel/plan_facts.json"
        (tmp_path / "out/novel/run.sh").write_text(script)
        signature = {"signature": sign(script.encode(), facts.parent)}
        facts.write_text(json.dumps(json.loads(facts.read_text()) | signature))
        client.post("/whole/start", {})
        wait_for(lambda: client.job("whole")["state"] == "ready", 600)
        client.post("/novel/start", {})
        wait_for(lambda: client.job().get("update", 0) > 1, 120)
        client.post("/novel/stop", {})
        wait_for(lambda: client.job()["state"] == "stopped", 120)
        client.post("/novel/start", {})
        wait_for(lambda: client.job()["state"] == "training" and client.job().get("record_age", 99) < 2, 120)
        client.post("/novel/stop", {"now": True})
        wait_for(lambda: client.job()["state"] == "stopped", 60)
        client.post("/novel/start", {})
        wait_for(lambda: client.job()["state"] == "ready", 600)
        name = "pretrain_64.pth"
        assert (tmp_path / "out/whole" / name).read_bytes() == (tmp_path / "out/novel" / name).read_bytes()
        assert processes(tmp_path / "out") == [] and ROOT.is_dir()
