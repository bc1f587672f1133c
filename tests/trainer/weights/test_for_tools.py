"""Which weights a tool takes and what their model is: from their tensors and names, or one line that asks."""

from pathlib import Path

import pytest
import torch

from common.command_line import Parser
from common.errors import UserError
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT
from trainer.trainer_utils import lm_checkpoint
from trainer.weights.files import find_weights, save_weights
from trainer.weights.for_tools import add_trained_model_flags, load_model, load_path
from trainer.weights.import_hf import shape_of_tensors
from trainer.weights.paths import resume_path, run_name, shape_in_name, weight_path

SMALL = {"hidden_size": 32, "num_hidden_layers": 1}
TINY = SMALL | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 70}
MOE = SMALL | {"use_moe": True}
SHAPES = {
    "w_32": SMALL,
    "w_64": {"hidden_size": 64, "num_hidden_layers": 3, "tie_word_embeddings": False},
    "w_48": TINY | {"hidden_size": 48, "intermediate_size": 80},
    "w_32_moe": MOE,
    "w_32_moe_8x2": MOE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


@pytest.fixture
def save(tmp_path):
    """Saves small random weights under the names given, or without a description as the file `name`; returns
    the folder."""

    def write(*shapes: str, name: str = "") -> Path:
        for shape in shapes:
            config = MiniMindConfig(**SHAPES[shape])
            if name:  # from elsewhere
                torch.save(MiniMindForCausalLM(config).half().state_dict(), tmp_path / name)
            else:
                save_weights(MiniMindForCausalLM(config), weight_path(tmp_path, "w", config))
        return tmp_path

    return write


def refused(call, *args, **asked) -> str:
    with pytest.raises(UserError) as error:
        call(*args, **asked)
    assert "\n" not in str(error.value)
    return str(error.value)


def load(folder: Path, weight: str = "w", **asked) -> MiniMindForCausalLM:
    return load_path(find_weights(folder, weight, **asked), **asked)[0]


@pytest.mark.parametrize("name", SHAPES)
def test_a_state_dict_and_its_name_tell_the_whole_shape(name):
    config = MiniMindConfig(**SHAPES[name])
    state = MiniMindForCausalLM(config).state_dict()
    assert run_name("w", config) == name  # MiniMind's, but for other experts than MiniMind's
    fields = shape_of_tensors(state)
    known = {"num_experts_per_tok": config.num_experts_per_tok, "intermediate_size": config.intermediate_size}
    assert MiniMindConfig(**known | fields).to_dict() == config.to_dict()
    # two equal tensors instead of one, as MiniMind writes them, or only one of them
    if config.tie_word_embeddings:
        copies = {key: value.clone() for key, value in state.items()}
        assert shape_of_tensors(copies)["tie_word_embeddings"]
        del copies["lm_head.weight"]
        assert shape_of_tensors(copies)["tie_word_embeddings"]
    named = shape_in_name(Path(f"some/w_2_{name.removeprefix('w_')}.pth"))
    experts = (config.num_experts, config.num_experts_per_tok) if config.use_moe else (None, None)
    assert tuple(named.values()) == (config.hidden_size, config.use_moe, *experts)
    assert resume_path("c", "w", config) == Path(f"c/{name}_resume.pth")


@pytest.mark.parametrize("name", ["w_32", "w_32_moe_8x2"])
def test_the_only_weights_need_no_flags(save, name, capsys):
    model = load(save(name))
    config = MiniMindConfig(**SHAPES[name])
    assert model.config.num_experts_per_tok == config.num_experts_per_tok and not model.training
    reference = MiniMindForCausalLM(config).eval()
    reference.load_state_dict(torch.load(save() / f"{name}.pth"))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    assert f"weights: {name}.pth" in capsys.readouterr().out
    shape = {key: getattr(config, key) for key in ("hidden_size", "num_hidden_layers", "use_moe")}
    assert load(save(), **shape).config.hidden_size == 32  # the flags that say the same are fine


def test_of_several_weights_a_flag_chooses(save):
    folder = save("w_32", "w_64", "w_32_moe", "w_32_moe_8x2")
    save("w_32", name="w_best_32.pth"), save("w_32", name="w_32_resume.pth")
    there = "w_32.pth, w_32_moe.pth, w_32_moe_8x2.pth, w_64.pth"
    assert f"holds several weights w: {there}; choose one with" in refused(find_weights, folder, "w")
    assert find_weights(folder, "w", hidden_size=64).name == "w_64.pth"
    assert find_weights(folder, "w", hidden_size=32, use_moe=False).name == "w_32.pth"
    assert find_weights(folder, "w", num_experts_per_tok=2).name == "w_32_moe_8x2.pth"
    assert find_weights(folder, "w_best").name == "w_best_32.pth"


def test_flags_that_contradict_the_weights_are_refused(save):
    folder = save("w_32")
    assert "holds no such weights, only w_32.pth" in refused(load, folder, hidden_size=64)
    line = refused(load, folder, num_hidden_layers=2)
    assert "--num_hidden_layers 2 contradicts the weights" in line and "--num_hidden_layers 1;" in line
    assert "nothing_*.pth do not exist (found there: w_32.pth)" in refused(find_weights, folder, "nothing")
    assert "holds no weights" in refused(find_weights, folder / "none", "w")


def test_what_cannot_be_known_is_asked_for(save):
    """A file named as if it had MiniMind's four experts, but it has eight: how many a token uses, nobody has
    said."""
    folder = save("w_32_moe_8x2", name="w_32_moe.pth")
    line = refused(load, folder)
    assert "w_32_moe.pth have 8 experts per layer, and nothing says how many" in line
    assert "name the file NAME_32_moe_8xN.pth with that number as N, or give --num_experts_per_tok" in line
    assert load(folder, num_experts_per_tok=2).config.num_experts_per_tok == 2
    line = refused(load, folder, num_experts_per_tok=9)
    assert "num_experts_per_tok 9 must be num_experts 8 or less" in line


def test_what_is_no_model_or_of_another_vocabulary_is_refused(save, tmp_path):
    assert "has 6400 tokens, the model's vocabulary 70" in refused(load, save("w_48"))
    torch.save({"a": torch.ones(2)}, tmp_path / "other_32.pth")
    assert refused(load, tmp_path, "other").startswith(f"weights {tmp_path}/other_32.pth: ")


# --- --model PATH


def load_named(*flags: object) -> MiniMindForCausalLM:
    parser = Parser()
    add_trained_model_flags(parser)
    return load_model(parser.parse_args([str(flag) for flag in flags]), "cpu")[0]


def test_a_model_by_its_path(save, tmp_path):
    folder = save("w_32", "w_32_moe_8x2")
    (folder / "w.gguf").write_bytes(b"GGUF")
    (folder / "empty").mkdir()
    assert load_named("--model", folder / "w_32.pth").config.num_hidden_layers == 1
    assert load_named("--model", folder / "w_32_moe_8x2.pth").config.num_experts_per_tok == 2
    for flag in ("--save_dir", "--model"):
        assert load_named("--weight", "w", flag, folder, "--use_moe", 0).config.hidden_size == 32
    file, none = folder / "w_32.pth", "not a Hugging Face folder, it has no config.json"
    for flags, line in (
        (["--model", "none.pth"], "--model none.pth: no such file or folder"),
        (["--model", file, "--weight", "w"], "both name a model; leave one of them out"),
        (["--model", file, "--hidden_size", 64], "--hidden_size 64 contradicts the weights"),
        (["--model", folder], "found there: w_32.pth, w_32_moe_8x2.pth"),
        (["--model", folder / "empty"], none),
        (["--model", folder / "w.gguf"], "w.gguf is for llama.cpp; give the .pth or the Hugging Face folder"),
        (["--model", ROOT / "README.md"], "README.md: not a readable weights file ("),
        ([], "/out/full_sft_*.pth do not exist"),
    ):
        assert line in refused(load_named, *flags)


def test_a_checkpoint_is_a_model_in_float32(tmp_path):
    """It tells the experts per token itself, under any name."""
    config = MiniMindConfig(**SHAPES["w_32_moe_8x2"])
    model = MiniMindForCausalLM(config).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lm_checkpoint(config, "w", model, optimizer, save_dir=tmp_path, fingerprint={"num_experts_per_tok": 2})
    path = (tmp_path / "w_32_moe_8x2_resume.pth").rename(tmp_path / "other.pth")
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert torch.equal(load_named("--model", path)(ids).logits, model(ids).logits)
    line = refused(load_named, "--model", path, "--num_experts_per_tok", 3)
    assert "--num_experts_per_tok 3 contradicts" in line


def test_rope_scaling_of_a_tool_is_minimind_s(save):
    """YaRN for the given weights: the same tensors, other angles."""
    path = find_weights(save("w_32"), "w")
    plain, scaled = load_path(path)[0], load_path(path, rope_scaling=True)[0]
    assert scaled.config.rope_parameters["rope_type"] == "yarn"
    assert scaled.config.rope_parameters["rope_theta"] == plain.config.rope_parameters["rope_theta"]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, scaled.state_dict()[name])
    assert not torch.equal(plain.model.rotary_emb.inv_freq, scaled.model.rotary_emb.inv_freq)
