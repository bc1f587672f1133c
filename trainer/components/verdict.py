"""What a run says of itself: a warning where it goes wrong in one of the known ways, each once, and a verdict at its
end. Everything is judged by figures that are the same on all ranks, so that all of them keep the same counts."""

import math
from typing import Any

import numpy as np
import torch

from common.errors import warn
from dataset.token_cache import TokenCache
from trainer.components.device import autocast_dtype, native_bfloat16
from trainer.components.resume import held_out_fingerprint
from trainer.components.state import Hooks, TrainState

FEW = 100  # updates in which a model hardly changes
LONG = 300  # updates, or half of a shorter run, in which a healthy model has left the unigram plateau
SOON = 20  # updates in a row; of rewards and completions half as many
RISES = 3  # evaluations in a row
PIECES, PIECE = 64, 1 << 14  # of a cache in which tokens are counted: a million


class Verdict(Hooks):
    """Warnings and the verdict of a run.

    Args:
        dataset: what is trained on; with a token cache the frequencies of its tokens are counted.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self.entropy: float | None = None  # of single tokens; counted when it is first asked for
        self.said: list[str] = []  # names of the warnings given
        self.pending: list[str] = []  # their texts that no record holds yet
        self.since: dict[str, int] = {}  # condition -> the last update that was reported without it
        self.first: dict[str, float] = {}  # figures of the first record, and of the last
        self.last: dict[str, float] = {}
        self.evaluations: list[tuple[int, float]] = []  # update, eval_loss

    def state_dict(self) -> dict[str, Any]:
        names = ("said", "pending", "since", "first", "last", "evaluations")
        return {"verdict": {name: getattr(self, name) for name in names}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved.get("verdict", {}))

    def warn(self, name: str, text: str) -> None:
        """Give a warning, if it was not given before."""
        if name not in self.said:
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
        args, updates = state.args, state.total_updates
        if updates < FEW:
            steps = args.accumulation_steps
            fewer = f" or lower --accumulation_steps, which is {steps}" if steps > 1 else " or lower --batch_size"
            self.warn("few", f"{updates} updates change a model little; raise --epochs{fewer}")
        if 2 * args.warmup_updates >= updates:
            text = f"--warmup_updates {args.warmup_updates} of {updates} updates: the learning rate hardly gets to its "
            self.warn("warmup", text + "peak; a tenth of the run is enough")
        emulated = autocast_dtype(state.autocast, state.device) == torch.bfloat16 and not native_bfloat16(state.device)
        if emulated and state.device.type in ("cpu", "cuda"):
            self.warn("dtype", f"--dtype {args.dtype}: this {state.device.type} emulates bfloat16; float32 is faster")
        if held_out_fingerprint(state.eval_loader) == state.run.get("data", ""):
            self.warn("held-out", "the held-out data are the training data: eval_loss cannot show what is remembered")

    def after_step(self, state: TrainState) -> None:
        """After the first update: what its losses tell. Sync point, once in a run."""
        if state.update != 1:
            return
        total, count, *sums = state.losses.tolist()
        loss, figures = total / max(count, 1), dict(zip(state.metric_names, sums, strict=True))
        vocabulary, weight = getattr(state.lm_config, "vocab_size", 0), state.args.from_weight
        # of stages whose loss is the cross entropy alone; random weights are about as good as chance
        if weight != "none" and not figures and vocabulary and loss > 1.01 * math.log(vocabulary):
            text = f"the first loss {loss:.2f} is above {math.log(vocabulary):.2f}, that of guessing: --from_weight "
            text += f"{weight} does not fit the text; was it trained with another tokenizer (--tokenizer_path)?"
            self.warn("first loss", text)
        if count and abs(figures.get("divergence", 1.0)) < 1e-5:
            self.warn(
                "teacher", "the teacher predicts what the student does: are they the same weights? Nothing to learn"
            )

    def remarks(self, state: TrainState, record: dict[str, Any]) -> dict[str, Any]:
        """The warnings since the last record."""
        self.note(state, record)
        pending, self.pending = self.pending, []
        return {"warnings": pending} if pending else {}

    def note(self, state: TrainState, record: dict[str, Any]) -> None:
        """Keep the figures of a record, and warn of what they tell."""
        update, args = record["update"], state.args
        figures = {name: record[name] for name in ("mean_loss", "reward") if record.get(name) is not None}
        self.first, self.last = figures | self.first, self.last | figures
        loss, start = figures.get("mean_loss"), self.first.get("mean_loss", 0.0)
        if "reward" in record:
            self.note_rewards(args, record)
        elif loss is not None:
            if self.lasts("diverged", update, 0 < 1.2 * start < loss, SOON):
                text = (
                    f"the loss is {loss:.2f}, and was {start:.2f} at the start: --learning_rate {args.learning_rate:g}"
                )
                self.warn("diverged", text + " is too large; try a third of it")
            self.note_plateau(state, update, loss)
        if (value := record.get("eval_loss")) is None:
            return
        self.evaluations.append((update, value))
        rising = [value for _, value in self.evaluations[-RISES - 1 :]]
        best, at = self.best()
        if "reward" not in record and len(rising) > RISES and rising == sorted(set(rising)) and clearly(best, value):
            kept = f" ({args.save_weight}_best)" if args.monitor == "eval_loss" else ""
            text = f"eval_loss has risen {RISES} times in a row, to {value:.3f}: it remembers its data; the best, "
            self.warn("rising", text + f"{best:.3f}, was at update {at}{kept}")

    def note_plateau(self, state: TrainState, update: int, loss: float) -> None:
        """Warn if the model knows the frequencies of single tokens, and nothing else yet."""
        cache, patience = getattr(self.dataset, "cache", None), max(FEW // 2, min(LONG, state.total_updates // 2))
        if state.metric_names or cache is None or "plateau" in self.said:
            return
        if self.entropy is None:
            self.entropy = unigram_entropy(cache)
        if self.lasts("plateau", update, loss > 0.97 * self.entropy, patience):
            text = f"the loss is still {loss:.2f} after {update} updates; the frequencies of single tokens alone give "
            text += f"{self.entropy:.2f}: raise --learning_rate, or make more and smaller updates"
            self.warn("plateau", text)

    def note_rewards(self, args: Any, record: dict[str, Any]) -> None:
        """Warn where nothing can be learned from the rewards. A record without a rollout tells nothing."""
        if record["reward"] is None:
            return
        equal = record.get("frac_reward_zero_std", float(record["reward_std"] < 1e-6)) == 1
        if self.lasts("rewards", record["update"], equal, SOON // 2):
            text = f"for {SOON // 2} updates all completions of a prompt got the same reward (frac_reward_zero_std 1): "
            self.warn("rewards", text + "nothing is learned; easier prompts, another --reward, or more SFT")
        if self.lasts("cut", record["update"], record["cut_share"] > 0.99, SOON // 2):
            text = f"for {SOON // 2} updates every completion was cut, at --max_gen_len {args.max_gen_len} or another "
            self.warn("cut", text + "limit; raise it, or train the model to answer briefly")

    # ---- the end

    def best(self) -> tuple[float, int]:
        """The lowest eval_loss, and its update."""
        return min((value, update) for update, value in self.evaluations)

    def verdict(self, state: TrainState) -> str:
        """One line for the end of the run, in words; empty if nothing was reported."""
        if "reward" in self.first:
            text = f"reward {self.first['reward']:.3f} at the start, {self.last['reward']:.3f} at the end"
        elif "mean_loss" in self.first:
            text = f"loss {self.first['mean_loss']:.3f} at the start, {self.last['mean_loss']:.3f} at the end"
        else:
            return ""
        if not self.evaluations:
            return f"verdict: {text}; whether it learns or remembers, only held-out data tell (--eval_share 0.02)"
        (value, at), (end, last) = self.best(), self.evaluations[-1]
        if "reward" in self.first:
            return f"verdict: {text}; held-out reward {-last:.3f}, the best {-value:.3f} at update {at}"
        earlier = [each for update, each in self.evaluations if update <= 0.8 * end]
        if clearly(value, last):
            trend = f"rising since update {at} ({value:.3f}): it remembers its data; fewer epochs, or more data"
        elif not earlier:
            trend = "evaluated at the end only; --eval_interval shows where it goes"
        elif clearly(last, earlier[-1]):
            trend = "still falling: more updates would help"
        else:
            trend = "hardly changing any more"
        gap = "" if "divergence" in state.metric_names else f" ({last - self.last['mean_loss']:+.3f})"
        return f"verdict: {text}; held-out loss {last:.3f}{gap}, {trend}"


def clearly(low: float, high: float) -> bool:
    """Whether a loss is above another by more than evaluations differ by chance: half a percent."""
    return high - low > 0.005 * abs(low)


def unigram_entropy(cache: TokenCache) -> float:
    """The cross entropy, in nats, of a model that knows how often each target occurs and nothing else; of a million
    tokens, from all parts of the cache."""
    size, counts = len(cache.tokens), np.zeros(1, dtype=np.int64)
    for begin in range(0, size, max(PIECE, size // PIECES)):
        end = min(size, begin + PIECE)
        mask = np.ones(end - begin, bool) if cache.loss_mask is None else np.array(cache.loss_mask[begin:end])
        first, last = np.searchsorted(cache.offsets, (begin, end))
        mask[cache.offsets[first:last] - begin] = False  # the first token of a sample is no target
        found = np.bincount(np.array(cache.tokens[begin:end])[mask], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    cache.release()
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())
