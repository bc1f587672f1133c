"""What is packed, and what is refused with one line before anything is written."""

import json
import shlex
from pathlib import Path

import pytest

from common.errors import UserError
from common.files import lock_output
from tests.conftest import write_jsonl
from tests.stage_process import context
from tools.carry import session
from tools.carry.collect import Collection, collect, stages_of_script
from tools.carry.pack_file import open_pack
from trainer import train_pretrain


def plan(folder: Path, *commands: list[str]) -> Path:
    """A folder with a run.sh of these commands."""
    folder.mkdir(exist_ok=True)
    lines = [f'"$python" {shlex.join(map(str, words))} "$@"' for words in commands]
    (folder / "run.sh").write_text("set -e\n" + "\n".join(lines) + "\n")
    return folder


@pytest.fixture
def texts(tmp_path):
    """Files of data by name, the names are of all kinds."""
    names = ("a, b.jsonl", "b.jsonl", "书 1.jsonl", "deep/c.jsonl", "deep/d.jsonl")
    (tmp_path / "data/deep").mkdir(parents=True)
    return {name: write_jsonl(tmp_path / "data" / name, [{"text": name}]) for name in names}


def packed(folder: Path, **settings) -> tuple[dict, dict]:
    """Settings of a stage in a pack, and its files of data with what they were."""
    flags = {"save_dir": folder, "checkpoint_dir": folder / "checkpoints", "hidden_size": 32} | settings
    words = [f"--{name}={value}" for name, value in flags.items()]
    manifest, sources = collect(plan(folder, ["trainer/train_pretrain.py", *words]), with_data=True)
    return manifest.stages[0].settings, {name: str(sources[name]) for name in manifest.data}


def test_data_of_all_forms(tmp_path, texts):
    """A file, several, a pattern, folders with weights; in the order in which a run reads them."""
    folder = str(tmp_path / "data")
    settings, data = packed(tmp_path / "plan", data_path=f"{folder}/a, b.jsonl")
    assert settings["data_path"] == "data/0/a__b.jsonl" and data == {
        "data/0/a__b.jsonl": f"{folder}/a, b.jsonl"
    }
    settings, data = packed(tmp_path / "plan", data_path=f"{folder}/书 1.jsonl,{folder}/deep")
    names = ["data/0/0000_书_1.jsonl", "data/0/0001_c.jsonl", "data/0/0002_d.jsonl"]
    assert settings["data_path"] == ",".join(names) and list(data) == names
    settings, data = packed(tmp_path / "plan", data_path=f"{folder}/deep/*.jsonl:0.25,{folder}/b.jsonl:3")
    assert settings["data_path"] == "data/0:0.25,data/1/b.jsonl:3"
    assert list(data) == ["data/0/0000_c.jsonl", "data/0/0001_d.jsonl", "data/1/b.jsonl"]
    same = f"{folder}/b.jsonl"
    settings, data = packed(tmp_path / "plan", data_path=same, eval_data_path=same, sample_prompts="none")
    assert settings["data_path"] == settings["eval_data_path"] == "data/0/b.jsonl" and len(data) == 1
    assert settings["sample_prompts"] == "none"


def test_data_in_the_folder_of_the_runs_always_come_along(tmp_path, texts):
    """Such as a plan's exercises, which nobody has elsewhere."""
    folder = plan(tmp_path / "plan")
    own = write_jsonl(folder / "exercises.jsonl", [{"text": "x"}])
    words = [f"--save_dir={folder}", f"--checkpoint_dir={folder}", f"--data_path={texts['b.jsonl']},{own}"]
    manifest, _ = collect(plan(folder, ["trainer/train_pretrain.py", *words]), with_data=False)
    assert [file.packed for file in manifest.data.values()] == [False, True]


def test_settings_are_those_that_differ_and_name_no_place(tmp_path, texts):
    more = {
        "log_file": "/tmp/x.log",
        "stop_after": "1h",
        "from_resume": 1,
        "tracker": "wandb",
        "device": "cuda:1",
    }
    settings, _ = packed(
        tmp_path / "plan", data_path=texts["b.jsonl"], text_separator="--/--", epochs=3, **more
    )
    assert settings == {
        "data_path": "data/0/b.jsonl", "hidden_size": "32", "epochs": "3", "text_separator": "--/--",
        "from_weight": "none", "device": "cuda:1",
    }  # fmt: skip


def test_start_weights_from_elsewhere_come_along(tmp_path):
    """A file, or a folder of Hugging Face; weights in the folder keep their name."""
    model = tmp_path / "Qwen3-0.6B"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "more.py"):
        (model / name).write_text("{}")
    (tmp_path / "other.pth").touch()
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan/full_sft_32.pth").touch()
    collection = Collection(tmp_path / "plan")
    args = train_pretrain.Args(save_dir=str(tmp_path / "plan"), hidden_size=32)
    assert collection.add_weights(str(model), args) == "start/0/Qwen3-0.6B"
    assert collection.add_weights(str(tmp_path / "other.pth"), args) == "start/1/other.pth"
    assert collection.add_weights(str(tmp_path / "plan/full_sft_32.pth"), args) == "full_sft_32.pth"
    assert (
        collection.add_weights("full_sft", args) == "full_sft"
        and collection.add_weights("none", args) == "none"
    )
    own = ["config.json", "model.safetensors", "tokenizer.json"]
    expected = {f"start/0/Qwen3-0.6B/{name}": model / name for name in own}
    expected |= {
        "start/1/other.pth": tmp_path / "other.pth",
        "full_sft_32.pth": tmp_path / "plan/full_sft_32.pth",
    }
    assert collection.sources == expected


@pytest.mark.parametrize(
    ("script", "flags", "line"),
    [
        ("train_pretrain", {"save_dir": "/elsewhere"}, "writes to /elsewhere, not to"),
        ("train_grpo", {"reward": "mine.py:f"}, "'mine.py:f' names code, which is not carried"),
        ("train_agent", {"environment": "mine:Tools"}, "'mine:Tools' names code"),
        (
            "train_ppo",
            {"reward_model": "/models/judge"},
            "--reward_model '/models/judge' names a place or code",
        ),
        ("train_distillation", {"from_teacher_weight": "y.pth"}, "--from_teacher_weight y.pth: no such file"),
        ("train_pretrain", {"save_weight": "a,b"}, "'a,b_32.json"),
        ("train_none", {}, "this code has no stage train_none"),
        ("train_pretrain", {"no_such": 1}, "--no_such is unknown"),
        ("train_pretrain", {"data_path": "/no/such.jsonl"}, "no such file"),
        ("train_pretrain", {"epochs": "$EPOCHS"}, "has variables; write their values"),
    ],
)
def test_what_cannot_be_carried_is_one_line(tmp_path, texts, script, flags, line):
    folder, pack = tmp_path / "plan", tmp_path / "run.mmt"
    given = {
        "save_dir": folder,
        "data_path": texts["b.jsonl"],
        "hidden_size": 32,
        "from_weight": "none",
    } | flags
    plan(folder, [f"trainer/{script}.py", *(f"--{name}={value}" for name, value in given.items())])
    (folder / "a,b_32.json").touch()
    with pytest.raises(UserError) as caught:
        session.pack(folder, pack, with_data=False)
    assert line in str(caught.value) and "\n" not in str(caught.value) and not pack.exists()


def hold(folder: str, ready, end) -> None:
    lock_output("pretrain_32", save_dir=folder)
    ready.set()
    end.wait(60)


def test_a_run_that_is_being_trained_is_not_packed(tmp_path, texts):
    folder = plan(tmp_path / "plan", ["trainer/train_pretrain.py", f"--save_dir={tmp_path / 'plan'}",
                                      f"--data_path={texts['b.jsonl']}", "--hidden_size=32"])  # fmt: skip
    ready, end = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(folder), ready, end))
    process.start()
    assert ready.wait(60)
    with pytest.raises(UserError, match=r"pretrain_32 is being trained in .*; stop it first"):
        session.pack(folder, tmp_path / "run.mmt", with_data=False)
    end.set()
    process.join()
    session.pack(folder, tmp_path / "run.mmt", with_data=False)
    with open_pack(tmp_path / "run.mmt") as (archive, manifest):
        assert (
            sorted(archive.namelist()) == ["carry.json", "origin/run.sh"]
            or "origin/edits.diff" in manifest.files
        )
        assert not manifest.updates and json.loads(archive.read("carry.json"))["name"] == "plan"


def test_edits_of_a_shell_file_count(tmp_path):
    (tmp_path / "run.sh").write_text(
        '"$python" trainer/train_pretrain.py --data_path \'a b\' \\\n  --epochs 9 "$@"  # longer\n# "$python" trainer/x\n'
    )
    ((script, args),) = stages_of_script(tmp_path / "run.sh")
    assert (script, args.data_path, args.epochs) == ("train_pretrain", "a b", 9)
