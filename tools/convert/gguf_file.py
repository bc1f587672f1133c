"""A model as one GGUF file, for llama.cpp and the programs built on it (ollama, LM Studio).

llama.cpp implements Qwen3's arithmetic, always with routing weights that sum to one. The patterns that split
text before merging are known to it by name.
"""

import json
import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.gguf.reader import read_gguf_metadata

from common.errors import UserError
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.train_tokenizer import PIECES
from tools.convert.hugging_face import own_tensors, stock_config

READER = Version("5.18")  # version of transformers; earlier ones normalise the text
BLOCK = 32  # weights with a common scale in Q8_0 and Q4_0
GENERATION_TAG = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


def write_gguf(
    path: Path, model: MiniMindForCausalLM, tokenizer: PreTrainedTokenizerBase, bits: int = 16
) -> None:
    """Write the file. Matrices are stored in float16, or in 8 or 4 bits (Q8_0, Q4_0); then the model's own
    matrices are rounded to the stored values. Norms and routers are stored in float32. Raises UserError if
    llama.cpp cannot represent the model or its tokenizer, or if the package gguf is missing."""
    try:
        import gguf
    except ImportError as error:
        raise UserError("the package gguf is not installed; pip install -r requirements-serve.txt") from error
    config = cast(MiniMindConfig, model.config)
    stock_config(config)  # raises UserError if the model has what stock Qwen3 lacks
    rope_type = (config.rope_parameters or {}).get("rope_type")
    if rope_type != "default":
        raise UserError(f"a GGUF file cannot have rope_scaling of type {rope_type}; leave it out")
    if config.use_moe and not config.norm_topk_prob:
        raise UserError("a GGUF file cannot have norm_topk_prob false; llama.cpp always normalises")
    architecture = "qwen3moe" if config.use_moe else "qwen3"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(path.stem)
    _add_shape(writer, config)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    kind = {16: "F16", 8: "Q8_0", 4: "Q4_0"}[bits]
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    _round(model, kind)
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names: Any = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for key, tensor in _stacked_experts(own_tensors(model)).items():
        stored = gguf.GGMLQuantizationType[_stored_as(key, tensor, kind)]
        data = gguf.quants.quantize(tensor.float().numpy(), stored)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored_as(key: str, tensor: Tensor, kind: str) -> str:
    """The type in which a tensor is stored if matrices are stored as `kind`."""
    if tensor.ndim == 1 or key.endswith("mlp.gate.weight"):
        return "F32"
    return kind if tensor.shape[-1] % BLOCK == 0 else "F16"


@torch.no_grad()
def _round(model: MiniMindForCausalLM, kind: str) -> None:
    """Round the tensors of a model to the values in the file. Rounding them again changes nothing."""
    import gguf

    for key, tensor in own_tensors(model).items():
        stored = gguf.GGMLQuantizationType[_stored_as(key, tensor, kind)]
        values = gguf.quants.dequantize(gguf.quants.quantize(tensor.float().numpy(), stored), stored)
        model.get_parameter(key).copy_(torch.from_numpy(values))


def _stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with those of all experts of a layer stacked into one [E, out, in]."""
    experts: dict[str, list[Tensor]] = {}
    for name in list(tensors):
        match = EXPERT.fullmatch(name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}.weight", []).append(tensors.pop(name))
    return tensors | {name: torch.stack(parts) for name, parts in experts.items()}


def _add_shape(writer: Any, config: MiniMindConfig) -> None:
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base((config.rope_parameters or {})["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.use_moe:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    from gguf import TokenType

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    pattern = pattern_name(content)
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]  # for ids that the tokenizer lacks
    types = [TokenType.UNUSED] * vocab_size
    for token, i in content["model"]["vocab"].items():
        tokens[i], types[i] = token, TokenType.NORMAL
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(pattern)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    for which in ("bos", "eos", "unk", "pad"):
        token_id = getattr(tokenizer, f"{which}_token_id")
        if token_id is not None:
            getattr(writer, f"add_{which}_token_id")(token_id)
    writer.add_eot_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(tokenizer.encode("a") != tokenizer.encode("a", add_special_tokens=False))
    writer.add_add_space_prefix(False)
    if tokenizer.chat_template:
        # {% generation %}, which only transformers knows, does not change the rendered text
        writer.add_chat_template(GENERATION_TAG.sub(r"{#\1 \2#}", cast(str, tokenizer.chat_template)))


def pattern_name(tokenizer: dict[str, Any], reader: str = "llama.cpp") -> str:
    """llama.cpp's name of the pattern with which a byte-level BPE splits text. tokenizer: the content of
    tokenizer.json. reader: program that is named in the error. Raises UserError if llama.cpp does not know
    such a pattern or tokenizer."""
    cut = tokenizer["pre_tokenizer"] or {}
    steps = cut["pretokenizers"] if cut.get("type") == "Sequence" else [cut]
    byte_level = steps[-1]
    known = tokenizer["model"]["type"] == "BPE" and byte_level.get("type") == "ByteLevel"
    if known and tokenizer["normalizer"] is None and not byte_level["add_prefix_space"]:
        if len(steps) == 1 and byte_level["use_regex"]:
            return "gpt-2"
        split = {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": False}
        if steps[:-1] == [split] and not byte_level["use_regex"]:
            return "qwen2"
    raise UserError(
        f"{reader} cannot read this tokenizer; it must be a byte-level BPE that splits text like "
        "Qwen2 or GPT-2"
    )


def read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 and the tokenizer, as transformers reads them from the file alone. Raises
    UserError if this version of transformers cannot read them."""
    if Version(transformers.__version__) < READER:
        raise UserError(
            f"transformers {transformers.__version__} reads the tokenizer of a GGUF file differently, so "
            f"it cannot be checked; pip install 'transformers>={READER}'"
        )
    fields, _ = read_gguf_metadata(str(path))
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(path.parent, **options)
    prefix = fields["general.architecture"]
    config.head_dim = fields[f"{prefix}.attention.key_length"]  # transformers leaves these two out
    if f"{prefix}.expert_feed_forward_length" in fields:
        config.moe_intermediate_size = fields[f"{prefix}.expert_feed_forward_length"]
    with redirect_stderr(StringIO()):  # hides a progress bar
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, config=config, dtype=torch.float32, **options
        )
    return model.eval(), cast(Any, AutoTokenizer.from_pretrained(path.parent, **options))
