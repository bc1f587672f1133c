"""A server of several models: the weights of a folder by name, loaded on demand."""

import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.prompts import document_tokens
from scripts.serve.models import Models
from tests.scripts.serve.servers import serving, user, wait_for
from trainer.weights.files import save_weights
from trainer.weights.for_tools import load_path
from trainer.weights.paths import weight_path

SHAPES = {"pretrain": (32, False), "full_sft": (48, False), "dpo": (32, True), "grpo": (32, False)}
GOOD = {"pretrain_32", "full_sft_48", "dpo_32_moe", "grpo_32"}


def write_weights(folder: Path, name: str, seed: int, **shape: Any) -> Path:
    """Weights so large that answers differ from prompt to prompt, as a training writes them."""
    torch.manual_seed(seed)
    config = MiniMindConfig(**shape, num_hidden_layers=1, tie_word_embeddings=False)
    model = MiniMindForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return save_weights(model, weight_path(folder, name, config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Weights of several stages and shapes, a file that is none, one that is damaged."""
    folder = tmp_path_factory.mktemp("weights") / "out"
    folder.mkdir()
    for seed, (name, (width, use_moe)) in enumerate(SHAPES.items()):
        write_weights(folder, name, seed, hidden_size=width, use_moe=use_moe)
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


# --- weights that are written anew


def greedy(path: Path, prompts: list[str], count: int) -> list[str]:
    """The continuations of texts by the weights that a file has now, by transformers."""
    model, tokenizer = load_path(path)
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    found = []
    for prompt in prompts:
        tokens = document_tokens(tokenizer, prompt)
        written = model.generate(torch.tensor([tokens]), **options)[0, len(tokens) :]
        found.append(tokenizer.decode(written, skip_special_tokens=True))
    return found


def continued(server: SimpleNamespace, prompts: str | list[str], count: int = 8) -> list[str]:
    fields = {"temperature": 0, "max_tokens": count, "prompt": prompts}
    answer = server.client.completions.create(model="trained_32", **fields)
    return [choice.text for choice in answer.choices]


@pytest.fixture
def training(tmp_path) -> SimpleNamespace:
    """A file of weights, `write` for the next ones, and `greedy` of a prompt by those that it has."""
    seeds = count()

    def write() -> Path:
        return write_weights(tmp_path, "trained", next(seeds), hidden_size=32)

    path = write()
    by_now = lambda prompt, length=8: greedy(path, [prompt], length)[0]  # noqa: E731
    return SimpleNamespace(path=path, folder=tmp_path, write=write, greedy=by_now)


def hold(server: SimpleNamespace, path: Path) -> threading.Event:
    """Let the model in a file write no further token until the event is set."""
    (model,) = [model for weights, model in server.decoding.loaded.items() if weights.path == path]
    go_on, step = threading.Event(), model.decoder.step

    def held() -> Any:
        return step() if go_on.wait(0.01) else []

    model.decoder.step = held
    return go_on


@pytest.mark.parametrize("is_given", [True, False])
def test_weights_that_were_written_anew_answer_from_then_on(training, is_given):
    name, given = ("trained_32", training.path) if is_given else (None, None)
    with serving(Models(name, given, load_path, training.folder)) as server:
        seen = set()
        for _ in range(3):
            assert continued(server, "The river") == [training.greedy("The river")]
            seen.add(training.greedy("The river"))
            training.write()
        assert len(seen) == 3
        continued(server, "x")
        assert len(server.decoding.loaded) == 1  # nothing is kept of the earlier ones


def test_weights_of_the_same_size_and_time_are_told_apart(training):
    with serving(Models(None, None, load_path, training.folder)) as server:
        before, stat = continued(server, "The river"), training.path.stat()
        training.write()
        os.utime(training.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert training.path.stat().st_size == stat.st_size
        assert before != continued(server, "The river") == [training.greedy("The river")]


@pytest.mark.parametrize("max_models", [1, 4])
def test_answers_end_with_the_weights_with_which_their_request_began(training, max_models):
    """Also those that had no place yet; one that only waits is answered by the new ones if it must, or by
    those that were there when it came."""
    texts = [f"Town {number}" for number in range(7)]
    old = greedy(training.path, texts, 20)
    models = Models("trained_32", training.path, load_path, training.folder)
    with serving(models, slots=4, max_models=max_models) as server, ThreadPoolExecutor(3) as pool:
        go_on = hold(server, training.path)
        begun = pool.submit(continued, server, texts, 20)
        wait_for(lambda: server.decoding.health()["writing"] >= 3)
        training.write()
        new = pool.submit(continued, server, "Town 0", 20)
        wait_for(lambda: len(server.decoding.unfinished) == 2)
        if max_models > 1:  # the new ones answer beside the old ones
            assert new.result() == [training.greedy("Town 0", 20)] and not begun.done()
        go_on.set()
        assert begun.result() == old
        assert new.result() == [training.greedy("Town 0", 20)] != old[:1]
        wait_for(lambda: len(server.decoding.loaded) == 1)


def test_weights_that_are_gone_go_on_answering_until_there_are_new_ones(training):
    models = Models("trained_32", training.path, load_path, training.folder)
    with serving(models) as server:
        old = continued(server, "The river")
        training.path.unlink()
        assert continued(server, "The river") == old
        training.write()
        assert continued(server, "The river") == [training.greedy("The river")] != old


def test_damaged_new_weights_are_an_error_until_they_are_written_again(training):
    with serving(Models(None, None, load_path, training.folder)) as server:
        continued(server, "The river")
        training.path.write_bytes(b"PK")
        with pytest.raises(openai.InternalServerError) as error:
            continued(server, "The river")
        assert error.value.code == "model_not_loadable"
        training.write()
        assert continued(server, "The river") == [training.greedy("The river")]


def test_weights_that_change_while_they_are_loaded_are_loaded_again(training):
    """Whether the first attempt read the old ones, or failed at half of each."""
    for fails in (False, True):
        attempts = []

        def load(path: Path, fails: bool = fails, attempts: list = attempts) -> tuple[Any, Any]:
            loaded = load_path(path)
            attempts.append(path)
            if len(attempts) == 1:
                training.write()
                if fails:
                    raise ValueError("half of each")
            return loaded

        with serving(Models(None, None, load, training.folder)) as server:
            assert continued(server, "The river") == [training.greedy("The river")] and len(attempts) == 2


def test_an_adapter_and_the_files_of_a_folder_are_part_of_the_model(tmp_path):
    folder, adapter = tmp_path / "model_hf", tmp_path / "lora"
    for place in (folder, adapter):
        place.mkdir()
        (place / "weights").write_text("old")
    models = Models("given", folder, load_path, None, [adapter])
    seen = [models.version(folder)]
    for place in (adapter, folder):
        (place / "new").write_text("new")
        os.replace(place / "new", place / "weights")
        seen.append(models.version(folder))
        assert models.version(folder) == seen[-1]
    assert len(set(seen)) == 3 and None not in seen
    assert models.version(tmp_path / "absent") is None
