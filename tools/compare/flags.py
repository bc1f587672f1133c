"""The flags of a comparison: those of all runs and those of each variant, including the settings of a
--config, and the flags that a variant may not change."""

import argparse
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.arguments import checked, flag_values, read_flags, stage_parser, yaml_values
from common.command_line import Parser
from common.errors import UserError
from common.settings import StageArgs, setting_option

# compare.py sets these for each run
OWN_FLAGS = {"save_weight", "checkpoint_dir", "from_resume", "resume_from", "stop_after", "print_config"}
# no variant may change these: seeds, folders, which records are held out and how they are cut
HELD_OUT = ("seed", "save_dir", "cache_dir", "monitor", "mode", "eval_share", "eval_data_path", "kind")
HELD_OUT += ("text_separator", "max_seq_len", "on_bad_data", "max_bad_share", "max_lost_text")


def split_flags(text: str) -> list[str]:
    """Split flags that were given in quotes into words. Raises UserError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text!r} cannot be split into flags: {error}") from None


def refuse_single_words(parser: Parser, words: Sequence[str], own: Iterable[str]) -> None:
    """Raise UserError for a flag of the stage that is a single word, such as --packing or
    --learning_rate=1e-3. If the user wrote it in quotes, it is meant as a variant, but a program does not see
    the quotes. own: flags of compare.py, which no variant has."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        action: argparse.Action | None = parser._option_string_actions.get(name)
        if action is None or " " in word or name.removeprefix("--") in own:
            continue
        is_bare = action.nargs == "?" and (not after or after.startswith("--") or " " in after)
        if equals or is_bare:
            flag = f"{name} {value if equals else 1}"
            raise UserError(
                f'{word} may be a variant or a flag of all runs: write "{flag}", in quotes, for a variant, '
                f"and {flag}, without them, for all runs"
            )


def settings_of(args_class: type[StageArgs], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that flags give, and those of a --config, in the order of their names. They are read now,
    so editing the file afterwards changes nothing. Settings in the file that compare.py sets for each run are
    left out. Raises UserError, also if a flag gives such a setting."""
    typed = {name: value for name, value in flags.items() if name != "config"}
    if taken := OWN_FLAGS & {args_class.aliases.get(name, name) for name in typed}:
        raise UserError(
            f"{', '.join(f'--{name}' for name in sorted(taken))}: this script sets it; leave it out"
        )
    given: dict[str, Any] = {}
    if "config" in flags:
        given = checked(args_class, yaml_values(args_class, flags["config"]))
        given = {name: value for name, value in given.items() if name not in OWN_FLAGS}
    return dict(sorted((given | checked(args_class, flag_values(typed))).items()))


def variant_settings(args_class: type[StageArgs], text: str) -> dict[str, Any]:
    """The settings of a variant, from its flags in quotes. Raises UserError."""
    try:
        return settings_of(args_class, read_flags(stage_parser(args_class, None), split_flags(text)))
    except UserError as error:
        raise UserError(f'variant "{text}": {error}') from None


def as_words(args_class: type[StageArgs], settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line."""
    return [f"--{name}={as_text(args_class, name, value)}" for name, value in settings.items()]


def as_text(args_class: type[StageArgs], name: str, value: Any) -> str:
    """The value of a setting in the form that its flag takes."""
    if value is None:
        return "auto" if setting_option(args_class.model_fields[name], "auto") else "none"
    return str(int(value) if isinstance(value, bool) else value)


def judged_by(objective: Any, metric: str) -> set[str]:
    """The settings that a figure depends on, besides the model and the data. The objective of the stage
    declares them. For `quiz` there are none."""
    name = metric.removeprefix("eval_")
    reads = objective.held_out_reads if name != "quiz" else {}
    of_metric = reads.get("loss" if name == "bpb" else name, "")  # bits per byte is the loss in another unit
    return {*reads.get("", "").split(), *of_metric.split()}
