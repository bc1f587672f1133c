"""The settings of a stage from its command line and a YAML file.

Flags override the file, and the file overrides the defaults of the stage. One line names all mistakes of a
source.
"""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from common.command_line import Parser, hint
from common.errors import UserError
from common.launcher import launch
from common.settings import Settings, StageArgs, setting_option

A = TypeVar("A", bound=StageArgs)
# (name as the user spelt it, label for messages such as `--epochs`, value)
NamedValue = tuple[str, str, Any]
METAVARS = {bool: "{0,1}", int: "INT", float: "FLOAT"}


def parse_args(args_class: type[A], description: str | None, argv: Sequence[str] | None = None) -> A:
    """The settings of a stage: the defaults of its class, overridden by --config and flags.

    Raises:
        UserError: one line with everything that is wrong in a source.
        SystemExit: after `--help` and `--print_config`.
    """
    flags = read_flags(stage_parser(args_class, description), argv)
    config, print_config = flags.pop("config", None), flags.pop("print_config", False)
    given = checked(args_class, flag_values(flags))
    if config is not None:
        given = checked(args_class, yaml_values(args_class, config)) | given
    args = args_class().model_copy(update=given)
    if print_config:
        print_and_exit(as_yaml(args_class, dict(args)))
    wrong = args.contradictions()
    if wrong:
        raise UserError("; ".join(wrong))
    if any("://" in str(value) for _, value in args):  # paths on a hub
        from common.hub import make_local

        make_local(args)
    return args


# --- the command line


def stage_parser(args_class: type[StageArgs], description: str | None, **options: Any) -> Parser:
    """The parser of the command line: every setting is a flag whose value stays text, in one group per
    section. Flags that are not given are not in the result."""
    title = " ".join((description or "").split("\n\n", 1)[0].split())
    parser = Parser(description=title, argument_default=argparse.SUPPRESS, **options)
    text = "YAML file with settings, in the sections shown here; flags override it"
    parser.add_argument("--config", metavar="FILE", help=text)
    parser.add_argument("--print_config", action="store_true", help="show every setting as YAML, and exit")
    for section, names in sections(args_class).items():
        group = parser.add_argument_group(section)
        for name in names:
            field = args_class.model_fields[name]
            group.add_argument(f"--{name}", **flag_options(field, field.default))
            for alias, of in args_class.aliases.items():
                if of == name:
                    same = flag_options(field, None) | {"help": f"another name of --{name}"}
                    group.add_argument(f"--{alias}", **same)
    return parser


def sections(args_class: type[StageArgs]) -> dict[str, list[str]]:
    """The settings of each section; those of the stage come last."""
    names: dict[str, list[str]] = {base.section: [] for base in StageArgs.__bases__}
    of_earlier: set[str] = set()
    for base in reversed(args_class.__mro__):
        if not issubclass(base, Settings) or base is Settings:
            continue
        own = [name for name in base.model_fields if name not in of_earlier]
        of_earlier.update(own)
        names.setdefault(base.section, []).extend(own)
    return {section: own for section, own in names.items() if own}


def flag_options(field: FieldInfo, default: Any) -> dict[str, Any]:
    """The arguments for argparse that make the flag of a setting; its value stays text."""
    kind: Any = field.annotation
    if type(None) in get_args(kind) and setting_option(field, "auto"):
        kind = get_args(kind)[0]  # of the value, once it is chosen
    metavar = METAVARS.get(kind, "TEXT")
    if get_origin(kind) is Literal:
        metavar = "{" + ",".join(kind.__args__) + "}"
    text = field.description or ""
    if setting_option(field, "auto") and default is None:
        default = "auto"
    if isinstance(default, bool):
        default = int(default)
    if default not in (None, ""):
        text += f" (default: {default} {setting_option(field, 'unit') or ''}".rstrip() + ")"
    options = {"metavar": metavar, "help": text.replace("%", "%%")}
    if metavar == METAVARS[bool]:  # a bare flag switches it on
        options |= {"nargs": "?", "const": "1"}
    return options


def add_flag(
    parser: argparse._ActionsContainer, args_class: type[Settings], name: str, **options: Any
) -> None:
    """Add the flag of a setting to the command line of a tool; `options` replace those of the setting."""
    field = args_class.model_fields[name]
    default = options.get("default", field.default)

    def value(text: str) -> Any:
        try:
            return getattr(args_class.model_validate({name: text}), name)
        except ValidationError as error:
            message = describe_mistake(args_class, name, error.errors()[0])
            raise argparse.ArgumentTypeError(message) from None

    options = flag_options(field, default) | {"type": value, "default": default} | options
    parser.add_argument(f"--{name}", **options)


def read_flags(parser: Parser, argv: Sequence[str] | None) -> dict[str, Any]:
    """The flags that are given, including unknown ones, so that one message can name them together with wrong
    values. Raises UserError for words that belong to no flag."""
    flags, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("--")]
    if rest and not unknown:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    for word in unknown:
        name = word.removeprefix("--").partition("=")[0]
        setattr(flags, name, None)
    return vars(flags)


def flag_values(flags: Mapping[str, Any]) -> list[NamedValue]:
    """The flags as values of settings."""
    return [(name, f"--{name}", value) for name, value in flags.items()]


# --- the values


def read_yaml(path: str) -> dict[str, dict[str, Any]]:
    """The sections of a YAML file; settings outside any section are in the section "". Raises UserError if
    the file cannot be read or is not a mapping."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = yaml.load(file, Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or no such date
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"--config {path} cannot be read ({why})") from error
    if not isinstance(content, dict | None):
        raise UserError(f"{path}: must be a mapping of sections, not {content!r}")
    sections: dict[str, dict[str, Any]] = {}
    for name, value in (content or {}).items():
        if isinstance(value, dict | None):
            sections[str(name)] = value or {}
        else:
            sections.setdefault("", {})[str(name)] = value
    return sections


def yaml_values(args_class: type[StageArgs], path: str) -> list[NamedValue]:
    """The values of a YAML file. Raises UserError if a setting stands outside its section."""
    section_of = {name: section for section, names in sections(args_class).items() for name in names}
    values, wrong = [], []
    for section, settings in read_yaml(path).items():
        for name, value in settings.items():
            right = section_of.get(args_class.aliases.get(name, name), section)
            label = f"{section}.{name}" if section else name
            if not right:
                wrong.append(f"{path}: section {name} must be a mapping of settings, not {value!r}")
            elif right != section:
                wrong.append(f"{path}: {label} belongs in the section {right}")
            values.append((str(name), f"{path}: {section}.{name}", value))
    if wrong:
        raise UserError("; ".join(wrong))
    return values


class Loader(yaml.SafeLoader):
    """A YAML loader that refuses a key given twice; YAML's own takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


def checked(args_class: type[StageArgs], given: Iterable[NamedValue]) -> dict[str, Any]:
    """The values of a source by the names of their settings, converted. Raises UserError: one line with all
    mistakes, each of which begins with the name as the user spelt it."""
    labels: dict[str, str] = {}
    values: dict[str, Any] = {}
    wrong = []
    for spelt, label, value in given:
        name = args_class.aliases.get(spelt, spelt)
        if name in values and values[name] != value:
            wrong.append(f"{labels[name]} and {label} are one setting; leave one of them out")
        labels[name], values[name] = label, value
        if value is None:
            values[name] = ""  # YAML's null is an empty text
    try:
        valid = args_class.model_validate(values)
    except ValidationError as error:
        mistakes = {str(mistake["loc"][0]): mistake for mistake in error.errors()}
        for name, label in labels.items():
            if name in mistakes and name in args_class.model_fields:
                wrong.append(f"{label} {describe_mistake(args_class, name, mistakes[name])}")
            elif name in mistakes:
                prefix = "--" if label.startswith("--") else ""
                known = [prefix + other for other in (*args_class.model_fields, *args_class.aliases)]
                wrong.append(f"{label} is unknown; {hint(name, known)}")
        raise UserError(" ".join("; ".join(wrong).splitlines())) from None
    if wrong:
        raise UserError("; ".join(wrong))
    return {name: getattr(valid, name) for name in valid.model_fields_set}


def describe_mistake(args_class: type[Settings], name: str, mistake: Mapping[str, Any]) -> str:
    """What is wrong with a value, from an error of pydantic."""
    if mistake["type"] == "value_error":
        return str(mistake["ctx"]["error"])
    message = mistake["msg"].replace("Input should", "must").partition(", unable")[0]
    if setting_option(args_class.model_fields[name], "auto"):
        message += " or auto"
    return f"{message}, not {mistake['input']!r}"


# --- --print_config


def as_yaml(args_class: type[StageArgs], values: Mapping[str, Any], **more: Any) -> str:
    """Every setting in its section, and further sections, as YAML that `--config` can read."""
    content: dict[str, Any] = {}
    for section, names in sections(args_class).items():
        content[section] = {}
        for name in names:
            is_auto = values[name] is None and setting_option(args_class.model_fields[name], "auto")
            content[section][name] = "auto" if is_auto else values[name]
    return yaml.safe_dump(content | more, allow_unicode=True, sort_keys=False, width=math.inf)


def print_and_exit(text: str) -> NoReturn:
    """Print on rank 0 and end the process."""
    if launch().rank == 0:
        print(text, end="", flush=True)
    raise SystemExit(0)
