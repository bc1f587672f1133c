"""A run.sh that a plan signed here, and every other one."""

import hmac
import os

import pytest

from scripts.planning.signature import KEY, is_signed, sign

SCRIPT = b"echo a plan\n"


def test_a_signature_is_of_this_script_and_of_this_place(tmp_path):
    folder, elsewhere = tmp_path / "out" / "novel", tmp_path / "elsewhere" / "novel"
    for each in (folder, elsewhere):
        each.mkdir(parents=True)
    signature = sign(SCRIPT, folder)
    key = (folder.parent / KEY).read_bytes()
    assert signature == hmac.new(key, SCRIPT, "sha256").hexdigest() and len(key) == 32
    assert (folder.parent / KEY).stat().st_mode & 0o777 == 0o600
    assert is_signed(SCRIPT, folder, signature) and sign(SCRIPT, folder.parent / "other") == signature
    assert not is_signed(SCRIPT + b"#", folder, signature)
    assert not is_signed(SCRIPT, elsewhere, signature)  # no key
    assert sign(SCRIPT, elsewhere) != signature and not is_signed(SCRIPT, elsewhere, signature)
    for odd in (None, "", signature[:-1], signature.upper(), 5, [signature], "\udce9", "é"):
        assert not is_signed(SCRIPT, folder, odd)


@pytest.mark.parametrize("fault", ["short", "readable", "foreign", "pipe", "folder"])
def test_a_key_that_others_may_know_is_none(tmp_path, fault, monkeypatch):
    signature, path = sign(SCRIPT, tmp_path / "novel"), tmp_path / KEY
    if fault == "short":
        path.write_bytes(path.read_bytes()[:-1])
    elif fault == "readable":
        path.chmod(0o644)
    elif fault == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    else:
        path.unlink()
        (os.mkfifo if fault == "pipe" else os.mkdir)(path)
    assert not is_signed(SCRIPT, tmp_path / "novel", signature)


def test_where_no_key_can_be_kept_a_plan_is_made_without_a_signature(tmp_path):
    (tmp_path / "file").write_text("")
    assert sign(SCRIPT, tmp_path / "file" / "novel") is None
