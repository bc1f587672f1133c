"""The settings of a stage from its command line and a YAML file.

Flags override the file, and that the defaults of the stage. Each source is checked as a whole: one line names
all its unknown names and wrong values.
"""

import argparse
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import yaml

from common.command_line import USE_INSTEAD, Parser
from common.errors import UserError
from common.hub import local_settings
from common.launcher import launch
from common.settings import StageArgs, settings_of

A = TypeVar("A", bound=StageArgs)
Entry = tuple[str, str, Any]  # how an error names it, the name of the setting, the value


def parse_args(
    args_class: type[A], description: str | None, argv: Sequence[str] | None = None, **defaults: Any
) -> A:
    """The settings of a stage: the defaults of its class (or `defaults`), overridden by --config and flags.

    Raises:
        UserError: one line with everything that is wrong in a source.
        SystemExit: after `--help` and `--print_config`.
    """
    options, entries = read_command_line(stage_parser(args_class, description), argv)
    given = checked(args_class, entries)
    sources = dict.fromkeys(given, "command line")
    if options.config is not None:
        from_file = checked(args_class, entries_of(options.config, read_yaml(options.config)))
        given = from_file | given
        sources = dict.fromkeys(from_file, options.config) | sources
    args = args_class(**defaults | given, given=frozenset(given))
    if options.print_config:
        print_and_exit(settings_as_yaml(args_class, args.values(), sources))
    wrong = args.contradictions()
    if wrong:
        raise UserError("; ".join(wrong))
    if any("://" in str(value) for value in args.values().values()):
        args = replace(args, **local_settings(args.values()))
    return args


def stage_parser(args_class: type[StageArgs], description: str | None, **options: Any) -> Parser:
    """The command line: every setting as a flag whose value stays text, in one group per section."""
    title = (description or "").split("\n", 1)[0]
    parser = Parser(description=title, argument_default=argparse.SUPPRESS, **options)
    text = "YAML file with settings, in the sections shown here; flags override it"
    parser.add_argument("--config", metavar="FILE", default=None, help=text)
    text = "show every setting with its source, as YAML, and exit"
    parser.add_argument("--print_config", action="store_true", default=False, help=text)
    groups: dict[str, Any] = {}
    for each in settings_of(args_class).values():
        if each.section not in groups:
            groups[each.section] = parser.add_argument_group(each.section)
        names = [each.name, *(alias for alias, name in args_class.aliases.items() if name == each.name)]
        groups[each.section].add_argument(*(f"--{name}" for name in names), **each.flag_options())
    return parser


def read_command_line(parser: Parser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Entry]]:
    """The options that are no settings (`config`, `print_config` ...), and what is given as flags, also
    flags that do not exist."""
    options, unknown = parser.parse_known_args(argv)
    others = {action.dest for action in parser._optionals._group_actions}
    entries = [(f"--{name}", name, text) for name, text in vars(options).items() if name not in others]
    flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    entries += [(word, word.lstrip("-"), None) for word in flags or unknown]
    return options, entries


def read_yaml(path: str) -> dict[str, dict[str, Any]]:
    """The sections of a YAML file, each a mapping of settings. Raises UserError if the file cannot be read or
    is something else."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = yaml.safe_load(file)
    # ValueError: not UTF-8, or a date that there is not
    except (OSError, ValueError, ArithmeticError, RecursionError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"--config {path} cannot be read ({why})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a mapping of sections, not {content!r}")
    for section, settings in content.items():
        if not isinstance(settings, dict | None):
            raise UserError(f"{path}: section {section} must be a mapping of settings, not {settings!r}")
    return {section: settings or {} for section, settings in content.items()}


def entries_of(path: str, sections: Mapping[str, Mapping[str, Any]]) -> list[Entry]:
    """The settings of a YAML file."""
    return [
        (f"{path}: {section}.{name}", name, value)
        for section, settings in sections.items()
        for name, value in settings.items()
    ]


def checked(args_class: type[StageArgs], entries: Iterable[Entry]) -> dict[str, Any]:
    """The values by the names of their settings, converted. Raises UserError: one line with all mistakes."""
    settings, values, wrong = settings_of(args_class), {}, []
    for label, name, value in entries:
        each = settings.get(args_class.aliases.get(name, name))
        if each is None:
            prefix = "--" if label.startswith("--") else ""
            wrong.append(f"{label} is unknown{hint(str(name), settings, prefix)}")
            continue
        try:
            values[each.name] = each.parse(value)
        except ValueError as error:
            wrong.append(f"{label} {error}")
    if wrong:
        raise UserError(" ".join("; ".join(wrong).splitlines()))
    return values


def hint(name: str, settings: Iterable[str], prefix: str) -> str:
    """What to use instead of an unknown name. prefix: `--` on a command line."""
    if name in USE_INSTEAD:
        return f": {USE_INSTEAD[name]}"
    near = difflib.get_close_matches(name.lower(), settings, 1)
    return f"; did you mean {prefix}{near[0]}" if near else "; see --help"


def settings_as_yaml(
    args_class: type[StageArgs], values: Mapping[str, Any], sources: Mapping[str, str]
) -> str:
    """Every setting with its value and source, as YAML that `--config` can read."""
    lines, section = [], ""
    for name, each in settings_of(args_class).items():
        if each.section != section:
            section = each.section
            lines.append(f"{section}:")
        value = "auto" if each.auto and values[name] is None else values[name]
        lines.append(setting_as_yaml(name, value, sources.get(name, "default")))
    return "\n".join(lines) + "\n"


def setting_as_yaml(name: str, value: Any, source: str) -> str:
    """A line of YAML that reads back as the same value, with its source."""
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text = yaml.safe_dump(value, default_style=style, allow_unicode=True, width=math.inf)
    text = text.removesuffix("...\n").rstrip("\n")
    return f"  {name}: {text}".ljust(60) + f"  # {source}"


def print_and_exit(text: str) -> NoReturn:
    """Print on rank 0 and end the process."""
    if launch().rank == 0:
        print(text, end="", flush=True)
    raise SystemExit(0)
