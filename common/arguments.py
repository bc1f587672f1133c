"""The settings of a stage from its command line and a YAML file.

Flags override the file, and that the defaults of the stage. One line names all the mistakes of a source.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import yaml

from common.command_line import Parser, hint
from common.errors import UserError
from common.hub import make_local
from common.launcher import launch
from common.settings import StageArgs, settings_of

A = TypeVar("A", bound=StageArgs)


def parse_args(
    args_class: type[A], description: str | None, argv: Sequence[str] | None = None, **defaults: Any
) -> A:
    """The settings of a stage: the defaults of its class (or `defaults`), overridden by --config and flags.

    Raises:
        UserError: one line with everything that is wrong in a source.
        SystemExit: after `--help` and `--print_config`.
    """
    flags = vars(stage_parser(args_class, description).parse_args(argv))
    config, print_config = flags.pop("config", None), flags.pop("print_config", False)
    given = checked(args_class, "--", flags)
    sources = dict.fromkeys(given, "command line")
    if config is not None:
        from_file = checked(args_class, f"{config}: ", read_yaml(config))
        given = from_file | given
        sources = dict.fromkeys(from_file, config) | sources
    args = args_class(**defaults | given, given=frozenset(given))
    if print_config:
        print_and_exit(settings_as_yaml(args_class, args.values(), sources))
    wrong = args.contradictions()
    if wrong:
        raise UserError("; ".join(wrong))
    if any("://" in str(value) for value in vars(args).values()):
        make_local(args)
    return args


def stage_parser(args_class: type[StageArgs], description: str | None, **options: Any) -> Parser:
    """The command line: every setting as a flag whose value stays text, in one group per section. What is not
    given is not in the result."""
    title = (description or "").split("\n", 1)[0]
    parser = Parser(description=title, argument_default=argparse.SUPPRESS, **options)
    text = "YAML file with settings, in the sections shown here; flags override it"
    parser.add_argument("--config", metavar="FILE", help=text)
    text = "show every setting with its source, as YAML, and exit"
    parser.add_argument("--print_config", action="store_true", help=text)
    groups: dict[str, Any] = {}
    for entry in settings_of(args_class).values():
        if entry.section not in groups:
            groups[entry.section] = parser.add_argument_group(entry.section)
        names = [entry.name] + [alias for alias, name in args_class.aliases.items() if name == entry.name]
        groups[entry.section].add_argument(*(f"--{name}" for name in names), **entry.flag_options())
    return parser


def read_yaml(path: str) -> dict[str, Any]:
    """The settings of a YAML file, named `section.name`. Raises UserError if the file cannot be read or has
    another form."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = yaml.safe_load(file)
    # ValueError: not UTF-8, or a date that there is not
    except (OSError, ValueError, ArithmeticError, RecursionError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"--config {path} cannot be read ({why})") from error
    if not isinstance(content, dict | None):
        raise UserError(f"{path}: must be a mapping of sections, not {content!r}")
    values = {}
    for section, settings in (content or {}).items():
        if not isinstance(settings, dict | None):
            raise UserError(f"{path}: section {section} must be a mapping of settings, not {settings!r}")
        for name, value in (settings or {}).items():
            values[f"{section}.{name}"] = value
    return values


def checked(args_class: type[StageArgs], source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a source by the names of their settings, converted. Raises UserError: one line with all
    mistakes, each of which begins with `source` and the name."""
    settings = settings_of(args_class)
    converted: dict[str, Any] = {}
    wrong = []
    for label, value in values.items():
        name = label.rpartition(".")[2]
        name = args_class.aliases.get(name, name)
        if name not in settings:
            wrong.append(f"{source}{label} is unknown; {hint(name, settings)}")
            continue
        try:
            converted[name] = settings[name].parse(value)
        except argparse.ArgumentTypeError as error:
            wrong.append(f"{source}{label} {error}")
    if wrong:
        raise UserError(" ".join("; ".join(wrong).splitlines()))
    return converted


def settings_as_yaml(
    args_class: type[StageArgs], values: Mapping[str, Any], sources: Mapping[str, str]
) -> str:
    """Every setting with its value and source, as YAML that `--config` can read."""
    lines, section = [], ""
    for name, entry in settings_of(args_class).items():
        if entry.section != section:
            section = entry.section
            lines.append(f"{section}:")
        value = "auto" if entry.auto and values[name] is None else values[name]
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
