"""Convert a model to another format, and check that the result is the same model.

    python scripts/convert_model.py --model out/full_sft_512.pth --to hf --output out/full_sft_512_hf
    python scripts/convert_model.py --weight full_sft --to gguf --output out/full_sft.gguf
    python scripts/convert_model.py --model SOME_FOLDER --to pth --output out/other_512.pth
    python scripts/convert_model.py --model out/demo --to page

hf: a Hugging Face folder with a stock architecture. gguf: one file for llama.cpp and the programs built on
it. pth: a weights file of this project and of MiniMind; a run's checkpoint can be converted, too. These
formats store the weights in float16; --bits 8 or 4 makes a GGUF file smaller. page: one HTML file to send,
with the weights in 8 or 4 bits and a small chat, which works offline in any browser. `--lora` merges an
adapter.
"""

import argparse
import os
import sys
from pathlib import Path

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from common.errors import UserError, say
from common.files import new_path
from common.settings import ROOT
from dataset.tokenizing import fingerprint
from model.model_minimind import MiniMindForCausalLM
from tools.convert.answers import Prompts, compare_answers, likeliest_answers, prompts_for
from tools.convert.gguf_file import read_gguf, write_gguf
from tools.convert.hugging_face import read_stock, write_folder
from tools.convert.page_check import check_page
from tools.convert.page_file import write_page
from tools.convert.parity import compare, text_logits
from trainer.weights.files import half_weights, keep_tokenizer, save_weights
from trainer.weights.for_tools import add_trained_model_flags, load_model, load_path, model_path
from trainer.weights.paths import is_pretrained_only, run_name, shape_in_name


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=(__doc__ or "").split("\n", 1)[0])
    flag = parser.add_argument
    flag("--to", choices=("hf", "gguf", "pth", "page"), required=True, help="format to convert to")
    text = "file or folder to write; it must not exist (default for page: beside the weights, NAME.html)"
    flag("--output", type=Path, help=text)
    text = "bits of a weight: in a page 8 (the default) or 4, in a GGUF file 16 (the default), 8 or 4"
    flag("--bits", type=int, choices=(16, 8, 4), help=text)
    add_trained_model_flags(parser, device=False)
    args = parser.parse_args()
    if args.output is None and args.to != "page":
        raise UserError(f"--to {args.to} needs --output, the file or folder to write")
    if args.bits is not None and args.to not in ("page", "gguf"):
        raise UserError(f"--to {args.to} holds float16; leave --bits out")
    if args.bits == 16 and args.to == "page":
        raise UserError("--to page holds 8 or 4 bits; leave --bits 16 out")
    return args


def convert(
    model: MiniMindForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    form: str,
    output: Path,
    bits: int = 16,
    prompts: Prompts | None = None,
) -> list[str]:
    """Round a model's weights to float16, write it in another format (hf, gguf or pth), reload it and
    compare. Returns lines that say what was compared. bits: bits of the matrices in a GGUF file. prompts:
    prompts that both the model and the rounded model answer. Raises UserError if the format cannot represent
    the model, the output cannot be written, or the reloaded model differs; then nothing is left behind."""
    before = text_logits(model, tokenizer)
    expected = likeliest_answers(model, tokenizer, prompts) if prompts else []
    model.load_state_dict(half_weights(model))
    with new_path(output) as path:
        if form == "hf":
            write_folder(path, model, tokenizer)
            other, other_tokenizer = read_stock(path)
        elif form == "gguf":
            write_gguf(path, model, tokenizer, bits)
            other, other_tokenizer = read_gguf(path)
        else:
            check_name(output, model)
            save_weights(model, path, description={"tokenizer": fingerprint(tokenizer)})
            other, other_tokenizer = load_path(path, tokenizer.name_or_path)
        lines = []
        try:
            lines.append(f"read back: {compare(model, tokenizer, other, other_tokenizer)}")
            if prompts:
                answers = compare_answers(expected, likeliest_answers(model, tokenizer, prompts))
                lines.append(f"{answers}, to {prompts}")
        except ValueError as error:
            what = f"{output} is not written: read back, it is not the same model"
            raise UserError(f"{what}; {error}") from error
        except UserError as error:
            raise UserError(f"{output} is not written: {error}") from error
        if form == "pth":
            os.replace(path.with_suffix(".json"), output.with_suffix(".json"))
    if form == "pth" and Path(tokenizer.name_or_path).resolve() != ROOT / "model":
        keep_tokenizer(tokenizer.name_or_path, output.parent, fingerprint(tokenizer))
    rounding = (text_logits(model, tokenizer) - before).abs().max()
    kind = "float16" if bits == 16 else f"{bits} bits"
    return [*lines, f"rounded to {kind}: the logits differ by at most {rounding:.1e}"]


def convert_to_page(
    model: MiniMindForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    bits: int,
    prompts: Prompts,
    continues_text: bool,
) -> list[str]:
    """Write a model as a page to send, and compare the page's answers to the prompts with the model's.
    Returns lines that say what was compared. Raises UserError if the page does not support the model, or if
    its answers differ; then nothing is written."""
    expected = likeliest_answers(model, tokenizer, prompts)
    with new_path(output) as path:
        write_page(path, output.stem, model, tokenizer, bits, continues_text)
        try:
            found = check_page(path, expected, model, tokenizer, prompts)
        except UserError as error:
            raise UserError(f"{output} is not written: {error}") from error
        size = path.stat().st_size
    return [found, f"{size / 1e6:.1f} MB, {bits} bits a weight; a double click opens it, also offline"]


def check_name(output: Path, model: MiniMindForCausalLM) -> None:
    """Raise UserError if the name of a weights file states another shape."""
    named, name = shape_in_name(output), f"{run_name('NAME', model.config)}.pth"
    if named and named != shape_in_name(Path(name)):
        raise UserError(
            f"--output {output.name}: the name of a weights file must state its shape; use {name}"
        )


def main() -> None:
    """Read the command line and convert."""
    args = parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load_model(args, "cpu")
    source = model_path(args)
    output = args.output or source.with_suffix(".html")
    bits = args.bits or (8 if args.to == "page" else 16)
    continues_text = is_pretrained_only(source) and not args.lora
    prompts = None if bits == 16 else prompts_for(tokenizer, source, continues_text)
    if args.to == "page" and prompts:
        lines = convert_to_page(model, tokenizer, output, bits, prompts, continues_text)
    else:
        lines = convert(model, tokenizer, args.to, output, bits, prompts)
    for line in lines:
        say(line)
    say(f"wrote {output}")


if __name__ == "__main__":
    with one_line_errors():
        main()
