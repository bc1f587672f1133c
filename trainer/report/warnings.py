"""Warnings of a run that goes wrong in a known way, each given once, and a line of figures at its end.

Every update counts, whatever --log_interval is: its loss stays on the device until the next record. The loss
is the cross entropy where `loss_fn` gives it as the metric `cross_entropy`, else the training loss without
the auxiliary one. All figures are the same on all ranks.
"""

import math
from dataclasses import asdict, dataclass, field
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import warn
from dataset.token_cache import TokenCache, target_mask
from trainer.devices.device import autocast_dtype, native_bfloat16
from trainer.run.resume import held_out_fingerprint
from trainer.run.state import Hooks, TrainState

MIN_UPDATES = 100  # a run of fewer is pointed out
MEAN_UPDATES = 20  # of a mean; a tenth of the updates so far if that is less
PLATEAU_UPDATES = 300  # or half of a shorter run: then a healthy model knows more than how often tokens occur
REWARD_UPDATES = 10  # in a row without a difference between rewards, or with cut completions only
RISES = 3  # of eval_loss in a row
FAIR_SAMPLES = 8  # of the first update, from which its loss alone is judged
MIN_DISTINCT_TRIGRAMS = 0.5  # in the answers to the sample prompts
CACHE_PARTS, PART_TOKENS = 64, 1 << 14  # of a token cache, in which tokens are counted: a million


@dataclass
class Series:
    """The first and the last of a series of values."""

    number: int = 0
    first: list[float] = field(default_factory=list)  # MEAN_UPDATES at most
    last: list[float] = field(default_factory=list)  # likewise

    def add(self, value: float) -> None:
        """Take in the next value."""
        self.number += 1
        self.first = [*self.first, value][:MEAN_UPDATES]
        self.last = [*self.last, value][-MEAN_UPDATES:]

    @property
    def of_mean(self) -> int:
        """How many values the means at both ends are of."""
        return max(1, min(MEAN_UPDATES, self.number // 10))

    def start(self) -> float:
        """The mean of the first values."""
        return fmean(self.first[: self.of_mean])

    def end(self) -> float:
        """The mean of the last values."""
        return fmean(self.last[-self.of_mean :])

    def end_error(self) -> float:
        """The standard error of `end`; infinite of too few values."""
        return (
            pstdev(self.last) / math.sqrt(self.of_mean) if len(self.last) >= MEAN_UPDATES // 2 else math.inf
        )


@dataclass
class Evaluation:
    """The loss on the held-out data after an update, and the training loss, a mean of the last updates
    then."""

    update: int
    held_out: float
    training: float | None
    training_error: float = math.inf  # the standard error of that mean


@dataclass
class History:
    """What the verdict knows of a run; a checkpoint holds it."""

    warned: list[str] = field(default_factory=list)  # names of the warnings given
    unrecorded: list[str] = field(default_factory=list)  # their texts that no record holds yet
    unread: list[tuple[int, float]] = field(default_factory=list)  # updates and losses not yet looked at
    losses: Series = field(default_factory=Series)  # without those of skipped and empty updates
    is_cross_entropy: bool = False
    first_update: int = 0  # that has a loss
    lowest: float = math.inf  # mean of MEAN_UPDATES losses, or the first loss
    lowest_update: int = 0  # the last of them
    rewards: Series = field(default_factory=Series)  # means of rollouts
    # condition -> the last update for which it did not hold
    false_at: dict[str, int] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    distinct_trigrams: float | None = None  # share, in the answers of the last evaluation


class Verdict(Hooks):
    """Warnings, and the verdict of a run. dataset: what it trains on; the tokens of a token cache are
    counted."""

    def __init__(self, dataset: Any):
        self.dataset, self.unigram_entropy = dataset, 0.0
        self.on_device: list[tuple[int, Tensor]] = []  # update, its loss []
        self.history = History()

    def state_dict(self) -> dict[str, Any]:
        self.fetch()
        return {"verdict": asdict(self.history)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        values = dict(saved["verdict"])
        values |= {name: Series(**values[name]) for name in ("losses", "rewards")}
        self.history = History(
            **values | {"evaluations": [Evaluation(**each) for each in values["evaluations"]]}
        )

    def forget_evaluations(self, state: TrainState) -> None:
        self.history.evaluations, self.history.distinct_trigrams = [], None

    def fetch(self) -> None:
        """Bring the losses of the updates since the last time to the host. Sync point."""
        if self.on_device:
            updates = [update for update, _ in self.on_device]
            losses = torch.stack([loss for _, loss in self.on_device]).tolist()
            self.history.unread += zip(updates, losses, strict=True)
            self.on_device = []

    def warn_if(self, holds: bool, name: str, text: str) -> None:
        """Give a warning, if it was not given before."""
        if holds and name not in self.history.warned:
            self.history.warned.append(name)
            self.history.unrecorded.append(text)
            warn(text)

    def has_lasted(self, name: str, update: int, holds: bool, updates: int) -> bool:
        """Whether a condition, looked at again and again, has held for so many updates in a row."""
        if not holds:
            self.history.false_at[name] = update
        return update - self.history.false_at.get(name, 0) >= updates

    # ---- the loop's hooks

    def batch_start(self, state: TrainState) -> None:
        """Before the first update: what the settings tell."""
        if state.update:
            return
        args, updates, device = state.args, state.total_updates, state.device.type
        text = f"only {updates} updates in this run; more --epochs, or a smaller --batch_size or --accumulation_steps, "
        text += "make more"
        self.warn_if(updates < MIN_UPDATES, "few", text)
        highest = highest_rate(state)
        text = f"--warmup_updates {args.warmup_updates} of {updates} updates: the learning rate reaches {highest:.2g}, "
        text += f"not --learning_rate {args.learning_rate:g}"
        self.warn_if(args.warmup_updates > 0 and highest < 0.7 * args.learning_rate, "warm-up", text)
        is_half = autocast_dtype(state.autocast, state.device) == torch.bfloat16
        emulated = is_half and device in ("cpu", "cuda") and not native_bfloat16(state.device)
        self.warn_if(
            emulated, "dtype", f"--dtype {args.dtype}: this {device} emulates bfloat16; float32 is faster"
        )
        same = held_out_fingerprint(state.eval_loader) == state.run.get("data", "")
        text = "the held-out data are the training data: eval_loss does not tell how the model does on other text"
        self.warn_if(same, "held-out", text)

    def after_step(self, state: TrainState) -> None:
        """Keep the update's loss, on the device, and its mean reward. After the first update a sync point."""
        if state.reward is not None:
            self.history.rewards.add(state.reward)
        if state.update_loss is not None:
            self.on_device.append((state.update, state.update_loss))
            self.history.is_cross_entropy = state.loss_is_cross_entropy
        if state.update == 1:
            self.look_at_the_first_update(state)

    def look_at_the_first_update(self, state: TrainState) -> None:
        """Warn of weights that do not fit the text, and of a teacher that is the student."""
        self.fetch()
        loss, guessing, weight = (
            self.history.unread[-1][1],
            self.loss_of_guessing(state),
            state.args.from_weight,
        )
        text = f"the cross entropy of the first update, {loss:.2f}, is above {guessing:.2f}, that of guessing each "
        text += f"token of the vocabulary alike: the weights of --from_weight {weight} do not fit this text"
        is_fair = state.run["global_batch"] >= FAIR_SAMPLES
        self.warn_if(weight != "none" and is_fair and loss > 1.01 * guessing, "first loss", text)
        sums = dict(zip(state.metric_names, state.losses[2:].tolist(), strict=True))
        is_same = math.isfinite(loss) and abs(sums.get("divergence", math.inf)) < 1e-5
        self.warn_if(
            is_same, "teacher", "the teacher predicts just what the student does: are they the same weights?"
        )

    def record_values_after_eval(self, state: TrainState, record: dict[str, Any]) -> dict[str, Any]:
        """The warnings since the last record, and of this one."""
        self.read_losses(state)
        if record.get("reward") is not None:
            self.look_at_rewards(state.args, record)
        if record.get("eval_loss") is not None:
            self.history.distinct_trigrams = record.get("distinct_trigrams")
            self.add_evaluation(state, record["update"], record["eval_loss"])
        texts, self.history.unrecorded = self.history.unrecorded, []
        return {"warnings": texts} if texts else {}

    # ---- losses

    def read_losses(self, state: TrainState) -> None:
        """Look at the losses of the updates since the last time, one after the other. Sync point."""
        self.fetch()
        unread, self.history.unread = self.history.unread, []
        for update, loss in unread:
            if math.isfinite(loss) and not self.history.rewards.number:  # a policy's loss tells nothing
                self.add_loss(state, update, loss)

    def add_loss(self, state: TrainState, update: int, loss: float) -> None:
        """Take in the loss of an update; warn of one that rose, or that does not leave the unigram
        plateau."""
        history = self.history
        history.losses.add(loss)
        if history.losses.number == 1:
            history.first_update = update
            if state.run["global_batch"] >= FAIR_SAMPLES:
                history.lowest, history.lowest_update = loss, update
        if len(history.losses.last) < MEAN_UPDATES:
            return
        mean = fmean(history.losses.last)
        if mean < history.lowest:
            history.lowest, history.lowest_update = mean, update
        text = f"the {self.loss_name} rose to {mean:.2f}, the mean of the last {MEAN_UPDATES} updates, from "
        text += f"{history.lowest:.2f} at update {history.lowest_update}; a smaller learning rate may help"
        self.warn_if(self.has_risen(state, mean), "rose", text)
        self.look_at_plateau(state, update, mean)

    def has_risen(self, state: TrainState, mean: float) -> bool:
        """Whether the loss lies far above its lowest: by a fifth and by four standard deviations of single
        updates; or whether each of the last updates is above both the first one and guessing."""
        losses, low = self.history.losses, self.history.lowest
        is_far = mean - low > max(0.2 * abs(low), 4 * pstdev(losses.last))
        return is_far or min(losses.last) > 1.05 * max(losses.first[0], self.loss_of_guessing(state))

    def look_at_plateau(self, state: TrainState, update: int, mean: float) -> None:
        """Warn if the model knows the frequencies of single tokens, and nothing else yet."""
        cache = getattr(self.dataset, "cache", None)
        if not (self.history.is_cross_entropy and isinstance(cache, TokenCache)):
            return
        if "plateau" in self.history.warned or "rose" in self.history.warned:
            return
        self.unigram_entropy = self.unigram_entropy or unigram_entropy(cache)
        patience = max(MIN_UPDATES // 2, min(PLATEAU_UPDATES, state.total_updates // 2))
        has_lasted = self.has_lasted("plateau", update, mean > 0.97 * self.unigram_entropy, patience)
        text = f"the cross entropy is still {mean:.2f} at update {update}; how often each token occurs gives "
        text += f"{self.unigram_entropy:.2f} by itself; more updates, or another --learning_rate than "
        text += f"{state.args.learning_rate:g}, may help"
        self.warn_if(has_lasted, "plateau", text)

    @property
    def loss_name(self) -> str:
        return "cross entropy" if self.history.is_cross_entropy else "loss"

    def loss_of_guessing(self, state: TrainState) -> float:
        """The cross entropy of guessing each token of the vocabulary alike; infinite for another loss."""
        size = getattr(state.lm_config, "vocab_size", 0)
        return math.log(size) if self.history.is_cross_entropy and size else math.inf

    # ---- rewards

    def look_at_rewards(self, args: Any, record: dict[str, Any]) -> None:
        """Warn where the rewards do not tell one completion from another, and where none ends by itself."""
        update = record["update"]
        if "frac_reward_zero_std" in record:
            which, are_equal = "all completions of a prompt", record["frac_reward_zero_std"] == 1
        else:
            which, are_equal = "all completions", record["reward_std"] < 1e-6
        has_lasted = self.has_lasted("rewards", update, are_equal, REWARD_UPDATES)
        text = f"{self.rollouts_since('rewards', update)} {which} got the same reward (the mean is "
        text += f"{record['reward']:.3f}), so it tells none from another; prompts of another difficulty, or another "
        text += "--reward, may"
        self.warn_if(has_lasted, "rewards", text)
        has_lasted = self.has_lasted("cut", update, record["cut_share"] == 1, REWARD_UPDATES)
        text = f"{self.rollouts_since('cut', update)} every completion was cut, at --max_gen_len {args.max_gen_len} or "
        text += "another limit: none ended by itself"
        self.warn_if(has_lasted, "cut", text)

    def rollouts_since(self, name: str, update: int) -> str:
        """The rollouts in which a condition has held; one that was made before may still have been trained
        on."""
        return f"in the rollouts of updates {self.history.false_at.get(name, 0) + 1} to {update}"

    # ---- evaluations

    def add_evaluation(self, state: TrainState, update: int, held_out: float) -> None:
        """Take in an eval_loss; warn if it rises."""
        history = self.history
        training = history.losses.end() if history.losses.number else None
        history.evaluations.append(Evaluation(update, held_out, training, history.losses.end_error()))
        if history.rewards.number:
            return
        values = [evaluation.held_out for evaluation in history.evaluations[-RISES - 1 :]]
        rises = len(values) > RISES and values == sorted(set(values))
        text = f"eval_loss has risen {RISES} times in a row, to {held_out:.3f}; {self.describe_rise(state)}"
        self.warn_if(rises and is_less(self.lowest_evaluation().held_out, held_out), "rising", text)

    def lowest_evaluation(self) -> Evaluation:
        return min(self.history.evaluations, key=lambda evaluation: evaluation.held_out)

    def describe_rise(self, state: TrainState) -> str:
        """Where eval_loss was lowest, and whether the training loss fell meanwhile."""
        low, now = self.lowest_evaluation(), self.history.evaluations[-1]
        text = f"the lowest, {low.held_out:.3f}, was at update {low.update}"
        if state.args.monitor == "eval_loss" and state.args.mode == "min":
            text += f" ({state.args.save_weight}_best)"
        if self.overfits(low, now):
            text += f"; the training loss fell meanwhile from {low.training:.3f} to {now.training:.3f}, a sign of "
            text += "overfitting"
        return text

    def overfits(self, low: Evaluation, now: Evaluation) -> bool:
        """Whether the training loss has fallen since an evaluation, by more than single updates differ by
        chance, and not just to where it was before a jump."""
        if low.training is None or now.training is None:
            return False
        is_healing = is_less(self.history.lowest, now.training, 0.02)
        by_chance = 3 * math.hypot(low.training_error, now.training_error)
        return (
            is_less(now.training, low.training, 0.01)
            and low.training - now.training > by_chance
            and not is_healing
        )

    # ---- the end

    def last_line(self, state: TrainState) -> str:
        """One line for the end of the run; empty if no update had a loss."""
        self.read_losses(state)
        history = self.history
        if history.rewards.number:
            ends = count(history.rewards.of_mean, "rollout")
            parts = [
                f"reward {history.rewards.start():.3f} in the first {ends}, {history.rewards.end():.3f} in the last"
            ]
        elif history.losses.number:
            parts = [self.describe_losses()]
        else:
            return ""
        if not history.evaluations:
            parts.append("no held-out data (--eval_share 0.02) tell how the model does on other text")
        elif history.rewards.number:
            low = self.lowest_evaluation()
            reward, best = -history.evaluations[-1].held_out, -low.held_out
            parts.append(f"held-out reward {reward:.3f}, the highest {best:.3f} at update {low.update}")
        else:
            parts.append(self.describe_evaluations(state))
        share = history.distinct_trigrams
        if share is not None and share < MIN_DISTINCT_TRIGRAMS:
            parts.append(f"its answers repeat themselves: {share:.0%} of their trigrams are distinct")
        return f"verdict: {'; '.join(parts)}"

    def describe_losses(self) -> str:
        """The losses of the first and of the last updates."""
        history, losses = self.history, self.history.losses
        text = f"{self.loss_name} {losses.first[0]:.3f} at update {history.first_update}, {losses.end():.3f} in the "
        text += f"last {count(losses.of_mean, 'update')}"
        if "rose" in history.warned and is_less(history.lowest, losses.end()):
            text += f", the lowest {history.lowest:.3f} at update {history.lowest_update}"
        return text

    def describe_evaluations(self, state: TrainState) -> str:
        """The last eval_loss, how far it is above the training loss, and where it came from."""
        now = self.history.evaluations[-1]
        text = f"held-out loss {now.held_out:.3f}"
        if self.history.is_cross_entropy and now.training is not None:
            text += f" ({now.held_out - now.training:+.3f})"
        if is_less(self.lowest_evaluation().held_out, now.held_out):
            return f"{text}, {self.describe_rise(state)}"
        if len(self.history.evaluations) == 1:
            return f"{text}, evaluated once; --eval_interval shows where it goes"
        earlier = [each for each in self.history.evaluations if each.update <= 0.8 * now.update]
        before = earlier[-1] if earlier else self.history.evaluations[0]
        if self.lowest_evaluation().held_out < now.held_out:  # it falls no more
            before = self.lowest_evaluation()
        reference = f"{before.held_out:.3f} at update {before.update}"
        if is_less(now.held_out, before.held_out):
            return f"{text}, still falling ({reference})"
        return f"{text}, hardly changed ({reference})"


def highest_rate(state: TrainState) -> float:
    """The highest learning rate of the schedule, at up to two thousand updates; infinite where a scheduler of
    torch sets it."""
    total = state.total_updates
    rates = [
        state.schedule(update, total, state.args) for update in range(1, total + 1, max(1, total // 1000))
    ]
    return max(math.inf if rate is None else rate for rate in rates)


def count(number: int, name: str) -> str:
    """A number of things: `1 update`, `20 updates`."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def is_less(low: float, high: float, share: float = 0.005) -> bool:
    """Whether a loss is below another by more than chance: evaluations differ by half a percent."""
    return high - low > share * abs(low)


def unigram_entropy(cache: TokenCache) -> float:
    """The cross entropy, in nats, of a model that knows how often each target occurs and nothing else; of a
    million tokens, from all parts of the cache."""
    size, parts = len(cache.tokens), []
    for begin in range(0, size, max(PART_TOKENS, size // CACHE_PARTS)):
        tokens = np.array(cache.tokens[begin : begin + PART_TOKENS])
        parts.append(tokens[target_mask(cache, begin, begin + len(tokens))])
    cache.release()
    counts = np.bincount(np.concatenate(parts))
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())
