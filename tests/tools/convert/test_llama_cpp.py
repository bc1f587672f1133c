"""GGUF files in llama.cpp itself: its token ids, logits, prompts and end token are those of the model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.prompts import prompt_tokens
from tests.tools.convert.pages import MOE, random_model, shipped_tokenizer
from tests.tools.convert.texts import own_tokenizer, thousand_texts, whole
from tools.convert.gguf_file import BLOCK, write_gguf

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="needs llama-cpp-python, which pip builds for some ten minutes", exc_type=ImportError
)
SHAPES = {
    "dense": {},
    "moe": MOE,
    "untied": {"tie_word_embeddings": False, "head_dim": 32, "num_key_value_heads": 2},
    "odd": {"hidden_size": 72, "head_dim": 20},  # matrices that cannot have fewer than 16 bits
}


@pytest.fixture
def open_file() -> Iterator[Callable[[Path], Any]]:
    """open_file(path) returns the model as llama.cpp has it, with a cache in float32."""
    opened = []

    def run(path: Path) -> Any:
        options = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "type_k": 0, "type_v": 0}
        opened.append(llama_cpp.Llama(str(path), logits_all=True, verbose=False, **options))
        return opened[-1]

    yield run
    for each in opened:
        each.close()


def rounded_input(bits: int, x: Tensor) -> Tensor:
    """What llama.cpp multiplies a matrix by: in 8 and 4 bits, blocks of whole numbers from -127 to 127, whose
    scales are float16."""
    if bits == 16 or x.shape[-1] % BLOCK:
        return x.half().float()
    blocks = x.unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * torch.where(largest > 0, 127 / largest, 0.0)).round()
    return (codes * (largest / 127).half().float()).flatten(-2)


@torch.no_grad()
def expected_logits(model: Any, contexts: Tensor, bits: int) -> Tensor:
    """The logits of a model whose matrices get the inputs that they have in llama.cpp."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("mlp.gate"):
            module.register_forward_pre_hook(lambda module, args: (rounded_input(bits, args[0]),))
    return model(contexts).logits


def llama_cpp_logits(other: Any, contexts: Tensor) -> Tensor:
    found = []
    for tokens in contexts.tolist():
        other.reset()
        other.eval(tokens)
        found.append(torch.from_numpy(other.scores[: len(tokens)].copy()))
    return torch.stack(found)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits(shape, bits, tmp_path, open_file):
    """In 8 and 4 bits most contexts agree to the rounding of float32. In the others an input was as near to
    one whole number as to the next."""
    tokenizer = own_tokenizer(tmp_path)
    model = random_model(vocab_size=len(tokenizer), **shape)
    model.load_state_dict({name: value.half().float() for name, value in model.state_dict().items()})
    write_gguf(tmp_path / "w.gguf", model, tokenizer, bits)
    contexts = torch.arange(40, 240).view(2, 100) if bits == 16 else torch.arange(40, 240).view(50, 4)
    found = llama_cpp_logits(open_file(tmp_path / "w.gguf"), contexts)
    expected = expected_logits(model, contexts, bits)
    assert expected.std() > 0.1
    difference = (found - expected).abs().amax(dim=(1, 2)) / expected.abs().max()
    if bits == 16 or shape == SHAPES["odd"]:
        assert difference.max() < 0.01
    else:
        assert difference.median() < 1e-5


@pytest.mark.parametrize("vocabulary", ["shipped", "own"])
def test_token_ids_of_a_thousand_texts(vocabulary, tmp_path, open_file):
    tokenizer = shipped_tokenizer() if vocabulary == "shipped" else own_tokenizer(tmp_path)
    write_gguf(tmp_path / "w.gguf", random_model(vocab_size=len(tokenizer)), tokenizer)
    other = open_file(tmp_path / "w.gguf")
    for text in map(whole, thousand_texts()):
        found = other.tokenize(text.encode(), add_bos=False, special=True)
        assert found == tokenizer.encode(text, add_special_tokens=False), text


def test_a_chat_has_the_prompt_of_the_template_and_ends(tmp_path, open_file):
    tokenizer = shipped_tokenizer()
    model = random_model(vocab_size=len(tokenizer), tie_word_embeddings=False)
    messages = [{"role": "system", "content": "简短。"}, {"role": "user", "content": "Hello"}]
    tokens = prompt_tokens(tokenizer, messages)
    hidden = []
    model.lm_head.register_forward_pre_hook(lambda module, args: hidden.append(args[0][0, -1]))
    model(torch.tensor([tokens]))
    head = torch.zeros_like(model.lm_head.weight)
    head[tokenizer.eos_token_id] = hidden[0]  # so the end token is the likeliest
    model.lm_head.weight.data = head
    write_gguf(tmp_path / "w.gguf", model, tokenizer)
    other = open_file(tmp_path / "w.gguf")
    assert other.token_eos() == tokenizer.eos_token_id
    said = other.create_chat_completion(messages, temperature=0, max_tokens=8)
    assert said["usage"]["prompt_tokens"] == len(tokens)
    assert other.input_ids[: len(tokens)].tolist() == tokens
    assert said["choices"][0]["finish_reason"] == "stop" and said["choices"][0]["message"]["content"] == ""
