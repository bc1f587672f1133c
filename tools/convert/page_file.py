"""A model as a page to send: one HTML file with the weights, the tokenizer and a small chat, which runs in
any browser without a network. The page itself is in `page/`; this file fills it in."""

import base64
import gzip
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from model.attention import kernels_fit
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import default_sampling
from tools.convert.chat_pieces import chat_pieces
from tools.convert.gguf_file import pattern_name
from tools.convert.hugging_face import own_tensors, stock_config
from tools.convert.products import products_module
from tools.convert.quantized import quantize

PAGE = Path(__file__).parent / "page"
WORKER = ("tokenizer.js", "sampling.js", "model.js", "conversation.js", "worker.js")
CONTEXT = 4096  # limit in tokens: keys and values take memory, of which a phone has little
MOST_NEW_TOKENS = 512  # limit of an answer, as in scripts/chat.py
PART = 1 << 22  # characters of base64 in one HTML element
ALIGNMENT = 16  # bytes
# settings of a BPE that change how text is split and that the page does not support
BPE_SETTINGS = (
    "dropout",
    "byte_fallback",
    "ignore_merges",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)
# settings of tokens that are found in the text before it is split
TOKEN_SETTINGS = ("single_word", "lstrip", "rstrip")
POLICY = (
    "default-src 'none'; script-src '{app}' 'wasm-unsafe-eval'; worker-src blob:; style-src '{style}'; "
    "base-uri 'none'; form-action 'none'"
)


def write_page(
    path: Path,
    name: str,
    model: MiniMindForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    bits: int,
    continues_text: bool,
) -> None:
    """Write the page, and round the model's matrices to the page's values: afterwards `model` computes what
    the page does. name: the model's name on the page. bits: 8 or 4 per weight. continues_text: whether it was
    pretrained only. Raises UserError if the page does not support the model or its tokenizer."""
    config = cast(MiniMindConfig, model.config)
    check_arithmetic(model)
    tensors, weights = packed(model, bits)
    rotary: Any = model.model.rotary_emb
    shape = config.own_fields() | {
        "frequencies": rotary.inv_freq.tolist(),
        "attention_scaling": rotary.attention_scaling,
    }
    sampling = default_sampling(model)
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    drawing = {key: getattr(sampling, key) for key in ("temperature", "top_k", "top_p", "repetition_penalty")}
    spec = {
        "name": name,
        "config": shape,
        "tensors": tensors,
        "bytes": len(weights),
        "tokenizer": tokenizer_spec(tokenizer, config.vocab_size),
        "template": None if continues_text else chat_pieces(tokenizer)._asdict(),
        "continues_text": continues_text,
        "start": start,
        "ends": [tokenizer.eos_token_id],
        "sampling": drawing,
        "context": min(config.max_position_embeddings, CONTEXT),
        "most_new_tokens": MOST_NEW_TOKENS,
    }
    path.write_text(filled(name, spec, weights), encoding="utf-8", newline="\n")


def check_arithmetic(model: MiniMindForCausalLM) -> None:
    """Raise UserError if a model needs what the page does not compute: fields that stock Qwen3 lacks, or
    other rules of attention."""
    stock_config(cast(MiniMindConfig, model.config))
    positions = torch.arange(2)
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        is_causal = attention.visible(positions[:, None], positions) is None
        if not (is_causal and kernels_fit(attention, torch.empty(1, 1, 1))):
            raise UserError("a page to send supports no other attention than causal scaled dot products")


def packed(model: MiniMindForCausalLM, bits: int) -> tuple[dict[str, dict[str, int]], bytes]:
    """The position of each tensor, and the bytes of all tensors. The model's matrices are rounded to these
    values."""
    tensors: dict[str, dict[str, int]] = {}
    parts: list[bytes] = []
    size = 0

    def add(content: bytes) -> int:
        nonlocal size
        at = size
        parts.append(content.ljust(-(-len(content) // ALIGNMENT) * ALIGNMENT, b"\0"))
        size += len(parts[-1])
        return at

    for name, tensor in own_tensors(model).items():
        rows, columns = tensor.shape if tensor.ndim == 2 else (1, len(tensor))
        about = {"rows": rows, "columns": columns}
        if tensor.ndim == 1 or name.endswith("mlp.gate.weight"):
            about["at"] = add(tensor.float().numpy().tobytes())
        else:
            quantized = quantize(tensor, bits)
            about |= {"at": add(quantized.packed()), "scales": add(quantized.scales.numpy().tobytes())}
            about["bits"] = bits
            _set(model, name, quantized.values(columns))
        tensors[name] = about
    return tensors, b"".join(parts)


@torch.no_grad()
def _set(model: MiniMindForCausalLM, name: str, values: Tensor) -> None:
    model.get_parameter(name).copy_(values)


def tokenizer_spec(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, Any]:
    """What the page needs to know of a tokenizer. Raises UserError if the page does not support it."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    bpe, added = content["model"], content["added_tokens"]
    pieces = pattern_name(content, "a page to send")
    odd = [name for name in BPE_SETTINGS if bpe.get(name)]
    odd += [name for name in TOKEN_SETTINGS if any(token[name] for token in added)]
    if odd:
        raise UserError(f"a page to send does not support this tokenizer, which has {', '.join(odd)}")
    vocabulary = [""] * vocab_size
    for token, i in bpe["vocab"].items():
        vocabulary[i] = token
    for token in added:
        vocabulary[token["id"]] = token["content"]
    ids = bpe["vocab"]
    merges = [[ids[first], ids[second]] for first, second in bpe["merges"]]
    tokens = [{"id": token["id"], "text": token["content"], "special": token["special"]} for token in added]
    return {"vocabulary": vocabulary, "merges": merges, "added": tokens, "pieces": pieces}


def filled(name: str, spec: dict[str, Any], weights: bytes) -> str:
    """The HTML of the page."""
    encoded = base64.b64encode(gzip.compress(weights, 9, mtime=0)).decode()
    parts = [encoded[i : i + PART] for i in range(0, len(encoded), PART)]
    app, style = read("app.js"), read("style.css")
    values = {
        "name": html.escape(name),
        "style": style,
        # a "<" in a token's text could end the element or begin a comment
        "spec": json.dumps(spec, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        "products": base64.b64encode(products_module()).decode(),
        "worker": "\n".join(map(read, WORKER)),
        "weights": "\n".join(f'<script type="text/plain" class="weights">{part}</script>' for part in parts),
        "app": app,
        "policy": POLICY.format(app=hash_of(app), style=hash_of(style)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], read("page.html"))


def read(name: str) -> str:
    """A file of the page."""
    return (PAGE / name).read_text(encoding="utf-8")


def hash_of(text: str) -> str:
    """The hash by which a Content Security Policy allows a script or style that is part of the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
