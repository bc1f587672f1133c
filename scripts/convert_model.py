"""Convert a model to another form, and check that it is the same model before saying so.

    python scripts/convert_model.py --model out/full_sft_512.pth --to hf --output out/full_sft_512_hf
    python scripts/convert_model.py --weight full_sft --to gguf --output out/full_sft.gguf
    python scripts/convert_model.py --model SOME_FOLDER --to pth --output out/other_512.pth
    python scripts/convert_model.py --weight full_sft --lora out/mine_768 --to lora --output mine_768.pth

hf: a Hugging Face folder of a stock architecture. gguf: one file for llama.cpp and what is built on it. pth:
a weights file of this project, also from the checkpoint of a run, sharded or not. lora: the adapter as a file
that MiniMind loads; in the other forms it is merged.
"""

import argparse
import sys
from pathlib import Path

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from common.errors import UserError, say
from common.files import new_path, write_json
from common.settings import ROOT
from dataset.tokenizing import fingerprint
from model.model_minimind import MiniMindForCausalLM
from tools.convert.gguf_file import read_gguf, write_gguf
from tools.convert.hugging_face import read_stock, write_folder
from tools.convert.parity import compare, text_logits
from trainer.objectives.lora import minimind_adapter, read_adapter
from trainer.run.checkpoint import write_file
from trainer.run.paths import run_name, shape_in_name
from trainer.weights.files import Description, description_of, half_state_dict, keep_tokenizer
from trainer.weights.for_tools import add_trained_model_flags, load_model, load_path, model_path

DTYPES = {  # of the weights, for each form
    "hf": ("float16", "bfloat16", "float32"),
    "gguf": ("float16", "float32"),
    "pth": ("float16",),
    "lora": ("float16",),
}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=(__doc__ or "").split("\n", 1)[0])
    flag = parser.add_argument
    flag("--to", choices=DTYPES, required=True, help="form to convert to")
    flag("--output", type=Path, required=True, help="file or folder to write; it must not exist")
    flag("--dtype", choices=DTYPES["hf"], default="float16", help="type of the weights")
    add_trained_model_flags(parser, device=False)
    return parser.parse_args()


def write_weights(path: Path, model: MiniMindForCausalLM, description: Description) -> dict[str, Tensor]:
    """Write a weights file of this project; returns its tensors in float32. Raises UserError if the file's
    name is that of another shape."""
    named, name = shape_in_name(path), f"{run_name('NAME', model.config)}.pth"
    if named and named != shape_in_name(Path(name)):
        raise UserError(f"--output {path.name}: the name of a weights file has its shape; call it {name}")
    weights = half_state_dict(model)
    with open(path, "w+b") as file:
        write_file(weights, file, {key: description.get(key) for key in ("model", "tokenizer")})
    return {name: tensor.float() for name, tensor in weights.items()}


def convert(
    model: MiniMindForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    form: str,
    output: Path,
    dtype: torch.dtype,
) -> list[str]:
    """Write a model in another form (a key of DTYPES), read it back and compare; returns what was compared,
    as lines. Raises UserError if the form cannot represent the model, the place cannot be written, or what is
    read back is not the same model; then nothing is written."""
    before = text_logits(model, tokenizer)
    tokenizer_hash = fingerprint(tokenizer)
    description = description_of(model, {"tokenizer": tokenizer_hash})
    with new_path(output) as path:
        if form == "hf":
            stored = write_folder(path, model, tokenizer, dtype)
            other, other_tokenizer = read_stock(path)
        elif form == "gguf":
            stored = write_gguf(path, model, tokenizer, dtype, output.stem)
            other, other_tokenizer = read_gguf(path)
        else:
            stored = write_weights(path, model, description)
            other, other_tokenizer = load_path(path, tokenizer.name_or_path)
        stored.setdefault("lm_head.weight", stored["model.embed_tokens.weight"])  # tied, so stored once
        model.load_state_dict(stored)
        try:
            parity = compare(model, tokenizer, other, other_tokenizer)
        except ValueError as error:
            raise UserError(
                f"{output} is not written: read back, it is not the same model; {error}"
            ) from error
    if form == "pth":
        write_json(output.with_suffix(".json"), description)
        if Path(tokenizer.name_or_path).resolve() != ROOT / "model":
            keep_tokenizer(tokenizer.name_or_path, output.parent, tokenizer_hash)
    rounding = (text_logits(model, tokenizer) - before).abs().max()
    return [
        f"read back: {parity}",
        f"the weights as they are stored: the logits differ by at most {rounding:.1e}",
    ]


def convert_adapter(model: MiniMindForCausalLM, adapter: Path, output: Path) -> str:
    """Write an adapter as MiniMind's file and read it back; returns what was compared, as a line. Raises
    UserError if MiniMind has no such adapters, or the file cannot be written."""
    config, tensors = read_adapter(model, adapter)
    with new_path(output) as path:
        torch.save(minimind_adapter(model, config, tensors), path)
        _, stored = read_adapter(model, path)
    largest, difference = 0.0, 0.0
    for name in {name.rsplit(".lora_", 1)[0] for name in tensors}:
        a, b = (f"{name}.lora_{part}.weight" for part in "AB")
        wanted = config["lora_alpha"] / config["r"] * (tensors[b] @ tensors[a])
        largest = max(largest, float(wanted.abs().max()))
        difference = max(difference, float((stored[b].float() @ stored[a].float() - wanted).abs().max()))
    return f"read back: what it adds to a weight, {largest:.1e} at most, differs by at most {difference:.1e}"


def main() -> None:
    """Read the command line and convert."""
    args = parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.dtype not in DTYPES[args.to]:
        possible = " or ".join(DTYPES[args.to])
        raise UserError(f"--dtype {args.dtype} does not go with --to {args.to}; use {possible}")
    if args.to == "lora":
        if args.lora is None:
            raise UserError("--to lora converts an adapter: name it with --lora")
        model_path(args)  # paths on a hub become local ones
        adapter, args.lora = Path(args.lora), None
        model, _ = load_model(args, "cpu")
        lines = [convert_adapter(model, adapter, args.output)]
    else:
        model, tokenizer = load_model(args, "cpu")
        lines = convert(model, tokenizer, args.to, args.output, getattr(torch, args.dtype))
    for line in lines:
        say(line)
    say(f"wrote {args.output}")


if __name__ == "__main__":
    with one_line_errors():
        main()
