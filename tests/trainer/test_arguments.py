"""The command line: MiniMind's flags, help that tells unit and default, all impossible settings at once."""

import pytest

from dataset.errors import UserError
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT
from trainer.arguments import check_args, model_config, stage_parser
from trainer.train_full_sft import FULL_SFT
from trainer.train_pretrain import PRETRAIN

MINIMIND = """save_dir save_weight epochs batch_size learning_rate device dtype num_workers accumulation_steps grad_clip
log_interval save_interval hidden_size num_hidden_layers max_seq_len use_moe data_path from_weight from_resume use_wandb
wandb_project use_compile"""
OWN = "checkpoint_dir tokenizer_path eval_data_path eval_interval seed weight_decay dropout packing on_bad_data"


@pytest.mark.parametrize("defaults", [PRETRAIN, FULL_SFT])
def test_flags_and_help(defaults):
    parser = stage_parser("Title.\n\nrest", **defaults)
    flags = {action.dest: action for action in parser._actions}
    assert set(f"{MINIMIND} {OWN}".split()) <= set(flags)
    assert all(action.help for action in flags.values())
    assert (flags["hidden_size"].default, flags["num_hidden_layers"].default) == (512, 8)
    text = " ".join(parser.format_help().split())
    for name, value in defaults.items():
        assert flags[name].default == value and f"(default: {value})" in text


def test_all_impossible_settings_are_told_at_once():
    parser = stage_parser("t", **FULL_SFT)
    check_args(parser.parse_args(["--data_path", "x"]))
    wrong = {"epochs": 0, "batch_size": 0, "accumulation_steps": 0, "learning_rate": -1, "max_seq_len": 7}
    wrong |= {"dropout": 1.0, "hidden_size": 100, "grad_clip": -1, "log_interval": 0, "save_interval": 0}
    line = ["--data_path", "x"] + [part for key, value in wrong.items() for part in (f"--{key}", str(value))]
    with pytest.raises(UserError) as error:
        check_args(parser.parse_args(line))
    assert all(f"--{key} " in str(error.value) for key in wrong)


def test_an_unknown_flag_is_one_line():
    for line in (["--data_path", "x", "--learning", "1"], ["--epochs", "2"], ["--data_path", "x", "--epochs", "two"]):
        with pytest.raises(UserError, match=r"; see --help$") as error:
            stage_parser("t", **FULL_SFT).parse_args(line)
        assert "\n" not in str(error.value)


def test_the_model_follows_the_command_line():
    args = stage_parser("t", **FULL_SFT).parse_args(
        ["--data_path", "x", "--hidden_size", "256", "--use_moe", "1", "--dropout", "0.1"]
    )
    config = model_config(args, load_tokenizer(ROOT / "model"))
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert (config.hidden_size, config.use_moe, config.dropout, config.vocab_size) == (256, True, 0.1, 6400)
