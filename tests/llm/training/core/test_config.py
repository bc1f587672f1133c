"""The engine's settings: five sources in order, one line for the mistakes of one, YAML that reads back."""

import itertools
import pickle
import re
from types import SimpleNamespace

import pytest

from common import hub
from common.arguments import parse_args
from common.errors import UserError
from common.settings import StageArgs, settings_of
from llm.training.core.config import SETTINGS, Config, EngineArgs, ModelConfig
from tests.stage_process import rank_variables
from trainer import train_full_sft, train_pretrain

# what the engine has beyond the stage scripts' flags
OWN = {"task", "num_samples", "noise", "validation_share", "data_module", "use_amp"}
OWN |= {"world_size", "master_addr", "master_port"}
STAGES = {"pretrain": train_pretrain.Args, "full_sft": train_full_sft.Args}


def read(*argv, env=None, task_defaults=None, stage_args=None) -> Config:
    def find_task(name):
        return SimpleNamespace(defaults=task_defaults or {}, stage_args=stage_args)

    return Config.from_args_and_env([str(part) for part in argv], env or {}, find_task)


@pytest.fixture
def run_yaml(tmp_path, monkeypatch):
    """Writes run.yaml into the current folder; gives the flags that name it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> tuple[str, str]:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return "--config", "run.yaml"

    return write


# ---- fields and sections


@pytest.mark.parametrize("stage", STAGES)
def test_the_settings_are_the_stage_scripts_with_their_defaults(stage):
    flags = settings_of(STAGES[stage])
    assert set(flags) | OWN == set(SETTINGS) and not set(flags) & OWN
    args = read("--task", stage, stage_args=STAGES[stage]).to_args()
    assert {name: getattr(args, name) for name in flags} == STAGES[stage]().values()
    assert args.contradictions() == [] and isinstance(args, EngineArgs) and isinstance(args, StageArgs)
    line = ["--data_path", "x", "--use_moe", "1", "--use_wandb", "--epochs", "7", "--learning_rate", "1e-3"]
    line += ["--eval_data_path", "none"]
    expected = parse_args(STAGES[stage], "", line)
    args = read("--task", stage, *line, stage_args=STAGES[stage]).to_args()
    assert {name: args.values()[name] for name in flags} == expected.values()
    assert args.given == expected.given | {"task"}


# ---- the order of the sources

SOURCES = ["default", "task", "yaml", "environment", "command line"]
VALUES = {"default": 32, "task": 11, "yaml": 12, "environment": 13, "command line": 14}
WHERE = {"task": "task t", "yaml": "run.yaml", "environment": "environment", "command line": "command line"}


@pytest.mark.parametrize(
    "present", [c for n in range(6) for c in itertools.combinations(SOURCES, n)], ids="+".join
)
def test_a_later_source_overrides_those_before_it(present, run_yaml):
    argv, env, task_defaults = ["--task", "t"], {}, None
    if "task" in present:
        task_defaults = {"batch_size": VALUES["task"]}
    if "yaml" in present:
        argv += run_yaml(f"training:\n  batch_size: {VALUES['yaml']}\n")
    if "environment" in present:
        env["MINIMIND_BATCH_SIZE"] = str(VALUES["environment"])
    if "command line" in present:
        argv += ["--batch_size", VALUES["command line"]]
    config = read(*argv, env=env, task_defaults=task_defaults)
    last = max((*present, "default"), key=SOURCES.index)
    assert config.training.batch_size == VALUES[last]
    assert config.sources.get("batch_size") == WHERE.get(last) and config.sources["task"] == "command line"


def test_a_task_that_knows_no_better_names_its_weights_like_itself():
    assert Config().checkpoint.save_weight == "model"
    assert read("--task", "my.file:Classifier").checkpoint.save_weight == "Classifier"
    assert read("--task", "x", "--save_weight", "y").checkpoint.save_weight == "y"
    assert read("--task", "x", task_defaults={"save_weight": "z"}).checkpoint.save_weight == "z"


def test_a_task_whose_class_nothing_finds_is_an_error():
    """Its settings and defaults would be ignored."""
    for argv, environ in ((["--task", "regression"], {}), ([], {"MINIMIND_TASK": "regression"})):
        with pytest.raises(UserError, match=r"--task regression: .*from_args_and_env\(find_task=find_task\)"):
            Config.from_args_and_env(argv, environ)


# ---- mistakes

API_KEY = {"MINIMIND_API_KEY": "x"}  # of the server
VARIABLES = API_KEY | {"MINIMIND_BATCH_SIEZ": "8", "MINIMIND_EPOCHS": "1.5", "MINIMIND_QQQQQQ": "8"}
TOLD = [  # flags, variables, YAML, defaults of the task; what is told
    ("--batch_siez 8", {}, "", {}, "--batch_siez is unknown; did you mean --batch_size"),
    ("--top_k 0", {}, "", {}, "--num_experts_per_tok must be greater than or equal to 1, not '0'"),
    ("--set seed=3", {}, "", {}, "--set seed is a setting of the engine, in section training"),
    ("--set seed", {}, "", {}, "argument --set: must be NAME=VALUE, not 'seed'"),
    (
        "", VARIABLES, "", {},
        "variable MINIMIND_batch_siez is unknown; did you mean batch_size; variable MINIMIND_epochs must be a "
        "valid integer, not '1.5'; variable MINIMIND_qqqqqq is unknown; see --help",
    ),
    (
        "", {}, "training: {batch_siez: 8}\nmodel: {use_moe: 3}", {},
        "run.yaml: training.batch_siez is unknown; did you mean batch_size; run.yaml: model.use_moe must be "
        "a valid boolean, not 3",
    ),
    ("", {}, "task_options: {seed: 1, a: [1]}", {}, "run.yaml: seed is a setting of the engine"),
    ("", {}, "task_options: {a: [1]}", {}, "run.yaml: a must be a single value"),
    (
        "--task t", {}, "", {"epochs": "two", "seed": None},
        "task t: its default epochs must be a valid integer, not 'two'; task t: its default seed must be a "
        "valid integer, not None",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "env", "yaml", "defaults", "told"), TOLD)
def test_all_mistakes_of_a_source_are_one_line(run_yaml, flags, env, yaml, defaults, told):
    argv = [*flags.split(), *(run_yaml(yaml) if yaml else ())]
    with pytest.raises(UserError) as error:
        read(*argv, env=env, task_defaults=defaults)
    assert str(error.value).startswith(told) and "\n" not in str(error.value)


def test_a_variable_of_another_program_is_no_setting():
    assert read(env=API_KEY) == Config()


def test_validate():
    with pytest.raises(UserError, match="--num_experts_per_tok 5 must be --num_experts 4 or less"):
        read("--task", "t", "--use_moe", "--top_k", 5).validate()
    with pytest.raises(UserError, match=r"--log_file and --log_dir both .*; --task is missing"):
        read("--log_file", "a", "--log_dir", "b").validate()


def test_top_k_is_another_name_of_num_experts_per_tok():
    config = Config(ModelConfig(top_k=2))
    assert config.model.num_experts_per_tok == config.model.top_k == config.to_args().top_k == 2
    config.model.top_k = 3
    assert config.values()["num_experts_per_tok"] == 3


# ---- a user's own settings, print_config


def test_task_options(run_yaml):
    defaults = {"depth": 2, "name": "x", "epochs": 3}
    argv = run_yaml("training: {task: x}\ntask_options:\n  depth: 3\n  lr: 1e-4\n  width: 1\n")
    for pair in ("width=2.5", "flag=true", "none=", "text=a b", "day=2026-01-02", "width=-1e+3"):
        argv += ("--set", pair)
    config = read(*argv, task_defaults=defaults)
    expected = {"depth": 3, "lr": 1e-4, "name": "x", "width": -1e3, "flag": True, "none": None, "text": "a b"}
    assert config.extra == expected | {"day": "2026-01-02"} and config.training.epochs == 3
    sources = [config.sources[name] for name in ("depth", "name", "width")]
    assert sources == ["run.yaml", "task x", "command line"]
    assert not hasattr(config.to_args(), "depth")


def test_print_config_shows_every_value_and_its_source_and_reads_back(run_yaml, capsys, monkeypatch):
    argv = [*run_yaml("training:\n  task: full_sft\n  seed: 3\n"), "--use_moe", "1", "--set", "depth=3"]
    sources = {"env": {"MINIMIND_BATCH_SIZE": "5"}, "stage_args": train_full_sft.Args}
    with pytest.raises(SystemExit) as stop:
        read(*argv, "--print_config", **sources)
    text = capsys.readouterr().out
    assert not stop.value.code
    for line in ("seed: 3 +# run.yaml", "batch_size: 5 +# environment", "use_moe: true +# command line"):
        assert re.search(line, text)
    assert re.search("max_seq_len: 768 +# task full_sft", text)
    assert re.search("log_file: null +# default", text)
    config = read(*argv, **sources)
    assert read(*run_yaml(text), stage_args=train_full_sft.Args) == config
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and copy.sources == config.sources
    for name, value in rank_variables(1, 2, 29500).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        read(*argv, "--print_config", **sources)
    assert capsys.readouterr().out == ""


def test_to_args_are_a_copy_in_which_use_amp_0_means_float32():
    config = read("--use_amp", "0", "--dtype", "bfloat16")
    args = config.to_args()
    assert args.dtype == "float32"
    args.batch_size = 1
    assert config.training.batch_size == 32


def test_paths_on_a_hub_become_local(monkeypatch):
    monkeypatch.setattr(hub, "local_path", lambda path, tokenizer_only: f"/copy/{tokenizer_only}")
    argv = [
        "--data_path",
        "hf://datasets/a/data",
        "--tokenizer_path",
        "hf://a/b",
        "--from_weight",
        "hf://a/b",
    ]
    args = read(*argv).to_args()
    assert (args.data_path, args.from_weight) == ("/copy/False", "/copy/False")
    assert args.tokenizer_path == "/copy/True"
