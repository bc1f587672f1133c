"""The settings and the command lines made from them: types, limits, choices, defaults and help; a YAML file;
all mistakes of a source in one line."""

import re
import string
from argparse import ArgumentTypeError
from dataclasses import dataclass, fields
from typing import Literal

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common.arguments import parse_args
from common.command_line import Parser
from common.errors import UserError
from common.settings import StageArgs, setting, settings_of
from dataset.token_cache import STAGE_LENGTH, load_tokenizer
from model.model_minimind import MiniMindConfig
from tests.conftest import ROOT
from tests.stage_process import Faults, run
from trainer import train_dpo, train_full_sft, train_pretrain
from trainer.objectives.next_token import SHAPE, model_config
from trainer.weights.for_tools import add_trained_model_flags, given_shape

STAGES = {"pretrain": train_pretrain.Args, "sft": train_full_sft.Args, "dpo": train_dpo.Args}
SETTINGS = settings_of(StageArgs)
MINIMIND = {  # defaults of MiniMind that a run here must have, too
    "pretrain": {
        "epochs": 2, "batch_size": 32, "accumulation_steps": 8, "learning_rate": 5e-4,
        "max_seq_len": 340, "save_weight": "pretrain", "from_weight": "none",
    },
    "sft": {
        "epochs": 2, "batch_size": 16, "accumulation_steps": 1, "learning_rate": 1e-5,
        "max_seq_len": 768, "save_weight": "full_sft", "from_weight": "pretrain",
    },
}  # fmt: skip
LIMITS = {  # texts that are just in, and just out
    "max_seq_len": (["8", "32768"], ["7", "32769"]),
    "eval_share": (["0", "0.5"], ["-0.001", "0.501"]),
    "hidden_size": (["16", "4096"], ["0", "24"]),
    "dropout": (["0", "0.999"], ["-0.001", "1"]),
    "epochs": (["1", "010"], ["0"]),
    "learning_rate": (["1e-30", "100"], ["0"]),
    "seed": (["0", str(2**63 - 1)], ["-1", str(2**63), "9" * 5000]),
}
NO_NUMBERS = ["two", "", "nan", "inf", "-inf", "1 2", "0x10", "none", "true"]


@dataclass(kw_only=True)
class OwnArgs(StageArgs):
    """A stage with a default and flags of its own."""

    epochs: int = 7
    z_loss: float = setting(0.25, "weight of the z-loss", "nats", ge=0)
    teacher: str | None = setting(None, "folder of the teacher; 100% of its layers")
    beta: Literal["low", "high"] = setting("low", "temperature")
    plain: int = 3


def mistake(args_class, *line: str) -> str:
    """The one line that a command line ends in."""
    with pytest.raises(UserError) as error:
        parse_args(args_class, "", line)
    assert "\n" not in str(error.value)
    return str(error.value)


def parsed(*line: str) -> StageArgs:
    return parse_args(StageArgs, "", line)


@pytest.fixture
def run_yaml(tmp_path):
    """Writes a YAML file; gives the flags that name it."""

    def write(text: str) -> tuple[str, str]:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return "--config", str(tmp_path / "run.yaml")

    return write


# ---- values


def test_the_defaults():
    for stage, expected in MINIMIND.items():
        args = parse_args(STAGES[stage], "", [])
        assert args.values().items() >= expected.items()
        assert args.values() == {name: each.default for name, each in settings_of(STAGES[stage]).items()}
    assert set(SETTINGS) == {each.name for each in fields(StageArgs)} - {"given"}
    assert SETTINGS["max_seq_len"].limits["le"] == MiniMindConfig().max_position_embeddings
    assert SETTINGS["hidden_size"].limits["multiple_of"] == 2 * MiniMindConfig().num_attention_heads
    assert {stage: Args.max_seq_len for stage, Args in STAGES.items()} == STAGE_LENGTH


@pytest.mark.parametrize("name", LIMITS)
def test_numbers(name):
    inside, outside = LIMITS[name]
    for text in inside:
        assert getattr(parsed(f"--{name}={text}"), name) == SETTINGS[name].kind(text)
    for text in [*outside, *NO_NUMBERS]:
        line = mistake(StageArgs, f"--{name}={text}")
        assert line.startswith(f"--{name} ") and line.endswith(f", not '{text}'")
        assert ("or auto" in line) == SETTINGS[name].auto


def test_booleans_and_auto():
    for text, value in {"0": False, "1": True, "true": True, "False": False}.items():
        assert parsed("--use_moe", text).use_moe is value
    args = parsed("--use_moe", "--epochs", "3")  # a bare flag
    assert args.use_moe is True and args.epochs == 3
    for wrong in ("2", "-1", "", "maybe"):
        assert mistake(StageArgs, f"--use_moe={wrong}").startswith("--use_moe must be a valid boolean")
    args = parse_args(train_full_sft.Args, "", ["--batch_size", "auto", "--learning_rate=auto"])
    assert args.batch_size is None and args.learning_rate is None and args.use_compile is None
    assert parsed("--use_compile", "0").use_compile is False
    assert "or auto, not 'none'" in mistake(StageArgs, "--use_compile", "none")


def test_choices_and_texts():
    assert parsed("--mode", "max").mode == "max"
    assert mistake(StageArgs, "--mode=MAX") == "--mode must be 'min' or 'max', not 'MAX'"
    for text in ("x", "7", "true", "caf\udce9 *.jsonl", "-"):
        args = parsed(f"--data_path={text}", f"--save_dir={text}")
        assert args.data_path == args.save_dir == text
    for text in ("", "None", "null", "none"):
        assert parsed(f"--data_path={text}").data_path is None
    assert parsed("--from_weight", "none").from_weight == "none"  # random weights
    assert mistake(StageArgs, "--save_dir=") == "--save_dir must not be empty"


ANY_TEXT = st.text(max_size=12) | st.text(alphabet=string.digits + "+-._eE ", max_size=8)


@given(st.sampled_from(list(SETTINGS)), ANY_TEXT)
@example("use_moe", "\u0661")
def test_any_text_is_a_value_or_one_line(name, text):
    try:
        value = SETTINGS[name].parse(text)
    except ArgumentTypeError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert value is None or SETTINGS[name].parse(value) == value


# ---- command lines


def test_all_mistakes_are_in_one_line():
    wrong = {"epochs": 0, "batch_size": "x", "max_seq_len": 7, "dtype": "int8", "use_moe": 2, "save_dir": ""}
    line = mistake(train_full_sft.Args, *[f"--{name}={value}" for name, value in wrong.items()])
    assert [part.split()[0] for part in line.split("; ")] == [f"--{name}" for name in wrong]
    line = mistake(StageArgs, "--epoch=1", "--mini_batch_size", "3", "--qqqqq")  # no abbreviations
    assert line.startswith("--epoch is unknown; did you mean --epochs; --mini_batch_size is unknown; use ")
    assert line.endswith("--qqqqq is unknown; see --help")
    line = mistake(StageArgs, "--save_weight", "a/b", "--log_file", "a", "--log_dir", "b")
    assert line == (
        "--save_weight 'a/b' must be a plain name; the folder is --save_dir; "
        "--log_file and --log_dir both name the log file; leave one of them out"
    )
    assert mistake(StageArgs, "--use_moe", "1", "extra") == "extra is unknown; see --help"
    assert mistake(StageArgs, "--epochs") == "argument --epochs: expected one argument; see --help"


def test_a_name_that_means_something_else_is_one_line():
    for name in ("none", "full_sft_best", "x.pth", "..", ".", ".hid", "a/b", "a/"):
        assert "--save_weight" in mistake(StageArgs, "--save_weight", name)
    for name in ("nones", "best", "_best_of", "x.pth2", "中文", "a b"):
        assert parsed("--save_weight", name).save_weight == name


def test_the_last_of_two_values_holds(monkeypatch):
    assert parsed("--epochs", "3", "--epochs=4").epochs == 4
    assert parsed("--top_k", "3", "--use_moe").num_experts_per_tok == 3
    args = parse_args(StageArgs, "", ["--seed", "3"], epochs=9, seed=8)
    assert args == StageArgs(epochs=9, seed=3) and args.given == {"seed"}
    monkeypatch.setattr("sys.argv", ["train.py", "--epochs", "9"])
    assert parse_args(StageArgs, "").epochs == 9


def test_experts_that_no_model_can_have():
    assert mistake(StageArgs, "--num_experts=8").startswith("--num_experts and --num_experts_per_tok shape")
    line = mistake(StageArgs, "--use_moe", "--num_experts_per_tok=5")
    assert line == "--num_experts_per_tok 5 must be --num_experts 4 or less"


def test_the_model_follows_the_command_line():
    line = "--hidden_size 256 --use_moe 1 --dropout 0.1 --num_experts 6 --num_experts_per_tok 3"
    config = model_config(load_tokenizer(ROOT / "model"), parsed(*line.split()))
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert (config.hidden_size, config.use_moe, config.dropout, config.vocab_size) == (256, True, 0.1, 6400)
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (8, 6, 3)


# ---- a YAML file


def test_flags_override_the_file_and_it_the_defaults(run_yaml, capsys):
    text = "training: {epochs: 3, seed: 4, learning_rate: 1e-4}\nmodel: {use_moe: true, top_k: 2}\ndata:\n"
    text += "  eval_data_path: null\nstage: {z_loss: 1}\n"
    args = parse_args(OwnArgs, "", [*run_yaml(text), "--seed", "5"])
    assert (args.epochs, args.seed, args.learning_rate, args.batch_size) == (3, 5, 1e-4, 32)
    assert (args.use_moe, args.num_experts_per_tok, args.z_loss) == (True, 2, 1.0)
    assert args.given >= {"epochs", "seed", "num_experts_per_tok", "eval_data_path"}
    with pytest.raises(SystemExit) as stop:
        parse_args(OwnArgs, "", [*run_yaml(text), "--seed", "5", "--save_weight=1e-4", "--print_config"])
    shown = capsys.readouterr().out
    assert not stop.value.code and re.search(r"seed: 5 +# command line", shown)
    assert re.search(r"epochs: 3 +# .*run.yaml", shown) and re.search(r"batch_size: 32 +# default", shown)
    again = parse_args(OwnArgs, "", run_yaml(shown))
    assert again.values() == args.values() | {"save_weight": "1e-4"}


YAML = {
    "training: {batch_siez: 8, epochs: x}\nmodel: {use_moe: 3}": (
        "FILE: training.batch_siez is unknown; did you mean batch_size; FILE: training.epochs must be a valid "
        "integer, not 'x'; FILE: model.use_moe must be a valid boolean, not 3"
    ),
    "training: {1: 8}": "FILE: training.1 is unknown; see --help",
    "training: {epochs: 1.5}": "FILE: training.epochs must be a valid integer",
    "training: {epochs: true}": "FILE: training.epochs must be a valid integer, not 'True'",
    "training: {epochs: }": "FILE: training.epochs must be a valid integer, not None",
    "training: {epochs: [1]}": "FILE: training.epochs must be a valid integer, not [1]",
    "training: {learning_rate: .nan}": "FILE: training.learning_rate must be a finite number or auto, not nan",
    "checkpoint: {save_weight: 7}": "FILE: checkpoint.save_weight must be a valid string, not 7",
    "batch_size: 8": "FILE: section batch_size must be a mapping of settings, not 8",
    "- training": "FILE: must be a mapping of sections, not ['training']",
    "stage: {mini_batch_size: 1}": "FILE: stage.mini_batch_size is unknown; use --batch_size",
    "training: {epochs: !!python/name:os.system ''}": "--config FILE cannot be read (could not determine a",
    "training: {epochs: 1": "--config FILE cannot be read (while parsing a flow mapping",
    "a: " + "[" * 1000: "--config FILE cannot be read (maximum recursion depth exceeded",
}


@pytest.mark.parametrize("text", YAML)
def test_a_mistake_in_the_file_is_one_line(run_yaml, text):
    flags = run_yaml(text)
    assert mistake(StageArgs, *flags).startswith(YAML[text].replace("FILE", flags[1]))


def test_a_file_that_cannot_be_read(tmp_path):
    told = "--config no.yaml cannot be read (No such file or directory)"
    assert mistake(StageArgs, "--config", "no.yaml") == told
    path = tmp_path / "run.yaml"
    path.write_bytes(b"model: {}\n# caf\xe9\n")
    told = f"--config {path} cannot be read ('utf-8' codec"
    assert mistake(StageArgs, "--config", str(path)).startswith(told)


def test_an_empty_file_is_fine(run_yaml):
    for text in ("", "# nothing\n", "---\n", "~", "\ufeff", "training:\n", "{}"):
        assert parsed(*run_yaml(text)) == StageArgs()


ANY_YAML = st.text(alphabet=st.sampled_from("ab:-[]{}#&*!|>'\"%@`,? \n\t\\xU8f1~"), max_size=40)
ANY_YAML |= st.binary(max_size=30).map(lambda data: data.decode("latin-1"))
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@few
@given(ANY_YAML)
@example('a: "\\UFFFFFFFF"')
@example('a: "\\U7FFFFFFF"')
@example("%YAML 99999999999999999999.1\n---\n")
@example("training: {2026-13-45: 1}")
@example("training: {seed: 2026-13-45}")
def test_whatever_a_file_holds_it_ends_in_one_line(run_yaml, text):
    try:
        parsed(*run_yaml(text))
    except UserError as error:
        assert str(error) and len(str(error).splitlines()) == 1


TEXT = st.text(min_size=1, max_size=12) | st.sampled_from(["no", "1e-4", "012", "~", "a #b", " a ", "\u2028"])


@few
@given(TEXT.filter(lambda text: text.lower() not in ("none", "null")), st.floats(1e-30, 1e30))
def test_what_print_config_shows_reads_back(run_yaml, capsys, text, rate):
    with pytest.raises(SystemExit):
        parsed(f"--data_path={text}", f"--learning_rate={rate}", "--print_config")
    shown = capsys.readouterr().out
    args = parsed(*run_yaml(shown))
    assert (args.data_path, args.learning_rate) == (text, rate)
    assert yaml.safe_load(shown)["data"]["data_path"] == text


# ---- a stage's own flags, and help


def test_a_subclass_adds_flags_and_changes_defaults():
    rows = settings_of(OwnArgs)
    assert list(rows) == [*SETTINGS, "z_loss", "teacher", "beta", "plain"]
    own = [each for name, each in rows.items() if name not in SETTINGS]
    assert {(each.section, each.role) for each in own} == {("stage", "run")}
    assert rows["epochs"].default == 7 and rows["epochs"].help == SETTINGS["epochs"].help
    args = parse_args(OwnArgs, "", ["--z_loss", "1", "--teacher=x", "--beta", "high", "--plain=4"])
    assert (args.epochs, args.z_loss, args.teacher, args.beta, args.plain) == (7, 1.0, "x", "high", 4)
    line = mistake(OwnArgs, "--z_loss", "-1", "--epochs", "0", "--beta", "no", "--plain", "a")
    assert [part.split()[0] for part in line.split("; ")] == ["--z_loss", "--epochs", "--beta", "--plain"]


@pytest.mark.parametrize("stage", ["pretrain", "lora", "ppo"])
def test_the_help_of_a_stage_is_grouped_and_has_unit_and_default(stage, tmp_path):
    """The script itself, started from another folder."""
    elsewhere = Faults(script=f"os.chdir({str(tmp_path)!r})")
    done = run(str(ROOT / f"trainer/train_{stage}.py"), ["--help"], elsewhere, COLUMNS="100")
    parts = re.split(r"^(\w+):\n", done.out, flags=re.M)
    groups = {name: " ".join(body.split()) for name, body in zip(parts[1::2], parts[2::2], strict=True)}
    sections = ["data", "model", "training", "optimization", "distributed", "checkpoint", "logging"]
    assert list(groups) == ["options", *sections, *([] if stage == "pretrain" else ["stage"])]
    assert done.err == "" and "(default: 0 updates)" in groups["training"]
    assert "--use_moe [{0,1}] 1: mixture of experts instead of a dense model (default: 0)" in groups["model"]
    if stage == "pretrain":
        assert "--epochs INT passes over the data (default: 2)" in groups["training"]
        assert "(default: 340 tokens)" in groups["data"]
    if stage == "lora":
        assert "--save_weight TEXT, --lora_name TEXT name of the weights" in groups["checkpoint"]


def test_the_flags_of_tools_have_the_same_types_and_limits():
    parser = Parser()
    add_trained_model_flags(parser)
    args = parser.parse_args([])
    told_by_the_model = ("model", "weight", "lora", "tokenizer_path", *SHAPE)
    defaults = {"save_dir": str(ROOT / "out"), "device": "auto", "inference_rope_scaling": 0}
    assert vars(args) == defaults | dict.fromkeys(told_by_the_model)
    args = parser.parse_args(["--hidden_size", "64", "--use_moe", "--num_experts_per_tok", "2"])
    assert given_shape(args) == {"hidden_size": 64, "use_moe": True, "num_experts_per_tok": 2}
    with pytest.raises(UserError) as error:
        parser.parse_args(["--hidden_size", "100"])
    assert str(error.value) == "argument --hidden_size: must be a multiple of 16, not '100'; see --help"
    words = " ".join(parser.format_help().split())
    assert "--num_hidden_layers INT depth --use_moe [{0,1}] 1: mixture" in words
