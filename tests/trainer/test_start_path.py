"""A run that starts from a model named by its path: its shape, tokenizer and tensors are those of the model."""

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from common.errors import UserError
from tests.conftest import ROOT, write_jsonl
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_run, flags
from trainer import train_full_sft
from trainer.trainer_utils import init_model, load_tokenizer, start_model_config, start_shape


@pytest.fixture
def folder(tmp_path):
    """A stock Qwen3 of a shape that no settings give, with its tokenizer."""
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 6464, "tie_word_embeddings": False}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, rope_parameters=rope, rms_norm_eps=1e-6))
    model.save_pretrained(tmp_path / "mine")
    AutoTokenizer.from_pretrained(ROOT / "model").save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


def test_shape_and_tensors_are_those_of_the_model(folder):
    args = start_shape(train_full_sft.Args(from_weight=str(folder), dropout=0.2))
    assert (args.hidden_size, args.num_hidden_layers, args.use_moe) == (48, 1, False)
    assert args.tokenizer_path == str(folder)
    config = start_model_config(load_tokenizer(args.tokenizer_path), args)
    assert (config.num_attention_heads, config.intermediate_size, config.vocab_size) == (2, 80, 6464)
    assert config.dropout == 0.2 and not config.tie_word_embeddings
    model, _ = init_model(config, args.from_weight, args.tokenizer_path)
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        wanted = Qwen3ForCausalLM.from_pretrained(folder).eval()(tokens).logits
        assert (model.eval()(tokens).logits - wanted).abs().max() <= 1e-4


def test_a_run_from_a_folder_resumes_bit_for_bit(corpus, folder, tmp_path):
    settings = {"from_weight": folder, "epochs": 1, "eval_interval": 0}
    shape = ("--hidden_size", "--num_hidden_layers")
    argvs = []
    for name in ("whole", "broken"):
        typed = flags(corpus, tmp_path / name, "sft", **settings)
        argvs.append([part for i, part in enumerate(typed) if part not in shape and typed[i - 1] not in shape])
    run("sft", argvs[0])
    run("sft", argvs[1], Faults(signals={6: 9}), status=-9)
    assert "resuming full_sft" in run("sft", [*argvs[1], "--from_resume", "1"]).out
    assert_same_run(tmp_path / "whole", tmp_path / "broken", "full_sft_48")


def test_a_run_with_rewards_starts_from_a_folder(folder, tmp_path):
    data = write_jsonl(tmp_path / "rl.jsonl", [{"prompt": f"{number}?"} for number in range(4)])
    settings = {"from_weight": folder, "data_path": data, "reward": "length", "num_generations": 2, "max_gen_len": 3}
    settings |= {"epochs": 1, "batch_size": 4, "save_dir": tmp_path / "out", "checkpoint_dir": tmp_path / "checkpoints"}
    run("grpo", [text for name, value in settings.items() for text in (f"--{name}", str(value))])
    assert (tmp_path / "out/grpo_48.pth").exists()


def test_what_cannot_be_is_one_line(folder, tmp_path):
    with pytest.raises(UserError, match=r"--hidden_size 64: --from_weight .*mine is of 48; leave the flag out"):
        start_shape(train_full_sft.Args(from_weight=str(folder), hidden_size=64))
    with pytest.raises(UserError, match="no such file or folder"):
        start_shape(train_full_sft.Args(from_weight="nowhere/model.pth"))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    with_epsilon = start_shape(train_full_sft.Args(from_weight=str(folder)))
    tokenizer = load_tokenizer(with_epsilon.tokenizer_path)
    assert start_model_config(tokenizer, with_epsilon).rms_norm_eps == 1e-5
    args = train_full_sft.Args(from_weight="pretrain", save_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"pretrain_512\.pth do not exist"):  # before the data are tokenised
        start_shape(args)
    torch.save({}, tmp_path / "pretrain_512.pth")  # from elsewhere: the flags say the shape
    assert start_shape(args) is args
