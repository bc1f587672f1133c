"""A server of several models: the weights of a folder by name, loaded on demand."""

import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.serve.models import Models
from tests.scripts.serve.servers import serving, user, wait_for
from trainer.weights.files import save_weights
from trainer.weights.for_tools import load_path
from trainer.weights.paths import weight_path

SHAPES = {"pretrain": (32, False), "full_sft": (48, False), "dpo": (32, True), "grpo": (32, False)}
GOOD = {"pretrain_32", "full_sft_48", "dpo_32_moe", "grpo_32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Weights of several stages and shapes, a file that is none, one that is damaged."""
    folder = tmp_path_factory.mktemp("weights") / "out"
    folder.mkdir()
    for seed, (name, (width, use_moe)) in enumerate(SHAPES.items()):
        torch.manual_seed(seed)
        shape = {"hidden_size": width, "num_hidden_layers": 1, "use_moe": use_moe}
        config = MiniMindConfig(**shape, tie_word_embeddings=False)
        model = MiniMindForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.4)
        save_weights(model, weight_path(folder, name, config))
    (folder / "other.pth").write_bytes(b"")
    (folder / "damaged_32.pth").write_bytes(b"PK")
    return folder


@pytest.fixture
def server(folder) -> Iterator[SimpleNamespace]:
    models = Models("full_sft_48", folder / "full_sft_48.pth", load_path, folder)
    with serving(models, max_new_tokens=20, max_models=2) as server:
        yield server


def ask(server: SimpleNamespace, name: Any, **fields: Any) -> str:
    fields = {"temperature": 0, "max_tokens": 8} | fields
    answer = server.client.chat.completions.create(model=name, messages=user("hello"), **fields)
    assert answer.model == (name or "full_sft_48")
    return answer.choices[0].message.content


def loaded(server: SimpleNamespace) -> list[str]:
    return [weights.path.stem for weights in server.decoding.loaded]


def test_all_weights_of_the_folder_are_offered_and_the_last_used_are_in_memory(server):
    listed = server.client.models.list().data
    assert {model.id for model in listed} == GOOD | {"damaged_32"}
    assert (listed[0].id, listed[0].loaded) == ("full_sft_48", True)
    assert not any(model.loaded or hasattr(model, "sampling") for model in listed[1:])
    texts = {name: ask(server, name) for name in sorted(GOOD)}
    assert len(set(texts.values())) == 4 and loaded(server) == ["grpo_32", "pretrain_32"]
    assert {name: ask(server, name) for name in reversed(texts)} == texts
    assert ask(server, None) == texts["full_sft_48"]


def test_models_answer_at_the_same_time_and_one_that_finds_no_room_waits(server):
    alone = {name: ask(server, name, max_tokens=20) for name in sorted(GOOD)}
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda name: ask(server, name, max_tokens=20), [*alone] * 6))
    assert together == [*alone.values()] * 6 and len(loaded(server)) == 2


def test_a_model_gets_room_beside_others_that_are_always_busy(server):
    """After at most one answer of each: the one that was loaded first begins no other until it has left."""
    is_over, answers = threading.Event(), Counter[str]()

    def keep_busy(name: str) -> None:
        while not is_over.is_set():
            ask(server, name, max_tokens=20)
            answers[name] += 1

    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(keep_busy, name) for name in ["full_sft_48", "pretrain_32"] * 4]
        wait_for(lambda: len(answers) == 2)
        for name in ("grpo_32", "dpo_32_moe", "grpo_32"):
            assert ask(server, name)
        is_over.set()
        for each in busy:
            each.result()


def test_a_model_that_was_deleted_is_not_found(server, folder):
    path = folder / "gone_32.pth"
    shutil.copyfile(folder / "grpo_32.pth", path)
    assert "gone_32" in {model.id for model in server.client.models.list().data}
    path.unlink()
    with pytest.raises(openai.NotFoundError):
        ask(server, "gone_32")
    assert ask(server, None)


def test_a_step_that_fails_ends_the_answers_of_its_model_alone(server, monkeypatch):
    def failing() -> None:
        raise RuntimeError("a broken model")

    ask(server, "pretrain_32")
    (model,) = [model for each, model in server.decoding.loaded.items() if each.path.stem == "pretrain_32"]
    monkeypatch.setattr(model.decoder, "step", failing)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask, server, None, max_tokens=20)
        with pytest.raises(openai.InternalServerError, match="a broken model"):
            ask(server, "pretrain_32")
        assert other.result()
    wait_for(lambda: not model.busy)
    assert ask(server, "grpo_32")


def test_names_that_no_file_of_the_folder_has_are_refused(server, folder):
    names = ["../outside_32", "other", "/etc/passwd", f"{folder}/grpo_32", "x" * 250, "", "\0"]
    for name in names:
        with pytest.raises(openai.NotFoundError) as error:
            ask(server, name)
        assert error.value.code == "model_not_found" and "GET /v1/models" in str(error.value)
    with pytest.raises(openai.NotFoundError):
        server.client.get("/models/..%2foutside_32", cast_to=object)


def test_damaged_weights_are_one_line_and_nothing_else_stops(server, capfd):
    with pytest.raises(openai.InternalServerError) as error:
        ask(server, "damaged_32")
    assert error.value.status_code == 500 and error.value.code == "model_not_loadable"
    assert "the model damaged_32 cannot be loaded: " in capfd.readouterr().err and ask(server, None)


def test_cards_say_which_weights_were_pretrained_only(server, folder):
    """By the stage that the file beside them names, else by their own name."""
    about = folder / "grpo_32.json"
    about.write_text('{"stage": "train_pretrain.py"}')
    continues = lambda: {model.id: model.continues_text for model in server.client.models.list().data}  # noqa: E731
    assert {name for name, value in continues().items() if value} == {"pretrain_32", "grpo_32"}
    about.write_text("[]")
    assert {name for name, value in continues().items() if value} == {"pretrain_32"}
    about.unlink()


def test_weights_in_folders_are_offered_and_without_a_given_model_the_newest_answers(tmp_path, folder):
    """Checkpoints and hidden folders hold none to chat with."""
    models = Models(None, None, load_path, tmp_path)
    with serving(models, max_new_tokens=20) as server:
        assert server.client.models.list().data == []
        with pytest.raises(openai.NotFoundError, match="There is no model yet"):
            ask(server, "minimind")
        for place in ("old", "new", "checkpoints"):
            (tmp_path / place).mkdir()
            shutil.copyfile(folder / "grpo_32.pth", tmp_path / place / "grpo_32.pth")
        shutil.copyfile(folder / "full_sft_48.pth", tmp_path / "full_sft_48.pth")
        os.utime(tmp_path / "old/grpo_32.pth", (1, 1))
        os.utime(tmp_path / "full_sft_48.pth", (2, 2))
        names = [model.id for model in server.client.models.list().data]
        assert names == ["new/grpo_32", "full_sft_48", "old/grpo_32"]
        assert ask(server, "old/grpo_32") == ask(server, "new/grpo_32")
        answer = server.client.chat.completions.create(model="minimind", messages=user("hello"), max_tokens=4)
        assert answer.model == "new/grpo_32"


@pytest.mark.parametrize("others", [True, False])
def test_the_name_of_the_first_model_and_one_model_alone(folder, others):
    models = Models("mine", folder / "full_sft_48.pth", load_path, folder if others else None)
    names = GOOD - {"full_sft_48"} | {"damaged_32"}
    assert {*models.paths()} == {"mine"} | (names if others else set())
    assert next(iter(models.paths())) == "mine" and models.find("minimind-3")[0] == "mine"
