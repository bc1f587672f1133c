"""Packs as a stranger builds them, or a bad disk: one line, and nothing is written outside the folder."""

import hashlib
import json
import os
import random
import stat
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from common.errors import UserError
from scripts import carry
from tests.stage_process import run
from tools.carry import pack_file, session
from tools.carry.manifest import MANIFEST
from tools.carry.pack_file import before_path, open_pack, unpack, write_pack

STAGE = {"script": "train_pretrain", "settings": {"data_path": "data/0/text.jsonl", "hidden_size": "32"}}
TEXT = b'{"text": "under the stone"}\n' * 40


def entry(content: bytes) -> dict:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def manifest(**changes) -> dict:
    """A manifest that is right, with changes."""
    files = {"pretrain_32.pth": entry(b"weights"), "tokenizer/0/tokenizer.json": entry(b"{}")}
    data = {"data/0/text.jsonl": entry(TEXT) | {"packed": True}}
    right = {"format": 1, "id": "0" * 32, "name": "plan", "written": "now", "code": "1", "versions": {}}
    right |= {"stages": [STAGE], "updates": {"pretrain_32": 4}, "files": files, "data": data}
    return right | changes


CONTENT = {"pretrain_32.pth": b"weights", "tokenizer/0/tokenizer.json": b"{}", "data/0/text.jsonl": TEXT}


def build(path: Path, content=CONTENT, about=None, modes: dict[str, int] | None = None) -> Path:
    """A pack, whatever it holds."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in content.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (modes or {}).get(name, 0) << 16
            archive.writestr(info, value)
        archive.writestr(
            MANIFEST, about if isinstance(about, (str, bytes)) else json.dumps(about or manifest())
        )
    return path


def refused(path: Path, folder: Path) -> str:
    """The line with which a pack is refused; nothing is written beside it."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as caught:
        session.go(path, folder / "to", None, None)
    assert sorted(folder.rglob("*")) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pack_holds_what_was_packed(tmp_path):
    build(tmp_path / "run.mmt")
    with open_pack(tmp_path / "run.mmt") as (archive, about):
        unpack(archive, about, tmp_path / "to")
    for name, value in CONTENT.items():
        assert (tmp_path / "to" / name).read_bytes() == value
        assert stat.S_IMODE((tmp_path / "to" / name).stat().st_mode) & 0o111 == 0


@pytest.mark.parametrize(
    "name",
    ["../out.pth", "/tmp/out.pth", "a/../../out.pth", "./a.pth", "a//b.pth", "a\\..\\b.pth", ".plan.key", "C:a.pth",
     "a/.b.json", "a.py", "run.sh", "a\nb.pth", "a.pth/", "", "a/b/c/d/e.pth", "x" * 300 + ".pth", "\ud800.pth",
     "trainer/loop.py", "origin/x.sh", "carry.json", "a\u202eb.pth"],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    files = {name: entry(b"x")}
    said = refused(build(tmp_path / "run.mmt", {}, manifest(files=files, data={})), tmp_path)
    assert "is not a" in said or "carry.json" in said
    with zipfile.ZipFile(tmp_path / "run.mmt") as archive:
        assert archive.namelist() == [MANIFEST]


@pytest.mark.parametrize("name", ["../out.pth", "/tmp/out.pth", "pretrain_32.pth/", "..", "b.pth"])
def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path, name):
    refused(build(tmp_path / "run.mmt", CONTENT | {name: b"x"}), tmp_path)


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFBLK, stat.S_IFDIR])
def test_links_and_devices_are_refused(tmp_path, kind):
    said = refused(build(tmp_path / "run.mmt", modes={"pretrain_32.pth": kind | 0o777}), tmp_path)
    assert "'pretrain_32.pth' is not a plain file" in said


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"format": 2}, "format"),
        ({"more": 1}, "more"),
        ({"name": "../x"}, "not a plain name"),
        ({"name": ""}, "not a plain name"),
        ({"id": "x"}, "id"),
        ({"stages": []}, "stages"),
        ({"stages": [STAGE | {"script": "../../x"}]}, "script"),
        ({"stages": [STAGE | {"script": "train_none"}]}, "this code has no stage train_none"),
        ({"files": {"pretrain_32.pth": {"bytes": -1, "sha256": "0" * 64}}}, "bytes"),
        ({"files": {"pretrain_32.pth": {"bytes": 1, "sha256": "0"}}}, "sha256"),
        ({"data": {"data/x.jsonl": entry(TEXT) | {"packed": True}}}, "is not the name of a file of the data"),
        ({"data": {"data/0/..": entry(TEXT) | {"packed": True}}}, "not a plain name"),
        ({"files": {"A.pth": entry(b"x"), "a.pth": entry(b"x")}}, "two of its files have one name"),
        ({"updates": {"pretrain_32": "4"}}, "updates"),
    ],
)  # fmt: skip
def test_a_manifest_that_says_something_else_is_refused(tmp_path, changes, line):
    assert line in refused(build(tmp_path / "run.mmt", about=manifest(**changes)), tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"save_dir": "/tmp"}, {"checkpoint_dir": "x"}, {"cache_dir": "x"}, {"log_file": "/tmp/x"}, {"log_dir": "x"},
        {"tensorboard_dir": "x"}, {"tracker": "wandb"}, {"resume_from": "x"}, {"config": "/etc/passwd"},
        {"data_path": "/etc/passwd"}, {"data_path": "data/0/../../x"}, {"data_path": "data/1/text.jsonl"},
        {"data_path": "hf://datasets/a/b"}, {"data_path": "data/0/text.jsonl,/etc/passwd"},
        {"sample_prompts": "/etc/passwd"}, {"tokenizer_path": "/tmp"}, {"tokenizer_path": "tokenizer/../.."},
        {"from_weight": "/tmp/x.pth"}, {"from_weight": "../x.pth"}, {"from_weight": "hf://a/b"},
        {"from_weight": "start/0/../../x"}, {"save_weight": "../x"}, {"save_weight": "a/b"}, {"no_such": "1"},
        {"hidden_size": "many"}, {"epochs=9 --save_dir": "x"}, {"monitor": "a:b"}, {"device": "cuda:0/x"},
        {"eval_share": "0.1", "eval_data_path": "data/0/text.jsonl"},
    ],
)  # fmt: skip
def test_settings_that_a_pack_may_not_have(tmp_path, settings):
    stage = STAGE | {"settings": STAGE["settings"] | settings}
    refused(build(tmp_path / "run.mmt", about=manifest(stages=[stage])), tmp_path)


@pytest.mark.parametrize(
    ("script", "settings"),
    [
        ("train_grpo", {"reward": "os:system"}),
        ("train_grpo", {"reward": "x.py:f"}),
        ("train_ppo", {"reward": "length,evil=0.5"}),
        ("train_grpo", {"reward_model": "/tmp/model"}),
        ("train_agent", {"environment": "mod:Class"}),
        ("train_agent", {"environment": "evil"}),
    ],
)
def test_code_is_refused(tmp_path, script, settings):
    given = {"script": script, "settings": {"data_path": "data/0/text.jsonl"} | settings}
    said = refused(build(tmp_path / "run.mmt", about=manifest(stages=[given])), tmp_path)
    assert "code, which is not carried" in said


def test_a_file_that_is_not_the_listed_one(tmp_path):
    """Another content of the same size, or another size."""
    said = refused(build(tmp_path / "run.mmt", CONTENT | {"pretrain_32.pth": b"Weights"}), tmp_path)
    assert "'pretrain_32.pth' is not the file that carry.json lists" in said
    said = refused(build(tmp_path / "run.mmt", CONTENT | {"pretrain_32.pth": b"more weights"}), tmp_path)
    assert "'pretrain_32.pth' is not as large as carry.json says" in said


def test_more_than_the_disk_holds_is_refused_before_it_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(pack_file, "disk_usage", lambda _: usage(100, 50, 50))
    assert "more than is free in" in refused(build(tmp_path / "run.mmt"), tmp_path)


def test_a_size_that_the_archive_lies_about(tmp_path):
    """The directory of the archive says 7 bytes, the compressed stream has a million."""
    with zipfile.ZipFile(tmp_path / "run.mmt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in CONTENT.items():
            archive.writestr(name, value if name != "pretrain_32.pth" else b"0" * 10**6)
        archive.writestr(MANIFEST, json.dumps(manifest()))
        archive.getinfo("pretrain_32.pth").file_size = 7
    refused(tmp_path / "run.mmt", tmp_path)


def test_what_is_no_archive(tmp_path):
    path = tmp_path / "run.mmt"
    assert "no such file" in refused(path, tmp_path)
    for content in (b"", b"PK", b"x" * 1000, b"PK\5\6" + bytes(18)):
        path.write_bytes(content)
        assert "is damaged, or no pack" in refused(path, tmp_path) or "no carry.json" in refused(
            path, tmp_path
        )
    for about in ("", "[]", "{", "1", "[" * 100_000, '{"format": NaN}'):
        refused(build(path, about=about), tmp_path)


def test_a_pack_that_was_cut_or_flipped(tmp_path):
    """At any place: one line, or, where a flip changes nothing that counts, the same files."""
    whole = build(tmp_path / "whole.mmt").read_bytes()
    rng, path = random.Random(5), tmp_path / "run.mmt"
    for length in rng.sample(range(len(whole)), 60):
        path.write_bytes(whole[:length])
        refused(path, tmp_path)
    for number, place in enumerate(rng.sample(range(len(whole)), 300)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        to = tmp_path / f"to_{number}"
        try:
            with open_pack(path) as (archive, about):
                unpack(archive, about, to)
        except UserError as error:
            assert "\n" not in str(error) and not to.exists()
        else:
            assert {name: (to / name).read_bytes() for name in CONTENT} == CONTENT


def test_the_pack_before_is_named_and_is_used_if_a_kill_left_it_alone(tmp_path, capsys):
    path = tmp_path / "run.mmt"
    about = open_manifest(build(path))
    sources = {}
    for name, value in CONTENT.items():
        sources[name] = tmp_path / Path(name).name
        sources[name].write_bytes(value)
    before = path.read_bytes()
    write_pack(path, about, sources)
    assert before_path(path).read_bytes() == before
    path.write_bytes(path.read_bytes()[:-9])
    assert f"; {path}.before is the pack before it" in refused(path, tmp_path)
    path.unlink()
    assert open_manifest(path) == about
    assert f"warning: {path} is not there; {path}.before" in capsys.readouterr().err


def open_manifest(path: Path):
    with open_pack(path) as (_, about):
        return about


def test_a_disk_that_is_full_leaves_the_pack_that_was_there(tmp_path):
    path = tmp_path / "run.mmt"
    about = open_manifest(build(path))
    before = path.read_bytes()
    with pytest.raises(UserError, match="cannot be written"):
        write_pack(path, about, {"pretrain_32.pth": tmp_path / "gone"})
    assert path.read_bytes() == before and sorted(tmp_path.iterdir()) == [path]


def test_a_folder_is_not_replaced_by_a_pack(tmp_path):
    about = open_manifest(build(tmp_path / "run.mmt"))
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "out", tmp_path / "pipe"):
        with pytest.raises(UserError, match="is not a file; give the file to write"):
            write_pack(path, about, {})
    assert (tmp_path / "out").is_dir() and not (tmp_path / "out.before").exists()


def test_a_wrong_command_is_one_line_and_status_2(tmp_path):
    path = build(tmp_path / "run.mmt", {"../x.pth": b"x"})
    script = str(Path(carry.__file__))
    for argv, line in (
        (["go", path], "'../x.pth'"),
        (["go", tmp_path / "none.mmt"], "no such file"),
        (["pack", tmp_path / "none", path], "no such folder"),
        (["pack", tmp_path, tmp_path / "new.mmt"], "holds neither the run.sh of a plan nor runs"),
        (["go", path, "--stop_after", "1d"], "must be a time such as"),
        (["gone"], "invalid choice"),
        ([], "required"),
    ):
        (said,) = run(script, argv, status=2).error_lines
        assert said.startswith("error: ") and line in said
