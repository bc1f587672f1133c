"""Speed of reinforcement learning: rollouts against transformers' `generate`, whole GRPO updates against MiniMind's.

python scripts/bench/rollouts.py --save_dir out/demo --data_path dataset/demo/sft_eval.jsonl
python scripts/bench/rollouts.py --save_dir out/demo --data_path dataset/demo/sft_eval.jsonl --peer_path ../minimind

Rollouts: both sample the same number of completions to the same prompts, with the same weights, temperature 1 and no
further limits; the peer is the stock class of transformers with the prompts of a batch padded on the left, as trainers
commonly call it. Updates: MiniMind's train_grpo.py, unmodified, in a process of its own, with the same prompts, group,
lengths and KL divergence, and a reward model that costs nothing (see scripts/bench/peers.py). It samples from the 50
likeliest tokens with probability 0.85.

The two alternate, and each ratio is the median of those of the rounds. Counted are the tokens up to each completion's
end token; sampling being random, the completions differ, and their mean lengths are told.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run the code beside this file, installed or not

from transformers import AutoModelForCausalLM

from common.command_line import Parser, one_line_errors
from common.errors import UserError, say
from dataset.prompts import Prompt, PromptDataset, collate_prompts
from scripts.bench.pairs import PeerProcess, check_peer
from scripts.convert.hugging_face import own_tensors, stock_config
from trainer import train_grpo
from trainer.components.checkpoint import snapshot
from trainer.components.device import mixed_precision
from trainer.components.language_model import SHAPE, frozen_model
from trainer.components.optimizer import build_optimizer
from trainer.components.policy_loss import METRICS
from trainer.components.reinforcement import build_sampler
from trainer.components.resume import model_fingerprint, run_fingerprint
from trainer.components.rewards import load_rewards
from trainer.components.rollouts import Rollouts
from trainer.components.state import TrainState
from trainer.components.trained_weights import add_trained_model_flags, load_model
from trainer.components.trajectories import Sampler
from trainer.loop import train_update, update_size

Way = Callable[[list[Prompt], int], tuple[float, list[int]]]  # prompts, a number -> seconds, tokens of each completion


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    add_trained_model_flags(parser)
    flag("--data_path", required=True, help="prompts, as train_grpo.py takes them")
    flag("--prompts", type=int, default=16, help="prompts of a rollout")
    flag("--num_generations", type=int, default=8, help="completions per prompt")
    flag("--max_seq_len", type=int, default=512, help="tokens of the longest prompt")
    flag("--max_gen_len", type=int, default=64, help="tokens of the longest completion")
    flag("--repeat", type=int, default=5, help="rounds")
    flag("--peer_path", help="folder of a checkout of jingyaogong/minimind: compare whole updates with its")
    flag("--peer_python", help="Python with the packages that it needs (default: this one)")
    flag("--json", help="file to write")
    args = parser.parse_args()
    if min(args.prompts, args.num_generations, args.max_gen_len, args.repeat) < 1:
        raise UserError("--prompts, --num_generations, --max_gen_len and --repeat must be at least 1")
    if args.peer_path:
        check_peer("minimind", "grpo", args.peer_path, args.peer_python)
    return args


# --- rollouts --------------------------------------------------------------------------------------------------------


def timed(write: Callable[[list[Prompt], int], list[int]]) -> Way:
    """A way that is timed from outside."""

    def run(prompts: list[Prompt], number: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        lengths = write(prompts, number)
        return time.perf_counter() - start, lengths

    return run


def ours(model: Any, tokenizer: Any, group: int, max_gen_len: int) -> Way:
    """Rollouts as training makes them."""
    sampler = Sampler(tokenizer, group, 1.0, max_gen_len, seed=0)
    return timed(lambda prompts, number: [each.sampled for each in sampler.write(model, prompts, number)])


def generated(model: Any, tokenizer: Any, group: int, max_gen_len: int) -> Way:
    """The same by `generate` of the stock class."""
    config = stock_config(model.config)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(model.device)
    stock.load_state_dict(own_tensors(model), strict=not config.tie_word_embeddings)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    options = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "num_return_sequences": group}
    options |= {"max_new_tokens": max_gen_len, "eos_token_id": end, "pad_token_id": pad}

    def write(prompts: list[Prompt], number: int) -> list[int]:
        torch.manual_seed(number)
        rows = {"input_ids": [prompt.input_ids for prompt in prompts]}
        batch = tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(stock.device)
        with torch.inference_mode():
            written = stock.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
        return [tokens_to_end(row, end) for row in written.tolist()]

    return timed(write)


def tokens_to_end(row: list[int], end: int) -> int:
    """Tokens up to the first end token, with it; what follows is filling."""
    return row.index(end) + 1 if end in row else len(row)


# --- whole updates ---------------------------------------------------------------------------------------------------


def grpo_args(args: argparse.Namespace, model: Any) -> train_grpo.Args:
    """The settings of both trainers."""
    shape = {name: getattr(model.config, name) for name in SHAPE}
    own = {"batch_size": args.prompts, "num_generations": args.num_generations, "max_gen_len": args.max_gen_len}
    own |= {"max_seq_len": args.max_seq_len, "learning_rate": 3e-7, "beta": 0.1, "loss_type": "grpo"}
    return train_grpo.Args(**shape, **own, temperature=0.8, reward="length,repetition")


def our_updates(args: argparse.Namespace, model: Any, tokenizer: Any, prompts: PromptDataset) -> Way:
    """Whole updates as the stage makes them."""
    settings, config, device = grpo_args(args, model), model.config, model.device
    reference = frozen_model(type(model)(config), device)
    reference.load_state_dict(model.state_dict())
    rewards = load_rewards(settings.reward)
    rollouts = Rollouts(settings, config, build_sampler(settings, tokenizer, prompts), rewards, reference)
    run = run_fingerprint(settings, model_fingerprint(config), prompts.fingerprint, len(prompts))
    autocast, scaler = mixed_precision("float32", device)  # on a CPU MiniMind's precision, whatever its --dtype says
    optimizer = build_optimizer(model, settings.learning_rate, settings.weight_decay)
    state = TrainState(
        args=settings,
        lm_config=config,
        model=model.train(),
        optimizer=optimizer,
        scaler=scaler,
        autocast=autocast,
        device=device,
        loss_fn=train_grpo.loss_fn,
        schedule=lambda *_: settings.learning_rate,
        run=run,
        metric_names=METRICS,
        size_fn=rollouts.size,
        hooks=[rollouts],
    )

    def update(batch: list[Prompt], number: int) -> list[int]:
        window = rollouts.prepare(state, [collate_prompts(batch)])
        written = rollouts.fresh["length"]
        targets, tokens, _ = update_size(state, [state.size(each) for each in window])
        train_update(state, window, targets, tokens)
        state.update += 1
        completions = args.prompts * args.num_generations
        return [round(written / completions)] * completions

    return timed(update)


def their_updates(peer: PeerProcess, end: int) -> Way:
    """Whole updates of MiniMind's script, on the prompts of its file, one batch after another."""

    def update(batch: list[Prompt], number: int) -> tuple[float, list[int]]:
        reply = peer.train(1)
        rows = [row["input_ids"] for each in reply["micro_batches"] for row in each["rows"]]
        return reply["seconds"], [tokens_to_end(row, end) for row in rows]

    return update


def minimind(args: argparse.Namespace, model: Any, tokenizer: Any, batches: list[list[Prompt]]) -> PeerProcess:
    """MiniMind's train_grpo.py on these prompts."""
    settings = grpo_args(args, model)
    names = (*SHAPE[:3], "batch_size", "num_generations", "max_seq_len", "max_gen_len", "learning_rate", "beta")
    flags = {name: getattr(settings, name) for name in (*names, "loss_type")}
    flags |= {"device": str(model.device), "num_workers": 0, "thinking_ratio": 0.0}
    dropped = {"role": "assistant", "content": "?"}  # MiniMind drops the last turn
    more = [*batches, batches[0]]  # its epoch, at whose end it writes files, does not end
    records = [{"conversations": [*prompt.messages, dropped]} for batch in more for prompt in batch]
    peer = argparse.Namespace(peer="minimind", peer_path=args.peer_path, peer_python=args.peer_python)
    return PeerProcess(peer, "grpo", records, tokenizer, snapshot(model.state_dict()), model.config, flags)


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(ways: dict[str, Way], batches: list[list[Prompt]]) -> dict[str, dict[str, list[float]]]:
    """Seconds, tokens per second and mean length of a completion of each way in each round; the ways take turns, and
    from round to round another goes first. The first batch of prompts is for warming up."""
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "rates": [], "lengths": []} for name in ways}
    for number, batch in enumerate(batches):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            seconds, lengths = ways[name](batch, number)
            values = {"seconds": seconds, "rates": sum(lengths) / seconds, "lengths": statistics.mean(lengths)}
            for field, value in values.items() if number else ():
                found[name][field].append(value)
    return found


def tell(title: str, found: dict[str, dict[str, list[float]]]) -> list[float]:
    """Print the figures of two ways; returns the ratios of their rates."""
    for name, figures in found.items():
        seconds, rate = (statistics.median(figures[field]) for field in ("seconds", "rates"))
        length = statistics.mean(figures["lengths"])
        say(f"{title}, {name}: {rate:,.0f} tokens/s, {seconds:.2f} s, {length:.1f} tokens per completion")
    ratios = [a / b for a, b in zip(*(figures["rates"] for figures in found.values()), strict=True)]
    say(f"{title}, ratio: {statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    return ratios


def main() -> None:
    """Measure and print."""
    args = parse_args()
    model, tokenizer = load_model(args)
    data = PromptDataset(args.data_path, tokenizer, args.max_seq_len, str(Path(args.save_dir) / "cache"))
    endless = itertools.cycle(data[i] for i in range(len(data)))
    batches = [list(itertools.islice(endless, args.prompts)) for _ in range(args.repeat + 1)]
    parts = (model, tokenizer, args.num_generations, args.max_gen_len)
    rollouts = measure({"ours": ours(*parts), "generate": generated(*parts)}, batches)
    report: dict[str, Any] = {"rollouts": rollouts | {"ratios": tell("rollouts", rollouts)}}
    if args.peer_path:
        with minimind(args, model, tokenizer, batches) as peer:
            theirs = their_updates(peer, tokenizer.eos_token_id)
            updates = measure({"ours": our_updates(args, model, tokenizer, data), "MiniMind": theirs}, batches)
        report["updates"] = updates | {"ratios": tell("updates", updates)}
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with one_line_errors():
        main()
