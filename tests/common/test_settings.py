"""The table of settings and the command lines made from it: MiniMind's flags, types, limits, choices and
defaults; help with unit and default, grouped by section; everything that is wrong told at once, in one
line."""

import re
import string
from dataclasses import dataclass, fields
from typing import Literal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from common.command_line import Parser
from common.config_sources import parse_args
from common.errors import UserError
from common.settings import StageArgs, Switch, setting, settings_of
from dataset.token_cache import STAGE_LENGTH
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT
from tests.stage_process import Faults, run
from trainer import train_dpo, train_full_sft, train_pretrain
from trainer.objectives.next_token import SHAPE
from trainer.optim.build import MUON_LR_SCALE, build_optimizer
from trainer.report.trackers import MODES
from trainer.trainer_utils import load_tokenizer, model_config
from trainer.weights.for_tools import add_trained_model_flags, given_shape

STAGES = {"train_pretrain": train_pretrain.Args, "train_full_sft": train_full_sft.Args}
SETTINGS = settings_of(StageArgs)
SECTIONS = {
    "data": "data_path eval_data_path eval_share text_separator cache_dir max_seq_len packing on_bad_data "
    "max_bad_share num_workers",
    "model": "hidden_size num_hidden_layers use_moe num_experts num_experts_per_tok dropout tokenizer_path",
    "training": "epochs batch_size accumulation_steps learning_rate warmup_updates optimizer weight_decay grad_clip "
    "seed max_bad_updates patience min_delta monitor mode",
    "optimization": "dtype use_compile parallel activation_checkpointing deterministic",
    "distributed": "device rank_timeout",
    "checkpoint": "save_dir save_weight checkpoint_dir from_weight from_resume resume_from extend_epochs save_interval "
    "keep_every keep_last",
    "logging": "log_interval eval_interval sample_prompts use_tensorboard tensorboard_dir use_wandb wandb_project "
    "swanlab_mode log_level log_file log_dir",
}
MINIMIND = """save_dir save_weight epochs batch_size learning_rate device dtype num_workers accumulation_steps grad_clip
log_interval save_interval hidden_size num_hidden_layers max_seq_len use_moe data_path from_weight from_resume use_wandb
wandb_project use_compile"""
DEFAULTS = {  # of both stages; MiniMind's where MiniMind has the flag, but for its dtype and its device
    "save_dir": str(ROOT / "out"),
    "device": "auto",
    "dtype": "auto",
    "num_workers": 0,
    "grad_clip": 1.0,
    "log_interval": 100,
    "save_interval": 1000,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "use_moe": False,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "from_resume": False,
    "use_wandb": False,
    "use_compile": "auto",
    "eval_data_path": None,
    "eval_share": 0.0,
    "text_separator": None,
    "cache_dir": str(ROOT / "dataset/cache"),
    "packing": False,
    "on_bad_data": "stop",
    "max_bad_share": 0.1,
    "dropout": 0.0,
    "tokenizer_path": str(ROOT / "model"),
    "warmup_updates": 0,
    "optimizer": "adamw",
    "weight_decay": 0.01,
    "seed": 42,
    "max_bad_updates": 5,
    "parallel": "ddp",
    "activation_checkpointing": False,
    "deterministic": False,
    "rank_timeout": 600,
    "checkpoint_dir": str(ROOT / "checkpoints"),
    "extend_epochs": False,
    "eval_interval": 0,
    "sample_prompts": "auto",
    "wandb_project": "MiniMind-Trainer",
    "swanlab_mode": "cloud",
    "patience": 0,
    "min_delta": 0.0,
    "monitor": "eval_loss",
    "mode": "min",
    "resume_from": None,
    "keep_every": 0,
    "keep_last": 3,
    "use_tensorboard": False,
    "tensorboard_dir": None,
    "log_level": "info",
    "log_file": None,
    "log_dir": None,
}
STAGE_DEFAULTS = {
    "train_pretrain": {
        "data_path": str(ROOT / "dataset/pretrain_t2t_mini.jsonl"),
        "save_weight": "pretrain",
        "from_weight": "none",
        "epochs": 2,
        "batch_size": 32,
        "accumulation_steps": 8,
        "learning_rate": 5e-4,
        "max_seq_len": 340,
    },
    "train_full_sft": {
        "data_path": str(ROOT / "dataset/sft_t2t_mini.jsonl"),
        "save_weight": "full_sft",
        "from_weight": "pretrain",
        "epochs": 2,
        "batch_size": 16,
        "accumulation_steps": 1,
        "learning_rate": 1e-5,
        "max_seq_len": 768,
    },
}
TYPES = {
    bool: "packing use_moe activation_checkpointing deterministic from_resume extend_epochs use_wandb use_tensorboard",
    int: "max_seq_len num_workers hidden_size num_hidden_layers num_experts num_experts_per_tok epochs batch_size "
    "accumulation_steps warmup_updates seed max_bad_updates rank_timeout save_interval log_interval eval_interval "
    "patience keep_every keep_last",
    float: "eval_share max_bad_share dropout learning_rate weight_decay grad_clip min_delta",
    str: "cache_dir tokenizer_path device save_dir save_weight checkpoint_dir from_weight wandb_project monitor "
    "sample_prompts",
    str | None: "data_path eval_data_path text_separator resume_from tensorboard_dir log_file log_dir",
}
CHOICES = {
    "on_bad_data": ("stop", "skip"),
    "optimizer": ("adamw", "muon"),
    "dtype": ("auto", "bfloat16", "float16", "float32", "bfloat16_emulated"),
    "parallel": ("ddp", "fsdp", "hsdp"),
    "swanlab_mode": ("cloud", "disabled", "local", "offline", "online"),
    "mode": ("min", "max"),
    "log_level": ("debug", "info", "warning", "error"),
}
SWITCHES = {"use_compile": ("auto", "0", "1")}
MUST = {1: "must be 1 or more", 0: "must be 0 or more"}
LIMITS = {  # setting -> texts that are just in, and texts that are just out with what is told
    "max_seq_len": (["8", "32768"], {"7": "must be 8 or more", "32769": "must be 32768 or less"}),
    "max_bad_share": (["0", "1"], {"-0.001": "must be 0 or more", "1.001": "must be 1 or less"}),
    "eval_share": (["0", "0.5"], {"-0.001": "must be 0 or more", "0.501": "must be 0.5 or less"}),
    "num_workers": (["0"], {"-1": MUST[0]}),
    "hidden_size": (["16", "4096"], {"0": "must be 16 or more", "24": "must be divisible by 16"}),
    "num_hidden_layers": (["1"], {"0": MUST[1]}),
    "num_experts": (["1"], {"0": MUST[1]}),
    "num_experts_per_tok": (["1"], {"0": MUST[1]}),
    "dropout": (["0", "0.999"], {"-0.001": "must be 0 or more", "1": "must be below 1"}),
    "epochs": (["1"], {"0": MUST[1]}),
    "batch_size": (["1"], {"0": MUST[1] + " or auto"}),
    "accumulation_steps": (["1"], {"0": MUST[1]}),
    "learning_rate": (
        ["1e-30", "100"],
        {"0": "must be above 0 or auto", "-1e-30": "must be above 0 or auto"},
    ),
    "warmup_updates": (["0"], {"-1": MUST[0]}),
    "weight_decay": (["0", "1"], {"-0.001": "must be 0 or more", "1.001": "must be 1 or less"}),
    "grad_clip": (["0", "1e9"], {"-0.001": "must be 0 or more"}),
    "seed": (["0", str(2**63 - 1)], {"-1": MUST[0], str(2**63): f"must be {2**63 - 1} or less"}),
    "max_bad_updates": (["1"], {"0": MUST[1]}),
    "rank_timeout": (["1"], {"0": MUST[1]}),
    "save_interval": (["1"], {"0": MUST[1]}),
    "log_interval": (["1"], {"0": MUST[1]}),
    "eval_interval": (["0"], {"-1": MUST[0]}),
    "patience": (["0"], {"-1": MUST[0]}),
    "min_delta": (["0"], {"-0.001": "must be 0 or more"}),
    "keep_every": (["0"], {"-1": MUST[0]}),
    "keep_last": (["0"], {"-1": MUST[0]}),
}
UNITS = {
    "max_seq_len": "tokens",
    "num_workers": "processes",
    "num_hidden_layers": "layers",
    "batch_size": "samples",
    "accumulation_steps": "micro-batches",
    "warmup_updates": "updates",
    "rank_timeout": "seconds",
    "save_interval": "micro-batches",
    "log_interval": "micro-batches",
    "eval_interval": "micro-batches",
    "keep_every": "updates",
}


@dataclass(kw_only=True)
class OwnArgs(StageArgs):
    """A stage with a default and flags of its own."""

    epochs: int = 7
    z_loss: float = setting(0.25, "weight of the z-loss", "nats", ge=0)
    teacher: str | None = setting(None, "folder of the teacher; 100% of its layers")
    beta: Literal["low", "high"] = setting("low", "temperature")
    plain: int = 3


def told(args_class, *line: str) -> str:
    """The one line that a command line ends in."""
    with pytest.raises(UserError) as error:
        parse_args(args_class, "", line)
    assert "\n" not in str(error.value)
    return str(error.value).removesuffix("; see --help")


def help_text(args_class, capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        parse_args(args_class, "Title.\n\nrest", ["--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def groups(text: str) -> dict[str, str]:
    """The groups of a help page, their text on one line."""
    parts = re.split(r"^(\w[\w ]*):\n", text, flags=re.M)
    return {name: " ".join(body.split()) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


# ---- the table


def test_the_settings_by_section():
    assert {name: each.section for name, each in SETTINGS.items()} == {
        name: section for section, names in SECTIONS.items() for name in names.split()
    }
    assert list(SETTINGS) == " ".join(SECTIONS.values()).split()
    assert set(SETTINGS) == {each.name for each in fields(StageArgs)} - {"given"} >= set(MINIMIND.split())


@pytest.mark.parametrize("stage", STAGES)
def test_the_defaults(stage):
    expected = DEFAULTS | STAGE_DEFAULTS[stage]
    args = parse_args(STAGES[stage], "", []).values()
    assert args == expected == {name: each.default for name, each in settings_of(STAGES[stage]).items()}
    assert {name: type(value) for name, value in args.items()} == {
        name: type(expected[name]) for name in args
    }


def test_the_types_and_choices():
    assert {name: each.kind for name, each in SETTINGS.items() if not each.choices} == {
        name: kind for kind, names in TYPES.items() for name in names.split()
    }
    assert {name: each.choices for name, each in SETTINGS.items() if each.choices} == CHOICES | SWITCHES
    assert all(each.default in each.choices for each in SETTINGS.values() if each.choices)


def test_the_choices_and_limits_are_those_of_what_they_choose():
    assert SETTINGS["max_seq_len"].limits["le"] == MiniMindConfig().max_position_embeddings
    assert SETTINGS["hidden_size"].limits["multiple_of"] == 2 * MiniMindConfig().num_attention_heads
    assert set(CHOICES["swanlab_mode"]) == set(MODES)
    assert all(hasattr(torch, name.removesuffix("_emulated")) for name in CHOICES["dtype"] if name != "auto")
    for name in CHOICES["optimizer"]:
        build_optimizer(
            MiniMindForCausalLM(MiniMindConfig(hidden_size=16, num_hidden_layers=1)), 0.1, 0.0, name
        )
    assert f"muon: {MUON_LR_SCALE:g} times this value" in SETTINGS["learning_rate"].help
    torch.Generator().manual_seed(SETTINGS["seed"].limits["le"])


@pytest.mark.parametrize("name", [name for name, each in SETTINGS.items() if each.kind in (int, float)])
def test_the_limits(name):
    inside, outside = LIMITS[name]
    for text in inside:
        assert SETTINGS[name].parse(text) == SETTINGS[name].kind(text)
    for text, must in outside.items():
        assert told(StageArgs, f"--{name}={text}") == f"--{name} {must}, not '{text}'"
    kind = "a whole number" if SETTINGS[name].kind is int else "a finite number"
    kind += " or auto" * SETTINGS[name].auto
    for text in (
        "two",
        "",
        "nan",
        "inf",
        "-inf",
        "1 2",
        "0x10",
        "none",
        "true",
        *(["1.5"] if "whole" in kind else []),
    ):
        assert told(StageArgs, f"--{name}={text}") == f"--{name} must be {kind}, not '{text}'"


def test_the_units():
    assert {name: each.unit for name, each in SETTINGS.items() if each.unit} == UNITS


# ---- values


@pytest.mark.parametrize(
    "text, value", {"0": False, "1": True, "true": True, "False": False, "FALSE": False}.items()
)
@pytest.mark.parametrize("name", TYPES[bool].split())
def test_a_boolean(name, text, value):
    assert getattr(parse_args(StageArgs, "", [f"--{name}", text]), name) is value
    args = parse_args(StageArgs, "", [f"--{name}", "--epochs", "3"])  # a bare flag
    assert getattr(args, name) is True and args.epochs == 3
    for wrong in ("2", "-1", "", "maybe"):
        assert told(StageArgs, f"--{name}={wrong}") == f"--{name} must be 0 or 1, not '{wrong}'"


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice(name):
    for text in CHOICES[name]:
        assert getattr(parse_args(StageArgs, "", [f"--{name}", text]), name) == text
    for wrong in (CHOICES[name][0].upper(), "", CHOICES[name][0][:-1]):
        line = told(StageArgs, f"--{name}={wrong}")
        assert line.startswith(f"--{name} must be '{CHOICES[name][0]}'") and line.endswith(f", not '{wrong}'")
        assert all(f"'{text}'" in line for text in CHOICES[name])


@pytest.mark.parametrize("name", TYPES[str | None].split() + TYPES[str].split())
def test_a_text(name):
    for text in ("x", "7", "true", "caf\udce9 *.jsonl", "-"):
        assert getattr(parse_args(StageArgs, "", [f"--{name}={text}"]), name) == text
    # of weights `none` means random ones
    for text in ("", "None", "null", *["none"] * (name != "save_weight")):
        if name in TYPES[str | None].split():
            assert getattr(parse_args(StageArgs, "", [f"--{name}={text}"]), name) is None
        elif text:
            assert getattr(parse_args(StageArgs, "", [f"--{name}={text}"]), name) == text
        else:
            assert told(StageArgs, f"--{name}=") == f"--{name} must not be empty"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_that_is_no_text(name):
    """As YAML and a task's own defaults give it."""
    each = SETTINGS[name]
    assert each.parse(each.default) == each.default and type(each.parse(each.default)) is type(each.default)
    wrong = [
        [1],
        {"a": 1},
        object(),
        0.5 if each.kind in (int, bool) else [],
        *([] if each.kind in (bool, Switch, int, float) else [True]),
    ]
    wrong += [] if each.kind == str | None else [None]
    wrong += [7] if each.choices or each.kind in (str, str | None) else []
    for value in wrong:
        with pytest.raises(ValueError, match=r"^must be ") as error:
            each.parse(value)
        shown = {None: "null", True: "true"}.get(value, repr(value)) if value.__hash__ else repr(value)
        assert str(error.value).endswith(f", not {shown}")


ANY_TEXT = st.text(max_size=12) | st.text(alphabet=string.digits + "+-._eE ", max_size=8)


@given(st.sampled_from(list(SETTINGS)), ANY_TEXT)
@example("seed", "9" * 5000)
@example("use_moe", "\u0661")
def test_any_text_is_a_value_of_the_type_or_one_line(name, text):
    each = SETTINGS[name]
    try:
        value = each.parse(text)
    except ValueError as error:
        assert (
            re.match(r"^must (be .*, not |not be empty$)", str(error)) and len(str(error).splitlines()) == 1
        )
    else:
        if each.choices or each.kind in (str, str | None):
            assert value in (text, None)
        else:
            assert type(value) is each.kind and each.parse(value) == value


# ---- command lines


def test_all_impossible_settings_are_told_at_once():
    wrong = {"epochs": 0, "batch_size": "x", "accumulation_steps": 0, "learning_rate": -1, "max_seq_len": 7}
    wrong |= {"dropout": 1.0, "hidden_size": 100, "grad_clip": -1, "log_interval": 0, "save_interval": 0}
    wrong |= {"dtype": "int8", "use_moe": 2, "save_dir": "", "parallel": "both"}
    line = told(train_full_sft.Args, *[f"--{name}={value}" for name, value in wrong.items()])
    assert [part.split()[0] for part in line.split("; ")] == [f"--{name}" for name in wrong]
    assert line.startswith(
        "--epochs must be 1 or more, not '0'; --batch_size must be a whole number or auto, not 'x'; "
    )


def test_all_contradictions_are_told_at_once():
    line = "--save_weight a/b --log_file a --log_dir b"
    line = told(StageArgs, *line.split())
    assert line.split("; --") == [
        "--save_weight 'a/b' must be a plain name; the folder is --save_dir",
        "log_file and --log_dir both name the log file; leave one of them out",
    ]
    for fine in (
        "--use_compile",
        "--parallel fsdp",
        "--optimizer muon",
        "--use_compile --parallel fsdp --optimizer muon",
    ):
        parse_args(StageArgs, "", fine.split())


@pytest.mark.parametrize("name", ["none", "full_sft_best", "x.pth", "..", ".", ".hid", "a/b", "a/"])
def test_a_name_that_means_something_else_is_one_line(name):
    assert "--save_weight" in told(StageArgs, "--save_weight", name)
    for fine in ("nones", "best", "_best_of", "x.pth2", "中文", "a b"):
        assert parse_args(StageArgs, None, ["--save_weight", fine]).save_weight == fine


def test_an_unknown_flag_is_one_line():
    assert told(StageArgs, "--epoch", "2") == "--epoch is unknown; did you mean --epochs"  # no abbreviations
    assert told(StageArgs, "--use_moe", "1", "extra") == "extra is unknown"
    assert told(StageArgs, "--epochs") == "argument --epochs: expected one argument"


def test_the_last_of_two_values_holds_and_the_class_stays_as_it_was():
    args = parse_args(StageArgs, "", ["--epochs", "3", "--epochs=4"])
    assert args.epochs == 4 and parse_args(StageArgs, "", []).epochs == 2
    assert parse_args(StageArgs, "", ["--seed", "3"], epochs=9, seed=8) == StageArgs(epochs=9, seed=3)


def test_the_command_line_is_that_of_the_process_by_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--epochs", "9"])
    assert parse_args(StageArgs, "").epochs == 9


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--num_experts 8",
            "--num_experts and --num_experts_per_tok shape a mixture of experts; add --use_moe 1",
        ),
        ("--num_experts_per_tok 2", "--num_experts and --num_experts_per_tok shape a mixture of experts"),
        ("--use_moe 1 --num_experts_per_tok 5", "--num_experts_per_tok 5 must be --num_experts 4 or less"),
    ],
)
def test_experts_that_no_model_can_have(line, message):
    assert told(train_full_sft.Args, *line.split()).startswith(message)


def test_the_model_follows_the_command_line():
    line = "--hidden_size 256 --use_moe 1 --dropout 0.1 --num_experts 6 --num_experts_per_tok 3"
    args = parse_args(train_full_sft.Args, "", line.split())
    tokenizer = load_tokenizer(ROOT / "model")
    config = model_config(tokenizer, args)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert (config.hidden_size, config.use_moe, config.dropout, config.vocab_size) == (256, True, 0.1, 6400)
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (8, 6, 3)


# ---- a stage's own flags


def test_a_subclass_adds_flags_and_changes_defaults():
    settings = settings_of(OwnArgs)
    assert list(settings) == [*SETTINGS, "z_loss", "teacher", "beta", "plain"]
    assert {each.section for name, each in settings.items() if name not in SETTINGS} == {"stage"}
    for name, each in SETTINGS.items():  # the default alone is its own
        own, given = settings[name], 7 if name == "epochs" else each.default
        assert (own.default, own.kind, own.help, own.unit, own.limits, own.section) == (
            given,
            *(each.kind, each.help, each.unit, each.limits, each.section),
        )
    args = parse_args(OwnArgs, "", ["--z_loss", "1", "--teacher=x", "--beta", "high", "--plain=4"])
    assert isinstance(args, OwnArgs) and (args.epochs, args.batch_size) == (7, 32)
    assert (args.z_loss, args.teacher, args.beta, args.plain) == (1.0, "x", "high", 4) and type(
        args.z_loss
    ) is float
    line = told(OwnArgs, "--z_loss", "-1", "--epochs", "0", "--beta", "no", "--plain", "a")
    assert line == (
        "--z_loss must be 0 or more, not '-1'; --epochs must be 1 or more, not '0'; "
        "--beta must be 'low' or 'high', not 'no'; --plain must be a whole number, not 'a'"
    )
    assert settings_of(StageArgs) == SETTINGS and "z_loss" not in SETTINGS


def test_a_subclass_has_contradictions_of_its_own():
    @dataclass(kw_only=True)
    class Strict(StageArgs):
        def contradictions(self):
            return [
                *super().contradictions(),
                *(["--seed 3 does not go with --epochs 3"] if self.seed == 3 else []),
            ]

    line = told(Strict, "--seed", "3", "--save_weight", "a/b")
    assert line.startswith("--save_weight 'a/b' must be") and line.endswith(
        "; --seed 3 does not go with --epochs 3"
    )


# ---- help


def test_the_help_has_unit_and_default(capsys):
    text = help_text(OwnArgs, capsys)
    by_section = groups(text)
    assert list(by_section) == ["options", *SECTIONS, "stage"]
    assert " ".join(text.split()).partition(" options: ")[0].endswith(" Title.") and "rest" not in text
    for name, each in settings_of(OwnArgs).items():
        value = {True: 1, False: 0}[each.default] if isinstance(each.default, bool) else each.default
        default = "" if value is None else f" (default: {value} {each.unit}".rstrip() + ")"
        metavar = {bool: "[{0,1}]", int: "INT", float: "FLOAT"}.get(each.kind, "TEXT")
        metavar = "{" + ",".join(each.choices) + "}" if each.choices else metavar
        metavar = f"[{metavar}]" if each.kind == Switch else metavar
        assert f"--{name} {metavar} {each.help}".rstrip() + default in by_section[each.section], name
    assert "--z_loss FLOAT weight of the z-loss (default: 0.25 nats)" in by_section["stage"]
    assert "100% of its layers" in by_section["stage"] and "--plain INT (default: 3)" in by_section["stage"]
    assert all(len(each.help) >= 5 for each in SETTINGS.values())


@pytest.mark.parametrize("stage", STAGES)
def test_the_help_of_a_stage_script_is_grouped_by_section(stage, tmp_path):
    """The script itself, started from another folder."""
    elsewhere = Faults(script=f"os.chdir({str(tmp_path)!r})")
    done = run(str(ROOT / f"trainer/{stage}.py"), ["--help"], elsewhere, COLUMNS="100")
    by_section = groups(done.out)
    assert list(by_section) == ["options", *SECTIONS] and done.err == ""
    for section, names in SECTIONS.items():
        flags = re.findall(r"(?:^|\s)--(\w+) [\[{A-Z]", by_section[section])
        # another name; in a help
        assert [name for name in flags if name not in ("top_k", "logdir")] == names.split()
    defaults = STAGE_DEFAULTS[stage]
    assert f"--epochs INT passes over the data (default: {defaults['epochs']})" in by_section["training"]
    assert f"(default: {defaults['max_seq_len']} tokens)" in by_section["data"]
    assert f"(default: {defaults['data_path']})" in by_section["data"]
    assert f"(default: {defaults['from_weight']})" in by_section["checkpoint"]


# ---- tools that use trained weights


def test_the_flags_of_tools_have_the_same_types_and_limits():
    parser = Parser()
    add_trained_model_flags(parser)
    args = parser.parse_args([])
    elsewhere = {name: DEFAULTS[name] for name in ("save_dir", "device")}
    untold = dict.fromkeys(
        ("model", "weight", "lora", "tokenizer_path", *SHAPE)
    )  # the model tells its shape and tokenizer
    assert vars(args) == elsewhere | untold
    assert given_shape(args) == {}
    args = parser.parse_args(["--hidden_size", "64", "--use_moe", "--num_experts_per_tok", "2"])
    assert given_shape(args) == {"hidden_size": 64, "use_moe": True, "num_experts_per_tok": 2}
    with pytest.raises(UserError) as error:
        parser.parse_args(["--hidden_size", "100"])
    assert str(error.value) == "argument --hidden_size: must be divisible by 16, not '100'; see --help"
    words = " ".join(parser.format_help().split())
    assert "--num_hidden_layers INT depth --use_moe [{0,1}] 1: mixture" in words


def test_the_default_lengths_of_the_token_cache_are_those_of_the_stages():
    stages = {"pretrain": train_pretrain, "sft": train_full_sft, "dpo": train_dpo}
    assert {kind: stage.Args.max_seq_len for kind, stage in stages.items()} == STAGE_LENGTH
