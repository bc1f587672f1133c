"""Copies of the code, of a git revision or of the files as they are, for scripts/compare.py."""

import filecmp
import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

from common.errors import UserError
from common.files import new_path
from common.settings import ROOT

CODE = ("common", "dataset", "llm", "model", "scripts", "tools", "trainer")  # the folders that are copied


def resolve_base(base: str) -> str:
    """A folder as an absolute path, a git revision as its commit. Raises UserError if it is neither."""
    if base and Path(base).is_dir():
        return str(Path(base).resolve())
    git(ROOT, "rev-parse", "--git-dir")  # is there a repository at all?
    try:
        return git(ROOT, "rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}").decode().strip()
    except UserError:
        raise UserError(
            f"--base {base!r} is no folder, and no revision of the git repository {ROOT}; git log --oneline "
            "lists its commits, git tag its versions"
        ) from None


def git(folder: Path, *words: str) -> bytes:
    """What a git command prints; line ends stay as they are committed. Raises UserError."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.autocrlf=false", *words], cwd=folder, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise UserError("git is not there, which tells what belongs to the code; install it") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise UserError(
            f"git {words[0]} in {folder}: {why}; it must be a git repository (git init makes one)"
        )
    return done.stdout


def copy_code(source: str, target: Path) -> None:
    """Copy the folders CODE, complete or not at all. Raises UserError.

    source: a folder, whose files of `code_files` are copied as they are; or a commit, whose files git writes
    without the entry in .git that a worktree would leave.
    """
    if target.exists():
        return
    with new_path(target) as place:
        place.mkdir()
        if not Path(source).is_dir():
            with tarfile.open(fileobj=io.BytesIO(git(ROOT, "archive", source))) as files:
                members = [member for member in files if is_code(member.name)]
                files.extractall(place, members, filter="data")
            return
        for name in code_files(Path(source)):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(source) / name, place / name)


def is_code(name: str) -> bool:
    """Whether the file of this name belongs to the code. In dataset/ lie data, too; what Python compiles is
    made anew."""
    top = name.partition("/")[0]
    return top in CODE and (name.endswith(".py") or top != "dataset") and "__pycache__" not in name


def code_files(folder: Path) -> list[str]:
    """The files of the code in a git working tree: those that git does not ignore, new ones too, and whatever
    is Python, which a run may import. Raises UserError."""
    there = [name for name in CODE if (folder / name).is_dir()]
    if "trainer" not in there:
        raise UserError(f"{folder} holds no code of this trainer")
    listing = ["ls-files", "-z", "--others", "--exclude-standard"]
    listed = git(folder, *listing, "--cached", "--", *there)
    listed += git(folder, *listing, "--ignored", "--", *(f":(glob){name}/**/*.py" for name in there))
    names = dict.fromkeys(listed.decode(errors="surrogateescape").split("\0"))
    return [name for name in names if is_code(name) and (folder / name).is_file()]


def copied_files(folder: Path) -> list[str]:
    """The files of a copy of the code."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [name for name in names if is_code(name)]


def differing_files(folder: Path, copy: Path, names: Iterable[str]) -> list[str]:
    """The files of the code that are not the same in two folders, or are in one of them only. names: of the
    first folder; the second is a copy."""
    every = {*names, *copied_files(copy)}
    same, _, _ = filecmp.cmpfiles(folder, copy, every, shallow=False)
    return sorted(every - set(same))
