"""Adapters: trained beside a frozen model, in PEFT's format, the same when merged; others are refused."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.errors import ReadError, UserError
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.trainer.devices.test_wrapping import flat_batch
from trainer.objectives.next_token import next_token_loss, target_logits
from trainer.weights import lora
from trainer.weights.lora import (
    TARGETS,
    adapter_weights,
    add_adapters,
    check_that_adapters_alone_are_trained,
    merge_adapter,
    save_adapter,
)
from trainer.weights.tensor_file import Writer


def base(use_moe: bool = False, **shape) -> MiniMindForCausalLM:
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=2, use_moe=use_moe, **shape)
    return MiniMindForCausalLM(config).eval()


def adapted(use_moe: bool = False, targets: tuple[str, ...] = TARGETS) -> MiniMindForCausalLM:
    """With adapters that change something."""
    model = base(use_moe)
    add_adapters(model, 4, 8.0, 0.0, targets)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def written(model: MiniMindForCausalLM, folder: Path) -> Path:
    writer = Writer()
    path = save_adapter(model, folder / "lora_32.pth", writer)
    writer.wait()
    return path


@pytest.mark.parametrize("use_moe", [False, True])
def test_only_adapters_are_trained_and_each_of_them(use_moe):
    """A new adapter changes nothing; the gradients of the first update are those of A at zero, of B not."""
    batch = flat_batch(3, [40, 30, 25])
    model, plain = base(use_moe), base(use_moe)
    add_adapters(model, 4, 8.0, 0.0, TARGETS)
    assert torch.equal(target_logits(model, batch)[0], target_logits(plain, batch)[0])
    loss, aux_loss, _ = next_token_loss(model, batch)
    (loss + aux_loss).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layers = 2 * (4 + 3 * (4 if use_moe else 1))
    assert len(trained) == 2 * layers and set(trained) == set(adapter_weights(model))
    assert all(p.grad is not None for p in trained.values())
    changed = sum(bool(p.grad.any()) for name, p in trained.items() if "lora_B" in name)
    assert changed >= layers - (18 if use_moe else 0)  # not all experts are chosen
    assert all(p.grad is None for name, p in model.named_parameters() if name not in trained)


@pytest.mark.parametrize("use_moe", [False, True])
def test_an_adapter_is_the_same_in_training_merged_and_by_its_formula(use_moe, tmp_path):
    batch = flat_batch(3, [40, 30, 25])
    model = adapted(use_moe)
    wanted = target_logits(model, batch)[0]
    folder = written(model, tmp_path)
    merged = merge_adapter(base(use_moe), folder)
    assert (target_logits(merged, batch)[0] - wanted).abs().max() <= 1e-5
    assert (wanted - target_logits(base(use_moe), batch)[0]).abs().max() > 0.01
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "model.layers.1.mlp." + ("experts.2." if use_moe else "") + "down_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
    assert a.shape[0] == b.shape[1] == 4
    by_formula = base(use_moe).get_parameter(f"{name}.weight").double() + 8 / 4 * b @ a
    assert (merged.get_parameter(f"{name}.weight") - by_formula).abs().max() <= 1e-7
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8.0, list(TARGETS))


def test_peft_loads_it_onto_the_stock_model(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = adapted()
    folder, own = written(model, tmp_path), base()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps", "tie_word_embeddings")
    stock = Qwen3ForCausalLM(Qwen3Config(**{name: getattr(own.config, name) for name in names})).eval()
    stock.load_state_dict(own.state_dict())
    tokens = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        wrapped = peft.PeftModel.from_pretrained(stock, folder)
        assert (wrapped(tokens).logits - model(tokens).logits).abs().max() <= 1e-5
        assert (wrapped.merge_and_unload()(tokens).logits - model(tokens).logits).abs().max() <= 1e-5


def change_config(folder: Path, **fields) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


WRONG = [  # fields of the adapter's config, and what is told; None: there is no config
    (None, "adapter_config.json does not exist"),
    ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
    ({"r": 8}, "is of another model"),
]


@pytest.mark.parametrize(("fields", "line"), WRONG)
def test_an_adapter_that_does_not_fit_is_one_line(tmp_path, fields, line):
    folder = written(adapted(targets=("q_proj",)), tmp_path)
    if fields is None:
        (folder / "adapter_config.json").unlink()
    else:
        change_config(folder, **fields)
    with pytest.raises(UserError) as error:
        merge_adapter(base(), folder)
    assert line in str(error.value) and str(folder) in str(error.value)


def test_minimind_s_file_of_an_adapter(tmp_path):
    """In its form, of its square layers: the merged model computes what its `forward` with the adapter beside
    does."""
    model, path, saved = base(), tmp_path / "lora_medical_32.pth", {}
    ids, wanted = torch.arange(3, 11)[None], base()
    for name, module in wanted.named_modules():
        if isinstance(module, torch.nn.Linear) and module.in_features == module.out_features:
            a, b = torch.randn(4, 32) * 0.1, torch.randn(32, 4) * 0.1
            saved |= {f"module.{name}.lora.A.weight": a.half(), f"module.{name}.lora.B.weight": b.half()}
            a, b = a.half().float(), b.half().float()
            module.register_forward_hook(lambda _, x, y, a=a, b=b: y + x[0] @ a.T @ b.T)
    torch.save(saved, path)
    assert {name.split(".")[-4] for name in saved} == {"q_proj", "o_proj"}
    with torch.no_grad():
        merged, plain = merge_adapter(model, path)(ids).logits, base()(ids).logits
        assert torch.allclose(merged, wanted(ids).logits, atol=1e-5)
        assert not torch.allclose(merged, plain, atol=1e-3)
    path.write_bytes(b"no")
    with pytest.raises(UserError, match="it is not readable"):
        merge_adapter(base(), path)


def test_an_adapter_on_a_disk_that_fails_is_not_called_damaged(tmp_path, monkeypatch):
    def fails(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    folder = written(adapted(targets=("q_proj",)), tmp_path)
    monkeypatch.setattr(lora, "load_file", fails)
    with pytest.raises(ReadError, match="cannot be read at present"):
        merge_adapter(base(), folder)


def test_what_is_trained_beside_the_adapters_is_refused_before_training():
    model = adapted()
    check_that_adapters_alone_are_trained(model)
    model.model.norm.requires_grad_(True)
    with pytest.raises(UserError, match=r"model\.norm\.weight is trained besides the adapters"):
        check_that_adapters_alone_are_trained(model)


def test_an_adapter_of_another_arithmetic_is_refused(tmp_path):
    """By the description beside it, if that is there."""
    folder = written(adapted(), tmp_path)
    beside = folder.with_name(f"{folder.name}.json")
    described = json.loads(beside.read_text())
    beside.write_text(json.dumps(described | {"model": described["model"] | {"rms_norm_eps": 0.5}}))
    with pytest.raises(UserError, match=r"of another model: it was trained with rms_norm_eps 0\.5, which"):
        merge_adapter(base(), folder)


def test_an_adapter_belongs_to_the_weights_that_it_was_trained_on(tmp_path, capsys):
    """Under any name and in any form, but trained further they are others; without the file that says which
    they were, nothing is known."""
    folder = written(adapted(), tmp_path)
    same, further = base(), base()
    same.load_state_dict({name: value.half() for name, value in base().state_dict().items()})
    merge_adapter(same, folder)
    assert "nothing beside it" not in capsys.readouterr().out
    with torch.no_grad():
        further.model.layers[1].mlp.down_proj.weight[0, 0] += 0.01
    with pytest.raises(
        UserError, match=r"was trained on other weights than these \(on --from_weight unknown"
    ):
        merge_adapter(further, folder)
    folder.with_name(f"{folder.name}.json").unlink()
    merge_adapter(further, folder)
    assert "no file beside it says which weights it was trained on" in capsys.readouterr().out
