"""The one way a run ends early: a single line on stderr, `error: ...` for a mistake and exit status 2."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def heeded_signals() -> list[int]:
    """The signals that may stop a run here: nohup has SIGHUP ignored, a shell Ctrl-C in its background."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


class UserError(Exception):
    """A mistake that the user can mend. The message names the file and line or the flag, and the way out."""


class LostRank(UserError):
    """Another rank ended while this one waited for it; what it said, or torchrun's report, is the reason."""


class Interrupted(BaseException):
    """A signal ended the run. The message says how to go on."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.number = number


def reason(error: BaseException) -> str:
    """The first line of an error, or its kind where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help if action.default is None or action.required else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse with this project's way of failing, and no abbreviated flags."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        """One line instead of the usage."""
        raise UserError(f"{message}; see --help")


def say(text: str) -> None:
    """Print, also where stdout cannot write every character that a file name or a record may hold."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def warn(text: str) -> None:
    """One `warning: ...` line on stderr, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {text}", file=sys.stderr, flush=True)


def run_main(main: Callable[[], None]) -> None:
    """Run a script's `main()`. A UserError becomes one line on stderr and exit status 2, a signal 128 + its number.

    Under torchrun the ranks mostly meet the same mistake: local rank 0 speaks first, and torchrun then ends the others
    before they repeat it. Each leaves its reason where torchrun's closing report finds it.
    """
    try:
        main()
    except UserError as error:
        _leave(f"error: {error}", 2, speak_first=_local_rank() == 0, is_cause=not isinstance(error, LostRank))
    except Interrupted as error:
        _leave(f"stopped: {error}", 128 + error.number, silent=_local_rank() > 0)  # the ranks stop together
    except KeyboardInterrupt:
        _leave("stopped: by Ctrl-C", 128 + signal.SIGINT)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _leave(line: str, status: int, speak_first: bool = True, is_cause: bool = True, silent: bool = False) -> NoReturn:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    for number in STOP_SIGNALS if several else ():  # from here on torchrun may end this rank at any moment
        signal.signal(number, signal.SIG_DFL)
    if several and is_cause:
        _tell_torchrun(line)
    if silent or not speak_first:
        time.sleep(2)
    sys.stdout.flush()
    if not silent:
        print(" ".join(line.splitlines()), file=sys.stderr, flush=True)
    if several and not is_cause:
        time.sleep(2)  # torchrun then sees first the rank that is the cause
    if several:
        os._exit(status)  # a rank that failed waits for nobody: ending a process group can
    sys.exit(status)


def _tell_torchrun(line: str) -> None:
    """Leave the reason in the file that torchrun quotes in its closing report (torch.distributed.elastic's format)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
