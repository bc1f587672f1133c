"""The engine's settings: five sources in order, one line for all that is wrong in one, and YAML that reads back."""

import itertools
import pickle
import string
from argparse import Namespace
from dataclasses import fields
from types import NoneType
from typing import Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dataset.errors import UserError
from llm.training.core.config import SECTIONS, SETTINGS, CheckpointConfig, Config, DataConfig, TrainingConfig
from llm.training.core.config_sources import config_parser
from tests.conftest import ROOT
from trainer.arguments import check_args, stage_parser
from trainer.train_full_sft import FULL_SFT
from trainer.train_pretrain import PRETRAIN

CONFIGS = sorted((ROOT / "llm" / "training" / "configs").glob("*.yaml"))
# what the engine has beyond the stage scripts' flags
OWN = {"task", "num_experts", "top_k", "num_samples", "noise", "validation_share", "patience", "min_delta", "monitor"}
OWN |= {"mode", "world_size", "master_addr", "master_port", "use_amp", "keep_every", "keep_last", "log_file"}
OWN |= {"tensorboard_dir"}
TASKS = {"pretrain": PRETRAIN, "full_sft": FULL_SFT}


def read(*argv, env=None, task_defaults=None) -> Config:
    return Config.from_args_and_env([str(part) for part in argv], env or {}, task_defaults)


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


@pytest.mark.parametrize("stage", TASKS)
def test_the_fields_are_the_stage_scripts_flags_with_their_defaults(stage):
    flags = {a.dest: a for a in stage_parser("", **TASKS[stage])._actions if a.dest != "help"}
    assert set(flags) | OWN == set(SETTINGS) and not set(flags) & OWN
    args = read("--task", stage, task_defaults=TASKS.get).to_args()
    assert {name: getattr(args, name) for name in flags} == {name: flag.default for name, flag in flags.items()}
    for name, flag in flags.items():
        kind, default = SETTINGS[name].kind, SETTINGS[name].default
        assert type(getattr(args, name)) is type(flag.default)
        if flag.choices == [0, 1] or flag.nargs == 0:
            assert kind is bool
        elif flag.choices:
            assert set(get_args(kind)) == set(flag.choices)
        else:
            assert kind == (flag.type or (str | None if default is None else str))
        if stage_parser("").get_default(name) is not None:  # not left to the stage
            assert default == stage_parser("").get_default(name)
    check_args(args)


def test_a_command_line_of_a_stage_script_means_the_same_here():
    line = [
        "--data_path",
        "x",
        "--use_moe",
        "1",
        "--packing",
        "0",
        "--use_wandb",
        "--epochs",
        "7",
        "--dtype",
        "float32",
    ]
    line += ["--learning_rate", "1e-3", "--from_weight", "none", "--swanlab_mode", "offline", "--from_resume", "1"]
    expected = vars(stage_parser("", **FULL_SFT).parse_args(line))
    args = vars(read("--task", "full_sft", *line, task_defaults=FULL_SFT).to_args())
    assert {name: args[name] for name in expected} == expected


def test_every_field_is_unique_documented_and_in_the_help(capsys):
    names = [f.name for cls in SECTIONS.values() for f in fields(cls)]
    assert names == list(SETTINGS) and len(set(names)) == len(names)
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out.partition("options:")[2]
    words = " ".join(text.split())
    groups = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups == list(SECTIONS)
    for name, setting in SETTINGS.items():
        default = {True: "true", False: "false", None: "none"}.get(setting.default, setting.default)
        if isinstance(setting.default, (int, float)) and not isinstance(setting.default, bool):
            default = setting.default
        expected = f"{setting.help} (default: {default})" if setting.default != "" else setting.help
        assert expected in words, name
        kind = {bool: "[BOOL]", int: "INT", float: "FLOAT"}.get(setting.kind, "TEXT")
        if get_origin(setting.kind) is Literal:
            kind = "{" + ",".join(get_args(setting.kind)) + "}"
        assert f"--{name} {kind} " in words


def test_help_is_read_from_below_the_field():
    assert SETTINGS["grad_clip"].help == "largest norm of the gradient; 0: no clipping"
    assert SETTINGS["grad_clip"].section == "training"
    assert all(action.help for action in config_parser(SETTINGS)._actions)


# ---- the order of the sources

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


@pytest.mark.parametrize("present", [c for n in range(6) for c in itertools.combinations(SOURCES, n)], ids="+".join)
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


# ---- types


@pytest.mark.parametrize("text", ["none", "NONE", ""])
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


@pytest.mark.parametrize("text, value", [("1", True), ("true", True), ("True", True), ("0", False), ("false", False)])
def test_booleans(run_yaml, text, value):
    assert read("--use_moe", text).model.use_moe is value
    assert read(env={"MINIMIND_USE_MOE": text}).model.use_moe is value
    assert read(*run_yaml(f"model: {{use_moe: {text}}}")).model.use_moe is value
    assert read("--use_moe").model.use_moe is True  # like --use_wandb
    assert read("--use_moe", "--epochs", "3").training.epochs == 3


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1E-4", "1.0e-4", ".0001", "'1e-4'"])
def test_floats(run_yaml, text):
    assert read(*run_yaml(f"training: {{learning_rate: {text}}}")).training.learning_rate == 1e-4
    config = read(*run_yaml("training: {grad_clip: 2}"), "--weight_decay", "0", task_defaults={"learning_rate": 1})
    values = (config.training.grad_clip, config.training.weight_decay, config.training.learning_rate)
    assert values == (2.0, 0.0, 1.0) and all(type(value) is float for value in values)


def test_an_integer_is_decimal_in_every_source(run_yaml):
    """YAML 1.1 would read 010 as 8 and 1:30 as 90."""
    assert read(*run_yaml("training: {seed: 010}")).training.seed == 10 == read("--seed", "010").training.seed
    assert "training.seed must be a whole number, not 1:30" in mistake(*run_yaml("training: {seed: 1:30}"))


# ---- refusals: YAML text, or flags, or environment -> the line

YAML = {
    "training: {batch_siez: 8}": "run.yaml:1: training.batch_siez is unknown; did you mean batch_size",
    "\ntraining:\n\n  batch_siez: 8\n": "run.yaml:4: training.batch_siez is unknown; did you mean batch_size",
    "training: {qqqqqq: 8}": "run.yaml:1: training.qqqqqq is unknown",
    "model: {batch_size: 8}": "run.yaml:1: model.batch_size is unknown; batch_size belongs to section training",
    "batch_size: 8": "run.yaml:1: batch_size belongs to section training",
    "model: {}\ntrainig: {epochs: 1}": "run.yaml:2: section trainig is unknown; did you mean training",
    "training: {[a]: 8}": "run.yaml:1: training.a list is unknown",
    "training: {1: 8}": "run.yaml:1: training.1 is unknown",
    "training: {epochs: 1.5}": "run.yaml:1: training.epochs must be a whole number, not 1.5",
    "training: {epochs: 1.0}": "run.yaml:1: training.epochs must be a whole number, not 1.0",
    "training: {epochs: true}": "run.yaml:1: training.epochs must be a whole number, not true",
    "training: {epochs: two}": "run.yaml:1: training.epochs must be a whole number, not 'two'",
    "training: {epochs: '2'}": "run.yaml:1: training.epochs must be a whole number, not '2'",
    "training: {epochs: }": "run.yaml:1: training.epochs must be a whole number, not null",
    "training: {epochs: [1]}": "run.yaml:1: training.epochs must be a whole number, not a list",
    "training: {epochs: {a: 1}}": "run.yaml:1: training.epochs must be a whole number, not a mapping",
    "training: {epochs: 0x10}": "run.yaml:1: training.epochs must be a whole number, not 0x10",
    "training: {epochs: !thing 3}": "run.yaml:1: training.epochs must be a whole number, not 3",
    "training: {epochs: !!python/name:os.system ''}": "run.yaml:1: training.epochs must be a whole number, not ",
    "training: {learning_rate: fast}": "run.yaml:1: training.learning_rate must be a finite number, not 'fast'",
    "training: {learning_rate: true}": "run.yaml:1: training.learning_rate must be a finite number, not true",
    "training: {learning_rate: .nan}": "run.yaml:1: training.learning_rate must be a finite number, not .nan",
    "training: {learning_rate: .inf}": "run.yaml:1: training.learning_rate must be a finite number, not .inf",
    "training: {learning_rate: null}": "run.yaml:1: training.learning_rate must be a finite number, not null",
    "model: {use_moe: 2}": "run.yaml:1: model.use_moe must be true or false (or 1 or 0), not 2",
    "model: {use_moe: 'true'}": "run.yaml:1: model.use_moe must be true or false (or 1 or 0), not 'true'",
    "model: {use_moe: 1.0}": "run.yaml:1: model.use_moe must be true or false (or 1 or 0), not 1.0",
    "model: {use_moe: yes}": "run.yaml:1: model.use_moe must be true or false (or 1 or 0), not yes",
    "training: {mode: best}": "run.yaml:1: training.mode must be min or max, not 'best'",
    "training: {mode: null}": "run.yaml:1: training.mode must be text, not null",
    "checkpoint: {from_weight: null}": "run.yaml:1: checkpoint.from_weight must be text, not null",
    "checkpoint: {from_weight: no}": "run.yaml:1: checkpoint.from_weight must be text, not no (put it in quotes)",
    "checkpoint: {save_weight: 7}": "run.yaml:1: checkpoint.save_weight must be text, not 7 (put it in quotes)",
    "logging: {log_file: 7}": "run.yaml:1: logging.log_file must be text, not 7 (put it in quotes)",
    "data: {data_path: [a, b]}": "run.yaml:1: data.data_path must be text, not a list",
    "training: {epochs: 1, seed: 1, epochs: 1}": "run.yaml:1: training.epochs is given twice, first on line 1",
    "model: {}\ndata: {}\nmodel: {}": "run.yaml:3: model is given twice, first on line 1",
    "training: 8": "run.yaml:1: section training must be a mapping of settings, not 8",
    "- training": "run.yaml:1: must be a mapping of sections, not a list",
    "\nhello": "run.yaml:2: must be a mapping of sections, not hello",
    "training: {epochs: 1": "run.yaml:1: is not YAML (expected ',' or '}', but got '<stream end>')",
    "training:\n\tepochs: 1": "run.yaml:2: is not YAML (found character '\\t' that cannot start any token)",
    "training: {epochs: *x}": "run.yaml:1: is not YAML (found undefined alias 'x')",
    "model: {}\n---\nmodel: {}": "run.yaml:2: is not YAML (but found another document)",
    "model: {}\n\x07": "run.yaml:2: holds a character that YAML does not allow",
    "a: " + "[" * 1000: "run.yaml is nested too deeply",
    "task_options: {batch_size: 1}": "run.yaml:1: task_options.batch_size is a setting of its own, in section training",
    "task_options: {a-b: 1}": "run.yaml:1: task_options.a-b must be named with letters, digits and underscores",
    "task_options: {a: [1]}": "run.yaml:1: task_options.a must be one value (put text in quotes)",
    "task_options: {a: 1, a: 2}": "run.yaml:1: task_options.a is given twice, first on line 1",
    "training: {batch_siez: 8, epochs: x}\nmodle: {}\nmodel: {use_moe: 3}": (
        "run.yaml:1: training.batch_siez is unknown; did you mean batch_size; "
        "run.yaml:1: training.epochs must be a whole number, not 'x'; "
        "run.yaml:2: section modle is unknown; did you mean model; "
        "run.yaml:3: model.use_moe must be true or false (or 1 or 0), not 3"
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
    "--epochs two": "--epochs must be a whole number, not 'two'; see --help",
    "--epochs 1.5": "--epochs must be a whole number, not '1.5'; see --help",
    "--epochs true": "--epochs must be a whole number, not 'true'; see --help",
    "--epochs none": "--epochs must be a whole number, not 'none'; see --help",
    "--epochs": "argument --epochs: expected one argument; see --help",
    "--learning_rate fast": "--learning_rate must be a finite number, not 'fast'; see --help",
    "--learning_rate nan": "--learning_rate must be a finite number, not 'nan'; see --help",
    "--grad_clip inf": "--grad_clip must be a finite number, not 'inf'; see --help",
    "--use_moe 2": "--use_moe must be true or false (or 1 or 0), not '2'; see --help",
    "--use_wandb yes": "--use_wandb must be true or false (or 1 or 0), not 'yes'; see --help",
    "--dtype int8": "--dtype must be auto or bfloat16 or float16 or float32, not 'int8'; see --help",
    "--on_bad_data none": "--on_bad_data must be stop or skip, not 'none'; see --help",
    "--set depth": "--set depth must be NAME=VALUE; see --help",
    "--set depth=[1,2]": "--set depth must be one value (put text in quotes); see --help",
    "--set depth='a": "--set depth has a value that is not YAML (put it in quotes); see --help",
    "--set seed=3": "--set seed is a setting of its own, in section training; see --help",
    "--set =3": "--set  must be named with letters, digits and underscores; see --help",
    "--config nowhere.yaml": "--config nowhere.yaml cannot be read (No such file or directory)",
    "--config .": "--config . cannot be read (Is a directory)",
    "--config=": "--config  cannot be read (No such file or directory)",
    "--epoch 1 --dtype int8 --seed x": (
        "--epoch is unknown; did you mean --epochs; --seed must be a whole number, not 'x'; "
        "--dtype must be auto or bfloat16 or float16 or float32, not 'int8'; see --help"
    ),
}
ENVIRONMENT = {
    ("MINIMIND_BATCH_SIEZ", "8"): "MINIMIND_BATCH_SIEZ is unknown; did you mean MINIMIND_BATCH_SIZE",
    ("MINIMIND_batch_size", "8"): "MINIMIND_batch_size is unknown; did you mean MINIMIND_BATCH_SIZE",
    ("MINIMIND_QQQQQQ", "8"): "MINIMIND_QQQQQQ is unknown",
    ("MINIMIND_", "8"): "MINIMIND_ is unknown",
    ("MINIMIND_EPOCHS", "1.5"): "MINIMIND_EPOCHS must be a whole number, not '1.5'",
    ("MINIMIND_EPOCHS", ""): "MINIMIND_EPOCHS must be a whole number, not ''",
    ("MINIMIND_USE_MOE", "on"): "MINIMIND_USE_MOE must be true or false (or 1 or 0), not 'on'",
    ("MINIMIND_MODE", "best"): "MINIMIND_MODE must be min or max, not 'best'",
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
    line = mistake("--task", "mine", task_defaults={"lerning_rate": 1, "epochs": "2", "use_moe": 1, "seed": None})
    assert line == (
        "task mine: its default lerning_rate is unknown; did you mean learning_rate; "
        "task mine: its default epochs must be a whole number, not '2'; "
        "task mine: its default seed must be a whole number, not null"
    )
    assert "its default save_dir must be text, not " in mistake(task_defaults={"save_dir": ROOT})


def test_a_yaml_file_that_is_no_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"model: {}\n# caf\xe9\n")
    assert mistake("--config", path) == f"{path}:2: is not UTF-8 text"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~", "\ufeff", "training:\n", "{}", "task_options: {}"])
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
    try:
        value = read("--set", f"x={text}").extra["x"]
        assert value is None or isinstance(value, (bool, int, float, str))
    except UserError as error:
        assert str(error).startswith("--set x ") and "\n" not in str(error)


# ---- a user's own settings


def test_task_options(run_yaml):
    argv = run_yaml("training: {task: x}\ntask_options:\n  depth: 3\n  lr: 1e-4\n  name: 'yes'\n")
    argv += ("--set", "width=2.5", "--set", "depth=4", "--set", "flag=true", "--set", "none=", "--set", "text=a b")
    argv += ("--set", "day=2026-01-02", "--set", "quoted='1e-4'", "--set", "width=-1e+3")
    config = read(*argv)
    expected = {"depth": 4, "lr": 1e-4, "name": "yes", "width": -1e3, "flag": True, "none": None, "text": "a b"}
    assert config.extra == expected | {"day": "2026-01-02", "quoted": "1e-4"}
    assert config.sources["task_options.depth"] == "command line"
    assert config.sources["task_options.lr"] == "run.yaml:4"
    assert not hasattr(config.to_args(), "depth")


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
    told = {line.split(":")[0].strip(): line.rpartition("  # ")[2] for line in text.splitlines() if "  # " in line}
    assert set(told) == set(SETTINGS) | {"depth"}
    expected = {"task": "run.yaml:2", "seed": "run.yaml:3", "batch_size": "MINIMIND_BATCH_SIZE", "depth": "run.yaml:5"}
    expected |= {"use_moe": "command line", "from_weight": "task full_sft", "epochs": "task full_sft"}
    expected |= {"log_file": "default"}
    assert {name: told[name] for name in expected} == expected
    columns = {line.index("  # ") for line in text.splitlines() if "  # " in line}
    assert len(columns) == 1
    as_yaml = yaml.safe_load(text)
    assert as_yaml["training"]["batch_size"] == 5 and as_yaml["model"]["use_moe"] is True
    assert as_yaml["logging"]["log_file"] is None and as_yaml["training"]["learning_rate"] == 1e-5
    assert printed(capsys, *argv, env={"RANK": "1"}) == ""


# ---- properties

PLAIN = st.text(alphabet=string.ascii_letters + string.digits + "_./-", min_size=1, max_size=12)
TEXT = (
    PLAIN
    | st.text(max_size=12)
    | st.sampled_from(["no", "1e-4", "012", "null", "~", "a: b", "a #b", " a ", "'", "2026-01-02", "\udce9", "\u2028"])
)


def texts(kind):
    """Texts that a field takes. A YAML document cannot hold a lone surrogate other than escaped, which is tried too."""
    return TEXT.filter(lambda text: type(None) not in get_args(kind) or text.lower() not in ("", "none"))


def values(kind):
    """Values of a field."""
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    numbers = {bool: st.booleans(), int: st.integers(), float: st.floats(allow_nan=False, allow_infinity=False)}
    if kind in numbers:
        return numbers[kind]
    return texts(kind) | st.none() if NoneType in get_args(kind) else texts(kind)


FIELDS = st.sampled_from(sorted(SETTINGS)).flatmap(lambda name: st.tuples(st.just(name), values(SETTINGS[name].kind)))
CHOICES = st.lists(FIELDS, max_size=8).map(dict)


def spelled(value) -> str:
    return "none" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def test_booleans_are_spelled():
    assert [spelled(value) for value in (True, None, 3, 0.5)] == ["1", "none", "3", "0.5"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHOICES)
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
    own = read(task_defaults=chosen)
    in_flow = read(*run_yaml(yaml.safe_dump(sections, default_flow_style=True)))
    if "task" in chosen and "save_weight" not in chosen:  # named after the task
        own.checkpoint.save_weight = flags.checkpoint.save_weight
    if "task" in chosen:
        own.training.task = flags.training.task
    assert flags == variables == written == in_flow == own
    assert {type(value) for value in flags.values().values()} <= {bool, int, float, str, NoneType}


OPTION_NAMES = st.from_regex(r"[a-z_][a-z_0-9]{0,8}", fullmatch=True).filter(lambda name: name not in SETTINGS)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHOICES, st.dictionaries(OPTION_NAMES, SCALARS, max_size=4))
def test_what_print_config_shows_reads_back_as_the_same_settings(run_yaml, chosen, options):
    config = read(task_defaults=chosen)
    config.extra = options
    config.sources |= {f"task_options.{name}": "odd\nsource\x85 \u2028\x07" for name in options}
    text = config.describe()
    again = read(*run_yaml(text), task_defaults=FULL_SFT)  # the file overrides every default
    assert again == config
    assert {k: type(v) for k, v in again.extra.items()} == {k: type(v) for k, v in options.items()}
    assert (
        again.describe().count("\n") == text.count("\n") == len(SETTINGS) + len(SECTIONS) + len(options) + bool(options)
    )
    plain = yaml.safe_load(text)  # any YAML reader sees the same
    assert {n: v for section in SECTIONS for n, v in plain[section].items()} == config.values()
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and copy.sources == config.sources


# ---- to_args and validate


def test_to_args():
    config = read("--use_moe", "1", "--dtype", "bfloat16")
    args = config.to_args()
    assert isinstance(args, Namespace) and set(vars(args)) == set(SETTINGS)
    assert args.use_moe == 1 and type(args.use_moe) is int and args.use_wandb is False and args.dtype == "bfloat16"
    assert read("--use_amp", "0", "--dtype", "bfloat16").to_args().dtype == "float32"
    assert args.top_k == 1 and args.data_path is None
    args.batch_size = 1
    assert config.training.batch_size == 32


IMPOSSIBLE = {
    "--epochs 0": "--epochs 0 must be 1 or more",
    "--hidden_size 100": "--hidden_size 100 must be divisible by 16 (8 heads of an even size)",
    "--num_experts 0": "--num_experts 0 must be 1 or more; --top_k 1 must be --num_experts 0 or less",
    "--top_k 0": "--top_k 0 must be 1 or more",
    "--top_k 5": "--top_k 5 must be --num_experts 4 or less",
    "--world_size=-1": "--world_size -1 must be 0 or more",
    "--master_port=-1": "--master_port -1 must be 0 or more",
    "--master_port 65536": "--master_port 65536 must be 65535 or less",
    "--keep_every=-1": "--keep_every -1 must be 0 or more",
    "--keep_last=-1": "--keep_last -1 must be 0 or more",
    "--patience=-1": "--patience -1 must be 0 or more",
    "--min_delta=-0.1": "--min_delta -0.1 must be 0 or more",
    "--num_samples 1": "--num_samples 1 must be 2 or more",
    "--noise=-0.1": "--noise -0.1 must be 0 or more",
    "--validation_share 0": "--validation_share 0.0 must be between 0 and 1",
    "--validation_share 1": "--validation_share 1.0 must be between 0 and 1",
    "--monitor=": "--monitor must not be empty",
    "--save_weight=": "--save_weight must not be empty",
    "--master_addr=": "--master_addr must not be empty",
    "--device tpu9": "--device tpu9 cannot be used",
    "--epochs 0 --patience=-1 --top_k 9": (
        "--epochs 0 must be 1 or more; --patience -1 must be 0 or more; --top_k 9 must be --num_experts 4 or less"
    ),
}


@pytest.mark.parametrize("line", IMPOSSIBLE)
def test_validate(line):
    config = read("--task", "t", *line.split())
    with pytest.raises(UserError) as error:
        config.validate()
    expected = IMPOSSIBLE[line]
    assert str(error.value).startswith(expected) if "tpu9" in line else str(error.value) == expected


def test_validate_accepts_the_edges():
    read("--task", "t").validate()
    edges = (
        "--top_k 4 --master_port 65535 --keep_last 0 --noise 0 --validation_share 0.001 --num_samples 2 --num_experts 4"
    )
    read("--task", "t", *edges.split()).validate()


def test_validate_finds_wrong_types_in_a_config_made_by_hand():
    config = Config(
        training=TrainingConfig(task="t", epochs="3", mode="middle", seed=True), data=DataConfig(cache_dir=ROOT)
    )
    with pytest.raises(UserError) as error:
        config.validate()
    assert str(error.value) == (
        f"--cache_dir must be text, not {ROOT}; --epochs must be a whole number, not '3'; "
        "--seed must be a whole number, not True; --mode must be min or max, not 'middle'"
    )
    Config(training=TrainingConfig(task="t"), checkpoint=CheckpointConfig(save_weight="x")).validate()
    assert "# default" in Config().describe()


# ---- the shipped files


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs(path):
    config = read("--config", path)
    config.validate()
    assert config.training.task == path.stem.removesuffix("_moe")
    assert config.model.use_moe == path.stem.endswith("_moe")
    assert config.checkpoint.from_weight == ("pretrain" if path.stem.startswith("full_sft") else "none")
    assert path.read_text().startswith("# ") and f"--config llm/training/configs/{path.name}" in path.read_text()


def test_the_shipped_configs_fit_together():
    assert [path.stem for path in CONFIGS] == ["full_sft", "full_sft_moe", "pretrain", "pretrain_moe", "regression"]
    for suffix in ("", "_moe"):
        before, after = (
            read("--config", ROOT / f"llm/training/configs/{s}{suffix}.yaml") for s in ("pretrain", "full_sft")
        )
        assert before.model == after.model and before.checkpoint.save_weight == after.checkpoint.from_weight
        assert before.data.data_path != after.data.data_path
