"""Hugging Face folders as models: transformers' own classes are the reference; what cannot be read is one
line."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from common.errors import ReadError, UserError
from tests.conftest import ROOT
from trainer.weights import import_hf
from trainer.weights.for_tools import load_path
from trainer.weights.paths import model_files

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"head_dim": 16, "vocab_size": 6400, "intermediate_size": 48, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e5}
IDS = torch.arange(60, 160).view(2, 50)
FOLDERS = {
    "dense": Qwen3Config(**SHAPE),
    "untied": Qwen3Config(**SHAPE | {"tie_word_embeddings": False}, rope_theta=1e4, rms_norm_eps=1e-5),
    "yarn": Qwen3Config(**SHAPE, rope_parameters=YARN),
    "moe": Qwen3MoeConfig(**SHAPE, **EXPERTS),
}


def write(folder: Path, config, **options):
    """A folder that transformers writes, with our tokenizer; returns the model."""
    torch.manual_seed(0)
    model = (Qwen3MoeForCausalLM if isinstance(config, Qwen3MoeConfig) else Qwen3ForCausalLM)(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder, **options)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((ROOT / "model" / name).read_bytes())
    return model


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path / "folder", FOLDERS["dense"])
    return tmp_path / "folder"


def refused(folder: Path, **asked) -> str:
    with pytest.raises(UserError) as error:
        load_path(folder, **asked)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", FOLDERS)
@torch.no_grad()
def test_a_stock_folder_gives_its_own_logits(kind, tmp_path):
    stock = write(tmp_path, FOLDERS[kind])
    model, tokenizer = load_path(tmp_path)
    assert (model(IDS).logits - stock(IDS).logits).abs().max() < 1e-5
    assert tokenizer.name_or_path == str(tmp_path) and model.config.eos_token_id == 2


@torch.no_grad()
def test_a_folder_of_several_files(tmp_path):
    stock = write(tmp_path, FOLDERS["dense"], max_shard_size="50kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert (load_path(tmp_path)[0](IDS).logits - stock(IDS).logits).abs().max() < 1e-5


TWO_KINDS = {"layer_types": ["full_attention", "sliding_attention"]}
DYNAMIC = {"rope_parameters": YARN | {"rope_type": "dynamic"}}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"model_type": "llama"}, "model_type llama is not supported"),
        (TWO_KINDS, "layers of sliding_attention are not supported"),
        (DYNAMIC, "rope_scaling of type dynamic is not supported"),
        ({"hidden_size": 64}, "size mismatch for model.embed_tokens.weight"),
    ],
)
def test_what_the_model_cannot_represent_is_named(folder, changed, line):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    assert line in refused(folder)


def test_damaged_folders(folder):
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "its weights are not readable (" in refused(folder)
    tensors = load_file(save(weights, whole))
    save_file({name: value for name, value in tensors.items() if "layers.1.mlp.up" not in name}, weights)
    line = refused(folder)
    assert "Missing key" in line and "model.layers.1.mlp.up_proj.weight" in line
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, weights)
    assert "q_proj.bias" in refused(folder)
    weights.unlink()
    assert "it holds no weights (model.safetensors)" in refused(folder)
    config.write_text("{")
    assert "config.json: not a readable config" in refused(folder)


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_a_file_is_not_executed(folder, tmp_path):
    harm = {"model.embed_tokens.weight": Harm(tmp_path / "ran")}
    (folder / "model.safetensors").unlink()
    torch.save(harm, folder / "pytorch_model.bin")
    assert "not readable" in refused(folder)
    assert not (tmp_path / "ran").exists()


def test_a_disk_error_is_not_damage(folder, monkeypatch):
    def fails(*_args, **_values):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for place, name in ((import_hf, "load_file"), (Path, "read_text")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            with pytest.raises(ReadError, match=r"cannot be read at present \(Input/output error\)"):
                load_path(folder)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}')
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fails)
        with pytest.raises(ReadError, match=r"index\.json cannot be read at present"):
            model_files(folder)
