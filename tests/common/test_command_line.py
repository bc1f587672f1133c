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

FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
TOO_MANY = (
    f"too many open files: a process here may have {resource.getrlimit(resource.RLIMIT_NOFILE)[1]}; raise the"
)
TOO_MANY += " hard limit (ulimit -Hn), or use fewer processes (--num_workers, --num_proc)"


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


def test_a_command_may_open_as_many_files_as_the_system_allows():
    code = "import resource\nfrom common.command_line import one_line_errors\nwith one_line_errors():\n"
    code += "    print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    command = ["bash", "-c", 'ulimit -Sn 256 && exec "$@"', "bash", sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == f"{hard} {hard}\n"


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


def test_a_command_ends_silently_when_nobody_reads_it_any_more():
    code = "from common.command_line import one_line_errors\nwith one_line_errors():\n    LINES"
    command = [sys.executable, "-c", code.replace("LINES", "while True: print('x' * 999)")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(5) == b"xxxxx"
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE and process.stderr.read() == b""
    # another pipe is no reader
    other = "import os; read, write = os.pipe(); os.close(read); os.write(write, b'x')"
    command[2] = code.replace("LINES", other)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("BrokenPipeError: [Errno 32] Broken pipe\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk", "utf-8"])
def test_stdout_takes_characters_that_its_encoding_lacks(encoding):
    text = "é 山 \U0001f600 \udcff"
    code = f"from common.command_line import one_line_errors\nwith one_line_errors():\n    print({text!a})"
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, check=True)
    assert done.stdout == f"{text}\n".encode(encoding, "backslashreplace") and done.stderr == b""


def rank(error: str, local_rank: int, folder) -> subprocess.CompletedProcess:
    code = "from common.command_line import one_line_errors\nfrom common.errors import *\n"
    code += f"with one_line_errors():\n    raise {error}"
    env = {**os.environ, "WORLD_SIZE": "2", "RANK": str(local_rank), "LOCAL_RANK": str(local_rank)}
    env |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    env["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{local_rank}.json")
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("local_rank", [0, 1])
def test_under_torchrun_a_mistake_is_in_its_report(local_rank, tmp_path):
    done = rank("UserError('--epochs must be 1 or more')", local_rank, tmp_path)
    assert done.returncode == 2 and done.stderr == "error: --epochs must be 1 or more\n"
    report = json.loads((tmp_path / f"{local_rank}.json").read_text())
    assert report["message"]["message"] == "error: --epochs must be 1 or more"
    assert int(report["message"]["extraInfo"]["timestamp"]) > 0


def test_under_torchrun_only_the_cause_is_in_the_report_and_a_signal_is_told_once(tmp_path):
    lost = rank("LostRank('rank 1: another rank ended')", 1, tmp_path)
    assert lost.returncode == 2 and lost.stderr == "error: rank 1: another rank ended\n"
    assert not list(tmp_path.iterdir())
    told = [rank("Interrupted(15, 'by SIGTERM')", number, tmp_path) for number in (0, 1)]
    assert [done.returncode for done in told] == [143, 143]
    assert [done.stderr for done in told] == ["stopped: by SIGTERM\n", ""]


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


def test_a_full_disk_is_one_line():
    """Of stdout; a mistake is told although what stands before it cannot be written."""
    code = "from common.command_line import one_line_errors\nfrom common.errors import *\n"
    code += "with one_line_errors():\n"
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    for lines, said in (
        ("    print('x')", "no space left on the disk that the output goes to; free some"),
        ("    print('x', flush=True)", "no space left on the disk that the output goes to; free some"),
        ("    print('x')\n    raise UserError('no data')", "no data"),
    ):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-c", code + lines]
            done = subprocess.run(command, cwd=ROOT, env=env, stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (2, f"error: {said}\n")


def test_closed_streams_are_replaced(capfd):
    """`command >&- <&-`; what is opened later must not get the number of a standard stream."""
    code = "import sys\nfrom common.command_line import one_line_errors\n"
    code += "with one_line_errors():\n    print('lost')\n"
    code += "    print(open('README.md').fileno(), file=sys.stderr)"
    done = subprocess.run(["sh", "-c", f'"{sys.executable}" -c "$0" >&- <&-', code], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert int(capfd.readouterr().err) > 2
