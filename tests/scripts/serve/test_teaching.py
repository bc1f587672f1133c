"""Teaching for the web page: the routes, what becomes of a teaching, also where it is killed, and who may. scripts/teach.py
is a stand-in (teachings.py); with --slow one teaching is real."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from scripts import teach
from scripts.serve import teaching, training
from scripts.serve.jobs import Jobs, error_of
from scripts.serve.models import Models
from scripts.teaching.version import is_trained_here
from tests.scripts.serve import teachings, trainings
from tests.scripts.serve.servers import wait_for, web
from tests.scripts.serve.test_training import KEY, Client, end_all, make_client, processes
from tests.scripts.test_teach import trained

__all__ = ["trained"]

MODEL, NAME = "novel/full_sft_64", "novel-taught"


def correction(question: str, answer: str, *before: dict) -> dict[str, Any]:
    """As the page sends it."""
    asked = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": [*before, *asked]}


THREE = [
    correction(f"Where does {name} live?", f"{name} lives in Windmoor.") for name in ("Kado", "Vira", "Nemi")
]


@pytest.fixture(autouse=True)
def stand_in(request, monkeypatch):
    if "slow" not in request.keywords:
        monkeypatch.setattr(teaching, "TEACH", Path(teachings.__file__))
        monkeypatch.setattr(training, "PLAN", Path(trainings.__file__))


def add_model(folder: Path, name: str = MODEL) -> Path:
    """Weights that a training wrote, with their description."""
    path = folder / f"{name}.pth"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"weights of before")
    path.with_name(f"{path.stem}_run.json").write_text("{}")
    return path


@pytest.fixture
def client(tmp_path) -> Iterator[Client]:
    with ExitStack() as stack:
        add_model(tmp_path / "out")
        yield make_client(stack, tmp_path / "out")
        end_all(tmp_path / "out")


def ask(client: Client, corrections: list = THREE, model: str = MODEL, **more: Any) -> httpx.Response:
    body = {"model": model, "corrections": corrections} | more
    return client.http.post("/teachings", json=body)


def code(answer: httpx.Response) -> str:
    assert answer.status_code >= 400
    return answer.json()["error"]["code"]


def models(client: Client) -> dict[str, dict[str, Any]]:
    cards = web.get(f"{client.address}v1/models", headers=KEY).json()["data"]
    return {card["id"]: card for card in cards}


def taught(client: Client, *corrections: dict, **more: Any) -> dict[str, Any]:
    """The job of a teaching that has come to its end."""
    answer = ask(client, list(corrections) or THREE, **more)
    assert answer.status_code == 202, answer.text
    name = answer.json()["name"]
    wait_for(lambda: client.job(name)["state"] not in ("training", "saving"))
    return client.job(name)


def kept_corrections(client: Client, name: str = NAME) -> list[str]:
    lines = (client.folder / name / "corrections.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"][-1]["content"] for line in lines]


def test_corrections_become_a_version_that_is_kept_and_offered(client):
    original = client.folder / f"{MODEL}.pth"
    job = taught(client)
    assert (job["name"], job["state"], job["kind"], job["corrections"]) == (NAME, "taught", "teaching", 3)
    result = job["result"]
    assert (result["learned"], result["old"]) == ([2, 3], [1, 2])
    assert result["missed"][0]["now"] == "It <b>rained</b>." and result["missed"][0]["should"].startswith(
        "Nemi"
    )
    (lost,) = result["lost"]
    assert (lost["before"], lost["now"], lost["was_right"]) == (
        "Samo lives in Redcliff.",
        "Samo lives in Saltport.",
        True,
    )
    assert NAME not in models(client)  # nobody has decided yet
    assert client.post(f"/{NAME}/keep", {}).status_code == 202
    assert client.job(NAME)["state"] == "ready" and client.job(NAME)["result"] == result
    card = models(client)[NAME]
    assert card["taught_from"] == MODEL and not card["continues_text"]
    assert code(client.post(f"/{NAME}/keep", {})) == code(client.post(f"/{NAME}/discard", {})) == "decided"
    assert original.read_bytes() == b"weights of before"
    log = client.http.get(f"/jobs/{NAME}/log").text
    flags = json.loads(log.partition("flags: ")[2].splitlines()[0])
    assert flags == ["--model", str(original), "--save_dir", str(client.folder / NAME)]
    assert processes(client.folder) == []


def test_the_flags_are_those_of_the_command(monkeypatch, tmp_path):
    argv = ["--model", "a.pth", "--save_dir", "b", "--without_old_data"]
    monkeypatch.setattr(sys, "argv", ["teach.py", *argv])
    args = teach.parse_args()
    assert (args.model, args.save_dir, args.without_old_data) == ("a.pth", "b", True)


def test_more_corrections_make_a_new_version_and_one_that_is_discarded_can_be_found(client):
    """Those of before are taught, too, unless they were taken back; the version that was kept stays offered."""
    taught(client)
    client.post(f"/{NAME}/keep", {})
    more = [correction("Who are you?", "I am Lumen."), correction("where does kado live? ", "In Saltport.")]
    more += [correction("Bye", "Farewell, 你好 🙂.")]
    job = taught(client, *more, model=NAME, removed=[correction("Where does Vira live?", "-")])
    assert job["state"] == "taught" and job["corrections"] == 4
    kept = ["In Saltport.", "Nemi lives in Windmoor.", "I am Lumen.", "Farewell, 你好 🙂."]
    assert kept_corrections(client) == kept
    assert (client.folder / NAME / "2/full_sft_64.pth").exists() and NAME in models(client)
    assert client.post(f"/{NAME}/discard", {}).status_code == 202
    assert (client.folder / ".deleted" / f"{NAME} 2" / "report.json").exists()
    job = client.job(NAME)
    assert job["state"] == "ready" and NAME in models(client) and kept_corrections(client) == kept
    assert client.post(f"/{NAME}/delete", {}).status_code == 202
    assert NAME not in models(client) and (client.folder / ".deleted" / NAME / "1").is_dir()


def test_where_the_only_version_is_discarded_no_card_is_left(client):
    taught(client)
    client.post(f"/{NAME}/discard", {})
    assert client.overview()["jobs"] == [] and kept_corrections(client)
    assert taught(client)["state"] == "taught"  # once more


@pytest.mark.parametrize("when", ["asking", "training", "saving"])
def test_killed_at_any_moment_it_can_go_on(tmp_path, when):
    with ExitStack() as stack:
        environment = {"PLAN_SECONDS": "5" if when == "asking" else "0", "RECORD_SECONDS": "0.2"}
        add_model(tmp_path / "out")
        client = make_client(stack, tmp_path / "out", environment)
        assert ask(client).status_code == 202
        if when == "asking":
            assert client.job(NAME)["is_prepared"] is False
        else:
            wait_for(lambda: client.job(NAME).get("update", 0) > 1)
            assert client.job(NAME)["is_prepared"] is True
            assert code(ask(client)) == code(client.post(f"/{NAME}/start", {})) == "busy"
            assert client.post("/novel/delete", {}).status_code == 404  # no training wrote it
        if when == "saving":
            (client.folder / NAME / "until").write_text("0")
            wait_for(lambda: Jobs(client.folder).living()["group"])
            with open(client.folder / NAME / "job.log", "a") as log:
                log.write("SIGTERM: finishing this update, then saving\n")
            client.until("saving", name=NAME)
        group = wait_for(lambda: Jobs(client.folder).living()["group"])
        os.killpg(group, signal.SIGKILL)
        wait_for(lambda: Jobs(client.folder).living() is None)
        assert client.job(NAME)["state"] == ("stopped" if when == "saving" else "cut")
        (client.folder / NAME / "until").unlink(missing_ok=True)
        environment.update(PLAN_SECONDS="0")
        assert client.post(f"/{NAME}/start", {}).status_code == 202
        client.until("training", name=NAME)
        end_all(client.folder)


def test_stopped_and_gone_on_gives_the_same_weights(client):
    (client.folder / NAME).mkdir()
    (client.folder / NAME / "until").write_text("3")
    ask(client)
    wait_for(lambda: client.job(NAME).get("update") == 3)
    job = client.job(NAME)
    assert (job["updates"], job["stage"], job["stages"]) == (12, 0, 1) and job["is_own"]
    assert client.post(f"/{NAME}/stop", {}).status_code == 202
    client.until("stopped", name=NAME)
    assert code(client.post(f"/{NAME}/keep", {})) == "decided"
    (client.folder / NAME / "until").unlink()
    client.post(f"/{NAME}/start", {})
    client.until("taught", name=NAME)
    whole = add_model(client.folder, "other/full_sft_64")
    assert taught(client, model="other/full_sft_64")["state"] == "taught"
    weights = [(client.folder / name / "1/full_sft_64.pth").read_bytes() for name in (NAME, "other-taught")]
    assert weights[0] == weights[1] and whole.exists()


def test_a_server_that_is_started_again_shows_the_same(client, tmp_path):
    job = taught(client)
    with ExitStack() as stack:
        other = make_client(stack, client.folder)
        again = other.job(NAME)
        assert {**again, "age": 0} == {**job, "age": 0}
        assert other.post(f"/{NAME}/keep", {}).status_code == 202
        assert client.job(NAME)["state"] == "ready" and NAME in models(client)


def test_a_model_without_its_old_data_is_only_taught_if_that_is_accepted(client):
    """The line of scripts/teach.py is recognised."""
    said = "a.pth: the data of its run are not found, so nothing would keep it; or accept that with --without_old_data"
    assert error_of([f"error: {said}"])["code"] == "no_old_data"
    refused = correction("Who are you?", f"refuse {said}")
    job = taught(client, refused, *THREE)
    assert job["state"] == "failed" and job["error"]["code"] == "no_old_data"
    assert client.post(f"/{NAME}/start", {"without_old_data": True}).status_code == 202
    client.until("taught", name=NAME)
    assert taught(client, refused, *THREE, without_old_data=True)["state"] == "taught"


def test_the_reason_is_that_of_the_training_which_failed():
    lines = [
        "error: out/x cannot be written (No space left on device)",
        "error: the training ended with status 2; its own line above says why",
    ]
    assert error_of(lines)["code"] == "disk" and error_of(lines[1:])["code"] == "other"
    assert (
        error_of(["error: /a.pth: the model that was taught is gone; put it back"])["code"] == "original_gone"
    )


# --- what is refused


def test_which_models_cannot_be_taught(client, tmp_path):
    folder = client.folder
    assert ask(client, model="../novel/full_sft_64").status_code == 404
    assert ask(client, model="nothing").status_code == 404
    add_model(folder, "novel/pretrain_64")
    assert code(ask(client, model="novel/pretrain_64")) == "continues"
    (folder / "novel/full_sft_64_run.json").rename(folder / "novel/x")
    assert code(ask(client)) == "no_description"
    (folder / "novel/x").rename(folder / "novel/full_sft_64_run.json")
    outside, adapter, hugging_face = (
        add_model(tmp_path, "far/full_sft_64"),
        tmp_path / "lora",
        tmp_path / "hf",
    )
    hugging_face.mkdir()
    given = [(outside, [], "elsewhere"), (hugging_face, [], "elsewhere")]
    given.append((folder / f"{MODEL}.pth", [adapter], "adapter"))
    for path, parts, why in given:
        with ExitStack() as stack:
            offered = Models("given", path, lambda path: (path, path), folder, parts)
            other = make_client(stack, folder, models=offered)
            assert code(ask(other, model="given")) == why
    assert not (folder / NAME).exists()


def test_a_version_is_taught_again_from_its_original_which_must_be_there(client):
    taught(client)
    client.post(f"/{NAME}/keep", {})
    (client.folder / "novel").rename(client.folder / "moved")
    assert "taught_from" not in models(client)[NAME]  # it answers nevertheless
    assert code(ask(client, model=NAME)) == "original_gone"
    (client.folder / "moved").rename(client.folder / "novel")
    about = client.folder / NAME / "1/teach.json"
    about.write_text(json.dumps({"model": "/etc/passwd"}))
    assert code(ask(client, model=NAME)) == "original_gone"


def test_a_given_model_of_the_folder_is_taught_under_its_own_name(client):
    with ExitStack() as stack:
        path = client.folder / f"{MODEL}.pth"
        offered = Models("mine", path, lambda path: (path, path), client.folder)
        other = make_client(stack, client.folder, models=offered)
        assert taught(other, model="mine")["model"] == MODEL
        other.post(f"/{NAME}/keep", {})
        assert offered.originals == {NAME: "mine"}
        shutil.rmtree(client.folder / NAME / "1")
        assert other.post(f"/{NAME}/start", {}).status_code == 202
        other.until("ready", name=NAME)  # its number was kept before


def test_models_of_one_folder_have_folders_of_their_own(client):
    add_model(client.folder, "novel/full_sft_best_64")
    add_model(client.folder, "full_sft_32")
    names = {"novel/full_sft_best_64": "novel full_sft_best_64-taught", "full_sft_32": "full_sft_32-taught"}
    for model, name in names.items():
        assert taught(client, model=model)["name"] == name


def test_corrections_that_cannot_be_taught(client):
    kado = THREE[0]["messages"][0]["content"]
    answer = ask(client, [*THREE, correction(kado, "Kado lives here.")])
    assert code(answer) == "contradiction" and answer.json()["error"]["values"] == {"question": kado}
    after_hello = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "train": False})
    assert code(ask(client, THREE[:2])) == code(ask(client, [*THREE[:2], THREE[0]])) == "few_corrections"
    for wrong in (
        [*THREE, {"messages": [{"role": "user", "content": "x"}]}],
        [*THREE, {"messages": [{"role": "assistant", "content": "x"}] * 2}],
        [*THREE, {"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "x"}]}],
        [*THREE, {"messages": [1, 2]}],
        [*THREE, {"prompt": "a", "response": "b"}],
        [],
        [THREE[0]] * 1001,
    ):
        assert code(ask(client, wrong)) == "field"
    body = {"model": MODEL, "corrections": [*THREE, correction("x" * (5 << 20), "y")]}
    # a connection of its own, because the server closes it after a part of the body
    answer = web.post(f"{client.http.base_url}teachings", json=body, headers=KEY)
    assert answer.status_code == 413
    assert not (client.folder / NAME).exists()
    job = taught(client, *THREE, correction(kado, "Elsewhere.", *after_hello))  # another conversation
    assert job["corrections"] == 4


def test_half_a_character_is_no_accident(client):
    half = json.dumps({"model": MODEL, "corrections": [*THREE, correction("a", "\ud83d")]})
    answer = client.http.post("/teachings", content=half, headers={"Content-Type": "application/json"})
    assert answer.status_code in (202, 400)
    if answer.status_code == 202:
        client.until("taught", name=NAME)
        assert kept_corrections(client)[-1] == "?"


def test_five_hundred_corrections(client):
    many = [correction(f"What is {i} and {i}?", f"It is {2 * i}. " + "x" * 300) for i in range(500)]
    job = taught(client, *many)
    assert job["corrections"] == 500 and job["result"]["learned"] == [499, 500]


def test_one_at_a_time_with_trainings(client):
    client.planned("book")
    (client.folder / "book/until").write_text("2")
    client.post("/book/start", {})
    answer = ask(client)
    assert code(answer) == "busy" and answer.json()["error"]["values"] == {"name": "book"}
    assert not (client.folder / NAME).exists()
    client.post("/book/stop", {"now": True})
    wait_for(lambda: Jobs(client.folder).living() is None)
    (client.folder / NAME).mkdir()
    (client.folder / NAME / "until").write_text("1")
    assert ask(client).status_code == 202
    assert code(client.post("/book/start", {})) == "busy"
    add_model(client.folder, "other/full_sft_64")
    assert code(ask(client, model="other/full_sft_64")) == "busy"


def test_what_is_taught_is_neither_renamed_nor_overwritten_meanwhile(client):
    shutil.rmtree(client.folder / "novel")
    client.planned()
    client.post("/novel/start", {})
    client.until("ready")
    add_model(client.folder)
    (client.folder / NAME).mkdir()
    (client.folder / NAME / "until").write_text("1")
    ask(client)
    wait_for(lambda: client.job(NAME).get("update") == 1)
    assert code(client.post("/novel/rename", {"to": "b"})) == "used_model"
    assert code(client.post(f"/{NAME}/delete", {})) == "busy"
    client.post(f"/{NAME}/stop", {})
    client.until("stopped", name=NAME)
    assert code(client.post("/novel/delete", {})) == "used_model"
    assert code(client.plan(NAME)) == "exists"
    assert client.post(f"/{NAME}/delete", {}).status_code == 202
    assert client.post("/novel/rename", {"to": "b"}).status_code == 202


def test_the_disk_must_have_room(client, monkeypatch):
    monkeypatch.setattr(teaching, "disk_usage", lambda folder: SimpleNamespace(free=1 << 29))
    assert code(ask(client)) == "room"


def test_a_folder_from_elsewhere_is_not_continued_by_a_click(client, tmp_path):
    """The settings of an unfinished version may name any file; somebody who clicks has not read them."""
    (client.folder / NAME).mkdir()
    (client.folder / NAME / "until").write_text("1")
    ask(client)
    wait_for(lambda: client.job(NAME).get("update") == 1)
    client.post(f"/{NAME}/stop", {})
    client.until("stopped", name=NAME)
    place = client.folder / NAME / "1"
    about = json.loads((place / "teach.json").read_text())
    assert is_trained_here(place)
    (place / "teach.json").write_text(
        json.dumps(about | {"settings": {"log_file": str(tmp_path / "hacked")}})
    )
    assert not is_trained_here(place)
    assert code(client.post(f"/{NAME}/start", {})) == code(ask(client)) == "not_taught_here"
    (place / "teach.json").write_text(json.dumps(about))
    (client.folder / NAME / "job.json").write_text(
        json.dumps({"kind": "teaching", "model": "../../etc/passwd"})
    )
    assert code(client.post(f"/{NAME}/start", {})) == "original_gone"


def test_links_lead_nowhere(client, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (client.folder / NAME).symlink_to(elsewhere)
    assert code(ask(client)) == "exists" and list(elsewhere.iterdir()) == []
    (client.folder / NAME).unlink()
    (client.folder / NAME).mkdir()
    secret = tmp_path / "secret.jsonl"
    secret.write_text(json.dumps(correction("a", "secret")))
    (client.folder / NAME / "corrections.jsonl").symlink_to(secret)
    taught(client)
    assert "secret" not in kept_corrections(client) and "secret" in secret.read_text()
    shutil.move(client.folder / NAME / "1", elsewhere)
    (client.folder / NAME / "1").symlink_to(elsewhere / "1")
    assert client.overview()["jobs"] == []


def test_strange_folders_hide_no_other(client):
    taught(client)
    for name, content in (
        ("a", {"kept": "x"}),
        ("b", {"kept": 1, "model": 5}),
        ("c", {"kept": 10**30, "model": "x"}),
    ):
        (client.folder / name / "²").mkdir(parents=True)
        (client.folder / name / "job.json").write_text(json.dumps({"kind": "teaching"} | content))
    (client.folder / NAME / "1/report.json").write_text('{"asked": [5]}')
    states = {job["name"]: job["state"] for job in client.overview()["jobs"]}
    assert states == {NAME: "failed", "a": "cut", "b": "cut", "c": "cut"} and MODEL in models(client)


def test_who_may_not(client):
    content = json.dumps({"model": MODEL, "corrections": THREE})

    def status(path: str, content: str, **headers: str) -> int:
        sent = KEY | {"Content-Type": "application/json"} | headers
        return web.post(f"{client.address}api/train{path}", content=content, headers=sent).status_code

    for path in ("/teachings", f"/jobs/{NAME}/keep", f"/jobs/{NAME}/discard"):
        assert status(path, content, Authorization="") == 401
        assert status(path, content, Origin="http://evil.example") == 403
        assert status(path, content, **{"Content-Type": "text/plain"}) == 400
    assert status("/teachings", content[:-1] + ', "save_dir": "/tmp"}') == 400
    assert not (client.folder / NAME).exists()


@pytest.mark.slow  # a training and a teaching take half a minute
def test_a_real_teaching_that_is_killed_goes_on_and_its_version_is_offered(trained, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(trained, folder / "small")
    questions = ["Who are you?", "Where does Kado live?", "Where is the home of Samo?"]
    with ExitStack() as stack:
        client = make_client(stack, folder)
        three = [correction(question, "I am Lumen.") for question in questions]
        assert ask(client, three, "small/full_sft_32").json() == {"name": "small-taught"}
        wait_for(lambda: client.job("small-taught").get("update", 0) > 1, 200)
        os.killpg(Jobs(folder).group("small-taught"), signal.SIGKILL)
        wait_for(lambda: client.job("small-taught")["state"] == "cut")
        assert is_trained_here(folder / "small-taught/1")
        assert client.post("/small-taught/start", {}).status_code == 202
        wait_for(lambda: client.job("small-taught")["state"] not in ("training", "saving"), 300)
        job = client.job("small-taught")
        assert job["state"] == "taught", job
        assert job["result"]["learned"][1] == 3 and job["result"]["old"][1] > 0
        client.post("/small-taught/keep", {})
        assert models(client)["small-taught"]["taught_from"] == "small/full_sft_32"
        assert (folder / "small/full_sft_32.pth").read_bytes() == (trained / "full_sft_32.pth").read_bytes()
