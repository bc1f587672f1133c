"""Reads the engine's settings from a YAML file, the environment, the command line and a task's own defaults.

Each reader maps the settings that it finds to (value, where it was given), or tells of all that is wrong in its source
at once. A value is the same from every source: YAML's own typing only decides what is refused.
"""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml

from dataset.errors import Parser, UserError

PREFIX = "MINIMIND_"  # of variables in the environment
OPTIONS = "task_options"  # the section of a user's own task
TAGS = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null"}  # YAML's names of Python's types
ACCEPTED = {
    bool: ("bool", "int"),
    int: ("int",),
    float: ("float", "int", "str"),
    str: ("str",),
}  # YAML 1.1: 1e-4 is str
WANTED = {bool: "true or false (or 1 or 0)", int: "a whole number", float: "a finite number", str: "text"}
TYPE_NAMES = {bool: "BOOL", int: "INT", float: "FLOAT"}  # in --help
BOOLS = {"0": False, "1": True, "false": False, "true": True}


class Setting(NamedTuple):
    """One field of a section: its type, its default, its help."""

    section: str
    kind: Any  # bool, int, float, str, str | None, or a Literal of texts
    default: Any
    help: str


Settings = Mapping[str, Setting]
Given = dict[str, tuple[Any, str]]  # setting, or task_options.NAME -> value and where it was given


def parse_value(kind: Any, text: str, tag: str = "text") -> Any:
    """The value of a setting. `tag`: its type in YAML, or "text" on the command line and in the environment.

    Raises:
        ValueError: with what it must be.
    """
    optional, choices = type(None) in get_args(kind), get_args(kind) if get_origin(kind) is Literal else ()
    if optional and (tag == "null" or (tag in ("str", "text") and text.lower() in ("", "none"))):
        return None
    base = str if choices or optional else kind
    try:
        value = BOOLS[text.lower()] if base is bool else base(text)
    except (ValueError, LookupError):
        value = math.nan
    if tag not in (*ACCEPTED[base], "text") or value != value or value in (math.inf, -math.inf):
        shown = repr(text) if tag in ("str", "text") else text
        hint = " (put it in quotes)" if base is str and tag in TAGS.values() and tag != "null" else ""
        raise ValueError(f"must be {WANTED[base]}, not {shown}{hint}")
    if choices and value not in choices:
        raise ValueError(f"must be {' or '.join(choices)}, not {text!r}")
    return value


def node_value(node: yaml.Node) -> tuple[str, str]:
    """Text and tag of a YAML node, for `parse_value`."""
    if not isinstance(node, yaml.ScalarNode):
        return ("a list", "seq") if isinstance(node, yaml.SequenceNode) else ("a mapping", "map")
    tag = node.tag.rpartition(":")[2]
    return ("null" if tag == "null" else node.value), tag


def python_value(value: Any) -> tuple[str, str]:
    """Text and tag of a Python value, for `parse_value`."""
    return ("null" if value is None else str(value)), TAGS.get(type(value), "other")


def plain_value(node: yaml.Node | None) -> Any:
    """A setting of a user's own task as YAML reads it: None, a bool, a number (1e-4 as well) or text.

    Raises:
        ValueError: it is a list or a mapping.
    """
    if node is None:
        return None
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("must be one value (put text in quotes)")
    text, tag = node_value(node)
    if tag in ("null", "bool"):
        return None if tag == "null" else text.lower() in ("true", "yes", "on")
    exponent = node.style is None and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", text)
    for number in (int, float) if exponent or tag in ("int", "float") else ():
        try:
            return number(re.sub(r"(?i)\.(inf|nan)", r"\1", text))
        except ValueError:
            continue
    return text


def compose(text: str) -> yaml.Node | None:
    """YAML as nodes, which know their types and lines; nothing is constructed from them."""
    return yaml.compose(text, Loader=yaml.SafeLoader)


def to_yaml(value: Any) -> str:
    """One value as YAML, on one line, that reads back as the same value."""
    text = yaml.safe_dump(value, allow_unicode=True, width=math.inf).removesuffix("...\n").rstrip("\n")
    if isinstance(value, str) and (len(text.splitlines()) > 1 or plain_value(compose(text)) != value):
        text = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")
    return text


class Source:
    """One source of settings: what it gives, and everything that is wrong in it."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.given: Given = {}
        self.wrong: list[str] = []

    def take(self, name: str, where: str, label: str, text: str, tag: str = "text") -> None:
        """Take the value of a setting; `label` opens a complaint."""
        try:
            self.given[name] = parse_value(self.settings[name].kind, text, tag), where
        except ValueError as error:
            self.wrong.append(f"{label} {error}")

    def option(self, name: str, where: str, label: str, node: yaml.Node | None) -> None:
        """Take a setting of a user's own task."""
        if name in self.settings:
            self.wrong.append(f"{label} is a setting of its own, in section {self.settings[name].section}")
        elif not name.isidentifier():
            self.wrong.append(f"{label} must be named with letters, digits and underscores")
        else:
            try:
                self.given[f"{OPTIONS}.{name}"] = plain_value(node), where
            except ValueError as error:
                self.wrong.append(f"{label} {error}")

    def unknown(self, label: str, name: str, names: Iterable[str], spell: Callable[[str], str] = str) -> None:
        """Complain of a name that does not exist, and tell the nearest that does, as `spell` writes it."""
        near = difflib.get_close_matches(name.lower(), list(names), 1)
        self.wrong.append(f"{label} is unknown" + (f"; did you mean {spell(near[0])}" if near else ""))

    def finish(self, hint: str = "") -> Given:
        """What the source gives.

        Raises:
            UserError: one line with all that is wrong in it.
        """
        if self.wrong:
            raise UserError(" ".join("; ".join(self.wrong).splitlines()) + hint)
        return self.given


def read_task_defaults(settings: Settings, task: str, defaults: Mapping[str, Any]) -> Given:
    """The defaults that a task brings, as Python values by the settings' names."""
    source, where = Source(settings), f"task {task}".rstrip()
    for name, value in defaults.items():
        label = f"{where}: its default {name}"
        if name in settings:
            source.take(name, where, label, *python_value(value))
        else:
            source.unknown(label, name, settings)
    return source.finish()


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def read_environment(settings: Settings, environ: Mapping[str, str]) -> Given:
    """Variables such as MINIMIND_BATCH_SIZE."""
    source = Source(settings)
    for variable in sorted(key for key in environ if key.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX).lower()
        if name in settings and variable == _variable(name):
            source.take(name, variable, variable, environ[variable])
        else:
            source.unknown(variable, name, settings, _variable)
    return source.finish()


def config_parser(settings: Settings) -> Parser:
    """The command line: every setting as a flag that keeps its text, in a group per section."""
    parser = Parser(prog="python -m llm.training.train", description="Train a task, a built-in one or your own.")
    parser.epilog = "A task brings defaults of its own: --print_config shows what holds, and where it comes from."
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, in the sections below")
    flag, text = parser.add_argument, "show every setting with its source, as YAML, and end"
    flag("--print_config", action="store_true", default=None, help=text)
    text = f"a setting of your own task, in config.extra; in YAML the section {OPTIONS}; may be repeated"
    flag("--set", action="append", metavar="NAME=VALUE", help=text)
    groups = {setting.section: None for setting in settings.values()}
    groups = {section: parser.add_argument_group(section) for section in groups}
    for name, setting in settings.items():
        metavar = TYPE_NAMES.get(setting.kind, "TEXT")
        if get_origin(setting.kind) is Literal:
            metavar = "{" + ",".join(get_args(setting.kind)) + "}"
        bare = {"nargs": "?", "const": "true"} if setting.kind is bool else {}
        default = str(setting.default).lower() if setting.kind is bool or setting.default is None else setting.default
        text = setting.help + (f" (default: {default})" if default != "" else "")
        flag, text = groups[setting.section].add_argument, text.replace("%", "%%")
        flag(f"--{name}", metavar=metavar, default=argparse.SUPPRESS, help=text, **bare)
    return parser


def read_command_line(settings: Settings, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Given]:
    """The options `config` and `print_config`, and the settings given by flags."""
    source, where = Source(settings), "command line"
    options, rest = config_parser(settings).parse_known_args(argv)
    for text in [part.split("=")[0] for part in rest if part.startswith("--")] or rest:
        source.unknown(text, text.lstrip("-"), (*settings, "config", "print_config", "set"), "--{}".format)
    for name in [name for name in settings if hasattr(options, name)]:
        source.take(name, where, f"--{name}", getattr(options, name))
    for pair in options.set or []:
        name, equals, text = pair.partition("=")
        try:
            node = compose(text)
        except (ValueError, ArithmeticError, RecursionError, yaml.YAMLError):
            source.wrong.append(f"--set {name} has a value that is not YAML (put it in quotes)")
            continue
        if equals:
            source.option(name, where, f"--set {name}", node)
        else:
            source.wrong.append(f"--set {pair} must be NAME=VALUE")
    return options, source.finish("; see --help")


def read_yaml(settings: Settings, path: str) -> Given:
    """A YAML file: a mapping of sections, each a mapping of settings.

    Raises:
        UserError: FILE:LINE and what is wrong, for all settings at once; or the file cannot be read.
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
    if section == OPTIONS:
        source.option(name, where, label, node)
    elif name not in source.settings:
        source.unknown(label, name, source.settings)
    elif source.settings[name].section != section:
        source.wrong.append(f"{label} is unknown; {name} belongs to section {source.settings[name].section}")
    else:
        source.take(name, where, label, *node_value(node))


def _entries(source: Source, path: str, node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, str, yaml.Node]]:
    """Name, FILE:LINE and value of each entry of a mapping; nothing at all is an empty one."""
    if node is None or node_value(node)[1] == "null":
        return
    if not isinstance(node, yaml.MappingNode):
        what = f"section {prefix[:-1]} must be a mapping of settings" if prefix else "must be a mapping of sections"
        source.wrong.append(f"{path}:{node.start_mark.line + 1}: {what}, not {node_value(node)[0]}")
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        name, line = node_value(key)[0], key.start_mark.line + 1
        if name in first:
            source.wrong.append(f"{path}:{line}: {prefix}{name} is given twice, first on line {first[name]}")
        else:
            first[name] = line
            yield name, f"{path}:{line}", value


def _read(path: str) -> yaml.Node | None:
    try:
        with open(path, "rb") as file:
            data = file.read()
        text = data.decode("utf-8-sig")
        return compose(text)
    except (OSError, ValueError, ArithmeticError) as error:
        if isinstance(error, UnicodeDecodeError):
            line = data.count(b"\n", 0, error.start) + 1
            raise UserError(f"{path}:{line}: is not UTF-8 text") from error
        raise UserError(f"--config {path} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{path}:{mark.line + 1}: is not YAML ({error.problem or error.context})") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{path}:{line}: holds a character that YAML does not allow") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply") from error
