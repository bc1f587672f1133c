"""Reads settings from a YAML file, the environment, the command line and a task's defaults: for scripts and
the engine.

Later sources override earlier ones: the defaults, a YAML file (--config), the environment
(MINIMIND_BATCH_SIZE=8), the command line (--batch_size 8). Each reader returns the settings that its source
gives as {name: (value, where)}, or raises one UserError with every mistake in it. Values are text, in YAML as
well; the settings table (settings.py, with pydantic) converts and checks them.
"""

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import yaml

from common.command_line import Parser
from common.errors import UserError, reason
from common.launcher import launch
from common.minimind_flags import USE_INSTEAD
from common.settings import AUTO, Setting, StageArgs, aliases_of, flag_options, settings_of

PREFIX = "MINIMIND_"  # of environment variables
OTHERS = ("MINIMIND_API_KEY",)  # environment variables of other programs
OPTIONS = "task_options"  # section for the options of a user's own task
WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}

Settings = Mapping[str, Setting]
Given = dict[str, tuple[Any, str]]  # name of a setting, or task_options.NAME -> value, where it was given
A = TypeVar("A", bound=StageArgs)


def option_value(text: str) -> bool | int | float | str | None:
    """The value of a user's own option: a number as for a flag (1e-4 is a float, 010 ten), true, false, null,
    or text, which 0x10, 1:30 and dates are."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(re.sub(r"(?i)\.(inf|nan)$", r"\1", text))
    return WORDS.get(text.lower(), text)


def to_yaml(value: Any) -> str:
    """One line of YAML that reads back as the same value."""
    text = yaml.safe_dump(value, allow_unicode=True, width=math.inf).removesuffix("...\n").rstrip("\n")
    if isinstance(value, str) and (
        len(text.splitlines()) > 1 or (text == value and option_value(text) != value)
    ):
        text = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")
    return text


class Source:
    """One source of settings: the values it gives, and its mistakes. args_class: the settings that there
    are."""

    def __init__(self, args_class: type):
        known = settings_of(args_class)
        self.settings = {**known, **{alias: known[name] for alias, name in aliases_of(args_class).items()}}
        self.given: Given = {}
        self.wrong: list[str] = []

    def take(self, name: str, where: str, label: str, value: Any) -> None:
        """Add the value of a setting; an error message begins with `label`."""
        setting = self.settings[name]
        try:
            parsed = setting.parse(value)
        except ValueError as error:
            self.wrong.append(f"{label} {error}")
            return
        before, _ = self.given.setdefault(setting.name, (parsed, where))
        if before != parsed:  # under another name, since no source gives a name twice
            self.wrong.append(
                f"{label} {parsed} contradicts {setting.name} {before}; they are one setting, give one"
            )

    def option(self, name: str, where: str, label: str, value: Any) -> None:
        """Add an option of a user's own task."""
        if name in self.settings:
            self.wrong.append(f"{label} is a built-in setting, in section {self.settings[name].section}")
        elif not name.isidentifier():
            self.wrong.append(f"{label} must be named with letters, digits and underscores")
        elif not isinstance(value, (str, int, float, type(None))):
            self.wrong.append(f"{label} must be a single value (put text in quotes)")
        else:
            self.given[f"{OPTIONS}.{name}"] = value, where

    def unknown(self, label: str, name: str, names: Iterable[str], spell: Callable[[str], str] = str) -> None:
        """Report an unknown name and what to use for one of MiniMind's, else the closest known one, by
        `spell`."""
        near = difflib.get_close_matches(name.lower(), list(names), 1)
        hint = f"; did you mean {spell(near[0])}" if near else ""
        self.wrong.append(f"{label} is unknown" + (f": {USE_INSTEAD[name]}" if name in USE_INSTEAD else hint))

    def finish(self, hint: str = "") -> Given:
        """The values that the source gives. Raises UserError: one line with all its mistakes."""
        if self.wrong:
            raise UserError(" ".join("; ".join(self.wrong).splitlines()) + hint)
        return self.given


def parse_args(
    args_class: type[A],
    description: str | None,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    **defaults: Any,
) -> A:
    """The settings of a stage: the defaults of its class (or `defaults`), overridden by file, environment and
    flags.

    Raises:
        UserError: one line with everything that is wrong in a source.
        SystemExit: after `--help` and `--print_config`.
    """
    options, given = read_sources(args_class, settings_parser(args_class, description), argv, environ)
    args = args_class(
        **defaults | {name: value for name, (value, _) in given.items()}, given=frozenset(given)
    )
    if options.print_config:
        places = {name: where for name, (_, where) in given.items()}
        print_once(described(settings_of(args_class), args.values(), places), environ)
    if wrong := args.contradictions():
        raise UserError("; ".join(wrong))
    return args


def read_sources(
    args_class: type,
    parser: Parser,
    argv: Sequence[str] | None,
    environ: Mapping[str, str],
    first: Given | None = None,
) -> tuple[argparse.Namespace, Given]:
    """The parsed options that are no settings (`config`, `print_config`, `set`), and the settings that the
    sources give, after those of `first`. Raises UserError: one line with all unknown names and invalid values
    of a source."""
    options, from_flags = read_command_line(args_class, parser, argv)
    from_file = read_yaml(args_class, options.config) if options.config is not None else {}
    return options, (first or {}) | from_file | read_environment(args_class, environ) | from_flags


def print_once(text: str, environ: Mapping[str, str]) -> None:
    """Print on rank 0 and end the process. environ: says which rank this is. Raises SystemExit always."""
    if launch(environ).rank == 0:
        print(text, end="", flush=True)
    raise SystemExit(0)


def described(settings: Settings, values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Every setting with its value and source, as YAML that `--config` can read. values: also of
    task_options."""
    by_section: dict[str, list[str]] = {}
    for name in dict.fromkeys([*settings, *values]):
        by_section.setdefault(settings[name].section if name in settings else OPTIONS, []).append(name)
    lines = []
    for section, names in by_section.items():
        lines.append(f"{section}:")
        for name in names:
            where = sources.get(name if name in settings else f"{OPTIONS}.{name}", "default")
            shown = "".join(c if c.isprintable() else "?" for c in where)
            is_auto = name in settings and settings[name].auto and values[name] == AUTO
            value = "auto" if is_auto else to_yaml(values[name])
            lines.append(f"  {f'{name}: {value}':58}  # {shown}")
    return "\n".join(lines) + "\n"


def settings_parser(args_class: type, description: str | None, **kwargs: Any) -> Parser:
    """The command line: every setting as a flag whose value stays text, in one group per section, and its
    aliases."""
    parser = Parser(
        description=(description or "").split("\n", 1)[0], argument_default=argparse.SUPPRESS, **kwargs
    )
    text = f"YAML file with settings, in the sections shown here; flags and {PREFIX}... variables override it"
    parser.add_argument("--config", metavar="FILE", default=None, help=text)
    text = "show every setting with its source, as YAML, and exit"
    parser.add_argument("--print_config", action="store_true", default=None, help=text)
    settings, aliases = settings_of(args_class).values(), aliases_of(args_class)
    for section in dict.fromkeys(each.section for each in settings):
        group = parser.add_argument_group(section)
        for each in (each for each in settings if each.section == section):
            options = flag_options(each)
            group.add_argument(f"--{each.name}", **options)
            for alias in (alias for alias, name in aliases.items() if name == each.name):
                named: dict[str, Any] = {"dest": alias, "help": f"another name of --{each.name}"}
                group.add_argument(f"--{alias}", **options | named)
    return parser


def read_task_defaults(args_class: type, task: str, defaults: Mapping[str, Any]) -> Given:
    """The defaults of a task. Names that are not settings are options of the task."""
    source, where = Source(args_class), f"task {task}".rstrip()
    for name, value in defaults.items():
        take = source.take if name in source.settings else source.option
        take(name, where, f"{where}: its default {name}", value)
    return source.finish()


def read_environment(args_class: type, environ: Mapping[str, str]) -> Given:
    """Settings from variables such as MINIMIND_BATCH_SIZE."""
    source = Source(args_class)
    for variable in sorted(key for key in environ if key.startswith(PREFIX) and key not in OTHERS):
        name = variable.removeprefix(PREFIX).lower()
        if name in source.settings and variable == variable.upper():
            source.take(name, variable, variable, environ[variable])
        else:
            source.unknown(variable, name, source.settings, lambda near: PREFIX + near.upper())
    return source.finish()


def read_command_line(
    args_class: type, parser: Parser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, Given]:
    """The parsed options, and the settings given as flags."""
    source, where = Source(args_class), "command line"
    options, rest = parser.parse_known_args(argv)
    flags = [flag.removeprefix("--") for action in parser._actions for flag in action.option_strings]
    for text in [part.split("=")[0] for part in rest if part.startswith("--")] or rest:
        source.unknown(text, text.lstrip("-"), flags, "--{}".format)
    for name in [name for name in vars(options) if name in source.settings]:
        source.take(name, where, f"--{name}", getattr(options, name))
    for pair in getattr(options, "set", []):
        name, equals, text = pair.partition("=")
        if equals:
            source.option(name, where, f"--set {name}", option_value(text))
        else:
            source.wrong.append(f"--set {pair} must be NAME=VALUE")
    unknown = any(" is unknown" in text for text in source.wrong)
    return options, source.finish("; see --help" * unknown)


def read_yaml(args_class: type, path: str) -> Given:
    """Settings from a YAML file: a mapping of sections, each a mapping of settings. Raises UserError:
    FILE:LINE and the mistake, for all settings at once; or the file cannot be read."""
    source = Source(args_class)
    for section, _, settings in _entries(source, path, _read(path), ""):
        for name, where, node in _entries(source, path, settings, f"{section}."):
            label = f"{where}: {section}.{name}"
            if not isinstance(node, yaml.ScalarNode):
                source.wrong.append(f"{label} must be a single value (put text in quotes)")
            elif section == OPTIONS:
                source.option(name, where, label, node.value if node.style else option_value(node.value))
            elif name not in source.settings:
                source.unknown(label, name, source.settings)
            elif source.settings[name].section != section:
                source.wrong.append(
                    f"{label} is unknown; {name} belongs to section {source.settings[name].section}"
                )
            else:
                source.take(name, where, label, None if node.tag.endswith(":null") else node.value)
    return source.finish()


def given_task(argv: Sequence[str] | None, environ: Mapping[str, str]) -> str:
    """The name of the engine's task, on which the other settings depend, before they are read; empty for
    none."""
    parser = Parser(add_help=False)
    parser.add_argument("--task")
    parser.add_argument("--config")
    options = parser.parse_known_args(argv)[0]
    text = options.task or environ.get(f"{PREFIX}TASK")
    if text is None and options.config:
        # mistakes are reported later
        with suppress(Exception), open(options.config, encoding="utf-8-sig") as file:
            return str(yaml.load(file, yaml.BaseLoader)["training"]["task"])
    return text or ""


def _entries(
    source: Source, path: str, node: yaml.Node | None, prefix: str
) -> Iterator[tuple[str, str, yaml.Node]]:
    """Name, FILE:LINE and value of each entry of a mapping; none for an empty document or section."""
    if node is None or node.tag.endswith(":null"):
        return
    if not isinstance(node, yaml.MappingNode):
        what = (
            f"section {prefix[:-1]} must be a mapping of settings"
            if prefix
            else "must be a mapping of sections"
        )
        kind = "a list" if isinstance(node, yaml.SequenceNode) else node.value
        source.wrong.append(f"{path}:{node.start_mark.line + 1}: {what}, not {kind}")
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else f"a {key.id}"
        line = key.start_mark.line + 1
        if name in first:
            source.wrong.append(f"{path}:{line}: {prefix}{name} is given twice, first on line {first[name]}")
        else:
            first[name] = line
            yield name, f"{path}:{line}", value


def _read(path: str) -> yaml.Node | None:
    """The root node of a YAML file; nodes know their line numbers."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return yaml.compose(file.read(), yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{path}:{mark.line + 1 if mark else 1}: is not YAML ({error.problem})") from error
    # ValueError: not UTF-8
    except (OSError, ValueError, ArithmeticError, RecursionError, yaml.YAMLError) as error:
        raise UserError(
            f"--config {path} cannot be read ({getattr(error, 'strerror', None) or reason(error)})"
        ) from error
