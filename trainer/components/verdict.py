"""What a run says of itself: a warning where it goes wrong in one of the known ways, each once, and a verdict at its
end. It judges by figures that are the same on all ranks."""

import math
from typing import Any

import numpy as np
import torch

from common.errors import warn
from dataset.token_cache import TokenCache, target_mask
from trainer.components.device import autocast_dtype, native_bfloat16
from trainer.components.resume import held_out_fingerprint
from trainer.components.state import Hooks, TrainState

FEW = 100  # updates in which a model hardly changes
LONG = 300  # updates, or half of a shorter run, in which a healthy model has left the unigram plateau
SOON = 20  # updates in a row above the first loss; of rewards half as many
RISES = 3  # evaluations in a row
PIECES, PIECE = 64, 1 << 14  # of a cache in which tokens are counted: a million


class Verdict(Hooks):
    """Warnings and the verdict of a run. dataset: what it trains on; the tokens of a token cache are counted."""

    def __init__(self, dataset: Any):
        self.dataset, self.entropy = dataset, 0.0
        self.said: list[str] = []  # names of the warnings given
        self.pending: list[str] = []  # their texts that no record holds yet
        self.since: dict[str, int] = {}  # condition -> the last update that was reported without it
        self.first: dict[str, float] = {}  # reward of the first record, loss of the first update
        self.last: dict[str, float] = {}  # of the last record
        self.evaluations: list[tuple[int, float]] = []  # update, eval_loss

    def state_dict(self) -> dict[str, Any]:
        return {"verdict": {name: value for name, value in vars(self).items() if name not in ("dataset", "entropy")}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved.get("verdict", {}))

    def warn_if(self, holds: bool, name: str, text: str) -> None:
        """Give a warning, if it was not given before."""
        if holds and name not in self.said:
            self.said.append(name)
            self.pending.append(text)
            warn(text)

    def lasts(self, name: str, update: int, holds: bool, updates: int) -> bool:
        """Whether a condition, looked at in each record, has held for so many updates in a row."""
        if not holds:
            self.since[name] = update
        return update - self.since.setdefault(name, 0) >= updates

    # ---- the loop's hooks

    def batch_start(self, state: TrainState) -> None:
        """Before the first update: what the settings tell."""
        if state.update:
            return
        args, updates, device = state.args, state.total_updates, state.device.type
        steps = args.accumulation_steps
        fewer = f"--accumulation_steps, which is {steps}" if steps > 1 else "--batch_size"
        text = f"{updates} updates change a model little; raise --epochs or lower {fewer}"
        self.warn_if(updates < FEW, "few", text)
        text = f"--warmup_updates {args.warmup_updates} of {updates} updates: the learning rate hardly reaches its peak"
        self.warn_if(2 * args.warmup_updates >= updates, "warm-up", f"{text}; a tenth of the run is enough")
        is_half = autocast_dtype(state.autocast, state.device) == torch.bfloat16
        emulated = is_half and device in ("cpu", "cuda") and not native_bfloat16(state.device)
        self.warn_if(emulated, "dtype", f"--dtype {args.dtype}: this {device} emulates bfloat16; float32 is faster")
        same = held_out_fingerprint(state.eval_loader) == state.run.get("data", "")
        text = "the held-out data are the training data: eval_loss cannot tell learning from remembering"
        self.warn_if(same, "held-out", text)

    def after_step(self, state: TrainState) -> None:
        """After the first update: what its losses tell. Sync point, once in a run."""
        if state.update != 1:
            return
        total, count, *sums = state.losses.tolist()
        loss, figures = total / max(count, 1), dict(zip(state.metric_names, sums, strict=True))
        self.first |= {"mean_loss": loss} if count else {}
        chance, weight = math.log(getattr(state.lm_config, "vocab_size", 0) or math.inf), state.args.from_weight
        # only where the loss is the cross entropy alone; random weights are about as good as chance
        text = f"the first loss {loss:.2f} is above {chance:.2f}, that of guessing: --from_weight {weight} does not "
        text += "fit the text; was it trained with another tokenizer (--tokenizer_path)?"
        self.warn_if(weight != "none" and not figures and loss > 1.01 * chance, "first loss", text)
        text = "the teacher predicts just what the student does: are they the same weights?"
        self.warn_if(count > 0 and abs(figures.get("divergence", 1.0)) < 1e-5, "teacher", text)

    def remarks(self, state: TrainState, record: dict[str, Any]) -> dict[str, Any]:
        """The warnings since the last record, and of this one."""
        update, args = record["update"], state.args
        figures = {name: record[name] for name in ("mean_loss", "reward") if record.get(name) is not None}
        self.first, self.last = figures | self.first, self.last | figures
        if "reward" in figures:
            self.look_at_rewards(args, record)
        elif "mean_loss" in figures and "reward" not in record:
            loss, start = figures["mean_loss"], self.first["mean_loss"]
            diverged = self.lasts("diverged", update, 0 < 1.2 * start < loss, SOON)
            text = f"the loss is {loss:.2f}, and was {start:.2f} at the start: --learning_rate {args.learning_rate:g} "
            self.warn_if(diverged, "diverged", text + "is too large; try a third of it")
            self.look_at_plateau(state, update, loss)
        if (value := record.get("eval_loss")) is not None:
            self.evaluations.append((update, value))
            rising = [each for _, each in self.evaluations[-RISES - 1 :]]
            low, at = self.best()
            rises = len(rising) > RISES and rising == sorted(set(rising)) and clearly(low, value)
            text = f"eval_loss has risen {RISES} times in a row, to {value:.3f}: it remembers its data; the best, "
            text += f"{low:.3f}, was at update {at}" + f" ({args.save_weight}_best)" * (args.monitor == "eval_loss")
            self.warn_if(rises and "reward" not in record, "rising", text)
        pending, self.pending = self.pending, []
        return {"warnings": pending} if pending else {}

    def look_at_plateau(self, state: TrainState, update: int, loss: float) -> None:
        """Warn if the model knows the frequencies of single tokens, and nothing else yet."""
        cache = getattr(self.dataset, "cache", None)
        if state.metric_names or not isinstance(cache, TokenCache) or {"plateau", "diverged"} & set(self.said):
            return
        self.entropy = self.entropy or unigram_entropy(cache)
        patience = max(FEW // 2, min(LONG, state.total_updates // 2))
        text = f"the loss is still {loss:.2f} after {update} updates; the frequencies of single tokens alone give "
        text += f"{self.entropy:.2f}: raise --learning_rate, or make more and smaller updates"
        self.warn_if(self.lasts("plateau", update, loss > 0.97 * self.entropy, patience), "plateau", text)

    def look_at_rewards(self, args: Any, record: dict[str, Any]) -> None:
        """Warn where nothing can be learned from the rewards."""
        equal = record.get("frac_reward_zero_std", float(record["reward_std"] < 1e-6)) == 1
        text = f"for {SOON // 2} updates all completions of a prompt got the same reward (frac_reward_zero_std 1), so "
        text += "nothing is learned; easier prompts, another --reward, or more SFT"
        self.warn_if(self.lasts("rewards", record["update"], equal, SOON // 2), "rewards", text)
        text = (
            f"for {SOON // 2} updates every completion was cut, at --max_gen_len {args.max_gen_len} or another limit; "
        )
        cut = self.lasts("cut", record["update"], record["cut_share"] > 0.99, SOON // 2)
        self.warn_if(cut, "cut", text + "raise it, or train the model to answer briefly")

    # ---- the end

    def best(self) -> tuple[float, int]:
        """The lowest eval_loss, and its update."""
        return min((value, update) for update, value in self.evaluations)

    def verdict(self, state: TrainState) -> str:
        """One line for the end of the run, in words; empty if nothing was reported."""
        name = "reward" if "reward" in self.first else "mean_loss"
        if name not in self.last:  # the run was stopped before its first record
            return ""
        first, last = self.first[name], self.last[name]
        text = f"verdict: {name.removeprefix('mean_')} {first:.3f} at the start, {last:.3f} at the end; "
        if not self.evaluations:
            return text + "whether it learns or remembers, only held-out data tell (--eval_share 0.02)"
        (low, at), (end, value) = self.best(), self.evaluations[-1]
        if name == "reward":
            return text + f"held-out reward {-value:.3f}, the best {-low:.3f} at update {at}"
        earlier = [each for update, each in self.evaluations if update <= 0.8 * end]
        if clearly(low, value):
            trend = f"rising since update {at} ({low:.3f}): it remembers its data; fewer epochs, or more data"
        elif not earlier:
            trend = "evaluated at the end only; --eval_interval shows where it goes"
        else:
            falls = clearly(value, earlier[-1])
            trend = "still falling: more updates would help" if falls else "hardly changing any more"
        gap = "" if "divergence" in state.metric_names else f" ({value - last:+.3f})"
        return text + f"held-out loss {value:.3f}{gap}, {trend}"


def clearly(low: float, high: float) -> bool:
    """Whether a loss is above another by more than evaluations differ by chance: half a percent."""
    return high - low > 0.005 * abs(low)


def unigram_entropy(cache: TokenCache) -> float:
    """The cross entropy, in nats, of a model that knows how often each target occurs and nothing else; of a million
    tokens, from all parts of the cache."""
    size, parts = len(cache.tokens), []
    for begin in range(0, size, max(PIECE, size // PIECES)):
        tokens = np.array(cache.tokens[begin : begin + PIECE])
        parts.append(tokens[target_mask(cache, begin, begin + len(tokens))])
    cache.release()
    counts = np.bincount(np.concatenate(parts))
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())
