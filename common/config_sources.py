"""Reads settings from a YAML file, the environment, the command line and a task's defaults: for scripts and the engine.

Later sources override earlier ones: the defaults, a YAML file (--config), the environment (MINIMIND_BATCH_SIZE=8), the
command line (--batch_size 8). Each reader returns the settings that its source gives as {name: (value, where)}, or
raises one UserError with every mistake in it. PyYAML parses; the settings table (settings.py, with pydantic) converts
and checks.
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
from common.errors import UserError
from common.launcher import launch
from common.settings import Setting, StageArgs, aliases_of, flag_options, settings_of

PREFIX = "MINIMIND_"  # of environment variables
OTHERS = ("MINIMIND_API_KEY",)  # environment variables of other programs
OPTIONS = "task_options"  # section for the options of a user's own task

Settings = Mapping[str, Setting]
Given = dict[str, tuple[Any, str]]  # name of a setting, or task_options.NAME -> value, where it was given
A = TypeVar("A", bound=StageArgs)


class Loader(yaml.SafeLoader):
    """SafeLoader that reads numbers as a command line does: 1e-4 is a float, 010 ten; 0x10, 1:30 and dates are text."""

    def number(self, node: yaml.ScalarNode) -> int | float | str:
        """An int, else a float, else the text."""
        text = self.construct_scalar(node)
        for kind in (int, float):
            with suppress(ValueError):
                return kind(re.sub(r"(?i)\.(inf|nan)$", r"\1", text))
        return text


TAG = "tag:yaml.org,2002:"
EXPONENT = "!exponent"  # a plain scalar such as 1e-4: text in YAML 1.1
Loader.add_implicit_resolver(EXPONENT, re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))
Loader.add_constructor(EXPONENT, Loader.number)
Loader.add_constructor(f"{TAG}int", Loader.number)
Loader.add_constructor(f"{TAG}float", Loader.number)
Loader.add_constructor(f"{TAG}timestamp", Loader.construct_yaml_str)
UNREADABLE = (ValueError, ArithmeticError, LookupError, RecursionError, yaml.YAMLError)  # raised by a bad YAML value


def to_yaml(value: Any) -> str:
    """One line of YAML that reads back as the same value."""
    text = yaml.safe_dump(value, allow_unicode=True, width=math.inf).removesuffix("...\n").rstrip("\n")
    if isinstance(value, str) and (len(text.splitlines()) > 1 or yaml.load(text, Loader) != value):
        text = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")
    return text


class Source:
    """One source of settings: the values it gives, and its mistakes. args_class: the settings that there are."""

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
            self.wrong.append(f"{label} {parsed} contradicts {setting.name} {before}; they are one setting, give one")

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
        """Report an unknown name and suggest the closest known one, written by `spell`."""
        near = difflib.get_close_matches(name.lower(), list(names), 1)
        self.wrong.append(f"{label} is unknown" + (f"; did you mean {spell(near[0])}" if near else ""))

    def finish(self, hint: str = "") -> Given:
        """The values that the source gives.

        Raises:
            UserError: one line with all its mistakes.
        """
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
    """The settings of a stage: the defaults of its class (or `defaults`), overridden by file, environment and flags.

    Raises:
        UserError: one line with everything that is wrong in a source.
        SystemExit: after `--help` and `--print_config`.
    """
    options, given = read_sources(args_class, settings_parser(args_class, description), argv, environ)
    args = args_class(**defaults | {name: value for name, (value, _) in given.items()})
    if options.print_config:
        places = {name: where for name, (_, where) in given.items()}
        print_once(described(settings_of(args_class), vars(args), places), environ)
    if wrong := args.contradictions():
        raise UserError("; ".join(wrong))
    return args


def read_sources(
    args_class: type, parser: Parser, argv: Sequence[str] | None, environ: Mapping[str, str], first: Given | None = None
) -> tuple[argparse.Namespace, Given]:
    """The parsed options that are no settings (`config`, `print_config`, `set`), and the settings that the sources
    give, after those of `first`.

    Raises:
        UserError: one line with all unknown names and invalid values of a source.
    """
    options, from_flags = read_command_line(args_class, parser, argv)
    from_file = read_yaml(args_class, options.config) if options.config is not None else {}
    return options, (first or {}) | from_file | read_environment(args_class, environ) | from_flags


def print_once(text: str, environ: Mapping[str, str]) -> None:
    """Print on rank 0 and end the process. environ: says which rank this is.

    Raises:
        SystemExit: always.
    """
    if launch(environ).rank == 0:
        print(text, end="", flush=True)
    raise SystemExit(0)


def described(settings: Settings, values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Every setting with its value and source, as YAML that `--config` can read. values: also of task_options."""
    rows: list[tuple[str, str | None]] = []
    for section in dict.fromkeys(each.section for each in settings.values()):
        names = [name for name, each in settings.items() if each.section == section]
        rows += [(f"{section}:", None)] + [(f"  {name}: {to_yaml(values[name])}", name) for name in names]
    own = [name for name in values if name not in settings]
    rows += [(f"{OPTIONS}:", None)] * bool(own)
    rows += [(f"  {name}: {to_yaml(values[name])}", f"{OPTIONS}.{name}") for name in own]
    width = min(60, max(len(text) for text, _ in rows))
    places = {name: "".join(c if c.isprintable() else "?" for c in where) for name, where in sources.items()}
    lines = [text if name is None else f"{text:{width}}  # {places.get(name, 'default')}" for text, name in rows]
    return "\n".join(lines) + "\n"


def settings_parser(args_class: type, description: str | None, **kwargs: Any) -> Parser:
    """The command line: every setting as a flag whose value stays text, in one group per section, and its aliases."""
    parser = Parser(description=(description or "").split("\n", 1)[0], argument_default=argparse.SUPPRESS, **kwargs)
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


def read_command_line(args_class: type, parser: Parser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Given]:
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
        try:
            value = yaml.load(text, Loader)
        except UNREADABLE:
            source.wrong.append(f"--set {name} has a value that is not YAML (put it in quotes)")
            continue
        if equals:
            source.option(name, where, f"--set {name}", value)
        else:
            source.wrong.append(f"--set {pair} must be NAME=VALUE")
    unknown = any(" is unknown" in text for text in source.wrong)
    return options, source.finish("; see --help" * unknown)


def read_yaml(args_class: type, path: str) -> Given:
    """Settings from a YAML file: a mapping of sections, each a mapping of settings.

    Raises:
        UserError: FILE:LINE and the mistake, for all settings at once; or the file cannot be read.
    """
    source = Source(args_class)
    sections = {setting.section for setting in source.settings.values()} | {OPTIONS}
    for section, line, node in _entries(source, path, _read(path), ""):
        if section in sections:
            for name, where, value in _entries(source, path, node, f"{section}."):
                _take_entry(source, section, name, where, value)
        elif section in source.settings:
            source.wrong.append(f"{line}: {section} belongs to section {source.settings[section].section}")
        else:
            source.unknown(f"{line}: section {section}", section, sections)
    return source.finish()


def first_given(name: str, section: str, argv: Sequence[str] | None, environ: Mapping[str, str]) -> str:
    """The value of a setting on which the other settings depend, before they are known; empty if no source gives it."""
    parser = Parser(add_help=False)
    parser.add_argument(f"--{name}")
    parser.add_argument("--config")
    options = parser.parse_known_args(argv)[0]
    text = getattr(options, name) or environ.get(PREFIX + name.upper())
    if text is not None or not options.config:
        return text or ""
    source = Source(StageArgs)  # whose mistakes are reported when all is read
    for key, _, node in _entries(source, options.config, _read(options.config), ""):
        for own, _, value in _entries(source, options.config, node, "") if key == section else ():
            if own == name and isinstance(value, yaml.ScalarNode):
                return value.value
    return ""


def _take_entry(source: Source, section: str, name: str, where: str, node: yaml.Node) -> None:
    label = f"{where}: {section}.{name}"
    try:
        is_text = node.tag == EXPONENT and section != OPTIONS  # the setting converts it, if it is a number
        value = node.value if is_text else Loader("").construct_object(node, deep=True)
    except UNREADABLE:
        source.wrong.append(f"{label} has a value that is not YAML (put it in quotes)")
        return
    if section == OPTIONS:
        source.option(name, where, label, value)
    elif name not in source.settings:
        source.unknown(label, name, source.settings)
    elif source.settings[name].section != section:
        source.wrong.append(f"{label} is unknown; {name} belongs to section {source.settings[name].section}")
    else:
        source.take(name, where, label, value)


def _entries(source: Source, path: str, node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, str, yaml.Node]]:
    """Name, FILE:LINE and value of each entry of a mapping; none for an empty document or section."""
    if node is None or node.tag.endswith(":null"):
        return
    if not isinstance(node, yaml.MappingNode):
        what = f"section {prefix[:-1]} must be a mapping of settings" if prefix else "must be a mapping of sections"
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
        with open(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: is not UTF-8 text") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise UserError(f"--config {path} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    try:
        return yaml.compose(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise UserError(f"{path}:{line}: is not YAML ({error.problem or error.context})") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{path}:{line}: contains a character that YAML does not allow") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply") from error
    except (ValueError, ArithmeticError) as error:  # a number that is too large: %YAML 9999.1, "\UFFFFFFFF"
        raise UserError(f"{path} is not YAML ({error})") from error
