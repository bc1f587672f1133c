"""The shell scripts run in bash 3.2, which is macOS's, and in a clone by a git that makes CRLF of line ends."""

import re
import shutil
import subprocess

import pytest

from tests.conftest import ROOT
from tests.test_docs import fenced

SCRIPTS = sorted(ROOT.glob("*/*.sh"))
# what came after bash 3.2
NEWER = {
    "mapfile": r"\b(mapfile|readarray)\b",
    "associative arrays, references": r"\b(declare|local|typeset|readonly)\s+-\w*[Angulc]",
    "other letters": r"\$\{\w+(\[[^]]*\])?(,|\^)",
    "transformations": r"\$\{\w+(\[[^]]*\])?@[QEPAaUuLK]\}",
    "negative index": r"\$\{\w+\[-\d",
    "negative length": r"\$\{\w+:[^-}]*:\s*-",
    "redirections": r"&>>|\|&|\{\w+\}[<>]",
    "fall through": r";&|;;&",
    "coproc": r"\bcoproc\b",
    "whether a variable is set": r"\[\[?\s+(!\s+)?-v\b",
    "wait for any": r"\bwait\s+-[npf]",
    "time by printf": r"%\([^)]*\)T",
    "variables": r"\$\{?(BASHPID|EPOCHSECONDS|EPOCHREALTIME|SRANDOM|BASH_ARGV0)\b",
    "shell options": r"\b(globstar|lastpipe|inherit_errexit|localvar_inherit|dirspell|autocd)\b",
    "padded sequence": r"\{0\d+\.\.",
    "unicode escapes": r"\$'[^']*\\[uU]",
}
MAY_BE_EMPTY = re.compile(r"\b(\w+)=\(\s*(?:\)|\"?\$(?!\{\w+\[@\]:-))")
GUARDED = re.compile(r"\$\{(\w+)\[@\]\+\"\$\{\1\[@\]\}\"\}")


def in_bash_3(script: str) -> list[str]:
    """What bash 3.2 does not have or refuses in a script that has `set -u`: newer syntax, and arrays that may be
    empty where they are expanded without a guard (to it an empty array is an unbound variable)."""
    code = re.sub(r"(^|\s)#.*", "", script)
    found = [name for name, pattern in NEWER.items() if re.search(pattern, code)]
    for name in MAY_BE_EMPTY.findall(code):
        if f"${{{name}[@]}}" in GUARDED.sub("", code):
            found.append(f"{name} may be empty")
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_runs_in_the_bash_of_macos(path):
    assert in_bash_3(path.read_text(encoding="utf-8")) == []
    assert b"\r" not in path.read_bytes()


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "docs/slurm.md", "docs/quickstart.md"])
def test_so_do_the_commands_of_the_manual(page):
    if (ROOT / page).exists():
        assert [found for block in fenced(page, "bash") for found in in_bash_3(block)] == []


REFUSED = """\
mapfile -t lines <file
declare -A names
echo ${name,,}
echo ${name^}
echo "${words[-1]}"
echo ${word::-1}
run &>>log
[[ -v name ]]
options=() && "$base" "${options[@]}"
flags=("$@"); run "${flags[@]}"
printf '%(%F)T'
local -n other=$1
"""
ALLOWED = """\
local options=() more=(-a -b) && "$base" ${more[@]+"${more[@]}"} ${options[@]+"${options[@]}"}
requirements=("${requirements[@]:-requirements.txt}") && run "${requirements[@]}"
words=(one); words+=("$@"); run "${words[@]}" "${@:2}" "${flags[i]%%=*}" ${name:-} ${name//,/ } ${!name:-} ${#words[@]}
local base="$(command -v python)" && run >log 2>&1 # options=() and "${options[@]}"
"""


@pytest.mark.parametrize("line", REFUSED.splitlines())
def test_what_bash_3_lacks_is_found(line):
    assert in_bash_3(line)


@pytest.mark.parametrize("line", ALLOWED.splitlines())
def test_what_bash_3_has_is_not(line):
    assert not in_bash_3(line)


# --- line ends


def test_a_clone_by_a_git_that_writes_crlf_has_the_same_bytes(tmp_path):
    """As Git for Windows is set up, for a clone that is then used in WSL."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    names = [name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    for name in names:
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, origin / name)
    git = [
        "git",
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "core.autocrlf=true",
        "-c",
        "core.eol=crlf",
    ]
    for words in (["init"], ["add", "--all"], ["commit", "--message", "all"], ["clone", origin, clone]):
        subprocess.run([*git, *words], cwd=origin, check=True, capture_output=True)
    assert [name for name in names if (clone / name).read_bytes() != (ROOT / name).read_bytes()] == []
    for script in ("quickstart.sh", "tour.sh"):
        command = ["bash", clone / "scripts" / script, "--wrong"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.startswith("error: unknown argument --wrong")
