"""How a command ends: one line on stderr and an exit status, alone and under torchrun."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from common.command_line import Parser, one_line_errors
from common.errors import Interrupted, LostRank, UserError
from tests.conftest import ROOT
from tests.stage_process import rank_variables

FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
HARD_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
TOO_MANY = f"too many open files: a process here may have {HARD_LIMIT}; raise the hard limit (ulimit -Hn), "
TOO_MANY += "or use fewer processes (--num_workers)"
IN_COMMAND = "from common.command_line import one_line_errors\nfrom common.errors import *\n"
IN_COMMAND += "with one_line_errors():\n    "


def python(code: str, prefix: tuple[str, ...] = (), **options) -> subprocess.Popen:
    """A process that runs one statement as a command does."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([*prefix, sys.executable, "-c", IN_COMMAND + code], cwd=ROOT, **pipes)


def caused_by(error, cause):
    error.__cause__ = cause
    return error


ENDS = {
    "the limit of open files": (FILES, 2, f"error: {TOO_MANY}\n"),
    "that limit behind a mistake": (caused_by(UserError("unreadable"), FILES), 2, f"error: {TOO_MANY}\n"),
    "a mistake": (UserError("data.jsonl:3: no 'text'"), 2, "error: data.jsonl:3: no 'text'\n"),
    "a mistake that a terminal would obey": (UserError("a\x1b[2Jb\u202ec"), 2, "error: a\\x1b[2Jb\\u202ec\n"),
    "a mistake of two lines": (UserError("it says:\n  why"), 2, "error: it says:   why\n"),
    "another rank's end": (LostRank("rank 1: another rank ended"), 2, "error: rank 1: another rank ended\n"),
    "a signal": (Interrupted(signal.SIGTERM, "by SIGTERM; saved"), 143, "stopped: by SIGTERM; saved\n"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "stopped: by Ctrl-C\n"),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_command_ends_in_one_line(case, capsys):
    error, status, line = ENDS[case]
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise error
    assert ended.value.code == status and capsys.readouterr() == ("", line)


def test_a_bug_keeps_its_traceback(capsys):
    for bug in (KeyError("x"), RuntimeError("x"), OSError(errno.EIO, "Input/output error")):
        with pytest.raises(type(bug)), one_line_errors():
            raise bug
    with one_line_errors():
        pass
    assert capsys.readouterr() == ("", "")


def test_a_command_may_open_as_many_files_as_the_system_allows():
    prefix = ("bash", "-c", 'ulimit -Sn 256 && exec "$@"', "bash")
    done = python("import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))", prefix)
    assert done.communicate()[0] == f"{HARD_LIMIT} {HARD_LIMIT}\n".encode()


def test_a_command_ends_silently_when_nobody_reads_it_any_more():
    process = python("while True: print('x' * 999)")
    assert process.stdout.read(5) == b"xxxxx"
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE and process.stderr.read() == b""
    # another pipe is no reader
    other = python("import os; read, write = os.pipe(); os.close(read); os.write(write, b'x')")
    assert other.communicate()[1].endswith(b"BrokenPipeError: [Errno 32] Broken pipe\n")
    assert other.returncode == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk", "utf-8"])
def test_stdout_takes_characters_that_its_encoding_lacks(encoding):
    text = "é 山 \U0001f600 \udcff"
    done = python(f"print({text!a})", env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.communicate() == (f"{text}\n".encode(encoding, "backslashreplace"), b"")


def test_under_torchrun_the_cause_is_in_its_report_and_a_signal_is_told_once(tmp_path):
    cases = {
        "mistake0": ("UserError('--epochs must be 1')", 2, "error: --epochs must be 1\n"),
        "mistake1": ("UserError('--epochs must be 1')", 2, "error: --epochs must be 1\n"),
        "lost1": ("LostRank('rank 1: another rank ended')", 2, "error: rank 1: another rank ended\n"),
        "signal0": ("Interrupted(15, 'by SIGTERM')", 143, "stopped: by SIGTERM\n"),
        "signal1": ("Interrupted(15, 'by SIGTERM')", 143, ""),
    }
    processes = {}
    for name, (error, _, _) in cases.items():
        env = os.environ | rank_variables(int(name[-1]), 2, 29500)
        env["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / name)
        processes[name] = python(f"raise {error}", env=env, text=True)
    for name, (_, status, line) in cases.items():
        assert processes[name].communicate() == ("", line) and processes[name].returncode == status
    assert {path.name for path in tmp_path.iterdir()} == cases.keys() - {"lost1"}
    for name in ("mistake0", "mistake1"):
        report = json.loads((tmp_path / name).read_text())["message"]
        assert report["message"] == "error: --epochs must be 1"
        assert int(report["extraInfo"]["timestamp"]) > 0


def test_the_parser_raises_and_knows_no_abbreviations():
    parser = Parser()
    parser.add_argument("--epochs", type=int, default=2, help="passes")
    wrongs = {"--epoch=3": "--epoch is unknown; did you mean --epochs"}
    wrongs |= {"--epochs=x": "argument --epochs: invalid int value: 'x'; see --help"}
    for wrong, message in wrongs.items():
        with pytest.raises(UserError) as error:
            parser.parse_args([wrong])
        assert str(error.value) == message
    assert "passes (default: 2)" in parser.format_help()


@pytest.mark.parametrize(
    "code", ["print('x')", "print('x', flush=True)", "print('x'); raise UserError('no data')"]
)
def test_a_full_disk_is_one_line(code):
    """Of stdout; a mistake is told although what stands before it cannot be written."""
    with open("/dev/full", "w") as full:
        done = python(code, stdout=full, text=True, env=os.environ | {"PYTHONUNBUFFERED": ""})
        said = done.communicate()[1]
    told = "no data" if "raise" in code else "no space left on the disk that the output goes to; free some"
    assert (done.returncode, said) == (2, f"error: {told}\n")


def test_closed_streams_are_replaced(capfd):
    """`command >&- <&-`; what is opened later must not get the number of a standard stream."""
    code = "import sys; print('lost'); print(open('README.md').fileno(), file=sys.stderr)"
    done = python(code, ("sh", "-c", '"$@" >&- <&-', "sh"), stdout=None, stderr=None)
    assert done.wait() == 0
    assert int(capfd.readouterr().err) > 2
