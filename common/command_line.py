"""How every command starts and ends: the argument parser, one line on stderr instead of a traceback, and the
log file."""

import argparse
import difflib
import io
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from common.errors import Interrupted, LostRank, UserError, log, not_utf8_locale, printable
from common.files import MACHINE_ERRORS
from common.launcher import launch

FAILED_RANK_PAUSE = 2.0  # seconds
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
# MiniMind's flags that do not exist here -> what to use; the others are flags, or `aliases` of a setting
ANSWERS_ARE_SHOWN = "leave it out: two completions with their rewards are shown at every --log_interval"
NO_CLIENT = "leave it out: here the model itself is run; any OpenAI client talks to serve_openai_api.py"
USE_INSTEAD = {
    "mini_batch_size": "use --batch_size: an update takes --batch_size x --accumulation_steps completions",
    "debug_mode": ANSWERS_ARE_SHOWN,
    "debug_interval": ANSWERS_ARE_SHOWN,
    "debug_log_ratio": "leave it out: approx_kl and clip_ratio are in the metrics file",
    "rollout_engine": "leave it out: the trainer samples, so that a resumed run has the same completions",
    "sglang_base_url": "leave it out, too",
    "sglang_model_path": "leave it out, too",
    "sglang_shared_path": "leave it out, too",
    "load_from": "use --model PATH (a .pth or a Hugging Face folder), for a stage --from_weight PATH",
    "lora_weight": "use --lora PATH, such as --lora out/lora_medical_768",
    "historys": "leave it out: the chat keeps what fits into --max_seq_len, and /reset starts over",
    "backend": NO_CLIENT,
    "api_base_url": NO_CLIENT,
    "api_key": NO_CLIENT,
    "api_model": NO_CLIENT,
    "stream": NO_CLIENT,
}
# What the same thing is called elsewhere -> what to use; only if the program has that flag.
TORCHRUN_SETS_IT = "leave it out: start with torchrun, which sets the rank"
OTHER_NAMES = {
    "lr": "use --learning_rate",
    "output_dir": "use --save_dir, and --checkpoint_dir for the state to resume from",
    "local_rank": TORCHRUN_SETS_IT,
    "fp16": "use --dtype float16",
    "bf16": "use --dtype bfloat16",
    "gradient_accumulation_steps": "use --accumulation_steps",
    "grad_accum": "use --accumulation_steps",
    "resume": "use --from_resume 1, which continues from the newest checkpoint",
    "resume_from_checkpoint": "use --from_resume 1, or --resume_from FILE",
    "num_train_epochs": "use --epochs",
    "num_epochs": "use --epochs",
    "max_updates": "use --max_steps",
    "max_iters": "use --max_steps",
    "per_device_train_batch_size": "use --batch_size",
    "warmup_steps": "use --warmup_updates",
    "max_length": "use --max_seq_len",
    "max_seq_length": "use --max_seq_len",
    "block_size": "use --max_seq_len",
    "max_grad_norm": "use --grad_clip",
    "gradient_checkpointing": "use --activation_checkpointing 1",
    "logging_steps": "use --log_interval",
    "save_steps": "use --save_interval",
    "eval_steps": "use --eval_interval",
    "model_name_or_path": "use --from_weight PATH",
    "train_file": "use --data_path",
    "dataset": "use --data_path",
    "report_to": "use --tracker wandb, or swanlab",
    "wandb": "use --tracker wandb",
    "use_swanlab": "use --tracker swanlab",
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each flag that has one, unless its help does so."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_shown = action.default is None or action.required or "(default: " in (action.help or "")
        return action.help if is_shown else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError and accepts no abbreviated flags."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise UserError; argparse would print the usage and exit."""
        if not message.startswith("unrecognized arguments: "):
            raise UserError(f"{message}; see --help")
        words = message.split()[2:]
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        known = self._option_string_actions
        raise UserError("; ".join(f"{word} is unknown; {hint(word, known)}" for word in flags or words))


def hint(name: str, known: Iterable[str]) -> str:
    """What to use instead of an unknown setting or flag. MiniMind's flags and common flags of other trainers
    have an answer; for the rest it names a similar flag."""
    name = name.lstrip("-").replace("-", "_")
    instead = USE_INSTEAD.get(name)
    if instead is not None:
        return instead
    flags = {flag.lstrip("-"): flag for flag in known}
    instead = OTHER_NAMES.get(name.lower(), "")
    named = re.search(r"--(\w+)", instead)
    if instead and (named is None or named[1] in flags):
        return instead
    near = difflib.get_close_matches(name.lower(), flags, 1, cutoff=0.7)
    return f"did you mean {flags[near[0]]}" if near else "see --help"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Wrap a command's `main()`. A UserError or an error of the machine becomes one line on stderr and exit
    status 2; a signal becomes exit status 128 + its number. If nobody reads stdout any more, as with `| head
    -1`, the command ends silently.

    Under torchrun all ranks usually raise the same UserError: local rank 0 prints first, and torchrun then
    terminates the others before they repeat it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # a file whose descriptor has become a pipe cannot be repositioned
            sys.stdout.reconfigure(errors="backslashreplace")  # for characters that its encoding lacks
    try:
        yield
        if sys.stdout is not None:  # closed by the shell
            sys.stdout.flush()
    except BrokenPipeError:
        leave_dead_console()
        sys.exit(128 + signal.SIGPIPE)
    except UserError as error:
        _exit(f"error: {error}", 2, error)
    except OSError as error:  # where nobody expected one: of a disk, a network share, a limit
        if error.errno not in MACHINE_ERRORS:
            raise
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", []))  # such as the callback's
        file = error.filename or "a file"
        _exit(f"error: {file} cannot be reached at present ({error.strerror}){notes}", 2, error)
    except UnicodeEncodeError as error:  # of the name of a file
        if error.encoding != sys.getfilesystemencoding() or error.encoding == "utf-8":
            raise
        _exit(f"error: {error.object} cannot be reached: {not_utf8_locale()}", 2, error)
    except Interrupted as error:
        _exit(f"stopped: {error}", 128 + error.number, error)
    except KeyboardInterrupt as error:
        _exit("stopped: by Ctrl-C", 128 + signal.SIGINT, error)


def leave_dead_console() -> None:
    """Discard output that cannot be written; otherwise Python would try again and complain when it exits."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open until the process ends)


def _exit(line: str, status: int, error: BaseException) -> NoReturn:
    place = launch()
    is_distributed = place.world_size > 1
    if is_distributed:
        # from here on torchrun may terminate this rank at any moment
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
    if place.local_rank > 0:
        time.sleep(FAILED_RANK_PAUSE)  # local rank 0 prints first
    leave_dead_console()
    # at a signal the ranks stop together, and one of them says so
    if place.local_rank == 0 or not isinstance(error, Interrupted):
        log.error(printable(" ".join(line.splitlines())))
    if not is_distributed:
        sys.exit(status)
    if isinstance(error, LostRank):
        # torchrun reports the rank that exits first, which must be the one that caused the failure
        time.sleep(FAILED_RANK_PAUSE)
    os._exit(status)  # destroying a process group whose peers are gone can hang


# --- the log file


def log_to(path: Path | None, level: str = "info") -> None:
    """Show only lines of `level` and above from now on. If a file is given, append them to it with time and
    level; several processes may write to it. A second call replaces the settings of the first. Raises
    UserError if the file cannot be written."""
    log.setLevel(level.upper())
    for handler in log.handlers[1:]:  # the first is the console
        log.removeHandler(handler)
        handler.close()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"the log file {path} cannot be written ({why}); give another --log_file") from error
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.addHandler(file)
