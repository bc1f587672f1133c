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
from dataset.token_cache import TokenCache
from trainer.devices.device import autocast_dtype, automatic_dtype, native_bfloat16
from trainer.run.callbacks import Callback
from trainer.run.resume import held_out_fingerprint
from trainer.run.state import TrainState

MIN_UPDATES = 100  # a run of fewer is pointed out
MEAN_UPDATES = 20  # of a mean; a tenth of the updates so far if that is less
PLATEAU_UPDATES = 300  # or half of a shorter run: then a healthy model knows more than how often tokens occur
REWARD_UPDATES = 10  # in a row without a difference between rewards, or with cut completions only
RISES_TO_WARN = 3  # of eval_loss in a row
MIN_SAMPLES_OF_FIRST_LOSS = 8  # of the first update, from which its loss alone is judged
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

    def means(self) -> tuple[float, float, int]:
        """The mean of the first values, that of the last ones, and how many values each is of."""
        count = max(1, min(MEAN_UPDATES, self.number // 10))
        return fmean(self.first[:count]), fmean(self.last[-count:]), count


@dataclass
class Evaluation:
    """The loss on the held-out data after an update, and the training loss, a mean of the last updates
    then."""

    update: int
    held_out: float
    training: float | None = None
    training_error: float = math.inf  # the standard error of that mean


@dataclass
class History:
    """The figures of a run; a checkpoint holds them."""

    warned: list[str] = field(default_factory=list)  # names of the warnings given
    unrecorded: list[str] = field(default_factory=list)  # their texts that no record holds yet
    losses: Series = field(default_factory=Series)  # without those of skipped and empty updates
    is_cross_entropy: bool = False
    # the cross entropy of guessing each token of the vocabulary alike; infinite for another loss
    guessing: float = math.inf
    first_update: int = 0  # that has a loss
    lowest: float = math.inf  # mean of MEAN_UPDATES losses, or the first loss
    lowest_update: int = 0  # the last of them
    rewards: Series = field(default_factory=Series)  # means of rollouts
    # condition -> the last update for which it did not hold
    false_at: dict[str, int] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    distinct_trigrams: float | None = None  # share, in the answers of the last evaluation

    def lowest_evaluation(self) -> Evaluation:
        """The one with the lowest eval_loss."""
        return min(self.evaluations, key=lambda evaluation: evaluation.held_out)

    def overfits(self, low: Evaluation, now: Evaluation) -> bool:
        """Whether the training loss has fallen between two evaluations, by more than single updates differ by
        chance, and not just to where it was before a jump."""
        if low.training is None or now.training is None:
            return False
        by_chance = 3 * math.hypot(low.training_error, now.training_error)
        has_fallen = is_less(now.training, low.training, 0.01) and low.training - now.training > by_chance
        return has_fallen and not is_less(self.lowest, now.training, 0.02)


class Verdict(Callback):
    """Warnings, and the verdict of a run. dataset: what it trains on; the tokens of a token cache are
    counted."""

    def __init__(self, dataset: Any):
        self.dataset, self.unigram_entropy = dataset, 0.0
        self.history = History()
        # updates and losses not yet looked at; the losses are on the device, or from a checkpoint
        self.unread: list[tuple[int, Tensor | float]] = []

    def state_dict(self) -> dict[str, Any]:
        unread = [(update, float(loss)) for update, loss in self.unread]
        return asdict(self.history) | {"unread": unread}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        values = dict(state)
        self.unread = values.pop("unread")
        values["losses"] = Series(**values["losses"])
        values["rewards"] = Series(**values["rewards"])
        values["evaluations"] = [Evaluation(**each) for each in values["evaluations"]]
        self.history = History(**values)

    def forget_evaluations(self, state: TrainState) -> None:
        self.history.evaluations, self.history.distinct_trigrams = [], None

    def warn(self, name: str, text: str) -> None:
        """Give a warning, if it was not given before."""
        if name not in self.history.warned:
            self.history.warned.append(name)
            self.history.unrecorded.append(text)
            warn(text)

    def on_batch_start(self, engine: Any, update: int) -> None:
        """Before the first update: what the settings tell."""
        if update > 1:
            return
        state = engine.state
        args, updates, device = state.args, state.total_updates, state.device.type
        if updates < MIN_UPDATES:
            self.warn(
                "few",
                f"only {updates} updates in this run; more --epochs, or a smaller --batch_size or "
                "--accumulation_steps, make more",
            )
        if args.warmup_updates > 0:
            some = range(1, updates + 1, max(1, updates // 1000))
            rates = [state.schedule(update, updates, args) for update in some]
            # None: a scheduler of torch sets it
            highest = max(math.inf if rate is None else rate for rate in rates)
            if highest < 0.7 * args.learning_rate:
                self.warn(
                    "warm-up",
                    f"--warmup_updates {args.warmup_updates} of {updates} updates: the learning rate reaches "
                    f"{highest:.2g}, not --learning_rate {args.learning_rate:g}",
                )
        is_half = autocast_dtype(state.autocast, state.device) == torch.bfloat16
        if is_half and device in ("cpu", "cuda") and not native_bfloat16(state.device):
            faster = automatic_dtype(state.device)
            self.warn("dtype", f"--dtype {args.dtype}: this {device} emulates bfloat16; {faster} is faster")
        if state.eval_loader is None:
            return
        if held_out_fingerprint(state.eval_loader) == state.run.get("data", ""):
            self.warn(
                "held-out",
                "the held-out data are the training data: eval_loss does not tell how the model does on "
                "other text",
            )

    def on_optimizer_step(self, engine: Any, update: int) -> None:
        """Keep the update's loss, on the device, and its mean reward. After the first update a sync point:
        warn of weights that do not fit the text, and of a teacher that is the student."""
        history, state = self.history, engine.state
        if state.reward is not None:
            history.rewards.add(state.reward)
        if state.update_loss is not None:
            self.unread.append((state.update, state.update_loss))
            history.is_cross_entropy = state.loss_is_cross_entropy
            size = getattr(state.lm_config, "vocab_size", 0)
            history.guessing = math.log(size) if history.is_cross_entropy and size else math.inf
        if state.update != 1:
            return
        loss, weight = float(self.unread[-1][1]), state.args.from_weight
        is_fair = state.run["global_batch"] >= MIN_SAMPLES_OF_FIRST_LOSS
        if weight != "none" and is_fair and loss > 1.01 * history.guessing:
            self.warn(
                "first loss",
                f"the cross entropy of the first update, {loss:.2f}, is above {history.guessing:.2f}, "
                "that of guessing each token of the vocabulary alike: the weights of --from_weight "
                f"{weight} do not fit this text",
            )
        if "divergence" in state.metric_names and math.isfinite(loss):
            divergence = float(state.losses[2 + state.metric_names.index("divergence")])
            if abs(divergence) < 1e-5:
                self.warn(
                    "teacher", "the teacher predicts just what the student does: are they the same weights?"
                )

    def on_log(self, engine: Any, record: dict[str, Any]) -> None:
        """Add the warnings since the last record, and of this one."""
        state, history, losses = engine.state, self.history, self.history.losses
        self.look_at_losses(state)
        if record.get("reward") is not None:
            self.look_at_rewards(state.args, record)
        if record.get("eval_loss") is not None:
            now = Evaluation(record["update"], record["eval_loss"])
            if losses.number:
                _, now.training, count = losses.means()
                if len(losses.last) >= MEAN_UPDATES // 2:
                    now.training_error = pstdev(losses.last) / math.sqrt(count)
            history.evaluations.append(now)
            history.distinct_trigrams = record.get("distinct_trigrams")
            values = [each.held_out for each in history.evaluations[-RISES_TO_WARN - 1 :]]
            has_risen = len(values) > RISES_TO_WARN and values == sorted(set(values))
            is_reward = history.rewards.number > 0
            if has_risen and not is_reward and is_less(history.lowest_evaluation().held_out, now.held_out):
                rise = self.describe_rise(state)
                self.warn(
                    "rising",
                    f"eval_loss has risen {RISES_TO_WARN} times in a row, to {now.held_out:.3f}; {rise}",
                )
        texts, history.unrecorded = history.unrecorded, []
        if texts:
            record["warnings"] = texts

    def look_at_losses(self, state: TrainState) -> None:
        """Take in the losses of the updates since the last time, one after the other; warn of one that rose,
        or that does not leave the unigram plateau. Sync point."""
        history, losses = self.history, self.history.losses
        cache = getattr(self.dataset, "cache", None)
        name = "cross entropy" if history.is_cross_entropy else "loss"
        unread, self.unread = self.unread, []
        for update, on_device in unread:
            loss = float(on_device)
            if not math.isfinite(loss) or history.rewards.number:  # a policy's loss tells nothing
                continue
            losses.add(loss)
            if losses.number == 1:
                history.first_update = update
                if state.run["global_batch"] >= MIN_SAMPLES_OF_FIRST_LOSS:
                    history.lowest, history.lowest_update = loss, update
            if losses.number < MEAN_UPDATES:
                continue

            mean = fmean(losses.last)
            if mean < history.lowest:
                history.lowest, history.lowest_update = mean, update
            # by a fifth and by four standard deviations of single updates; or each of the last updates is
            # above both the first one and guessing
            rose = mean - history.lowest > max(0.2 * abs(history.lowest), 4 * pstdev(losses.last))
            if rose or min(losses.last) > 1.05 * max(losses.first[0], history.guessing):
                self.warn(
                    "rose",
                    f"the {name} rose to {mean:.2f}, the mean of the last {MEAN_UPDATES} updates, "
                    f"from {history.lowest:.2f} at update {history.lowest_update}; a smaller learning rate "
                    "may help",
                )

            # the model knows the frequencies of single tokens, and nothing else yet
            if not history.is_cross_entropy or not isinstance(cache, TokenCache):
                continue
            if "plateau" in history.warned or "rose" in history.warned:
                continue
            patience = max(MIN_UPDATES // 2, min(PLATEAU_UPDATES, state.total_updates // 2))
            if state.total_updates < patience:
                continue  # the run is too short to tell
            if not self.unigram_entropy:
                self.unigram_entropy = unigram_entropy(cache)
            if mean <= 0.97 * self.unigram_entropy:
                history.false_at["plateau"] = update
            if update - history.false_at.get("plateau", 0) >= patience:
                self.warn(
                    "plateau",
                    f"the cross entropy is still {mean:.2f} at update {update}; how often each token occurs "
                    f"gives {self.unigram_entropy:.2f} by itself; more updates, or another --learning_rate "
                    f"than {state.args.learning_rate:g}, may help",
                )

    def look_at_rewards(self, args: Any, record: dict[str, Any]) -> None:
        """Warn where the rewards do not tell one completion from another, and where none ends by itself."""
        update, false_at = record["update"], self.history.false_at
        if "frac_reward_zero_std" in record:
            which, are_equal = "all completions of a prompt", record["frac_reward_zero_std"] == 1
        else:
            which, are_equal = "all completions", record["reward_std"] < 1e-6
        equal = (
            f"{which} got the same reward (the mean is {record['reward']:.3f}), so it tells none from "
            "another; prompts of another difficulty, or another --reward, may"
        )
        cut = (
            f"every completion was cut, at --max_gen_len {args.max_gen_len} or another limit: none ended by "
            "itself"
        )
        conditions = [("rewards", are_equal, equal), ("cut", record["cut_share"] == 1, cut)]
        for name, holds, text in conditions:
            if not holds:
                false_at[name] = update
            # a rollout that was made before may still have been trained on
            begin = false_at.get(name, 0) + 1
            if update - begin + 1 >= REWARD_UPDATES:
                self.warn(name, f"in the rollouts of updates {begin} to {update} {text}")

    def describe_rise(self, state: TrainState) -> str:
        """Where eval_loss was lowest, and whether the training loss fell meanwhile."""
        low, now = self.history.lowest_evaluation(), self.history.evaluations[-1]
        text = f"the lowest, {low.held_out:.3f}, was at update {low.update}"
        if state.args.monitor == "eval_loss" and state.args.mode == "min":
            text += f" ({state.args.save_weight}_best)"
        if self.history.overfits(low, now):
            text += f"; the training loss fell meanwhile from {low.training:.3f} to {now.training:.3f}, "
            text += "a sign of overfitting"
        return text

    def on_train_end(self, engine: Any) -> None:
        """One line of figures for the end of the run, if any update had a loss."""
        state = engine.state
        self.look_at_losses(state)
        history, losses, rewards = self.history, self.history.losses, self.history.rewards
        if not (losses.number or rewards.number):
            return
        start, end, count = (rewards if rewards.number else losses).means()
        plural = "" if count == 1 else "s"
        if rewards.number:
            text = f"reward {start:.3f} in the first {count} rollout{plural}, {end:.3f} in the last"
        else:
            name = "cross entropy" if history.is_cross_entropy else "loss"
            text = f"{name} {losses.first[0]:.3f} at update {history.first_update}, "
            text += f"{end:.3f} in the last {count} update{plural}"
            if "rose" in history.warned and is_less(history.lowest, end):
                text += f", the lowest {history.lowest:.3f} at update {history.lowest_update}"
        if history.evaluations:
            text += f"; {self.describe_evaluations(state)}"
        else:
            text += "; no held-out data (--eval_share 0.02) tell how the model does on other text"
        share = history.distinct_trigrams
        if share is not None and share < MIN_DISTINCT_TRIGRAMS:
            text += f"; its answers repeat themselves: {share:.0%} of their trigrams are distinct"
        state.last_lines.append(f"verdict: {text}")

    def describe_evaluations(self, state: TrainState) -> str:
        """The last held-out loss or reward, and where it goes."""
        history = self.history
        low, now = history.lowest_evaluation(), history.evaluations[-1]
        if history.rewards.number:
            text = f"held-out reward {-now.held_out:.3f}"
            return f"{text}, the highest {-low.held_out:.3f} at update {low.update}"
        text = f"held-out loss {now.held_out:.3f}"
        if history.is_cross_entropy and now.training is not None:
            text += f" ({now.held_out - now.training:+.3f})"
        if is_less(low.held_out, now.held_out):
            return f"{text}, {self.describe_rise(state)}"
        if len(history.evaluations) == 1:
            return f"{text}, evaluated once; --eval_interval shows where it goes"
        before = low
        if low.held_out >= now.held_out:  # it is the lowest: compared with the one at four fifths of the run
            earlier = [each for each in history.evaluations if each.update <= 0.8 * now.update]
            before = earlier[-1] if earlier else history.evaluations[0]
        change = "still falling" if is_less(now.held_out, before.held_out) else "hardly changed"
        return f"{text}, {change} ({before.held_out:.3f} at update {before.update})"


def is_less(low: float, high: float, share: float = 0.005) -> bool:
    """Whether a loss is below another by more than chance: evaluations differ by half a percent."""
    return high - low > share * abs(low)


def unigram_entropy(cache: TokenCache) -> float:
    """The cross entropy, in nats, of a model that knows how often each target occurs and nothing else; of a
    million tokens, from all parts of the cache."""
    size, parts = len(cache.tokens), []
    for begin in range(0, size, max(PART_TOKENS, size // CACHE_PARTS)):
        tokens = np.array(cache.tokens[begin : begin + PART_TOKENS])
        parts.append(tokens[cache.loss_mask[begin : begin + len(tokens)]])
    counts = np.bincount(np.concatenate(parts))
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())
