"""Copies of the code for scripts/compare.py, from a git revision or from the current files."""

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

CODE = ("common", "dataset", "llm", "model", "scripts", "tools", "trainer")  # copied


def resolve_base(base: str) -> str:
    """The absolute path of a folder, or the commit of a git revision. Raises UserError if it is neither."""
    if base and Path(base).is_dir():
        return str(Path(base).resolve())
    git(ROOT, "rev-parse", "--git-dir")  # is there a repository at all?
    try:
        return git(ROOT, "rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}").decode().strip()
    except UserError:
        raise UserError(
            f"--base {base!r} is neither a folder nor a revision of the git repository {ROOT}; "
            "git log --oneline lists its commits, git tag its versions"
        ) from None


def git(folder: Path, *words: str) -> bytes:
    """The output of a git command. Line ends stay as they were committed. Raises UserError."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.autocrlf=false", *words], cwd=folder, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise UserError("git, which lists the files of the code, is not installed; install it") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise UserError(
            f"git {words[0]} in {folder}: {why}; it must be a git repository (git init makes one)"
        )
    return done.stdout


def copy_code(source: str, target: Path) -> None:
    """Copy the folders CODE, completely or not at all. Raises UserError.

    source: a folder, whose files of `code_files` are copied unchanged; or a commit, whose files are written
    by git. No entry in .git is left, as a worktree would leave one.
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
    """Whether a file of this name belongs to the code. Data in dataset/ do not, nor do the files that Python
    compiles."""
    top = name.partition("/")[0]
    return top in CODE and (name.endswith(".py") or top != "dataset") and "__pycache__" not in name


def code_files(folder: Path) -> list[str]:
    """The files of the code in a git working tree: all that git does not ignore, new ones included, and all
    Python files, because a run may import them. Raises UserError."""
    there = [name for name in CODE if (folder / name).is_dir()]
    if "trainer" not in there:
        raise UserError(f"{folder} does not contain the code of this trainer")
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
    """The files of the code that differ between two folders, or are in only one of them. names: those of the
    first folder. The second folder is a copy."""
    every = {*names, *copied_files(copy)}
    same, _, _ = filecmp.cmpfiles(folder, copy, every, shallow=False)
    return sorted(every - set(same))
