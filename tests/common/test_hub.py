"""Paths on a hub become local ones: huggingface_hub against a hub on the loopback; ModelScope's are told how
to download."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from common.hub import local_path, shown_name
from dataset.files import expand_paths
from tests.conftest import ROOT
from tests.fake_hub import FRESH, Hub
from tests.stage_process import Faults, rank_variables, run

ROWS = b'{"text": "a"}\n' * 1000
NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def hub():
    model = {"config.json": b"{}", "tokenizer.json": b"{}", "README.md": b"x"}
    found = Hub(
        {
            "datasets/a/data": {"sft.jsonl": ROWS, "more/b.jsonl": ROWS, "note.md": b"x"},
            "datasets/a/parts": {
                f"d/{name}.jsonl": name.encode() for name in ("b", "c", "a", "deep/a", ".a")
            },
            "datasets/a/gated": {"sft.jsonl": ROWS},
            "models/a/m-0.6B": model | {"model.safetensors": b"w", "pytorch_model.bin": b"p"},
            "models/a/old": model | {"pytorch_model.bin": b"p", "full_sft_64.pth": b"f"},
        }
    )
    found.gated.add("datasets/a/gated")
    yield found
    found.close()


NO_PAUSES = "import time\ntime.sleep = lambda seconds: None\n"  # between attempts, of which there are five


def ask(hub, cache: Path, path: str, *flags: str, status: int = 0, script: str = "", **env: str):
    """A process that asks for a path, with what it prints; and the hub's requests. script: is run first."""
    hub.requests.clear()
    environment = hub.environment(cache) | env
    return run("tests.fake_hub", [path, *flags], Faults(script=FRESH + script), status=status, **environment)


def test_a_file_is_downloaded_once_and_used_offline(hub, tmp_path):
    path = "hf://datasets/a/data/sft.jsonl"
    command = [sys.executable, "-m", "tests.fake_hub", f"{path}:2,local.jsonl:1"]
    environment = hub.environment(tmp_path)
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    copy, weight = process.stdout.splitlines()[-1].removesuffix(",local.jsonl:1").rsplit(":", 1)
    assert (Path(copy).read_bytes(), weight, process.stderr) == (ROWS, "2", "")
    again = ask(hub, tmp_path, path)
    assert again.out == f"{path}: {copy}\n{copy}\n"
    assert "GET" not in [request[0] for request in hub.requests]
    for env in (OFFLINE, NOWHERE):
        assert ask(hub, tmp_path, path, **env).out.splitlines()[-1] == copy
        assert hub.requests == []
    silent = ask(hub, tmp_path, path, **rank_variables(1, 2, 29500))
    assert silent.out == f"{copy}\n"  # rank 0 says it for all


def test_a_model_is_its_folder(hub, tmp_path):
    for flags, files in (
        (["--tokenizer_only"], {"tokenizer.json"}),
        ([], {"config.json", "tokenizer.json", "model.safetensors"}),
    ):
        folder = Path(ask(hub, tmp_path, "hf://a/m-0.6B", *flags).out.splitlines()[-1])
        assert {file.name for file in folder.iterdir()} == files
    assert shown_name(folder) == "m-0.6B"
    folder = Path(ask(hub, tmp_path, "hf://a/old").out.splitlines()[-1])
    assert (folder / "pytorch_model.bin").read_bytes() == b"p"
    assert not (folder / "full_sft_64.pth").exists()
    file = Path(ask(hub, tmp_path, "hf://a/old/full_sft_64.pth").out.splitlines()[-1])
    assert file.read_bytes() == b"f"


@pytest.mark.parametrize(
    ("path", "files"), [("a/data/*.jsonl", ["more/b.jsonl", "sft.jsonl"]), ("a/data/more", ["b.jsonl"])]
)
def test_patterns_and_folders_of_a_dataset(hub, tmp_path, path, files):
    """A pattern goes on to the data path, which expands it; fnmatch's * is also /, as in the library."""
    asked = f"hf://datasets/{path}"
    copy = Path(ask(hub, tmp_path, asked).out.splitlines()[-1])
    folder = copy.parent if "*" in path else copy
    found = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    assert found == files


def test_the_first_files_of_a_pattern_are_downloaded_and_no_others(hub, tmp_path):
    """By name, as glob has it. What else is in the cache changes nothing, nor does a missing network."""
    path = "hf://datasets/a/parts/d/*.jsonl[:2]"
    done = ask(hub, tmp_path, f"{path}:3")
    typed = done.out.splitlines()[-1].removesuffix(":3")
    copy = Path(typed).parent
    assert sorted(file.name for file in copy.iterdir()) == ["a.jsonl", "b.jsonl"]
    assert expand_paths(typed) == [f"{copy}/a.jsonl", f"{copy}/b.jsonl"] and done.err == ""
    assert ask(hub, tmp_path, path.replace("2", "3")).out.splitlines()[-1] == f"{copy}/*.jsonl[:3]"
    assert sorted(file.name for file in copy.iterdir()) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    for env in ({}, OFFLINE, NOWHERE):
        assert ask(hub, tmp_path, path, **env).out.splitlines()[-1] == typed
    assert expand_paths(typed) == [f"{copy}/a.jsonl", f"{copy}/b.jsonl"]


@pytest.mark.parametrize(
    ("path", "env", "message"),
    [
        ("datasets/a/parts/d/*.jsonl[:4]", {}, "the pattern fits 3; "),
        ("datasets/a/parts/d/b.jsonl[:1]", {}, "must follow a pattern"),
        ("datasets/a/parts/d[:1]", {}, "must follow a pattern"),
        ("datasets/a/parts/**/*.jsonl[:1]", {}, "name the folder"),
        ("datasets/a/parts/d/*.jsonl[:1]", NOWHERE, "http://127.0.0.1:9 cannot be reached ("),
        ("datasets/a/none/*.jsonl[:1]", {}, "check the name"),
        ("datasets/a/data/no.jsonl", {}, "check the name"),
        ("datasets/a/data/nothing", {}, "check the name"),
        ("datasets/a/none/sft.jsonl", {}, "check the name"),
        ("datasets/a/gated/sft.jsonl", {}, "gated"),
        ("datasets/a/data@v9/sft.jsonl", {}, "check the name"),
        ("a/m-0.6B", NOWHERE, "http://127.0.0.1:9 cannot be reached ("),
        ("a/m-0.6B", OFFLINE, "does not hold it"),
    ],
)
def test_what_cannot_be_had_is_one_line(hub, tmp_path, path, env, message):
    done = ask(hub, tmp_path, f"hf://{path}", status=2, **env)
    assert done.out == ""
    assert done.err.startswith(f"error: hf://{path}: ") and message in done.err
    assert done.err.count("\n") == 1


def test_an_interrupted_download_leaves_no_half_file(hub, tmp_path):
    hub.cut = 5000
    done = ask(hub, tmp_path, "hf://datasets/a/data/sft.jsonl", status=2, script=NO_PAUSES)
    hub.cut = None
    assert "start again" in done.err.splitlines()[-1]
    assert [file for file in tmp_path.rglob("sft.jsonl") if file.exists()] == []


def test_paths_without_a_download():
    assert local_path("a.jsonl:1, b.jsonl:2") == "a.jsonl:1, b.jsonl:2"
    for wrong in ("hf://a", "hf://datasets/a", "hf://", "hf://datasets/datasets/a/b"):
        with pytest.raises(UserError, match="write hf://datasets/OWNER/NAME/FILE for data"):
            local_path(wrong)
    with pytest.raises(UserError, match="modelscope download --dataset"):
        local_path("modelscope://datasets/gongjy/data/sft.jsonl")
