"""Copies of the code, of a git revision or of the files as they are, for scripts/compare.py."""

import filecmp
import io
import shutil
import subprocess
import tarfile
from pathlib import Path

from common.errors import UserError
from common.files import new_path
from common.settings import ROOT

CODE = ("common", "dataset", "llm", "model", "scripts", "tools", "trainer")  # the folders that are copied


def resolve_base(base: str) -> str:
    """A folder as an absolute path, a git revision as its commit. Raises UserError if it is neither."""
    if Path(base).is_dir():
        return str(Path(base).resolve())
    return git(ROOT, "rev-parse", "--verify", f"{base}^{{commit}}").decode().strip()


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

    source: a folder, whose files are copied as they are, also new ones, but for those that git ignores; or a
    commit, whose files git writes without the entry in .git that a worktree would leave.
    """
    if target.exists():
        return
    with new_path(target) as place:
        place.mkdir()
        if not Path(source).is_dir():
            with tarfile.open(fileobj=io.BytesIO(git(ROOT, "archive", source))) as files:
                members = [member for member in files if member.name.partition("/")[0] in CODE]
                files.extractall(place, members, filter="data")
            return
        for name in listed_files(Path(source)):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(source) / name, place / name)


def listed_files(folder: Path) -> list[str]:
    """The files of a git working tree in the folders CODE that are there and not ignored.
    Raises UserError."""
    there = [name for name in CODE if (folder / name).is_dir()]
    if "trainer" not in there:
        raise UserError(f"{folder} holds no code of this trainer")
    listed = git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *there)
    names = listed.decode(errors="surrogateescape").split("\0")
    return [name for name in dict.fromkeys(names) if name and (folder / name).is_file()]


def differing_files(folder: Path, other: Path) -> list[str]:
    """The Python files that are not the same in two folders of code, or are in one of them only."""
    names = {
        str(path.relative_to(at))
        for at in (folder, other)
        for top in CODE
        for path in (at / top).rglob("*.py")
    }
    same, _, _ = filecmp.cmpfiles(folder, other, names, shallow=False)
    return sorted(names - set(same))
