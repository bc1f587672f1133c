"""The engine's settings: five sources in order, one line for all that is wrong in one, and YAML that reads
back."""

import itertools
import pickle
import re
import string
from dataclasses import fields, is_dataclass
from types import NoneType, SimpleNamespace
from typing import Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common.config_sources import parse_args
from common.errors import UserError
from common.settings import StageArgs, Switch, settings_of
from llm.training.core.config import SETTINGS, Config, EngineArgs, ModelConfig, engine_parser
from tests.conftest import ROOT
from trainer import train_full_sft, train_pretrain

SECTIONS = {f.name: f.default_factory for f in fields(Config) if is_dataclass(f.default_factory)}
CONFIGS = sorted((ROOT / "llm" / "training" / "configs").glob("*.yaml"))
# what the engine has beyond the stage scripts' flags
OWN = {"task", "num_samples", "noise", "validation_share", "data_module"}
OWN |= {"world_size", "master_addr", "master_port", "use_amp"}
STAGES = {"pretrain": train_pretrain.Args, "full_sft": train_full_sft.Args}
TASKS = {
    name: {flag: value for flag, value in vars(args_class()).items() if value != getattr(StageArgs, flag)}
    for name, args_class in STAGES.items()
}
FULL_SFT = TASKS["full_sft"]


def read(*argv, env=None, task_defaults=None) -> Config:
    """task_defaults: of the task, or a function that gives them by its name."""

    def find_task(name):
        defaults = task_defaults(name) if callable(task_defaults) else task_defaults or {}
        return SimpleNamespace(defaults=defaults, stage_args=None)

    return Config.from_args_and_env([str(part) for part in argv], env or {}, find_task)


def mistake(*argv, env=None, task_defaults=None) -> str:
    """The one line that these settings end in."""
    with pytest.raises(UserError) as error:
        read(*argv, env=env, task_defaults=task_defaults)
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.fixture
def run_yaml(tmp_path, monkeypatch):
    """Writes run.yaml into the current folder; gives the flags that name it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> tuple[str, str]:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return "--config", "run.yaml"

    return write


# ---- fields, defaults and help


@pytest.mark.parametrize("stage", STAGES)
def test_the_fields_are_the_stage_scripts_flags_with_their_defaults(stage):
    flags = settings_of(STAGES[stage])
    assert set(flags) | OWN == set(SETTINGS) and not set(flags) & OWN
    args = read("--task", stage, task_defaults=TASKS.get).to_args()
    for name, flag in flags.items():
        assert getattr(args, name) == flag.default and type(getattr(args, name)) is type(flag.default), name
        assert SETTINGS[name].default == getattr(StageArgs, name)  # what the engine has without a task
        for attribute in ("kind", "help", "unit", "limits", "section", "choices"):
            assert getattr(SETTINGS[name], attribute) == getattr(flag, attribute), (name, attribute)
    assert args.contradictions() == []


def test_a_command_line_of_a_stage_script_means_the_same_here():
    line = "--data_path x --use_moe 1 --packing 0 --use_wandb --epochs 7 --dtype float32 --learning_rate 1e-3"
    line += " --from_weight none --swanlab_mode offline --from_resume true --eval_data_path none"
    expected = parse_args(train_full_sft.Args, "", line.split()).values()
    assert (expected["use_wandb"], expected["from_resume"], expected["eval_data_path"]) == (True, True, None)
    args = read("--task", "full_sft", *line.split(), task_defaults=FULL_SFT).to_args().values()
    assert {name: args[name] for name in expected} == expected


def test_every_field_is_unique_documented_and_in_the_help(capsys):
    for section, cls in SECTIONS.items():
        assert cls.section == section
        assert {f.name for f in fields(cls)} == {name for name, s in SETTINGS.items() if s.section == section}
    # `given`
    assert sum(len(fields(cls)) for cls in SECTIONS.values()) == len(SETTINGS) == len(fields(EngineArgs)) - 1
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out.partition("options:")[2]
    words = " ".join(text.split())
    parts = re.split(r"^(\w+):\n", text, flags=re.M)  # a heading and the flags below it, by turns
    groups = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(groups) == set(SECTIONS)
    for name, setting in SETTINGS.items():
        default = int(setting.default) if isinstance(setting.default, bool) else setting.default
        shown = f"(default: {default} {setting.unit}".rstrip() + ")"
        assert (
            setting.help and f"{setting.help} {shown if default not in ('', None) else ''}".rstrip() in words
        ), name
        kind = {bool: "[{0,1}]", Switch: "[{auto,0,1}]", int: "INT", float: "FLOAT"}.get(setting.kind, "TEXT")
        if get_origin(setting.kind) is Literal:
            kind = "{" + ",".join(get_args(setting.kind)) + "}"
        assert f"--{name} {kind} " in " ".join(groups[setting.section].split())


def test_help_and_section_are_those_of_the_table():
    assert SETTINGS["grad_clip"].help == "largest L2 norm of the gradient; 0: no clipping"
    assert SETTINGS["grad_clip"].section == "training"
    assert all(action.help for action in engine_parser()._actions)


# ---- the order of the sources

RANK_1 = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SOURCES = ["default", "task", "yaml", "environment", "command line"]
VALUES = {"default": 32, "task": 11, "yaml": 12, "environment": 13, "command line": 14}
WHERE = {"default": "default", "task": "task t", "yaml": "run.yaml:3", "environment": "MINIMIND_BATCH_SIZE"}
WHERE["command line"] = "command line"


def read_from(present, run_yaml) -> Config:
    argv, env, task_defaults = ["--task", "t"], {}, None
    if "task" in present:
        task_defaults = {"batch_size": VALUES["task"]}
    if "yaml" in present:
        argv += run_yaml(f"# comment\ntraining:\n  batch_size: {VALUES['yaml']}\n")
    if "environment" in present:
        env["MINIMIND_BATCH_SIZE"] = str(VALUES["environment"])
    if "command line" in present:
        argv += ["--batch_size", VALUES["command line"]]
    return read(*argv, env=env, task_defaults=task_defaults)


@pytest.mark.parametrize(
    "present", [c for n in range(6) for c in itertools.combinations(SOURCES, n)], ids="+".join
)
def test_a_later_source_overrides_those_before_it(present, run_yaml):
    config, last = read_from(present, run_yaml), max((*present, "default"), key=SOURCES.index)
    assert config.training.batch_size == VALUES[last]
    assert config.sources["batch_size"] == WHERE[last]
    assert config.sources["epochs"] == "default" and config.sources["task"] == "command line"


def test_the_task_may_be_named_by_every_source(run_yaml):
    named = [["--task", "full_sft"], run_yaml("training: {task: full_sft}")]
    configs = [read(*argv, task_defaults=TASKS.get) for argv in named]
    configs.append(read(env={"MINIMIND_TASK": "full_sft"}, task_defaults=TASKS.get))
    assert [c.training.learning_rate for c in configs] == [1e-5] * 3
    assert all(c.sources["learning_rate"] == "task full_sft" for c in configs)
    overridden = read(*named[1], "--task", "pretrain", task_defaults=TASKS.get)
    assert overridden.training.learning_rate == 5e-4


def test_a_task_that_knows_no_better_names_its_weights_like_itself():
    assert Config().checkpoint.save_weight == "model"
    assert read("--task", "regression").checkpoint.save_weight == "regression"
    assert read("--task", "my.file:Classifier", task_defaults={}).checkpoint.save_weight == "Classifier"
    config = read("--task", "x", "--save_weight", "y")
    assert config.checkpoint.save_weight == "y" and config.sources["save_weight"] == "command line"
    assert read("--task", "x", task_defaults={"save_weight": "z"}).checkpoint.save_weight == "z"


def test_an_unknown_task_is_the_callers_to_refuse():
    def look_up(name):
        raise UserError(f"--task {name} is unknown")

    assert mistake("--task", "sft", task_defaults=look_up) == "--task sft is unknown"
    assert read(task_defaults=look_up).training.task == ""  # `validate` tells of it
    with pytest.raises(UserError, match="--task is missing: give the name of a task"):
        read(task_defaults=look_up).validate()


def test_sources_default_to_this_process(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--epochs", "9"])
    monkeypatch.setenv("MINIMIND_SEED", "5")
    monkeypatch.setenv("OTHER", "5")
    config = Config.from_args_and_env()
    assert (config.training.epochs, config.training.seed) == (9, 5)


def test_a_task_whose_class_nothing_finds_is_told():
    """Its settings and defaults would be ignored."""
    for argv, environ in ((["--task", "regression"], {}), ([], {"MINIMIND_TASK": "regression"})):
        with pytest.raises(UserError, match=r"--task regression: .*from_args_and_env\(find_task=find_task\)"):
            Config.from_args_and_env(argv, environ)


# ---- types


@pytest.mark.parametrize("text", ["none", "NONE", "null", ""])
def test_none_is_for_optional_fields_only(run_yaml, text):
    argv = run_yaml("{data: {eval_data_path: x}, logging: {log_file: x}}")
    for config in (
        read(*argv, f"--eval_data_path={text}", f"--log_file={text}"),
        read(*argv, env={"MINIMIND_EVAL_DATA_PATH": text, "MINIMIND_LOG_FILE": text}),
        read(*run_yaml(f"data: {{eval_data_path: '{text}'}}\nlogging: {{log_file: ~}}")),
    ):
        assert config.data.eval_data_path is None and config.logging.log_file is None
    assert read("--from_weight", "none").checkpoint.from_weight == "none"
    assert read(*run_yaml("checkpoint: {from_weight: none}")).checkpoint.from_weight == "none"


@pytest.mark.parametrize(
    "text, value",
    [("1", True), ("true", True), ("True", True), ("yes", True), ("0", False), ("false", False)],
)
def test_booleans(run_yaml, text, value):
    assert read("--use_moe", text).model.use_moe is value
    assert read(env={"MINIMIND_USE_MOE": text}).model.use_moe is value
    assert read(*run_yaml(f"model: {{use_moe: {text}}}")).model.use_moe is value
    assert read("--use_moe").model.use_moe is True  # like --use_wandb
    assert read("--use_moe", "--epochs", "3").training.epochs == 3


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1E-4", "1.0e-4", ".0001", "'1e-4'"])
def test_floats(run_yaml, text):
    assert read(*run_yaml(f"training: {{learning_rate: {text}}}")).training.learning_rate == 1e-4
    config = read(
        *run_yaml("training: {grad_clip: 2}"),
        "--weight_decay",
        "0",
        "--task=t",
        task_defaults={"learning_rate": 1},
    )
    values = (config.training.grad_clip, config.training.weight_decay, config.training.learning_rate)
    assert values == (2.0, 0.0, 1.0) and all(type(value) is float for value in values)


def test_an_integer_is_decimal_in_every_source(run_yaml):
    """YAML 1.1 would read 010 as 8, 0x10 as 16 and 1:30 as 90."""
    texts = {"010": 10, "'2'": 2, "1.0": 1, "1_000": 1000}
    for text, value in texts.items():
        config = read(*run_yaml(f"training: {{seed: {text}}}"))
        assert config.training.seed == value == read("--seed", text.strip("'")).training.seed
        assert type(config.training.seed) is int
    for text in ("1:30", "0x10", "0b1", "0o10"):
        assert f"training.seed must be a whole number, not '{text}'" in mistake(
            *run_yaml(f"training: {{seed: {text}}}")
        )
        assert f"--seed must be a whole number, not '{text}'" in mistake("--seed", text)
    assert "must be a finite number or auto, not '1:30.5'" in mistake(
        *run_yaml("training: {learning_rate: 1:30.5}")
    )


def test_text_in_yaml_needs_no_quotes(run_yaml):
    config = read(*run_yaml("checkpoint: {save_weight: 7, from_weight: no}"))
    assert (config.checkpoint.save_weight, config.checkpoint.from_weight) == ("7", "no")


def test_a_date_in_yaml_is_text(run_yaml):
    assert read(*run_yaml("data: {data_path: 2026-01-02}")).data.data_path == "2026-01-02"
    assert read(*run_yaml("data: {data_path: 2026-13-45}")).data.data_path == "2026-13-45"


# ---- refusals: YAML text, or flags, or environment -> the line

TEXT_HINT = "text (in YAML put it in quotes)"
YAML = {
    "training: {batch_siez: 8}": "run.yaml:1: training.batch_siez is unknown; did you mean batch_size",
    "\ntraining:\n\n  batch_siez: 8\n": "run.yaml:4: training.batch_siez is unknown; did you mean batch_size",
    "training: {qqqqqq: 8}": "run.yaml:1: training.qqqqqq is unknown",
    "model: {batch_size: 8}": "run.yaml:1: model.batch_size is unknown; batch_size belongs to section training",
    "batch_size: 8": "run.yaml:1: section batch_size must be a mapping of settings, not 8",
    "model: {}\ntrainig: {epochs: 1}": "run.yaml:2: trainig.epochs is unknown; epochs belongs to section training",
    "training: {[a]: 8}": "run.yaml:1: training.a sequence is unknown",
    "training: {1: 8}": "run.yaml:1: training.1 is unknown",
    "training: {epochs: 1.5}": "run.yaml:1: training.epochs must be a whole number, not '1.5'",
    "training: {epochs: true}": "run.yaml:1: training.epochs must be a whole number, not 'true'",
    "training: {epochs: two}": "run.yaml:1: training.epochs must be a whole number, not 'two'",
    "training: {epochs: '2.5'}": "run.yaml:1: training.epochs must be a whole number, not '2.5'",
    "training: {epochs: 0}": "run.yaml:1: training.epochs must be 1 or more, not '0'",
    "training: {epochs: .inf}": "run.yaml:1: training.epochs must be a whole number, not '.inf'",
    "training: {epochs: }": "run.yaml:1: training.epochs must be a whole number, not null",
    "training: {epochs: [1]}": "run.yaml:1: training.epochs must be a single value (put text in quotes)",
    "training: {epochs: {a: 1}}": "run.yaml:1: training.epochs must be a single value (put text in quotes)",
    "training: {epochs: {[1]: 1}}": "run.yaml:1: training.epochs must be a single value (put text in quotes)",
    "training: {epochs: &x [*x]}": "run.yaml:1: training.epochs must be a single value (put text in quotes)",
    "training: {epochs: 0x10}": "run.yaml:1: training.epochs must be a whole number, not '0x10'",
    "training: {epochs: !!python/name:os.system ''}": "run.yaml:1: training.epochs must be a whole number, not ''",
    "model: {use_moe: !!bool maybe}": "run.yaml:1: model.use_moe must be 0 or 1, not 'maybe'",
    "training: {learning_rate: fast}": "run.yaml:1: training.learning_rate must be a finite number or auto, not 'fast'",
    "training: {learning_rate: true}": "run.yaml:1: training.learning_rate must be a finite number or auto, not 'true'",
    "training: {learning_rate: .nan}": "run.yaml:1: training.learning_rate must be a finite number or auto, not '.nan'",
    "training: {learning_rate: .inf}": "run.yaml:1: training.learning_rate must be a finite number or auto, not '.inf'",
    "training: {learning_rate: null}": "run.yaml:1: training.learning_rate must be a finite number or auto, not null",
    "training: {learning_rate: 0}": "run.yaml:1: training.learning_rate must be above 0 or auto, not '0'",
    "model: {use_moe: 2}": "run.yaml:1: model.use_moe must be 0 or 1, not '2'",
    "model: {use_moe: 0.5}": "run.yaml:1: model.use_moe must be 0 or 1, not '0.5'",
    "model: {use_moe: null}": "run.yaml:1: model.use_moe must be 0 or 1, not null",
    "model: {use_moe: maybe}": "run.yaml:1: model.use_moe must be 0 or 1, not 'maybe'",
    "training: {mode: best}": "run.yaml:1: training.mode must be 'min' or 'max', not 'best'",
    "training: {mode: null}": "run.yaml:1: training.mode must be 'min' or 'max', not null",
    "checkpoint: {from_weight: null}": f"run.yaml:1: checkpoint.from_weight must be {TEXT_HINT}, not null",
    "checkpoint: {save_weight: ''}": "run.yaml:1: checkpoint.save_weight must not be empty",
    "data: {data_path: [a, b]}": "run.yaml:1: data.data_path must be a single value (put text in quotes)",
    "training: {epochs: 1, seed: 1, epochs: 1}": "run.yaml:1: training.epochs is given twice, first on line 1",
    "model: {}\ndata: {}\nmodel: {}": "run.yaml:3: model is given twice, first on line 1",
    "training: 8": "run.yaml:1: section training must be a mapping of settings, not 8",
    "- training": "run.yaml:1: must be a mapping of sections, not a list",
    "\nhello": "run.yaml:2: must be a mapping of sections, not hello",
    "training: {epochs: 1": "run.yaml:1: is not YAML (expected ',' or '}', but got '<stream end>')",
    "training:\n\tepochs: 1": "run.yaml:2: is not YAML (found character '\\t' that cannot start any token)",
    "training: {epochs: *x}": "run.yaml:1: is not YAML (found undefined alias 'x')",
    "model: {}\n---\nmodel: {}": "run.yaml:2: is not YAML (but found another document)",
    "model: {}\n\x07": (
        "--config run.yaml cannot be read (unacceptable character #x0007: special characters are not allowed)"
    ),
    "a: " + "[" * 1000: "--config run.yaml cannot be read (maximum recursion depth exceeded)",
    "task_options: {batch_size: 1}": "run.yaml:1: task_options.batch_size is a built-in setting, in section training",
    "task_options: {a-b: 1}": "run.yaml:1: task_options.a-b must be named with letters, digits and underscores",
    "task_options: {a: [1]}": "run.yaml:1: task_options.a must be a single value (put text in quotes)",
    "task_options: {a: 1, a: 2}": "run.yaml:1: task_options.a is given twice, first on line 1",
    "training: {batch_siez: 8, epochs: x}\nmodle: {dropout: 0}\nmodel: {use_moe: 3}": (
        "run.yaml:1: training.batch_siez is unknown; did you mean batch_size; "
        "run.yaml:1: training.epochs must be a whole number, not 'x'; "
        "run.yaml:2: modle.dropout is unknown; dropout belongs to section model; "
        "run.yaml:3: model.use_moe must be 0 or 1, not '3'"
    ),
}
FLAGS = {
    "--batch_siez 8": "--batch_siez is unknown; did you mean --batch_size; see --help",
    "--batch_siez=8": "--batch_siez is unknown; did you mean --batch_size; see --help",
    "--batch 8": "--batch is unknown",  # no abbreviations
    "--qqqqqq 8": "--qqqqqq is unknown; see --help",
    "--confg x": "--confg is unknown; did you mean --config; see --help",
    "-e 3": "-e is unknown",
    "full_sft": "full_sft is unknown",
    "--epochs two": "--epochs must be a whole number, not 'two'",
    "--epochs 1.5": "--epochs must be a whole number, not '1.5'",
    "--epochs true": "--epochs must be a whole number, not 'true'",
    "--epochs none": "--epochs must be a whole number, not 'none'",
    "--epochs": "argument --epochs: expected one argument; see --help",
    "--learning_rate fast": "--learning_rate must be a finite number or auto, not 'fast'",
    "--learning_rate nan": "--learning_rate must be a finite number or auto, not 'nan'",
    "--grad_clip inf": "--grad_clip must be a finite number, not 'inf'",
    "--use_moe 2": "--use_moe must be 0 or 1, not '2'",
    "--use_wandb maybe": "--use_wandb must be 0 or 1, not 'maybe'",
    "--dtype int8": "--dtype must be 'auto', 'bfloat16', 'float16', 'float32' or 'bfloat16_emulated', not 'int8'",
    "--on_bad_data none": "--on_bad_data must be 'stop' or 'skip', not 'none'",
    "--set depth": "--set depth must be NAME=VALUE",
    "--set seed=3": "--set seed is a built-in setting, in section training",
    "--set =3": "--set  must be named with letters, digits and underscores",
    "--config nowhere.yaml": "--config nowhere.yaml cannot be read (No such file or directory)",
    "--config .": "--config . cannot be read (Is a directory)",
    "--config=": "--config  cannot be read (No such file or directory)",
    "--epoch 1 --dtype int8 --seed x": (
        "--epoch is unknown; did you mean --epochs; --dtype must be 'auto', 'bfloat16', 'float16', 'float32' or "
        "'bfloat16_emulated', not 'int8'; --seed must be a whole number, not 'x'; see --help"
    ),
}
ENVIRONMENT = {
    ("MINIMIND_BATCH_SIEZ", "8"): "MINIMIND_BATCH_SIEZ is unknown; did you mean MINIMIND_BATCH_SIZE",
    ("MINIMIND_batch_size", "8"): "MINIMIND_batch_size is unknown; did you mean MINIMIND_BATCH_SIZE",
    ("MINIMIND_QQQQQQ", "8"): "MINIMIND_QQQQQQ is unknown",
    ("MINIMIND_", "8"): "MINIMIND_ is unknown",
    ("MINIMIND_EPOCHS", "1.5"): "MINIMIND_EPOCHS must be a whole number, not '1.5'",
    ("MINIMIND_EPOCHS", ""): "MINIMIND_EPOCHS must be a whole number, not ''",
    ("MINIMIND_EPOCHS", "0"): "MINIMIND_EPOCHS must be 1 or more, not '0'",
    ("MINIMIND_USE_MOE", "maybe"): "MINIMIND_USE_MOE must be 0 or 1, not 'maybe'",
    ("MINIMIND_MODE", "best"): "MINIMIND_MODE must be 'min' or 'max', not 'best'",
}


@pytest.mark.parametrize("text", YAML)
def test_refused_yaml(run_yaml, text):
    assert mistake(*run_yaml(text)) == YAML[text]


@pytest.mark.parametrize("line", FLAGS)
def test_refused_flags(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    assert mistake(*line.split()).startswith(FLAGS[line])


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_refused_environment(variable):
    assert mistake(env=dict([variable])) == ENVIRONMENT[variable]
    both = mistake(env={"MINIMIND_ZEBRA_ZEBRA": "1", **dict([variable])})
    assert both == f"{ENVIRONMENT[variable]}; MINIMIND_ZEBRA_ZEBRA is unknown" or "MINIMIND_b" in both


def test_refused_defaults_of_a_task():
    line = mistake(
        "--task", "mine", task_defaults={"epochs": "two", "use_moe": 1, "seed": None, "a-b": 1, "a": [1]}
    )
    assert line == (
        "task mine: its default epochs must be a whole number, not 'two'; "
        "task mine: its default seed must be a whole number, not null; "
        "task mine: its default a-b must be named with letters, digits and underscores; "
        "task mine: its default a must be a single value (put text in quotes)"
    )
    assert f"its default save_dir must be {TEXT_HINT}, not " in mistake(
        "--task=t", task_defaults={"save_dir": ROOT}
    )


def test_a_yaml_file_that_is_no_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"model: {}\n# caf\xe9\n")
    assert mistake("--config", path).startswith(
        f"--config {path} cannot be read ('utf-8' codec can't decode byte 0xe9"
    )


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "~", "\ufeff", "training:\n", "{}", "task_options: {}"]
)
def test_an_empty_yaml_file_is_fine(run_yaml, text):
    assert read(*run_yaml(text)) == Config()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(alphabet=st.sampled_from("ab:-[]{}#&*!|>'\"%@`,? \n\t\\xU8f1~"), max_size=40)
    | st.binary(max_size=30).map(lambda data: data.decode("latin-1"))
)
@example('a: "\\UFFFFFFFF"')
@example('a: "\\U7FFFFFFF"')
@example("%YAML 99999999999999999999.1\n---\n")
def test_whatever_a_yaml_file_holds_it_ends_in_one_line(run_yaml, text):
    try:
        read(*run_yaml(text))
    except UserError as error:
        assert str(error) and "\n" not in str(error)
    value = read("--set", f"x={text}").extra["x"]
    assert value is None or isinstance(value, (bool, int, float, str))


# ---- a user's own settings


def test_task_options(run_yaml):
    argv = run_yaml("training: {task: x}\ntask_options:\n  depth: 3\n  lr: 1e-4\n  name: 'yes'\n")
    argv += (
        "--set",
        "width=2.5",
        "--set",
        "depth=4",
        "--set",
        "flag=true",
        "--set",
        "none=",
        "--set",
        "text=a b",
    )
    argv += ("--set", "day=2026-01-02", "--set", "quoted='1e-4'", "--set", "width=-1e+3")
    config = read(*argv)
    expected = {
        "depth": 4,
        "lr": 1e-4,
        "name": "yes",
        "width": -1e3,
        "flag": True,
        "none": None,
        "text": "a b",
    }
    assert config.extra == expected | {"day": "2026-01-02", "quoted": "'1e-4'"}
    assert config.sources["task_options.depth"] == "command line"
    assert config.sources["task_options.lr"] == "run.yaml:4"
    assert not hasattr(config.to_args(), "depth")


def test_a_default_of_a_task_that_no_setting_has_is_an_option_of_it(run_yaml):
    defaults = {"depth": 2, "width": 0.5, "name": "x", "epochs": 3}
    argv = ("--task", "mine", "--set", "depth=4", *run_yaml("task_options: {width: 2}"))
    config = read(*argv, task_defaults=defaults)
    assert config.extra == {"depth": 4, "width": 2, "name": "x"} and config.training.epochs == 3
    sources = [config.sources[f"task_options.{name}"] for name in ("depth", "width", "name")]
    assert sources == ["command line", "run.yaml:1", "task mine"]


# ---- print_config


def printed(capsys, *argv, env=None, task_defaults=None) -> str:
    with pytest.raises(SystemExit) as stop:
        read(*argv, "--print_config", env=env, task_defaults=task_defaults)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_print_config_tells_every_value_and_its_source(run_yaml, capsys):
    argv = run_yaml("training:\n  task: full_sft\n  seed: 3\ntask_options:\n  depth: 3\n")
    env = {"MINIMIND_BATCH_SIZE": "5"}
    text = printed(capsys, *argv, "--use_moe", "1", env=env, task_defaults=FULL_SFT)
    told = {
        line.split(":")[0].strip(): line.rpartition("  # ")[2] for line in text.splitlines() if "  # " in line
    }
    assert set(told) == set(SETTINGS) | {"depth"}
    expected = {
        "task": "run.yaml:2",
        "seed": "run.yaml:3",
        "batch_size": "MINIMIND_BATCH_SIZE",
        "depth": "run.yaml:5",
    }
    expected |= {"use_moe": "command line", "from_weight": "task full_sft", "max_seq_len": "task full_sft"}
    expected |= {"log_file": "default"}
    assert {name: told[name] for name in expected} == expected
    columns = {line.index("  # ") for line in text.splitlines() if "  # " in line}
    assert len(columns) == 1
    as_yaml = yaml.safe_load(text)
    assert as_yaml["training"]["batch_size"] == 5 and as_yaml["model"]["use_moe"] is True
    assert as_yaml["logging"]["log_file"] is None and as_yaml["training"]["learning_rate"] == 1e-5
    assert printed(capsys, *argv, env=RANK_1) == ""


# ---- properties

PLAIN = st.text(alphabet=string.ascii_letters + string.digits + "_./-", min_size=1, max_size=12)
TEXT = (
    PLAIN
    | st.text(max_size=12)
    | st.sampled_from(
        ["no", "1e-4", "012", "null", "~", "a: b", "a #b", " a ", "'", "2026-01-02", "\udce9", "\u2028"]
    )
)


def texts(setting):
    """Texts that a field takes. A YAML document cannot hold a lone surrogate other than escaped, which is
    tried too."""
    if type(None) in get_args(setting.kind):
        return TEXT.filter(lambda text: text.lower() not in ("", "none", "null")) | st.none()
    return TEXT.filter(bool)


def numbers(setting):
    """Numbers within a field's limits."""
    limits = setting.limits
    if setting.kind is float:
        ends = {
            "min_value": limits.get("ge", limits.get("gt")),
            "max_value": limits.get("le", limits.get("lt")),
        }
        open_ends = {"exclude_min": "gt" in limits, "exclude_max": "lt" in limits}
        return st.floats(**ends, **open_ends, allow_nan=False, allow_infinity=False)
    step, highest = limits.get("multiple_of", 1), limits.get("le")
    return st.integers(limits["ge"] // step, highest and highest // step).map(lambda number: number * step)


def values(setting):
    """Values of a field."""
    if setting.kind == Switch:
        return st.sampled_from(["auto", False, True])
    if setting.choices:
        return st.sampled_from(setting.choices)
    if setting.kind is bool:
        return st.booleans()
    return numbers(setting) if setting.kind in (int, float) else texts(setting)


FIELDS = st.sampled_from(sorted(SETTINGS)).flatmap(
    lambda name: st.tuples(st.just(name), values(SETTINGS[name]))
)
CHOICES = st.lists(FIELDS, max_size=8).map(dict)


def spelled(value) -> str:
    return "none" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def test_booleans_are_spelled():
    assert [spelled(value) for value in (True, None, 3, 0.5)] == ["1", "none", "3", "0.5"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHOICES)
@example({"save_weight": "1e-4", "learning_rate": 1e-5})  # 1e-4 is text in YAML 1.1
def test_all_sources_agree(run_yaml, chosen):
    flags = read(*[f"--{name}={spelled(value)}" for name, value in chosen.items()])
    assert {name: value for name, value in flags.values().items() if name in chosen} == {
        **chosen,
        **{name: float(value) for name, value in chosen.items() if SETTINGS[name].kind is float},
    }
    variables = read(env={f"MINIMIND_{name.upper()}": spelled(value) for name, value in chosen.items()})
    sections: dict[str, dict] = {}
    for name, value in chosen.items():
        sections.setdefault(SETTINGS[name].section, {})[name] = value
    written = read(*run_yaml(yaml.safe_dump(sections)))
    own = read("--task=t", task_defaults=chosen)
    in_flow = read(*run_yaml(yaml.safe_dump(sections, default_flow_style=True)))
    own.training.task = flags.training.task
    if "save_weight" not in chosen:  # named after the task
        own.checkpoint.save_weight = flags.checkpoint.save_weight
    assert flags == variables == written == in_flow == own
    assert {type(value) for value in flags.values().values()} <= {bool, int, float, str, NoneType}


OPTION_NAMES = st.from_regex(r"[a-z_][a-z_0-9]{0,8}", fullmatch=True).filter(
    lambda name: name not in SETTINGS
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHOICES, st.dictionaries(OPTION_NAMES, SCALARS, max_size=4))
def test_what_print_config_shows_reads_back_as_the_same_settings(run_yaml, chosen, options):
    config = read("--task=t", task_defaults=chosen)
    config.extra = options
    config.sources |= {f"task_options.{name}": "odd\nsource\x85 \u2028\x07" for name in options}
    text = config.describe()
    again = read(*run_yaml(text), task_defaults=FULL_SFT)  # the file overrides every default
    assert again == config
    assert {k: type(v) for k, v in again.extra.items()} == {k: type(v) for k, v in options.items()}
    assert (
        again.describe().count("\n")
        == text.count("\n")
        == len(SETTINGS) + len(SECTIONS) + len(options) + bool(options)
    )
    plain = yaml.safe_load(text)  # any YAML reader sees the same
    assert {n: v for section in SECTIONS for n, v in plain[section].items()} == config.values()
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and copy.sources == config.sources


# ---- to_args and validate


def test_to_args():
    config = read("--use_moe", "1", "--dtype", "bfloat16")
    args = config.to_args()
    assert (
        isinstance(args, EngineArgs)
        and isinstance(args, StageArgs)
        and args.values().keys() == SETTINGS.keys()
    )
    assert args.use_moe is True and args.use_wandb is False and args.dtype == "bfloat16"
    assert read("--use_amp", "0", "--dtype", "bfloat16").to_args().dtype == "float32"
    assert args.top_k == 1 and args.data_path is None
    args.batch_size = 1
    assert config.training.batch_size == 32


OUTSIDE = {
    "--epochs 0": "--epochs must be 1 or more, not '0'",
    "--hidden_size 100": "--hidden_size must be divisible by 16, not '100'",
    "--top_k 0": "--top_k must be 1 or more, not '0'",
    "--world_size=-1": "--world_size must be 0 or more, not '-1'",
    "--master_port=-1": "--master_port must be 0 or more, not '-1'",
    "--master_port 65536": "--master_port must be 65535 or less, not '65536'",
    "--keep_every=-1": "--keep_every must be 0 or more, not '-1'",
    "--keep_last=-1": "--keep_last must be 0 or more, not '-1'",
    "--patience=-1": "--patience must be 0 or more, not '-1'",
    "--min_delta=-0.1": "--min_delta must be 0 or more, not '-0.1'",
    "--num_samples 1": "--num_samples must be 2 or more, not '1'",
    "--noise=-0.1": "--noise must be 0 or more, not '-0.1'",
    "--validation_share 0": "--validation_share must be above 0, not '0'",
    "--validation_share 1": "--validation_share must be below 1, not '1'",
    "--monitor=": "--monitor must not be empty",
    "--save_weight=": "--save_weight must not be empty",
    "--master_addr=": "--master_addr must not be empty",
    "--epochs 0 --patience=-1 --top_k x": (
        "--top_k must be a whole number, not 'x'; --epochs must be 1 or more, not '0'; "
        "--patience must be 0 or more, not '-1'"
    ),
}


@pytest.mark.parametrize("line", OUTSIDE)
def test_a_value_outside_its_limits(line):
    told = mistake("--task", "t", *line.split()).removesuffix("; see --help")
    assert sorted(told.split("; ")) == sorted(OUTSIDE[line].split("; "))


LOG_FILES = "--log_file and --log_dir both name the log file; leave one of them out"
IMPOSSIBLE = {
    "--use_moe --top_k 5": "--num_experts_per_tok 5 must be --num_experts 4 or less",
    "--save_weight a/b": "--save_weight 'a/b' must be a plain name; the folder is --save_dir",
    "--log_file a --log_dir b": LOG_FILES,
    "--task= --use_moe --top_k 9 --log_file a --log_dir b": (
        f"{LOG_FILES}; --num_experts_per_tok 9 must be --num_experts 4 or less; --task is missing: give the name of a "
        "task, or package.module:ClassName for one of your own"
    ),
}


@pytest.mark.parametrize("line", IMPOSSIBLE)
def test_validate(line):
    config = read("--task", "t", *line.split())
    with pytest.raises(UserError) as error:
        config.validate()
    assert str(error.value) == IMPOSSIBLE[line]


def test_validate_accepts_the_edges():
    read("--task", "t").validate()
    edges = (
        "--use_moe --top_k 4 --num_experts 4 --master_port 65535 --keep_last 0 --noise 0 --validation_share 0.001 "
        "--num_samples 2"
    )
    read("--task", "t", *edges.split()).validate()


GIVE_TOP_K = {  # a source that gives top_k 2
    "command line": lambda run_yaml: (["--top_k", "2"], {}, None),
    "environment": lambda run_yaml: ([], {"MINIMIND_TOP_K": "2"}, None),
    "YAML": lambda run_yaml: (run_yaml("model: {top_k: 2}"), {}, None),
    "task": lambda run_yaml: ([], {}, {"top_k": 2}),
}


@pytest.mark.parametrize("source", GIVE_TOP_K)
def test_top_k_is_another_name_of_num_experts_per_tok(run_yaml, source):
    argv, env, defaults = GIVE_TOP_K[source](run_yaml)
    config = read("--task", "t", "--use_moe", *argv, env=env, task_defaults=defaults)
    assert config.model.num_experts_per_tok == config.model.top_k == config.to_args().top_k == 2
    assert config.sources["num_experts_per_tok"] != "default" and config.extra == {}
    assert (
        read("--num_experts_per_tok", "3", *(argv if source != "command line" else []), env=env).model.top_k
        == 3
    )
    config.model.top_k = 4
    assert config.model.num_experts_per_tok == 4


def test_two_names_of_a_setting_must_agree(run_yaml):
    both = "--num_experts_per_tok 3 --top_k"
    assert read(*f"{both} 3".split()).model.top_k == 3
    told = "contradicts num_experts_per_tok 3; they are one setting, give one"
    assert mistake(*f"{both} 2".split()) == f"--top_k 2 {told}"
    env = {"MINIMIND_TOP_K": "2", "MINIMIND_NUM_EXPERTS_PER_TOK": "3"}
    assert mistake(env=env) == f"MINIMIND_TOP_K 2 {told}"
    argv = run_yaml("model:\n  num_experts_per_tok: 3\n  top_k: 2")
    assert mistake(*argv) == f"run.yaml:3: model.top_k 2 {told}"
    assert ModelConfig(top_k=2) == ModelConfig(num_experts_per_tok=2) != ModelConfig()


# ---- the shipped files


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs(path):
    config = read("--config", path)
    config.validate()
    assert config.training.task == path.stem.removesuffix("_moe")
    assert config.model.use_moe == path.stem.endswith("_moe")
    assert config.checkpoint.from_weight == ("pretrain" if path.stem.startswith("full_sft") else "none")
    assert (
        path.read_text().startswith("# ") and f"--config llm/training/configs/{path.name}" in path.read_text()
    )


def test_the_shipped_configs_fit_together():
    assert [path.stem for path in CONFIGS] == [
        "full_sft",
        "full_sft_moe",
        "pretrain",
        "pretrain_moe",
        "regression",
    ]
    for suffix in ("", "_moe"):
        before, after = (
            read("--config", ROOT / f"llm/training/configs/{s}{suffix}.yaml")
            for s in ("pretrain", "full_sft")
        )
        assert before.model == after.model and before.checkpoint.save_weight == after.checkpoint.from_weight
        assert before.data.data_path != after.data.data_path
