"""The engine's settings: five sources in order, one line for the mistakes of one, YAML that reads back."""

import itertools
import pickle
from types import SimpleNamespace

import pytest
import yaml

from common import hub
from common.arguments import parse_args
from common.errors import UserError
from llm.training.core.config import Config, EngineArgs, ModelConfig
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


@pytest.mark.parametrize("stage", STAGES)
def test_the_settings_are_the_stage_scripts_with_their_defaults(stage):
    args = read("--task", stage, stage_args=STAGES[stage]).to_args()
    of_script = dict(STAGES[stage]())
    assert dict(args).keys() == of_script.keys() | OWN and not of_script.keys() & OWN
    assert dict(args).items() >= of_script.items() and args.contradictions() == []
    line = ["--data_path", "x", "--use_moe", "1", "--epochs", "7", "--batch_size", "auto"]
    line += ["--eval_data_path", "none"]
    expected = parse_args(STAGES[stage], "", line)
    args = read("--task", stage, *line, stage_args=STAGES[stage]).to_args()
    assert dict(args).items() >= dict(expected).items() and isinstance(args, STAGES[stage])
    assert args.model_fields_set == expected.model_fields_set | {"task"}


# ---- the order of the sources

SOURCES = ["default", "task", "yaml", "environment", "command line"]
VALUES = {"default": 32, "task": 11, "yaml": 12, "environment": 13, "command line": 14}


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
    is_given = "batch_size" in config.to_args().model_fields_set
    assert is_given == (last not in ("default", "task"))


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
VARIABLES = API_KEY | {"MINIMIND_BATCH_SIEZ": "8", "MINIMIND_EPOCHS": "1.5", "MINIMIND_BATCH_SIZE": ""}
TOLD = [  # flags, variables, YAML, defaults of the task; what is told
    ("--batch_siez 8", {}, "", {}, "--batch_siez is unknown; did you mean --batch_size"),
    ("--top_k 0", {}, "", {}, "--top_k must be greater than or equal to 1, not '0'"),
    ("--set seed=3", {}, "", {}, "--set seed is a setting of the engine; give it as --seed"),
    ("--set seed", {}, "", {}, "argument --set: must be NAME=VALUE, not 'seed'"),
    ("", {}, "task_options: {seed: 1}", {}, "run.yaml: seed is a setting of the engine"),
    (
        "", VARIABLES, "", {},
        "variable MINIMIND_BATCH_SIEZ is unknown; did you mean batch_size; variable MINIMIND_BATCH_SIZE must "
        "not be empty; variable MINIMIND_EPOCHS must be a valid integer, not '1.5'",
    ),
    (
        "", {"MINIMIND_TOP_K": "1", "MINIMIND_NUM_EXPERTS_PER_TOK": "2"}, "", {},
        "variable MINIMIND_NUM_EXPERTS_PER_TOK and variable MINIMIND_TOP_K are one setting",
    ),
    (
        "", {}, "training: {batch_siez: 8}\nmodel: {use_moe: 3}", {},
        "run.yaml: training.batch_siez is unknown; did you mean batch_size; run.yaml: model.use_moe must be "
        "a valid boolean, not 3",
    ),
    (
        "--task t", {}, "", {"epochs": "two", "seed": None},
        "task t: its default epochs must be a valid integer, not 'two'; task t: its default seed must not be "
        "empty",
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
    assert config.to_args().num_experts_per_tok == 3


# ---- a user's own settings, print_config


def test_task_options(run_yaml):
    defaults = {"depth": 2, "name": "x", "epochs": 3}
    argv = run_yaml("training: {task: x}\ntask_options:\n  depth: 3\n  lr: 1e-4\n  width: 1\n")
    for pair in ("width=2.5", "flag=true", "none=null", "text=a b", "day=2026-01-02"):
        argv += ("--set", pair)
    config = read(*argv, task_defaults=defaults)
    expected = {"depth": 3, "lr": 1e-4, "name": "x", "width": 2.5, "flag": True, "none": None, "text": "a b"}
    assert config.extra == expected | {"day": "2026-01-02"} and config.training.epochs == 3
    assert not hasattr(config.to_args(), "depth")


def test_print_config_shows_every_value_and_reads_back(run_yaml, capsys, monkeypatch):
    argv = [*run_yaml("training:\n  task: full_sft\n  seed: 3\n"), "--use_moe", "1", "--set", "depth=3"]
    sources = {"env": {"MINIMIND_BATCH_SIZE": "5"}, "stage_args": train_full_sft.Args}
    with pytest.raises(SystemExit) as stop:
        read(*argv, "--print_config", **sources)
    text = capsys.readouterr().out
    assert not stop.value.code
    shown = yaml.safe_load(text)
    assert (shown["training"]["seed"], shown["training"]["batch_size"]) == (3, 5)
    assert (shown["data"]["max_seq_len"], shown["task_options"]) == (768, {"depth": 3})
    config = read(*argv, **sources)
    again = read(*run_yaml(text), stage_args=train_full_sft.Args)
    assert dict(again.to_args()) == dict(config.to_args()) and again.extra == config.extra
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and copy.to_args().model_fields_set == config.to_args().model_fields_set
    for name, value in rank_variables(1, 2, 29500).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        read(*argv, "--print_config", **sources)
    assert capsys.readouterr().out == ""


def test_to_args_are_a_copy_in_which_use_amp_0_means_float32():
    config = read("--use_amp", "0", "--dtype", "bfloat16")
    args = config.to_args()
    assert args.dtype == "float32" and isinstance(args, EngineArgs)
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
