"""A weights file describes itself: its config is read from there, whatever its name, and never another's in
silence."""

import hashlib
import json
import os

import pytest
import torch
from transformers import AutoTokenizer

from common.errors import UserError
from common.settings import StageArgs
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT
from tests.stage_process import run
from tests.trainer.stage_flags import flags
from trainer.stage import read_start_weights
from trainer.trainer_utils import init_model
from trainer.weights import files as model_files
from trainer.weights.config import model_config, vocabulary_hash
from trainer.weights.files import read_model, save_weights
from trainer.weights.for_tools import load_path
from trainer.weights.tensor_file import write_file

ODD = {"hidden_size": 32, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "head_dim": 16, "use_moe": True}
ODD |= {"num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": False}
ODD |= {"rope_parameters": {"rope_theta": 1e4}}
SMALL = {"hidden_size": 32, "num_hidden_layers": 1}
IDS = torch.arange(40, 70)[None]


def model_of(**fields) -> MiniMindForCausalLM:
    torch.manual_seed(0)
    return MiniMindForCausalLM(MiniMindConfig(**fields)).eval()


@pytest.mark.parametrize("name", ["w_32_moe_3x2.pth", "w_512.pth"])
def test_the_config_is_in_the_file_whatever_its_name(name, tmp_path):
    """Fields that no tensor shows, too: with the defaults these weights would be another model."""
    model = model_of(**ODD)
    path = save_weights(model, tmp_path / "w_32_moe_3x2.pth", description={"stage": "s", "update": 3})
    path.with_suffix(".json").unlink()
    path = path.rename(tmp_path / name)
    weights, config = read_model(path)
    assert config.own_fields() == model.config.own_fields()
    loaded, _ = load_path(path)
    model.load_state_dict({key: value.half() for key, value in model.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert torch.equal(torch.load(path, weights_only=True)["lm_head.weight"], weights["lm_head.weight"])


def test_weights_with_a_part_that_the_model_lacks_are_refused(tmp_path):
    """Such as a second head."""
    model = model_of(**SMALL)
    model.mtp = torch.nn.Linear(32, 100)
    with pytest.raises(UserError, match=r"do not fit the model: Unexpected key.*mtp.weight"):
        load_path(save_weights(model, tmp_path / "w.pth"))


def test_killed_between_the_two_files_nothing_is_wrong(tmp_path, monkeypatch):
    """The weights say what they are; the JSON of those before is not read."""
    save_weights(model_of(hidden_size=32, num_hidden_layers=2), tmp_path / "w_32.pth")
    monkeypatch.setattr(model_files, "write_json", lambda *args: os.abort)
    save_weights(model_of(hidden_size=32, num_hidden_layers=2, rms_norm_eps=1e-3), tmp_path / "w_32.pth")
    assert json.loads((tmp_path / "w_32.json").read_text())["model"]["rms_norm_eps"] == 1e-6
    assert load_path(tmp_path / "w_32.pth")[0].config.rms_norm_eps == 1e-3


def test_weights_from_elsewhere_beside_the_description_of_others_are_refused(tmp_path):
    model = model_of(**SMALL)
    path = save_weights(model, tmp_path / "w_32.pth")
    torch.save(model.half().state_dict(), path)
    with pytest.raises(UserError, match=r"w_32.json describes other weights than .*w_32.pth.*; delete it"):
        load_path(path)
    path.with_suffix(".json").unlink()
    assert load_path(path)[0].config.num_hidden_layers == 1


def test_a_field_that_the_code_does_not_know_is_refused(tmp_path):
    model = model_of(**SMALL)
    fields = model.config.own_fields()
    for window in (0, 7):  # 0 may not be what the code without it does
        with open(tmp_path / "w.pth", "w+b") as file:
            write_file(model.state_dict(), file, {"model": fields | {"window": window}, "tokenizer": None})
        with pytest.raises(UserError, match=f"w.pth: its model has window {window}, which this version"):
            read_model(tmp_path / "w.pth")


class Args(StageArgs):
    from_weight: str = "w"


def test_a_stage_takes_the_config_of_its_start_weights(tmp_path):
    """By name or by path, without a flag for it; the dropout is the run's own."""
    save_weights(model_of(**ODD | {"num_hidden_layers": 3}), tmp_path / "w_32_moe_3x2.pth")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "model")
    experts = {"use_moe": True, "num_experts": 3, "num_experts_per_tok": 2}
    by_name = Args(save_dir=str(tmp_path), hidden_size=32, dropout=0.1, **experts)
    by_path = Args(from_weight=str(tmp_path / "w_32_moe_3x2.pth"), dropout=0.1)
    for args in (by_name, by_path):
        args, start = read_start_weights(args)
        assert (args.num_hidden_layers, args.num_experts_per_tok) == (3, 2)
        config = model_config(tokenizer, args, start)
        assert (config.rms_norm_eps, config.norm_topk_prob, config.head_dim) == (1e-5, False, 16)
        assert config.dropout == 0.1 and config.tokenizer_sha256 == vocabulary_hash(tokenizer)
        init_model(config, args.from_weight, save_dir=tmp_path)


def test_weights_do_not_become_a_model_of_other_arithmetic(tmp_path):
    """A config of one's own that leaves out a field would give a model that runs, and is wrong."""
    path = save_weights(model_of(**SMALL, rms_norm_eps=1e-5), tmp_path / "w.pth")
    with pytest.raises(UserError, match="they are of rms_norm_eps 1e-05, not 1e-06"):
        init_model(MiniMindConfig(**SMALL), str(path))
    longer = MiniMindConfig(**SMALL, rms_norm_eps=1e-5, inference_rope_scaling=True)
    assert init_model(longer, str(path))[0].config.rope_parameters["rope_type"] == "yarn"  # for longer texts


def test_weights_that_do_not_fit_the_text_are_warned_of(corpus, tmp_path):
    """MiniMind's weights have as many tokens as ours, and nothing says which: the first loss shows it."""
    (tmp_path / "out").mkdir()
    model = model_of(**SMALL)
    for parameter in model.parameters():
        parameter.data *= 8  # sure of the wrong tokens
    torch.save(model.half().state_dict(), tmp_path / "out/pretrain_32.pth")
    argv = flags(corpus, tmp_path, "sft", num_hidden_layers=1, epochs=1)
    warned = run("full_sft", argv).err
    assert "the loss of pure guessing" in warned
    assert "weights of --from_weight pretrain do not fit" in warned
    described = json.loads((tmp_path / "out/full_sft_32.json").read_text())
    start = hashlib.sha256((tmp_path / "out/pretrain_32.pth").read_bytes()).hexdigest()
    assert described["stage"] == "train_full_sft.py"
    assert described["from_weight"] == {"name": "pretrain", "sha256": start}
    assert described["update"] > 1 and described["data"]["data"]
