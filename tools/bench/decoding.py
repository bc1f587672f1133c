"""Speed of rollouts: our decoder against transformers' `generate`, with the same weights and prompts.

    python tools/bench/decoding.py --save_dir out/demo --data_path dataset/demo/sft_eval.jsonl

Both sample the same number of completions to the same prompts at temperature 1, without top-k or top-p. The
peer is the stock class of transformers with the prompts of a batch padded on the left, as trainers commonly
call it. The two alternate, and the ratio is the median of those of the rounds. Counted are the tokens up to
each completion's end token; sampling being random, the completions differ, and their mean length is printed.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import AutoModelForCausalLM

from common.command_line import Parser, one_line_errors
from common.errors import UserError, say
from dataset.rollout_prompts import PromptDataset
from model.generation import generate
from model.sampling import Sampling
from tools.convert.hugging_face import own_tensors, stock_config
from trainer.weights.for_tools import add_trained_model_flags, load_model

Decoder = Callable[[list[list[int]]], list[int]]  # prompts -> number of tokens of each completion
GROUP = 8  # completions per prompt


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    add_trained_model_flags(parser)
    flag("--data_path", required=True, help="prompts, as train_grpo.py takes them")
    flag("--prompts", type=int, default=16, help="prompts of a rollout")
    flag("--max_gen_len", type=int, default=64, help="tokens of the longest completion")
    flag("--repeat", type=int, default=5, help="rounds")
    args = parser.parse_args()
    if min(args.prompts, args.max_gen_len, args.repeat) < 1:
        raise UserError("--prompts, --max_gen_len and --repeat must be at least 1")
    return args


def our_decoder(model: Any, tokenizer: Any, max_gen_len: int) -> Decoder:
    """Completions as training samples them."""
    seeds = itertools.count()

    def write(prompts: list[list[int]]) -> list[int]:
        samplings = [[Sampling(1.0, seed=next(seeds)) for _ in range(GROUP)] for _ in prompts]
        slots = len(prompts) * GROUP
        answers = generate(model, prompts, samplings, max_gen_len, [tokenizer.eos_token_id], slots)
        return [len(answer.tokens) for group in answers for answer in group]

    return write


def stock_decoder(model: Any, tokenizer: Any, max_gen_len: int) -> Decoder:
    """The same by `generate` of the stock class."""
    config = stock_config(model.config)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(model.device)
    stock.load_state_dict(own_tensors(model), strict=not config.tie_word_embeddings)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    options = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "num_return_sequences": GROUP}
    options |= {"max_new_tokens": max_gen_len, "eos_token_id": end, "pad_token_id": pad}

    def write(prompts: list[list[int]]) -> list[int]:
        batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        batch = batch.to(stock.device)
        with torch.inference_mode():
            rows = stock.generate(**batch, **options)[:, batch["input_ids"].shape[1] :].tolist()
        # padding follows the end token
        return [row.index(end) + 1 if end in row else len(row) for row in rows]

    return write


def main() -> None:
    """Measure and print. The decoders take turns, another one first from round to round; round 0 is for
    warming up."""
    args = parse_args()
    torch.manual_seed(0)
    model, tokenizer = load_model(args)
    data = PromptDataset(args.data_path, tokenizer, 512)
    endless = itertools.cycle(list(data[i].input_ids) for i in range(len(data)))
    decoders = {
        "ours": our_decoder(model, tokenizer, args.max_gen_len),
        "generate": stock_decoder(model, tokenizer, args.max_gen_len),
    }
    rates: dict[str, list[float]] = {name: [] for name in decoders}  # tokens per second of each round
    lengths: dict[str, list[float]] = {name: [] for name in decoders}  # tokens per completion
    order = list(decoders)
    for number in range(args.repeat + 1):
        prompts = list(itertools.islice(endless, args.prompts))
        for name in order:
            begin = time.perf_counter()
            tokens = sum(decoders[name](prompts))
            if number > 0:
                rates[name].append(tokens / (time.perf_counter() - begin))
                lengths[name].append(tokens / (args.prompts * GROUP))
        order.reverse()
    for name in decoders:
        say(f"{name}: {median(rates[name]):,.0f} tokens/s, {mean(lengths[name]):.1f} tokens per completion")
    ratios = [ours / other for ours, other in zip(rates["ours"], rates["generate"], strict=True)]
    say(f"ratio: {median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")


if __name__ == "__main__":
    with one_line_errors():
        main()
