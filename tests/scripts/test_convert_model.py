"""Conversions: the same model in every form, by a reference that nobody here wrote; what cannot be is one
line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from packaging.version import Version
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts import convert_model
from tests.conftest import ROOT
from tools.convert import answers, gguf_file, hugging_face, page_check, page_file, parity
from tools.convert.gguf_file import pattern_name, read_gguf
from tools.convert.hugging_face import read_stock
from trainer.weights.files import read_model, save_weights, tokenizer_folder
from trainer.weights.for_tools import load_path
from trainer.weights.paths import run_name

SHAPES = {"dense": {}, "moe": {"use_moe": True, "num_experts": 3, "num_experts_per_tok": 2}}
TOKENS = 500
reads_gguf = pytest.mark.skipif(
    Version(transformers.__version__) < gguf_file.READER,
    reason="this transformers reads GGUF files otherwise",
)
IDS = torch.arange(60, 124).view(2, 32)


def write_tokenizer(folder: Path) -> None:
    """The repository's tokenizer with its first tokens and merges only: the readers of GGUF files are
    slow."""
    content = json.loads((ROOT / "model/tokenizer.json").read_text(encoding="utf-8"))
    bpe = content["model"]
    bpe["vocab"] = {token: i for token, i in bpe["vocab"].items() if i < TOKENS}
    bpe["merges"] = [pair for pair in bpe["merges"] if "".join(pair) in bpe["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((ROOT / "model" / name).read_bytes())


def saved(folder: Path, **shape) -> Path:
    """The file of a model with random weights, far enough from zero that mistakes show; its tokenizer beside
    it."""
    write_tokenizer(folder)
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=2, vocab_size=TOKENS, **shape)
    model = MiniMindForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    path = folder / f"{run_name('w', model.config)}.pth"
    save_weights(model, path)
    return path


@pytest.fixture(scope="module", params=SHAPES)
def weights(request, tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp(request.param), **SHAPES[request.param])


@pytest.fixture
def convert(call):
    """convert(model, to, output, *flags) runs the command; returns what it printed, or its error line."""

    def run(model: Path, to: str, output: Path, *flags: str) -> str:
        done = call(convert_model, "--model", model, "--to", to, "--output", output, *flags)
        if done.returncode == 0:
            assert done.stdout.endswith(f"wrote {output}\n")
            return done.stdout
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert not list(output.parent.glob(".*/"))  # no half-written folder
        return done.stderr

    return run


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


# --- the forms


def test_a_hugging_face_folder_is_a_stock_model_and_comes_back_bit_for_bit(weights, convert, tmp_path):
    folder, again = tmp_path / "folder", tmp_path / weights.name
    said = convert(weights, "hf", folder)
    assert "28 conversations are rendered alike" in said
    assert "rounded to float16: the logits differ by at most 0.0e+00" in said  # fp16 as they were
    own, tokenizer = load_path(weights)
    stock, _ = read_stock(folder)
    assert type(stock) is (Qwen3MoeForCausalLM if own.config.use_moe else Qwen3ForCausalLM)
    assert (logits(own) - logits(stock)).abs().max() < 1e-5
    config = json.loads((folder / "config.json").read_text())
    assert not list(folder.glob("*.py")) and "auto_map" not in config
    # the names of earlier versions of transformers
    assert config["rope_theta"] == 1e6 and "rope_scaling" not in config
    assert config.get("num_experts") == (3 if own.config.use_moe else None)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (weights.parent / name).read_bytes()
    convert(folder, "pth", again)
    assert tokenizer_folder(again).name.startswith("tokenizer_")  # the folder's went along
    assert load_path(again)[1].get_vocab() == tokenizer.get_vocab()
    before, after = read_model(weights)[0], read_model(again)[0]
    assert list(before) == list(after)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_models_sampling_defaults_go_along_with_it(convert, tmp_path):
    folder, again = tmp_path / "folder", tmp_path / "again"
    convert(saved(tmp_path), "hf", folder)
    path = folder / "generation_config.json"
    fields = json.loads(path.read_text())
    wanted = {"eos_token_id": 2, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 50}
    assert {name: fields[name] for name in wanted} == wanted and fields.get("repetition_penalty") is None
    path.write_text(json.dumps(fields | {"temperature": 0.3, "top_k": None, "repetition_penalty": 1.1}))
    convert(folder, "hf", again)
    written = json.loads((again / "generation_config.json").read_text())
    assert (written["temperature"], written["top_k"], written["do_sample"]) == (0.3, 50, True)
    assert written["repetition_penalty"] == 1.1
    path.write_text('{"top_p": 0}')
    assert "top_p: Input should be greater than 0" in convert(folder, "pth", tmp_path / "other_32.pth")
    path.write_text('{"repetition_penalty": 0}')
    assert "repetition_penalty: Input should be" in convert(folder, "pth", tmp_path / "other_32.pth")


@reads_gguf
def test_a_gguf_file_is_read_back_by_transformers(weights, convert, tmp_path):
    path = tmp_path / "w.gguf"
    convert(weights, "gguf", path)
    own, tokenizer = load_path(weights)
    other, other_tokenizer = read_gguf(path)
    assert (logits(own) - logits(other)).abs().max() < 1e-3
    texts = ["Hello, it's 2024! 你好，世界。", *parity.HARD_TEXTS]
    assert [other_tokenizer.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
    assert other_tokenizer.eos_token_id == 2 and other.config.eos_token_id == 2
    fields = GGUFReader(path).fields
    wanted = {"general.name": "w"}
    wanted |= {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": False}
    wanted |= {"tokenizer.ggml.eot_token_id": 2}
    assert {name: fields[name].contents() for name in wanted} == wanted
    # control, user-defined
    assert fields["tokenizer.ggml.token_type"].contents()[:10] == [3, 3, 3, *[4] * 6, 3]
    template = fields["tokenizer.chat_template"].contents()
    assert "generation -" not in template and "add_generation_prompt" in template


@reads_gguf
@pytest.mark.parametrize(("bits", "kind", "least"), [(8, "Q8_0", 0.99), (4, "Q4_0", 0.4)])
def test_a_small_gguf_file(weights, convert, tmp_path, bits, kind, least, monkeypatch):
    """Its matrices are those of gguf's own quantisation; stacked ones of experts, too."""
    monkeypatch.setattr(answers, "LEAST_SHARE", least)  # random weights answer anything
    sizes = {}
    for each in (16, bits):
        convert(weights, "gguf", tmp_path / f"{each}.gguf", "--bits", each)
        sizes[each] = (tmp_path / f"{each}.gguf").stat().st_size
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / f"{bits}.gguf").tensors}
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {kind, "F32"}
    own = read_model(weights)[0]
    for name, key in (("token_embd", "embed_tokens"), ("blk.1.attn_k", "layers.1.self_attn.k_proj")):
        stored, exact = tensors[f"{name}.weight"], own[f"model.{key}.weight"].float().numpy()
        read = dequantize(stored.data, stored.tensor_type)
        scale = np.abs(exact).reshape(len(exact), -1, 32).max(axis=2, keepdims=True) / (
            127 if bits == 8 else 8
        )
        difference = np.abs(read - exact).reshape(len(exact), -1, 32)
        assert (difference <= scale * (0.6 if bits == 8 else 1.01)).all() and difference.max() > 0
    assert sizes[bits] < sizes[16]


@reads_gguf
def test_a_head_of_its_own(convert, tmp_path):
    source = saved(tmp_path, tie_word_embeddings=False)
    convert(source, "hf", tmp_path / "folder")
    assert "lm_head.weight" in load_file(tmp_path / "folder/model.safetensors")
    convert(source, "gguf", tmp_path / "w.gguf")
    assert (logits(load_path(source)[0]) - logits(read_gguf(tmp_path / "w.gguf")[0])).abs().max() < 1e-3


# --- the page to send


def test_a_page_answers_as_the_model_does(weights, convert, tmp_path):
    said = convert(weights, "page", tmp_path / "page.html")
    assert re.search(r"\d+ of 64 answers are the model's.*, to 64 prompts, 0 of them from", said)
    assert re.search(r"0\.\d MB, 8 bits a weight; a double click opens it, also offline\n", said)
    for flags, line in (
        (("page", "--bits", 16), "--to page holds 8 or 4 bits; leave --bits 16 out"),
        (("hf", "--bits", 8), "--to hf holds float16; leave --bits out"),
    ):
        assert line in convert(weights, flags[0], tmp_path / "other", *flags[1:])


def test_without_node_the_rounded_model_answers(convert, tmp_path, monkeypatch):
    monkeypatch.setattr(page_check, "find_node", lambda: None)
    weights = saved(tmp_path)
    assert "if Node is installed, the page itself answers" in convert(weights, "page", tmp_path / "a.html")
    monkeypatch.setattr(answers, "LEAST_SHARE", 1.01)
    line = convert(weights, "page", tmp_path / "b.html")
    assert "b.html is not written: it is no longer the same model: it gives" in line
    assert not (tmp_path / "b.html").exists()


@pytest.mark.skipif(page_check.find_node() is None, reason="needs Node 18 or newer")
def test_a_page_that_computes_something_else_is_not_written(convert, tmp_path, monkeypatch):
    weights, quantize = saved(tmp_path), page_file.quantize

    def wrong(tensor, bits):
        packed = quantize(tensor, bits)
        return packed if len(tensor) == TOKENS else packed._replace(scales=-packed.scales)

    monkeypatch.setattr(page_file, "quantize", wrong)
    monkeypatch.setattr(page_file, "_set", lambda *args: None)
    assert "page.html is not written: it is no longer the same" in convert(
        weights, "page", tmp_path / "page.html"
    )
    monkeypatch.setattr(page_file, "pattern_name", lambda *args: "gpt-2")
    assert "has other token ids" in convert(weights, "page", tmp_path / "page.html")


def test_a_page_of_pretraining_is_asked_about_its_own_data(convert, tmp_path):
    weights = saved(tmp_path).rename(tmp_path / "pretrain_32.pth")
    records = [{"text": f"{i} is a number, and so is {i + 1}; their sum is {2 * i + 1}."} for i in range(9)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"settings": {"eval_data_path": str(tmp_path / "held_out.jsonl"), "data_path": "elsewhere"}}
    (tmp_path / "pretrain_32_run.json").write_text(json.dumps(settings))
    assert "64 prompts, 9 of them" in convert(weights, "page", tmp_path / "page.html")
    assert '"continues_text": true' in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_folder_of_a_run_and_a_page_beside_the_weights(call, tmp_path):
    saved(tmp_path).rename(tmp_path / "full_sft_32.pth")
    done = call(convert_model, "--model", tmp_path, "--to", "page")
    assert done.stdout.endswith(f"wrote {tmp_path / 'full_sft_32.html'}\n")
    done = call(convert_model, "--model", tmp_path, "--to", "page")
    assert done.returncode == 2 and "full_sft_32.html already exists" in done.stderr
    done = call(convert_model, "--model", tmp_path, "--to", "hf")
    assert "--to hf needs --output" in done.stderr


# --- what is refused


@reads_gguf
def test_a_conversion_that_fails_leaves_nothing(convert, tmp_path, monkeypatch):
    weights = saved(tmp_path)
    before, source = set(tmp_path.iterdir()), weights.read_bytes()
    own_tensors = hugging_face.own_tensors

    def wrong(model):
        return {name: value + 0.01 for name, value in own_tensors(model).items()}

    monkeypatch.setattr(hugging_face, "own_tensors", wrong)
    line = convert(weights, "hf", tmp_path / "folder")
    assert "folder is not written: read back, it is not the same model; the logits differ by up to" in line
    for name, other, expected in (
        ("GENERATION_TAG", re.compile("()(assistant)"), "conversation 1 of 28 is rendered"),
        ("pattern_name", lambda _: "gpt-2", "has other token ids"),
    ):
        monkeypatch.setattr(gguf_file, name, other)
        assert expected in convert(weights, "gguf", tmp_path / "w.gguf")
    there = tmp_path / "there"
    there.mkdir()
    assert f"{there} already exists; remove it" in convert(weights, "pth", there)
    line = convert(weights, "pth", tmp_path / "x_16.pth")
    assert "x_16.pth: the name of a weights file must state its shape; use NAME_32.pth" in line
    there.rmdir()
    assert set(tmp_path.iterdir()) == before and weights.read_bytes() == source


def test_llama_cpp_s_names_of_patterns():
    ours = json.loads((ROOT / "model/tokenizer.json").read_text(encoding="utf-8"))
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    assert pattern_name(ours) == "qwen2" and pattern_name(ours | {"pre_tokenizer": gpt2}) == "gpt-2"
    other = json.loads(json.dumps(ours).replace(r"\\p{N}|", r"\\p{N}{1,3}|"))
    assert other != ours
    for changed in (other, ours | {"normalizer": {"type": "NFC"}}, ours | {"pre_tokenizer": None}):
        with pytest.raises(convert_model.UserError, match="cannot read this tokenizer"):
            pattern_name(changed)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"norm_topk_prob": False}, "cannot have norm_topk_prob false"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
            "rope_scaling of type yarn",
        ),
    ],
)
def test_what_gguf_cannot_represent_is_refused(convert, tmp_path, changed, expected):
    convert(saved(tmp_path, **SHAPES["moe"]), "hf", tmp_path / "folder")
    path = tmp_path / "folder/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert expected in convert(tmp_path / "folder", "gguf", tmp_path / "w.gguf")
