"""The engine's settings: five sources in order, one line for the mistakes of one, YAML that reads back."""

import itertools
import pickle
from types import SimpleNamespace

import pytest
import yaml

from common import hub
from common.arguments import parse_args
from common.errors import UserError
from common.settings import setting
from llm.training.core.config import Config, EngineArgs, ModelConfig, OptimizationConfig, TrainingConfig
from llm.training.tasks.language_model import FullSFTArgs, PretrainArgs
from tests.stage_process import rank_variables
from trainer import train_full_sft, train_pretrain

# what the engine has beyond the stage scripts' flags
OWN = {"task", "num_samples", "noise", "validation_share", "data_module", "use_amp"}
OWN |= {"world_size", "master_addr", "master_port"}
STAGES = {"pretrain": (train_pretrain.Args, PretrainArgs), "full_sft": (train_full_sft.Args, FullSFTArgs)}


class OwnArgs(EngineArgs):
    """The settings of a user's task."""

    batch_size: int = 11
    epochs: int = 3
    depth: int = setting(2, "an own one", ge=1)


def read(*argv, env=None, args_class=EngineArgs) -> Config:
    def find_task(name):
        return SimpleNamespace(args_class=args_class)

    return Config.from_args_and_env([str(part) for part in argv], env or {}, find_task)


@pytest.fixture
def run_yaml(tmp_path, monkeypatch):
    """Writes run.yaml into the current folder; gives the flags that name it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> tuple[str, str]:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return "--config", "run.yaml"

    return write


@pytest.mark.parametrize("stage", STAGES)
def test_the_settings_are_the_stage_scripts_with_their_defaults(stage):
    script_args, args_class = STAGES[stage]
    args = read("--task", stage, args_class=args_class).args
    of_script = dict(script_args())
    assert dict(args).keys() == of_script.keys() | OWN and not of_script.keys() & OWN
    assert dict(args).items() >= of_script.items() and args.contradictions() == []
    line = ["--data_path", "x", "--use_moe", "1", "--epochs", "7", "--batch_size", "5"]
    line += ["--eval_data_path", "none"]
    expected = parse_args(script_args, "", line)
    args = read("--task", stage, *line, args_class=args_class).args
    assert dict(args).items() >= dict(expected).items() and isinstance(args, script_args)
    assert args.model_fields_set == expected.model_fields_set | {"task"}


# ---- the order of the sources

SOURCES = ["task", "yaml", "environment", "command line"]
VALUES = {"task": 11, "yaml": 12, "environment": 13, "command line": 14}


@pytest.mark.parametrize("present", itertools.combinations(SOURCES, 2), ids="+".join)
def test_a_later_source_overrides_those_before_it(present, run_yaml):
    argv, env = ["--task", "t"], {}
    if "yaml" in present:
        argv += run_yaml(f"training:\n  batch_size: {VALUES['yaml']}\n")
    if "environment" in present:
        env["MINIMIND_BATCH_SIZE"] = str(VALUES["environment"])
    if "command line" in present:
        argv += ["--batch_size", VALUES["command line"]]
    config = read(*argv, env=env, args_class=OwnArgs if "task" in present else EngineArgs)
    last = max(present, key=SOURCES.index)
    assert config.training.batch_size == VALUES[last]


def test_a_task_that_knows_no_better_names_its_weights_like_itself():
    assert Config().checkpoint.save_weight == "model"
    assert read("--task", "my.file:Classifier").checkpoint.save_weight == "Classifier"
    assert read("--task", "x", "--save_weight", "y").checkpoint.save_weight == "y"
    assert read("--task", "x", args_class=FullSFTArgs).checkpoint.save_weight == "full_sft"


def test_a_task_whose_class_nothing_finds_is_an_error():
    """Its settings and defaults would be ignored."""
    for argv, environ in ((["--task", "regression"], {}), ([], {"MINIMIND_TASK": "regression"})):
        with pytest.raises(UserError, match=r"--task regression: .*from_args_and_env\(find_task=find_task\)"):
            Config.from_args_and_env(argv, environ)


# ---- mistakes

API_KEY = {"MINIMIND_API_KEY": "x"}  # of the server
VARIABLES = API_KEY | {"MINIMIND_BATCH_SIEZ": "8", "MINIMIND_EPOCHS": "1.5", "MINIMIND_BATCH_SIZE": ""}
TOLD = [  # flags, variables, YAML; what is told
    ("--batch_siez 8", {}, "", "--batch_siez is unknown; did you mean --batch_size"),
    ("--top_k 0", {}, "", "--top_k must be greater than or equal to 1, not '0'"),
    (
        "", VARIABLES, "",
        "variable MINIMIND_BATCH_SIEZ is unknown; did you mean batch_size; variable MINIMIND_BATCH_SIZE must "
        "not be empty; variable MINIMIND_EPOCHS must be a valid integer, not '1.5'",
    ),
    (
        "", {}, "data: {epochs: 3}\ntrainign: {seed: 1}\nlogging: {top_k: 1}\nmodel: {depth: 1}",
        "run.yaml: data.epochs belongs in the section training; run.yaml: trainign.seed belongs in the section "
        "training; run.yaml: logging.top_k belongs in the section model; run.yaml: model.depth belongs in the "
        "section stage",
    ),
    ("", {}, "training: {seed: 1, seed: 2}", "--config run.yaml cannot be read (seed is given twice"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "env", "yaml", "told"), TOLD)
def test_all_mistakes_of_a_source_are_one_line(run_yaml, flags, env, yaml, told):
    argv = ["--task", "t", *flags.split(), *(run_yaml(yaml) if yaml else ())]
    with pytest.raises(UserError) as error:
        read(*argv, env=env, args_class=OwnArgs)
    assert str(error.value).startswith(told) and "\n" not in str(error.value)


def test_a_variable_of_another_program_is_no_setting():
    assert read(env=API_KEY).args == Config().args


def test_validate():
    with pytest.raises(UserError, match="--num_experts_per_tok 5 must be --num_experts 4 or less"):
        read("--task", "t", "--use_moe", "--top_k", 5).validate()
    with pytest.raises(UserError, match=r"--log_file and --log_dir both .*; --task is missing"):
        read("--log_file", "a", "--log_dir", "b").validate()


def test_top_k_is_another_name_of_num_experts_per_tok():
    config = Config(model=ModelConfig(top_k=2), training=TrainingConfig(epochs=5))
    assert config.model.num_experts_per_tok == config.model.top_k == config.args.top_k == 2
    config.model.top_k = 3
    assert config.args.num_experts_per_tok == 3 and config.args.epochs == config.training.epochs == 5


# ---- a user's own settings, print_config


def test_print_config_shows_every_value_and_reads_back(run_yaml, capsys, monkeypatch):
    argv = [*run_yaml("training:\n  task: t\n  seed: 3\nstage: {depth: 3}\n"), "--use_moe", "1"]
    sources = {"env": {"MINIMIND_BATCH_SIZE": "5"}, "args_class": OwnArgs}
    with pytest.raises(SystemExit) as stop:
        read(*argv, "--print_config", **sources)
    text = capsys.readouterr().out
    assert not stop.value.code
    shown = yaml.safe_load(text)
    assert (shown["training"]["seed"], shown["training"]["batch_size"]) == (3, 5)
    assert shown["training"]["epochs"] == 3 and shown["stage"] == {"depth": 3}
    config = read(*argv, **sources)
    again = read(*run_yaml(text), args_class=OwnArgs)
    assert dict(again.args) == dict(config.args) and config.args.depth == 3
    copy = pickle.loads(pickle.dumps(config))
    assert copy.args == config.args and copy.model is copy.args
    assert copy.args.model_fields_set == config.args.model_fields_set
    for name, value in rank_variables(1, 2, 29500).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        read(*argv, "--print_config", **sources)
    assert capsys.readouterr().out == ""


def test_use_amp_0_means_float32():
    assert read("--use_amp", "0", "--dtype", "bfloat16").args.dtype == "float32"
    assert Config(optimization=OptimizationConfig(use_amp=False)).args.dtype == "float32"


def test_paths_on_a_hub_become_local(monkeypatch):
    monkeypatch.setattr(hub, "local_path", lambda path, tokenizer_only: f"/copy/{tokenizer_only}")
    argv = ["--data_path", "hf://datasets/a/data"]
    argv += ["--tokenizer_path", "hf://a/b", "--from_weight", "hf://a/b"]
    args = read(*argv).args
    assert (args.data_path, args.from_weight) == ("/copy/False", "/copy/False")
    assert args.tokenizer_path == "/copy/True"
