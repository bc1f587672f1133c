"""Reads the engine's settings from a YAML file, the environment, the command line and a task's own defaults.

Each reader returns the settings it finds as {name: (value, where it was given)}, or raises one UserError with every
mistake in its source. PyYAML parses; the settings table (common/settings.py, with pydantic) converts and checks.
"""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml

from common.command_line import Parser
from common.errors import UserError
from common.settings import Setting, add_grouped_flags

PREFIX = "MINIMIND_"  # of environment variables
OPTIONS = "task_options"  # section for the options of a user's own task
ALIASES = {"top_k": "num_experts_per_tok"}  # other names of settings

Settings = Mapping[str, Setting]
Given = dict[str, tuple[Any, str]]  # name of a setting, or task_options.NAME -> value, where it was given


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
    """One source of settings: the values it gives, and its mistakes."""

    def __init__(self, settings: Settings):
        aliases = {alias: settings[name] for alias, name in ALIASES.items() if name in settings}
        self.settings = {**settings, **aliases}
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


def read_task_defaults(settings: Settings, task: str, defaults: Mapping[str, Any]) -> Given:
    """The defaults of a task. Names that are not settings are options of the task."""
    source, where = Source(settings), f"task {task}".rstrip()
    for name, value in defaults.items():
        take = source.take if name in source.settings else source.option
        take(name, where, f"{where}: its default {name}", value)
    return source.finish()


def read_environment(settings: Settings, environ: Mapping[str, str]) -> Given:
    """Settings from variables such as MINIMIND_BATCH_SIZE."""
    source = Source(settings)
    for variable in sorted(key for key in environ if key.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX).lower()
        if name in source.settings and variable == variable.upper():
            source.take(name, variable, variable, environ[variable])
        else:
            source.unknown(variable, name, source.settings, lambda near: PREFIX + near.upper())
    return source.finish()


def config_parser(args_class: type) -> Parser:
    """The command line: every setting as a flag, in one group per section. Values stay text."""
    parser = Parser(prog="python -m llm.training.train", description="Train a built-in task or your own.")
    parser.epilog = "A task may have its own defaults: --print_config shows every setting and its source."
    flag = parser.add_argument
    flag("--config", metavar="FILE", help="YAML file with settings in the sections shown by --help")
    text = "show every setting with its source, as YAML, and exit"
    flag("--print_config", action="store_true", default=None, help=text)
    text = f"an option of your own task, stored in config.extra (in YAML: section {OPTIONS}); may be repeated"
    flag("--set", action="append", metavar="NAME=VALUE", help=text)
    for alias, name in ALIASES.items():
        flag(f"--{alias}", metavar="INT", help=f"another name of --{name}")
    add_grouped_flags(parser, args_class)
    return parser


def read_command_line(
    settings: Settings, args_class: type, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, Given]:
    """The parsed options (`config`, `print_config`), and the settings given as flags."""
    source, where = Source(settings), "command line"
    options, rest = config_parser(args_class).parse_known_args(argv)
    for text in [part.split("=")[0] for part in rest if part.startswith("--")] or rest:
        source.unknown(text, text.lstrip("-"), (*source.settings, "config", "print_config", "set"), "--{}".format)
    for name in [name for name in source.settings if getattr(options, name, None) is not None]:
        source.take(name, where, f"--{name}", getattr(options, name))
    for pair in options.set or []:
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
    return options, source.finish("; see --help")


def read_yaml(settings: Settings, path: str) -> Given:
    """Settings from a YAML file: a mapping of sections, each a mapping of settings.

    Raises:
        UserError: FILE:LINE and the mistake, for all settings at once; or the file cannot be read.
    """
    source = Source(settings)
    sections = {setting.section for setting in settings.values()} | {OPTIONS}
    for section, line, node in _entries(source, path, _read(path), ""):
        if section in sections:
            for name, where, value in _entries(source, path, node, f"{section}."):
                _take_entry(source, section, name, where, value)
        elif section in settings:
            source.wrong.append(f"{line}: {section} belongs to section {settings[section].section}")
        else:
            source.unknown(f"{line}: section {section}", section, sections)
    return source.finish()


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
