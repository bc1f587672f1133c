"""How a command ends: one line on stderr and an exit status, alone and under torchrun; and its lines, on the
console and in a log file."""

import os
import signal
import subprocess
import sys

import pytest

from common.command_line import Parser, log_to, one_line_errors
from common.errors import Interrupted, LostRank, UserError, check_utf8, log, say, warn
from tests.conftest import ROOT
from tests.stage_process import rank_variables
from trainer.callbacks.base import plain

IN_COMMAND = "from common.command_line import *\nfrom common.errors import *\nwith one_line_errors():\n    "


def python(code: str, **options) -> subprocess.Popen:
    """A process that runs one statement as a command does."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, "-c", IN_COMMAND + code], cwd=ROOT, **pipes)


def noted(error: Exception, note: str) -> Exception:
    """The exception, with a note."""
    error.add_note(note)
    return error


ENDS = {
    "a mistake": (UserError("data.jsonl:3: no 'text'"), 2, "error: data.jsonl:3: no 'text'\n"),
    "a mistake that a terminal would obey": (UserError("a\x1b[2Jb\u202ec"), 2, "error: a\\x1b[2Jb\\u202ec\n"),
    "a mistake of two lines": (UserError("it says:\n  why"), 2, "error: it says:   why\n"),
    "a disk": (
        OSError(5, "Input/output error", "out"),
        2,
        "error: out cannot be reached at present (Input/output error)\n",
    ),
    "a disk, in a user's code": (
        noted(PermissionError(13, "Permission denied", "out"), "callback Mine failed in on_log"),
        2,
        "error: out cannot be reached at present (Permission denied); callback Mine failed in on_log\n",
    ),
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
    for bug in (KeyError("x"), RuntimeError("x"), OSError("x")):
        with pytest.raises(type(bug)), one_line_errors():
            raise bug
    assert capsys.readouterr() == ("", "")


def test_a_command_ends_silently_when_nobody_reads_it_any_more():
    process = python("while True: print('x' * 999)")
    assert process.stdout.read(5) == b"xxxxx"
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE and process.stderr.read() == b""


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "utf-8"])
def test_stdout_takes_characters_that_its_encoding_lacks(encoding):
    text = "é 山 \U0001f600 \udcff"
    done = python(f"print({text!a})", env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.communicate() == (f"{text}\n".encode(encoding, "backslashreplace"), b"")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("check_utf8('--data_path', sys.argv[1])", "--data_path cannot be read: "),
        ("os.stat('/tmp/\\u6570')", "/tmp/\\u6570 cannot be reached: "),
        ("find_files('/tmp/\\u6570')", "/tmp/\\u6570 cannot be reached: "),
    ],
)
def test_a_locale_without_utf8_is_the_cause_not_the_name(code, line):
    """Python then reads a name in Chinese as single bytes, and has no bytes for one."""
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    needed = {"find_files": "dataset.files", "check_utf8": "common.errors"}
    name = code.partition("(")[0]
    code = (f"from {needed[name]} import {name}; " if name in needed else "") + code
    command = [sys.executable, "-c", f"import sys\n{IN_COMMAND}{code}", "/tmp/\u6570\u636e"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: {line}the locale (LC_ALL=C) is not UTF-8; put PYTHONUTF8=1 before the command\n"
    )
    env["PYTHONUTF8"] = "1"
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "locale" not in done.stderr


def test_a_name_that_is_not_utf8_is_told_as_such():
    with pytest.raises(UserError, match=r"--save_dir is not UTF-8: .*; rename or convert it"):
        check_utf8("--save_dir", "out/\udcff")
    with pytest.raises(UserError, match=r"settings\['file'\] is not UTF-8: "):
        plain({"file": "out/\udcff"}, "settings")


def test_lines_do_not_end_a_run_whose_terminal_is_gone():
    """stdout and stderr are pipes that nobody reads."""
    code = "import os; sys.stdin.read(); say('x'); warn('y'); os._exit(7)"
    process = python(code, stdin=subprocess.PIPE)
    for pipe in (process.stdout, process.stderr, process.stdin):  # the last one lets it go on
        pipe.close()
    assert process.wait(60) == 7


def test_under_torchrun_a_mistake_is_told_by_each_rank_and_a_signal_once():
    """torchrun ends the other ranks while they wait for the first one to tell a mistake."""
    cases = {
        0: ("UserError('--epochs must be 1')", 2, "error: --epochs must be 1\n"),
        1: ("LostRank('rank 1: another rank ended')", 2, "error: rank 1: another rank ended\n"),
        2: ("Interrupted(15, 'by SIGTERM')", 143, ""),
    }
    processes = []
    briefly = "import common.command_line as c; c.FAILED_RANK_PAUSE = 0.2\n    "  # no torchrun waits
    for rank, (error, _, _) in cases.items():
        env = os.environ | rank_variables(rank, 3, 29500)
        processes.append(python(f"{briefly}raise {error}", env=env, text=True))
    for process, (_, status, line) in zip(processes, cases.values(), strict=True):
        assert process.communicate() == ("", line) and process.returncode == status


def test_the_parser_raises_and_knows_no_abbreviations():
    parser = Parser()
    parser.add_argument("--epochs", type=int, default=2, help="passes")
    parser.add_argument("--seed", type=int)
    wrongs = {
        "--epoch=3": "--epoch is unknown; did you mean --epochs",
        "--show_speed": "--show_speed is unknown; see --help",  # not --seed
        "--epochs=x": "argument --epochs: invalid int value: 'x'; see --help",
    }
    for wrong, message in wrongs.items():
        with pytest.raises(UserError) as error:
            parser.parse_args([wrong])
        assert str(error.value) == message
    assert "passes (default: 2)" in parser.format_help()


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_lines_of_a_level_and_above_are_shown_and_logged(tmp_path, capsys, level):
    path = tmp_path / "logs/run.log"
    log_to(path, level)
    try:
        log.debug("debug: details")
        say("two\nlines\x1b")
        warn("slow")
        log.error("error: gone")
    finally:
        log_to(None)
    lines = [("DEBUG", "debug: details"), ("INFO", "two"), ("INFO", "lines\\x1b")]
    lines += [("WARNING", "warning: slow"), ("ERROR", "error: gone")]
    first = [name for name, _ in lines].index(level.upper())
    found = [line[20:].split(maxsplit=1) for line in path.read_text().splitlines()]
    assert found == [list(line) for line in lines[first:]]
    out, err = capsys.readouterr()
    shown = [text for _, text in lines[first:]]
    assert out.splitlines() == shown[:-2] and err.splitlines() == shown[-2:]
    say("more")
    assert "more" not in path.read_text()  # the file is left
    with pytest.raises(UserError, match=r"run.log/x cannot be written \(.*\); give another --log_file"):
        log_to(path / "x")
