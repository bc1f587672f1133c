"""A server of several models: the weights of a folder by name, loaded on demand."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from fastapi.testclient import TestClient

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.serve.api import create_app
from scripts.serve.models import Settings
from tests.conftest import ROOT
from tests.scripts.serve.test_api import serving, user, wait_for
from tests.stage_process import run
from trainer.run.paths import weight_path
from trainer.weights.files import save_weights
from trainer.weights.for_tools import load_path

SHAPES = {"pretrain": (32, False), "full_sft": (48, False), "dpo": (32, True), "grpo": (32, False)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Weights of several stages and shapes, a file that is none, one that is damaged, and a link out of the
    folder."""
    folder = tmp_path_factory.mktemp("weights") / "out"
    folder.mkdir()
    for seed, (name, (width, use_moe)) in enumerate(SHAPES.items()):
        torch.manual_seed(seed)
        config = MiniMindConfig(
            hidden_size=width, num_hidden_layers=1, use_moe=use_moe, tie_word_embeddings=False
        )
        model = MiniMindForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.4)
        save_weights(model, weight_path(folder, name, config))
    (folder / "other.pth").write_bytes(b"")
    (folder / "damaged_32.pth").write_bytes(b"PK")
    outside = folder.parent / "outside_32.pth"
    shutil.copy(folder / "pretrain_32.pth", outside)
    (folder / "linked_32.pth").symlink_to(outside)
    (folder / "itself_32.pth").symlink_to(folder / "itself_32.pth")
    return folder


NAMES = {"pretrain_32", "full_sft_48", "dpo_32_moe", "grpo_32", "damaged_32"}


@pytest.fixture
def server(folder):
    path = folder / "full_sft_48.pth"
    settings = Settings("full_sft_48", 4, 64, 20, save_dir=folder, path=path, load=load_path, max_models=2)
    with serving(*load_path(path), settings) as server:
        yield server


def ask(server: SimpleNamespace, name: str | None, **fields: Any) -> str:
    fields = {"temperature": 0, "max_tokens": 8} | fields
    answer = server.client.chat.completions.create(model=name, messages=user("hello"), **fields)
    assert answer.model == (name or server.model.name)
    return answer.choices[0].message.content


def test_all_weights_of_the_folder_are_offered_and_loaded_on_demand(server, folder):
    listed = server.client.models.list().data
    assert {model.id for model in listed} == NAMES
    assert (listed[0].id, listed[0].loaded) == ("full_sft_48", True)
    assert not any(model.loaded or hasattr(model, "sampling") for model in listed[1:])
    assert server.client.models.retrieve("dpo_32_moe").id == "dpo_32_moe"
    texts = {name: ask(server, name) for name in sorted(NAMES - {"damaged_32"})}
    assert len(set(texts.values())) == len(texts)
    assert len(server.models.loaded) == 2 and server.models.first.name in server.models.loaded
    assert {name: ask(server, name) for name in reversed(texts)} == texts
    with serving(*load_path(folder / "grpo_32.pth"), Settings("grpo_32", 4, 64, 20)) as other:
        assert ask(other, "grpo_32") == texts["grpo_32"]
        assert [model.id for model in other.client.models.list()] == ["grpo_32"]


def test_two_models_answer_at_the_same_time_and_a_third_waits_for_one_that_is_idle(server):
    loaded = server.models.loaded
    alone = {name: ask(server, name, max_tokens=20) for name in ("full_sft_48", "pretrain_32")}
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda name: ask(server, name, max_tokens=20), [*alone] * 4))
    assert together == [*alone.values()] * 4
    gate = threading.Event()
    second = loaded["pretrain_32"]
    add = second.decoder.add
    second.decoder.add = lambda *args: gate.wait(30) and add(*args)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, "pretrain_32")
        wait_for(lambda: second.busy)
        assert ask(server, "full_sft_48", max_tokens=20) == alone["full_sft_48"]
        with pytest.raises(openai.InternalServerError) as error:
            ask(server, "grpo_32")
        assert error.value.status_code == 503 and error.value.code == "models_busy"
        gate.set()
        assert answer.result()
    wait_for(lambda: not second.busy)
    assert ask(server, "grpo_32") and set(loaded) == {"full_sft_48", "grpo_32"}
    wait_for(lambda: not second.scheduler.thread.is_alive())


def test_names_that_no_file_of_the_folder_has_are_refused(server, folder):
    names = ["linked_32", "../outside_32", "outside_32", "/etc/passwd", f"{folder.parent}/outside_32"]
    for name in [*names, "x" * 250, "", "\0"]:
        with pytest.raises(openai.NotFoundError) as error:
            ask(server, name)
        assert error.value.code == "model_not_found" and "GET /v1/models" in str(error.value)
    with pytest.raises(openai.NotFoundError):
        server.client.get("/models/..%2foutside_32", cast_to=object)


def test_what_is_refused_anyway_does_not_wait_for_a_model_to_be_loaded(server, monkeypatch):
    """Also while one is being loaded."""
    gate, loads = threading.Event(), threading.Event()

    def slow(path: Path) -> Any:
        loads.set()
        assert gate.wait(60)
        return load_path(path)

    monkeypatch.setattr(server.models, "settings", replace(server.models.settings, load=slow))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, "pretrain_32")
        try:
            assert loads.wait(30)
            with pytest.raises(openai.BadRequestError):
                ask(server, "pretrain_32", timeout=20, extra_body={"n": 5})
            for prompt, told in (([[1] * 9999], "leaves no room"), ([-1], "token numbers")):
                with pytest.raises(openai.BadRequestError, match=told):
                    server.client.completions.create(model="dpo_32_moe", prompt=prompt, timeout=5)
            with pytest.raises(openai.NotFoundError):
                ask(server, "none_32", timeout=20)
            assert ask(server, None, timeout=20) and not answer.done()
        finally:
            gate.set()
        assert answer.result()
    wait_for(lambda: not server.models.loaded["pretrain_32"].busy)
    assert ask(server, "dpo_32_moe")


def test_damaged_weights_are_one_line_and_nothing_else_stops(server, capfd):
    """Not even the model that would have made room for it."""
    ask(server, "pretrain_32")
    with pytest.raises(openai.InternalServerError) as error:
        ask(server, "damaged_32")
    assert "pretrain_32" in server.models.loaded
    assert error.value.status_code == 500 and error.value.code == "model_not_loadable"
    assert "damaged_32" in capfd.readouterr().err and ask(server, None)


@pytest.mark.parametrize(("limit", "others"), [(4, NAMES - {"full_sft_48"}), (1, set())])
def test_the_name_of_the_first_model_and_one_model_alone(folder, limit, others):
    path = folder / "full_sft_48.pth"
    settings = Settings("mine", 4, 64, 20, save_dir=folder, path=path, load=load_path, max_models=limit)
    with TestClient(create_app(*load_path(path), settings)) as client:
        listed = client.get("/v1/models").json()["data"]
        assert {model["id"] for model in listed} == {"mine"} | others and listed[0]["id"] == "mine"
        body = {"model": "pretrain_32", "messages": user("hello")}
        status = client.post("/v1/chat/completions", json=body).status_code
        assert status == (200 if others else 404)


THREADS = """
import os, sys, threading
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(3)
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.serve.api import create_app
from scripts.serve.models import Settings, in_own_thread
from dataset.token_cache import load_tokenizer

def count():
    return len(os.listdir("/proc/self/task"))

def load():
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=256, num_hidden_layers=2)).float()
    print("here", torch.rand(10**6).exp().sum() > 0, count())
    return model

begin = count()  # the main thread
model = in_own_thread(load)
app = create_app(model, load_tokenizer({root!r} + "/model"), Settings(slots=64, context=4096))
print("left", count() - begin, threading.active_count() - 1)
os._exit(0)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the threads are counted in Linux's /proc")
def test_no_threads_of_torch_are_left_beside_those_of_the_decoder(tmp_path):
    """Two teams of them would sleep between operators; the load had some, as had the cache, which is
    filled."""
    script = tmp_path / "threads.py"
    script.write_text(THREADS.format(root=str(ROOT)), encoding="utf-8")
    here, left = run(str(script), []).out.strip().splitlines()[-2:]
    assert here.startswith("here tensor(True)") and int(here.split()[-1]) >= 4
    assert left == "left 0 0"
