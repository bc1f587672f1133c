"""A run that starts from a model named by its path: its shape, tokenizer and tensors are those of the
model."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from common.errors import UserError
from dataset.token_cache import load_tokenizer
from dataset.tokenizing import fingerprint
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT, write_jsonl
from tests.stage_process import run
from tests.trainer.stage_flags import flags
from trainer import train_full_sft
from trainer.stage import read_settings, read_start_weights
from trainer.trainer_utils import init_model
from trainer.weights.config import model_config
from trainer.weights.files import save_weights, tokenizer_folder
from trainer.weights.for_tools import load_path


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
    args, start = read_start_weights(train_full_sft.Args(from_weight=str(folder), dropout=0.2))
    assert (args.hidden_size, args.num_hidden_layers, args.use_moe) == (48, 1, False)
    assert args.tokenizer_path == str(folder)
    config = model_config(load_tokenizer(args.tokenizer_path), args, start)
    assert (config.num_attention_heads, config.intermediate_size, config.vocab_size) == (2, 80, 6464)
    assert config.dropout == 0.2 and not config.tie_word_embeddings
    model, _ = init_model(config, args.from_weight, args.tokenizer_path)
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        wanted = Qwen3ForCausalLM.from_pretrained(folder).eval()(tokens).logits
        assert (model.eval()(tokens).logits - wanted).abs().max() <= 1e-4


@pytest.fixture
def tokenizers(tmp_path) -> dict[str, Path]:
    """One of the repository's tokens with another template, and one with other tokens."""
    own = AutoTokenizer.from_pretrained(ROOT / "model")
    own.chat_template += " "
    own.save_pretrained(tmp_path / "template")
    content = (ROOT / "model" / "tokenizer.json").read_text(encoding="utf-8")
    a, b = (json.loads(content)["model"]["vocab"][token] for token in ("a", "b"))
    swapped = content.replace(f'"a": {a},', f'"a": {b},').replace(f'"b": {b},', f'"b": {a},')
    shutil.copytree(tmp_path / "template", tmp_path / "tokens")
    (tmp_path / "tokens" / "tokenizer.json").write_text(swapped, encoding="utf-8")
    return {"template": tmp_path / "template", "tokens": tmp_path / "tokens"}


def test_the_tokenizer_is_named_once(corpus, tokenizers, tmp_path):
    """Two of them in one --save_dir: runs that start from weights find theirs, and so do tools."""
    settings = {"epochs": 1, "num_hidden_layers": 1, "eval_interval": 0, "save_interval": 100}
    out = tmp_path / "out"
    (out / ".tokenizer_x.tmp").mkdir(parents=True)  # left behind by a kill
    for name, tokenizer in tokenizers.items():
        base = flags(corpus, tmp_path, "pretrain", **settings, save_weight=f"base_{name}")
        run("pretrain", [*base, "--tokenizer_path", str(tokenizer)])
        tuned = settings | {"from_weight": f"base_{name}", "save_weight": f"chat_{name}"}
        run("sft", flags(corpus, tmp_path, "sft", **tuned))
        wanted = fingerprint(load_tokenizer(tokenizer))
        for weights in (f"base_{name}_32.pth", f"chat_{name}_32.pth"):
            assert tokenizer_folder(out / weights).parent == out
            assert fingerprint(load_path(out / weights)[1]) == wanted
    assert len(list(out.glob("tokenizer_*"))) == 2
    again = flags(corpus, tmp_path, "sft", **tuned)
    assert "nothing to do" in run("sft", [*again, "--from_resume", "1"]).out
    run("sft", again)  # a new run: the files of the one before are set aside, with their tokenizer
    for path in (out / "earlier_1/chat_tokens_32.pth", tmp_path / "checkpoints/chat_tokens_32_resume.pth"):
        assert fingerprint(load_path(path)[1]) == wanted
    (tmp_path / "moved").mkdir()
    weights = shutil.copyfile(out / "chat_tokens_32.pth", tmp_path / "moved/chat_tokens_32.pth")
    with pytest.raises(UserError, match="has other tokens than the one of the weights"):
        load_path(weights)


def test_weights_that_are_not_there_are_one_line(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        read_start_weights(train_full_sft.Args(from_weight="nowhere/model.pth"))
    args = train_full_sft.Args(from_weight="pretrain", save_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"pretrain_512\.pth do not exist"):  # before the data are tokenised
        read_start_weights(args)


def test_a_flag_with_the_value_of_its_default_counts(tmp_path, monkeypatch):
    """Of weights of another shape it is refused, whichever value it has."""
    config = MiniMindConfig(hidden_size=64, num_hidden_layers=2)
    path = save_weights(MiniMindForCausalLM(config), tmp_path / "w.pth")
    data = write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}])
    line = ["--from_weight", str(path), "--data_path", str(data)]
    monkeypatch.setattr(sys, "argv", ["train_full_sft.py", *line])
    args, _ = read_settings(train_full_sft.Args, "")
    assert (args.hidden_size, args.num_hidden_layers) == (64, 2)
    for flag in (["--hidden_size", "512"], ["--num_hidden_layers", "8"]):
        monkeypatch.setattr(sys, "argv", ["train_full_sft.py", *line, *flag])
        with pytest.raises(UserError, match=f"{flag[0]} {flag[1]}: --from_weight .* leave the flag out"):
            read_settings(train_full_sft.Args, "")
