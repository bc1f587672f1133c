"""Chat with trained weights in the terminal; answers are streamed.

python scripts/chat.py --weight full_sft
python scripts/chat.py --weight full_sft --prompt "Who are you?"      a single answer
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.errors import UserError
from trainer.components.device import prepare_device, select_device
from trainer.components.trained_weights import add_trained_model_flags, given_shape, load_trained


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    add_trained_model_flags(parser)
    flag("--prompt", help="answer this one message and exit")
    flag("--system", help="system prompt")
    flag("--max_new_tokens", type=int, default=512, help="longest answer, in tokens")
    flag("--temperature", type=float, default=0.7, help="sampling temperature; 0: always the likeliest token")
    flag("--top_p", type=float, default=0.9, help="sample from the smallest set of tokens with this probability")
    flag("--seed", type=int, default=42, help="random seed of the sampling")
    return parser.parse_args()


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and the tokenizer that the flags of `add_trained_model_flags` select."""
    device = select_device(args.device)
    prepare_device(device)
    return load_trained(args.weight, args.save_dir, args.tokenizer_path, device, **given_shape(args))


@torch.no_grad()
def generate(model: Any, tokenizer: Any, chats: list[list[dict]], max_new_tokens: int, **options: Any) -> list[str]:
    """The assistant's next turn in each chat."""
    tokenizer.padding_side = "left"  # so that every answer begins at the end of its row
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=len(chats) > 1, return_tensors="pt", return_dict=True
    ).to(model.device)
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    return tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Answer one message, or chat until the input ends."""
    args = parse_args()
    if args.temperature < 0 or not 0 < args.top_p <= 1 or args.max_new_tokens < 1:
        raise UserError("--temperature must not be negative, --top_p above 0 up to 1, --max_new_tokens at least 1")
    torch.manual_seed(args.seed)
    model, tokenizer = load_model(args)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature > 0:
        options |= {"temperature": args.temperature, "top_p": args.top_p}
    options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    start = [{"role": "system", "content": args.system}] if args.system else []
    if args.prompt is not None:
        generate(model, tokenizer, [[*start, {"role": "user", "content": args.prompt}]], **options)
        return
    print("Type a message; an empty line starts a new conversation, Ctrl-D exits.")
    messages = list(start)
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text.strip():
            messages = list(start)
            continue
        messages.append({"role": "user", "content": text})
        try:
            (answer,) = generate(model, tokenizer, [messages], **options)
            messages.append({"role": "assistant", "content": answer})
        except KeyboardInterrupt:  # Ctrl-C ends the answer, not the chat
            messages.pop()
            print()
        sys.stdout.flush()


if __name__ == "__main__":
    with one_line_errors():
        main()
