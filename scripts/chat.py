"""Chat with trained weights in the terminal; the answer streams as it is written.

python scripts/chat.py --weight full_sft --hidden_size 512
python scripts/chat.py --weight full_sft --hidden_size 512 --prompt "Who are you?"      one answer, then out
"""

import argparse
import sys

import torch
from transformers import TextStreamer

from dataset.errors import Parser, UserError, run_main
from trainer.arguments import model_config, trained_model_flags
from trainer.trainer_utils import init_model, load_tokenizer, pick_device


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    trained_model_flags(parser)
    flag("--prompt", help="ask this one question and leave")
    flag("--system", help="system prompt")
    flag("--max_new_tokens", type=int, default=512, help="longest answer, in tokens")
    flag("--temperature", type=float, default=0.7, help="0: always the likeliest token")
    flag("--top_p", type=float, default=0.9, help="smallest set of tokens with this probability")
    flag("--seed", type=int, default=42, help="of the sampling")
    return parser.parse_args()


def answer(model, tokenizer, messages: list[dict], args: argparse.Namespace, streamer=None) -> str:
    """The assistant's next turn to `messages`, streamed to `streamer` if given."""
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(model.device)
    sampling = {"do_sample": args.temperature > 0}
    if sampling["do_sample"]:
        sampling |= {"temperature": args.temperature, "top_p": args.top_p}
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=args.max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        streamer=streamer,
        **sampling,
    )
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Answer one prompt, or go on until the input ends."""
    args = parse_args()
    if args.temperature < 0 or not 0 < args.top_p <= 1 or args.max_new_tokens < 1:
        raise UserError("--temperature must not be negative, --top_p above 0 up to 1, --max_new_tokens at least 1")
    config = model_config(args, load_tokenizer(args.tokenizer_path))
    device = pick_device(args.device, 0)
    torch.manual_seed(args.seed)
    model, tokenizer = init_model(config, args.weight, args.tokenizer_path, args.save_dir, device)
    model.eval()
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    if args.prompt is not None:
        answer(model, tokenizer, [*messages, {"role": "user", "content": args.prompt}], args, streamer)
        return
    print("Type a message; an empty line starts a new conversation, Ctrl-D leaves.")
    start = list(messages)
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
            messages.append({"role": "assistant", "content": answer(model, tokenizer, messages, args, streamer)})
        except KeyboardInterrupt:  # Ctrl-C ends the answer, not the chat
            messages.pop()
            print()
        sys.stdout.flush()


if __name__ == "__main__":
    run_main(main)
