"""Settings as a user meets them: values, defaults and help of flags; a YAML file; all mistakes of a source in
one line; what a resumed run may change."""

import re
from typing import ClassVar, Literal

import pytest
import yaml

from common.arguments import parse_args
from common.command_line import Parser
from common.errors import UserError
from common.settings import StageArgs, setting
from dataset.token_cache import load_tokenizer
from llm.training.core.config import EngineArgs
from model.model_minimind import MiniMindConfig
from tests.conftest import ROOT
from tests.stage_process import Faults, run
from trainer import train_full_sft, train_pretrain
from trainer.weights.config import model_config
from trainer.weights.for_tools import NAMED_BY_TOOLS, add_trained_model_flags, given_shape

MINIMIND = {  # defaults of MiniMind that a run here must have, too
    train_pretrain: {
        "epochs": 2, "batch_size": 32, "accumulation_steps": 8, "learning_rate": 5e-4,
        "max_seq_len": 340, "save_weight": "pretrain", "from_weight": "none",
    },
    train_full_sft: {
        "epochs": 2, "batch_size": 16, "accumulation_steps": 1, "learning_rate": 1e-5,
        "max_seq_len": 768, "save_weight": "full_sft", "from_weight": "pretrain",
    },
}  # fmt: skip
LIMITS = {  # texts that are just in, and just out
    "max_seq_len": (["8", "32768"], ["7", "32769"]),
    "hidden_size": (["16", "4096"], ["0", "24"]),
    "dropout": (["0", "0.999"], ["-0.001", "1"]),
    "epochs": (["1", "010"], ["0", "1.5"]),
    "learning_rate": (["1e-30", "100"], ["0", "nan", "inf"]),
    "seed": (["0", str(2**63 - 1)], ["-1", str(2**63)]),
}


class OwnArgs(StageArgs):
    """A stage with a default and flags of its own."""

    epochs: int = 7
    z_loss: float = setting(0.25, "weight of the z-loss", "nats", ge=0)
    beta: Literal["low", "high"] = setting("low", "100% of it")
    plain: int = 3


def mistake(*line: str, args_class=StageArgs) -> str:
    """The one line that a command line ends in."""
    with pytest.raises(UserError) as error:
        parse_args(args_class, "", line)
    assert "\n" not in str(error.value)
    return str(error.value)


def parsed(*line: str, args_class=StageArgs) -> StageArgs:
    return parse_args(args_class, "", line)


@pytest.fixture
def run_yaml(tmp_path):
    """Writes a YAML file; gives the flags that name it."""

    def write(text: str) -> tuple[str, str]:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return "--config", str(tmp_path / "run.yaml")

    return write


# ---- values


def test_the_defaults_are_those_of_minimind_and_of_the_model():
    for script, expected in MINIMIND.items():
        assert dict(parsed(args_class=script.Args)).items() >= expected.items()
    config = model_config(load_tokenizer(ROOT / "model"), StageArgs())
    assert config.own_fields() == MiniMindConfig(**config.own_fields()).own_fields()
    assert (config.hidden_size, config.num_hidden_layers, config.use_moe) == (512, 8, False)


@pytest.mark.parametrize("name", LIMITS)
def test_numbers(name):
    inside, outside = LIMITS[name]
    for text in inside:
        value = getattr(parsed(f"--{name}={text}"), name)
        assert value == type(value)(text)
    for text in [*outside, "two", "1 2", "0x10", "true", "none"]:
        line = mistake(f"--{name}={text}")
        assert line.startswith(f"--{name} must be ") and line.endswith(f", not '{text}'")
    assert mistake(f"--{name}=") == f"--{name} must not be empty"


def test_booleans_auto_choices_and_texts():
    for text, value in {"0": False, "1": True, "true": True, "False": False}.items():
        assert parsed("--use_moe", text).use_moe is value
    assert parsed("--use_moe", "--epochs", "3").use_moe is True  # a bare flag
    assert parsed("--use_compile=auto").use_compile is None
    for name in ("batch_size", "learning_rate"):
        line = f"--{name} must be a number, not auto; scripts/plan.py chooses one for your data"
        assert mistake(f"--{name}", "auto") == line
    assert parsed("--use_compile", "0").use_compile is False
    assert mistake("--use_compile", "no way").endswith("or auto, not 'no way'")
    assert mistake("--batch_size=") == "--batch_size must not be empty"  # nothing is not auto
    assert mistake("--mode=MAX") == "--mode must be 'min' or 'max', not 'MAX'"
    for text in ("x", "7", "true", "caf\udce9 *.jsonl", "-"):
        assert parsed(f"--data_path={text}", f"--save_dir={text}").save_dir == text
    for text in ("", "None", "null", "none"):
        assert parsed(f"--data_path={text}").data_path is None
    assert parsed("--from_weight", "none").from_weight == "none"  # random weights


# ---- command lines


def test_all_mistakes_are_in_one_line():
    """Wrong values, and unknown names beside them, with hints only where they are close."""
    line = mistake(
        "--show_speed", "--epoch=1", "--max_seq_len", "7", "--dtype=int8", "--mini_batch_size", "3"
    )
    parts = line.split("; ")
    assert [part.split()[0] for part in parts[:2]] == ["--max_seq_len", "--dtype"]
    told = "--show_speed is unknown; see --help; --epoch is unknown; did you mean --epochs; "
    told += "--mini_batch_size is unknown; use --batch_size"
    assert told in line
    assert mistake("--use_moe", "1", "extra") == "extra is unknown; see --help"
    assert mistake("--epochs") == "argument --epochs: expected one argument; see --help"


def test_two_names_of_a_setting_must_not_contradict():
    told = "--num_experts_per_tok and --top_k are one setting; leave one of them out"
    assert mistake("--num_experts_per_tok", "3", "--top_k", "2", "--use_moe") == told
    for line in (["--top_k", "3"], ["--top_k", "3", "--num_experts_per_tok=3"]):
        assert parsed("--use_moe", *line).num_experts_per_tok == 3
    assert parsed("--epochs", "3", "--epochs=4").epochs == 4  # of one name the last holds


def test_values_that_do_not_go_together():
    line = mistake("--save_weight", "a/b", "--log_file", "a", "--log_dir", "b")
    assert line == (
        "--save_weight 'a/b' must be a plain name; the folder is --save_dir; "
        "--log_file and --log_dir both name the log file; leave one of them out"
    )
    for name in ("none", "full_sft_best", "x.pth", "..", ".hid", "a/"):
        assert "--save_weight" in mistake("--save_weight", name)
    for name in ("nones", "_best_of", "x.pth2", "中文", "a b"):
        assert parsed("--save_weight", name).save_weight == name
    assert mistake("--num_experts=8").startswith("--num_experts and --num_experts_per_tok shape")
    line = mistake("--use_moe", "--num_experts_per_tok=5")
    assert line == "--num_experts_per_tok 5 must be --num_experts 4 or less"


# ---- a YAML file


def test_flags_override_the_file_and_it_the_defaults_and_print_config_reads_back(run_yaml, capsys):
    text = "training: {epochs: 3, seed: 4, learning_rate: 1e-4}\nmodel: {use_moe: true, top_k: 2}\ndata:\n"
    text += "  eval_data_path: null\nstage: {z_loss: 1}\noptimization: {use_compile: auto}\n"
    line = [*run_yaml(text), "--seed", "5", "--save_weight=1e-4"]
    args = parsed(*line, args_class=OwnArgs)
    assert (args.epochs, args.seed, args.learning_rate, args.batch_size) == (3, 5, 1e-4, 32)
    assert (args.use_moe, args.num_experts_per_tok, args.z_loss) == (True, 2, 1.0)
    assert {"epochs", "seed", "num_experts_per_tok", "eval_data_path"} <= args.model_fields_set
    with pytest.raises(SystemExit) as stop:
        parsed(*line, "--print_config", args_class=OwnArgs)
    shown = capsys.readouterr().out
    assert not stop.value.code and yaml.safe_load(shown)["stage"]["z_loss"] == 1.0
    assert dict(parsed(*run_yaml(shown), args_class=OwnArgs)) == dict(args)
    for text in ("", "# nothing\n", "---\n", "~", "\ufeff", "training:\n", "{}"):
        assert parsed(*run_yaml(text)) == StageArgs()


YAML = {
    "training: {batch_siez: 8, epochs: x}\nmodel: {use_moe: 3}": (
        "FILE: training.batch_siez is unknown; did you mean batch_size; FILE: training.epochs must be a valid "
        "integer, not 'x'; FILE: model.use_moe must be a valid boolean, not 3"
    ),
    "training: {epochs: 1}\nmodel: {}\ntraining: {seed: 2}": "--config FILE cannot be read (training is given ",
    "training: {epochs: 1, seed: 2, epochs: 1}": "--config FILE cannot be read (epochs is given twice",
    "model: {top_k: 2, num_experts_per_tok: 1}": "FILE: model.top_k and FILE: model.num_experts_per_tok are one",
    "training: {epochs: 1}\ndata: {epochs: 2}": "FILE: data.epochs belongs in the section training",
    "training: {epochs: , batch_size: }": (
        "FILE: training.epochs must not be empty; FILE: training.batch_size must not be empty"
    ),
    "training: {epochs: true}": "FILE: training.epochs must be a valid integer, not 'True'",
    "training: {learning_rate: .nan}": "FILE: training.learning_rate must be a finite number, not nan",
    "checkpoint: {save_weight: 7}": "FILE: checkpoint.save_weight must be a valid string, not 7",
    "training: {1: 8}": "FILE: training.1 is unknown; see --help",
    "learning_rate: 1e-3\nbatch_size: 8\ntop_k: 2": (
        "FILE: learning_rate belongs in the section training; FILE: batch_size belongs in the section training; "
        "FILE: top_k belongs in the section model"
    ),
    "epochs: 1\ntraining: {batch_size: 8}": "FILE: epochs belongs in the section training",
    "trainign: 8\nmodel: [1]": (
        "FILE: section trainign must be a mapping of settings, not 8; FILE: section model must be a mapping"
    ),
    "- training": "FILE: must be a mapping of sections, not ['training']",
    "stage: {mini_batch_size: 1}": "FILE: stage.mini_batch_size is unknown; use --batch_size",
    "training: {epochs: 1": "--config FILE cannot be read (while parsing a flow mapping",
    "# caf\udce9": "--config FILE cannot be read ('utf-8' codec",
}


@pytest.mark.parametrize("text", YAML)
def test_a_mistake_in_the_file_is_one_line(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert mistake("--config", str(file)).startswith(YAML[text].replace("FILE", str(file)))
    told = "--config no.yaml cannot be read (No such file or directory)"
    assert mistake("--config", "no.yaml") == told


# ---- a stage's own flags, help, tools, resume


def test_a_subclass_adds_flags_and_changes_defaults():
    line = ["--z_loss", "1", "--beta", "high", "--plain=4"]
    args = parsed(*line, args_class=OwnArgs)
    assert (args.epochs, args.z_loss, args.beta, args.plain) == (7, 1.0, "high", 4)
    line = mistake("--z_loss", "-1", "--epochs", "0", "--beta", "no", "--plain", "a", args_class=OwnArgs)
    assert [part.split()[0] for part in line.split("; ")] == ["--z_loss", "--epochs", "--beta", "--plain"]


def test_a_setting_is_compared_when_a_run_is_resumed_unless_it_is_marked():
    compared = OwnArgs(seed=3, plain=4).compared()
    assert {"z_loss": 0.25, "plain": 4, "seed": 3, "epochs": 7, "packing": False}.items() <= compared.items()
    may_change = {"data_path", "batch_size", "num_workers", "dtype", "device", "save_dir", "log_interval"}
    assert not may_change & compared.keys()
    assert EngineArgs().compared().keys() == StageArgs().compared().keys()  # each resumes the other's runs

    class Marked(OwnArgs):
        may_change: ClassVar[str] = "plain"

    assert OwnArgs().compared().keys() - Marked().compared().keys() == {"plain"}
    for base in EngineArgs.__mro__:  # no name that there is not
        assert set(vars(base).get("may_change", "").split()) <= EngineArgs.model_fields.keys()


@pytest.mark.parametrize("stage", ["pretrain", "lora", "ppo"])
def test_the_help_of_a_stage_is_grouped_and_has_unit_and_default(stage, tmp_path):
    """The script itself, started from another folder."""
    elsewhere = Faults(script=f"os.chdir({str(tmp_path)!r})")
    done = run(str(ROOT / f"trainer/train_{stage}.py"), ["--help"], elsewhere, COLUMNS="100")
    parts = re.split(r"^(\w+):\n", done.out, flags=re.M)
    groups = {name: " ".join(body.split()) for name, body in zip(parts[1::2], parts[2::2], strict=True)}
    sections = ["data", "model", "training", "optimization", "distributed", "checkpoint", "logging"]
    assert list(groups) == ["options", *sections, "stage"]
    assert done.err == "" and "(default: 0 updates)" in groups["training"]
    assert "--use_moe [{0,1}] 1: mixture of experts instead of a dense model (default: 0)" in groups["model"]
    assert "--use_compile [{0,1}] 1: torch.compile the model" in groups["optimization"]
    if stage == "pretrain":
        assert "--epochs INT passes over the data (default: 2)" in groups["training"]
        assert "(default: 340 tokens)" in groups["data"]
    if stage == "lora":
        assert "--lora_name TEXT another name of --save_weight" in groups["checkpoint"]


@pytest.mark.parametrize(
    ("width", "heads", "of_keys"),
    [(16, 1, 1), (64, 1, 1), (96, 2, 1), (192, 3, 1), (208, 2, 1), (256, 4, 2), (512, 8, 4), (768, 8, 4)],
)
def test_heads_of_a_new_model_have_64_dimensions_where_the_width_allows_it(width, heads, of_keys):
    """From a width of 512 on they are MiniMind's."""
    found = StageArgs(hidden_size=width).heads()
    assert tuple(found.values()) == (heads, of_keys) and width % (2 * heads) == 0
    config = model_config(load_tokenizer(ROOT / "model"), StageArgs(hidden_size=width))
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, of_keys)
    assert config.head_dim * heads == width


def test_heads_that_are_given():
    shape = StageArgs(hidden_size=256, num_attention_heads=8)
    assert shape.heads() == {"num_attention_heads": 8, "num_key_value_heads": 4}
    given = ["--hidden_size", "256", "--num_attention_heads", "8", "--num_key_value_heads", "auto"]
    assert parse_args(StageArgs, "", given).heads() == shape.heads()
    for flags, told in (
        (["--num_attention_heads", "3"], "--num_attention_heads 3: --hidden_size 512 is not made up of"),
        (
            ["--num_key_value_heads", "3"],
            "--num_key_value_heads 3 must divide the number of heads, which is 8",
        ),
        (["--num_attention_heads", "0"], "greater than or equal to 1 or auto, not '0'"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            parse_args(StageArgs, "", flags)


def test_the_flags_of_tools_have_the_same_types_and_limits():
    parser = Parser()
    add_trained_model_flags(parser)
    args = parser.parse_args([])
    told_by_the_model = ("model", "weight", "lora", "tokenizer_path", *NAMED_BY_TOOLS)
    defaults = {"save_dir": str(ROOT / "out"), "device": "auto", "inference_rope_scaling": 0}
    assert vars(args) == defaults | dict.fromkeys(told_by_the_model)
    args = parser.parse_args(["--hidden_size", "64", "--use_moe", "--num_experts_per_tok", "2"])
    assert given_shape(args) == {"hidden_size": 64, "use_moe": True, "num_experts_per_tok": 2}
    with pytest.raises(UserError) as error:
        parser.parse_args(["--hidden_size", "100"])
    assert str(error.value) == "argument --hidden_size: must be a multiple of 16, not '100'; see --help"
    assert "--num_hidden_layers INT depth --use_moe [{0,1}] 1: mixture" in " ".join(
        parser.format_help().split()
    )
