"""Warnings of a run that goes wrong in a known way, and the verdict at its end. Both are functions of the
records of the metrics file and of some facts about the run, which are in `<run>_run.json`. The report page
(scripts/runs) shows the verdict as well."""

from statistics import fmean, pstdev
from typing import Any

Record = dict[str, Any]
MIN_UPDATES = 100  # a run of fewer is pointed out
LAST_RECORDS = 5  # a problem must show in all of them
RISES = 3  # of eval_loss in a row
SAME = 0.005  # evaluations differ by chance by this share
SMALL_RATE = 1e-4  # learning rates up to this are small for weights that have read little
HARDLY = 0.02  # a loss that falls by less than this share at such a rate
LARGEST_ROUNDING = 0.1  # nats a token, on the average; in bfloat16 some hundredths
FEW_RIGHT = 0.5  # share of right answers below which a model answers badly
MIN_NEW_ANSWERS = 3  # questions with new answers; fewer of them say little
MIN_DISTINCT_TRIGRAMS = 0.5  # in the answers to the sample prompts

SENTENCES = {
    "no loss": "no update had a finite loss",
    "trained": "{name} {first:.3f} at first, {last:.3f} at last",
    "learned": "{name} {first:.3f} before the first update, {now:.3f} at last",
    "nothing learned": "hardly anything was learned: --learning_rate {rate:g} is too small; after a short "
    "pretraining take 1e-3 (docs/training.md)",
    "diverged": "the loss rose from {low:.3f} at update {low_update:,.0f}: the run diverged",
    "hardly fell": "it fell by less than 2 %, so hardly anything was learned",
    "still falling": "still falling",
    "nothing held out": "without held-out data (--eval_share 0.02) nothing shows how the model does "
    "on other text",
    "held out": "{name} {now:.3f} at last",
    "own text": "measured on the training data, so it says nothing about other text",
    "better": "still getting better ({before:.3f} at update {before_update:,.0f})",
    "same": "hardly changed since update {before_update:,.0f} ({before:.3f})",
    "worse": "the best, {best:.3f}, was at update {best_update:,.0f} ({best_weights})",
    "overfitting": "the training loss fell meanwhile, which is overfitting",
    "fewer right": "it was {best:.3f} at update {best_update:,.0f}, but fewer answers were right then",
    "answers": "answers {right:.0f} of {asked:.0f} held-out questions right",
    "answers now": "answers {right:.0f} of {asked:.0f} held-out questions right ({before:.0f} before the "
    "first update)",
    "answers known": "of {asked:.0f} whose answer a training conversation gives, {right:.0f}",
    "answers new": "of {asked:.0f} whose answer none gives, {right:.0f}",
    "answers few": "next: a larger model, a longer pretraining, more text that says each thing in several "
    "ways, or more conversations (docs/training.md#how-many-answers-are-right)",
    "repeats": "its answers repeat themselves: {share:.0%} of their trigrams are distinct",
}


def facts_for_warnings(args: Any, total_updates: int, guessing: float | None, **more: Any) -> dict[str, Any]:
    """The facts that warnings need besides the records. guessing: cross entropy if all tokens were equally
    likely; None for other losses. more: held_out_is_training, best_weights, data_tokens (None: unknown)."""
    names = ("warmup_updates", "learning_rate", "from_weight", "monitor", "mode")
    facts = {name: getattr(args, name) for name in names}
    facts |= {"max_gen_len": getattr(args, "max_gen_len", None)}
    return facts | {"total_updates": total_updates, "guessing": guessing} | more


# --- warnings


def find_warnings(records: list[Record], facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Warnings as (name, text), only if the records leave no doubt. records: the first and the last records
    of a run, at least one. facts: see `facts_for_warnings`."""
    found = warnings_on_settings(facts) + warnings_on_start(records[0], facts)
    if "reward" in records[0]:
        return found + warnings_on_rollouts(records, facts)
    return found + warnings_on_loss(records, facts)


def warnings_on_settings(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Warnings that follow from the settings."""
    found = []
    updates, warmup = facts["total_updates"], facts["warmup_updates"]
    if updates < MIN_UPDATES:
        text = f"only {updates} updates in this run; more --epochs, or a smaller --batch_size or "
        found.append(("few updates", f"{text}--accumulation_steps, make more"))
    if warmup >= updates:
        text = f"--warmup_updates {warmup} of {updates} updates: --learning_rate is never reached"
        found.append(("warm-up", text))
    if facts["held_out_is_training"]:
        found.append(("held-out data", "they are the training data: eval_loss says nothing about other text"))
    return found


def warnings_on_start(first: Record, facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Warnings that follow from the first update."""
    found = []
    loss, guessing = first["loss"], facts["guessing"]
    if first["update"] > 1 or loss is None:
        return []
    if guessing is not None and facts["from_weight"] != "none" and loss > 1.05 * guessing:
        text = f"the first one, {loss:.2f}, is above {guessing:.2f}, the loss of pure guessing: the "
        found.append(("loss", f"{text}weights of --from_weight {facts['from_weight']} do not fit this text"))
    divergence = first.get("divergence")
    if divergence is not None and abs(divergence) < 1e-5:
        found.append(("teacher", "it predicts exactly what the student predicts: are they the same weights?"))
    return found


def warnings_on_loss(records: list[Record], facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Warnings that follow from the losses."""
    found = []
    if rise := loss_rise(records, facts):
        low, low_update, now = rise
        text = f"it rose to {now:.2f}, the mean of the last {LAST_RECORDS} records, from {low:.2f} at "
        found.append(("loss rose", f"{text}update {low_update}; a smaller --learning_rate may help"))
    evaluations = [record for record in records if record.get("eval_loss") is not None]
    values = [record["eval_loss"] for record in evaluations[-RISES - 1 :]]
    if len(values) > RISES and values == sorted(set(values)):
        best = min(evaluations, key=lambda record: record["eval_loss"])
        text = f"eval_loss has risen {RISES} times in a row, to {values[-1]:.3f}; the lowest, "
        found.append(("eval_loss rose", f"{text}{best['eval_loss']:.3f}, was at update {best['update']}"))
    if (
        evaluations
        and 2 * records[-1]["update"] >= facts["total_updates"]
        and learned_nothing(records, facts)
    ):
        first, now = records[0]["initial_eval_loss"], values[-1]
        text = f"eval_loss was {first:.3f} before the first update and is {now:.3f}: "
        found.append(
            ("learning rate", text + SENTENCES["nothing learned"].format(rate=facts["learning_rate"]))
        )
    return found


def learned_nothing(records: list[Record], facts: dict[str, Any]) -> bool:
    """Whether the held-out loss stays near its initial value, at more than half of the loss of guessing, with
    a small learning rate."""
    evaluations = [record["eval_loss"] for record in records if record.get("eval_loss") is not None]
    first, guessing = records[0].get("initial_eval_loss"), facts["guessing"]
    if not evaluations or first is None or guessing is None or facts["learning_rate"] > SMALL_RATE:
        return False
    return first > guessing / 2 and abs(evaluations[-1] - first) <= HARDLY * first


def loss_rise(records: list[Record], facts: dict[str, Any]) -> tuple[float, int, float] | None:
    """If the loss has risen: the lowest mean of consecutive losses, the update at its end, and the last mean.
    It has risen if the last mean is higher by a fifth and by more than single records differ, or if the last
    losses are above both the first loss and guessing."""
    known = [(record["update"], record.get("mean_loss")) for record in records]
    known = [(update, loss) for update, loss in known if loss is not None]
    losses = [loss for _, loss in known]
    if len(losses) <= LAST_RECORDS:
        return None
    ends = range(LAST_RECORDS, len(losses) + 1)
    means = {known[end - 1][0]: fmean(losses[end - LAST_RECORDS : end]) for end in ends}
    low_update = min(means, key=lambda update: means[update])
    low, now, last, first = means[low_update], means[known[-1][0]], losses[-LAST_RECORDS:], losses[0]
    has_risen = now - low > max(0.2 * abs(low), 0.2 * (first - low), 4 * pstdev(last))
    is_above_all = min(last) > 1.05 * max(first, facts["guessing"] or first)
    return (low, low_update, now) if has_risen or is_above_all else None


def warnings_on_rollouts(records: list[Record], facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Warnings that follow from rewards and completions."""
    found = []
    gap = records[-1].get("sampling_logp_difference")
    if gap is not None and gap > LARGEST_ROUNDING:
        text = (
            f"the sampled tokens' log-probabilities differ from the sampler's by {gap:.2f} nats on average: "
        )
        found.append(("sampling", f"{text}decoding and training do not compute the same"))
    last = records[-LAST_RECORDS:]
    if len(last) < LAST_RECORDS:
        return found
    if all(record.get("frac_reward_zero_std", record.get("reward_std") == 0) == 1 for record in last):
        text = f"in the last {LAST_RECORDS} records all completions of each prompt got the same reward: "
        found.append(
            ("rewards", f"{text}nothing is learned from them; take other prompts, or another --reward")
        )
    if all(record.get("cut_share") == 1 for record in last):
        text = f"in the last {LAST_RECORDS} records all completions were cut off, at "
        found.append(("completions", f"{text}--max_gen_len {facts['max_gen_len']} or at another limit"))
    return found


# --- the verdict


def verdict_sentences(records: list[Record], facts: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The outcome of a run, as keys of SENTENCES with their values."""
    name = "reward" if any("reward" in record for record in records) else "mean_loss"
    values = [record[name] for record in records if record.get(name) is not None]
    if not values:
        return [("no loss", {})]
    count = max(1, len(values) // 10)
    first, last = values[0], fmean(values[-count:])
    if name == "reward":  # a single one says little
        first = fmean(values[:count])
    found: list[tuple[str, dict[str, Any]]] = []
    if name == "reward" or initial_value(records, facts) is None:  # the loss of one batch says less
        found.append(("trained", {"name": name.removeprefix("mean_"), "first": first, "last": last}))
    rise = loss_rise(records, facts) if name == "mean_loss" else None
    if rise:
        found.append(("diverged", {"low": rise[0], "low_update": rise[1]}))
    answers = answer_sentences(records)
    held_out = held_out_sentences(records, facts, has_diverged=rise is not None)
    if ("answers few", {}) in answers:  # a loss that gets better says nothing of answers that are wrong
        held_out = [(key, values) for key, values in held_out if key != "better"]
    found = answers + found + held_out
    shares = [record["distinct_trigrams"] for record in records if "distinct_trigrams" in record]
    if shares and shares[-1] < MIN_DISTINCT_TRIGRAMS:
        found.append(("repeats", {"share": shares[-1]}))
    return found


def answer_sentences(records: list[Record]) -> list[tuple[str, dict[str, Any]]]:
    """Sentences about the number of right answers to held-out questions, if any were asked."""
    asked = [record for record in records if record.get("eval_answers") is not None]
    if not asked:
        return []
    count, now = asked[-1]["asked"], asked[-1]["eval_answers"]
    values, key = {"right": now * count, "asked": count}, "answers"
    before = records[0].get("initial_eval_answers")
    if before is not None:
        values, key = values | {"before": before * count}, "answers now"
    found: list[tuple[str, dict[str, Any]]] = [(key, values)]
    new = asked[-1].get("new_asked", 0)
    if MIN_NEW_ANSWERS <= new < count:
        new_right = asked[-1]["eval_new_answers"] * new
        found.append(("answers known", {"right": now * count - new_right, "asked": count - new}))
        found.append(("answers new", {"right": new_right, "asked": new}))
    return found + ([("answers few", {})] if now < FEW_RIGHT else [])


def initial_value(records: list[Record], facts: dict[str, Any]) -> float | None:
    """The held-out metric before the first update, if it was evaluated again."""
    name = facts["monitor"]
    is_evaluated = any(record.get(name) is not None for record in records)
    return records[0].get(f"initial_{name}") if is_evaluated else None


def held_out_sentences(
    records: list[Record], facts: dict[str, Any], has_diverged: bool
) -> list[tuple[str, dict[str, Any]]]:
    """Sentences about the trend of the held-out metric of --monitor."""
    name, sign = facts["monitor"], -1 if facts["mode"] == "max" else 1
    evaluations = [record for record in records if record.get(name) is not None]
    if not evaluations:
        trend = [] if has_diverged else training_loss_sentences(records)
        return [*trend, ("nothing held out", {})]
    now = evaluations[-1]
    best = min(evaluations, key=lambda record: sign * record[name])
    # the last evaluation before the last fifth of the run
    before = evaluations[0]
    for record in evaluations:
        if record["update"] <= 0.8 * now["update"]:
            before = record
    values = {"name": name, "now": now[name]}
    initial = initial_value(records, facts)
    found: list[tuple[str, dict[str, Any]]] = [("held out", values)]
    if initial is not None:
        found = [("learned", values | {"first": initial})]
    if facts.get("held_out_is_training"):  # older code did not say
        found.append(("own text", {}))
    if learned_nothing(records, facts):
        return [*found, ("nothing learned", {"rate": facts["learning_rate"]})]
    if len(evaluations) == 1:
        return found
    if sign * (now[name] - best[name]) > SAME * abs(best[name]):
        values |= {"best": best[name], "best_update": best["update"], "best_weights": facts["best_weights"]}
        right_then, right_now = best.get("eval_answers"), now.get("eval_answers")
        is_known = name == "eval_loss" and right_then is not None and right_now is not None
        if is_known and right_then < right_now:
            return [*found, ("fewer right", values)]
        trained_then, trained_now = best.get("mean_loss"), now.get("mean_loss")
        has_fallen = bool(trained_then and trained_now and trained_now < 0.99 * trained_then)
        found.append(("worse", values))
        if has_fallen and not has_diverged and name == "eval_loss":
            found.append(("overfitting", {}))
        return found
    values |= {"before": before[name], "before_update": before["update"]}
    is_better = sign * (before[name] - now[name]) > SAME * abs(now[name])
    return [*found, ("better" if is_better else "same", values)]


def training_loss_sentences(records: list[Record]) -> list[tuple[str, dict[str, Any]]]:
    """Sentences about the trend of the training loss; without held-out data there is nothing else to judge
    by."""
    losses = [record["mean_loss"] for record in records if record.get("mean_loss") is not None]
    if len(losses) < 2 or any("reward" in record for record in records):
        return []
    count = max(1, len(losses) // 10)
    first, last = losses[0], fmean(losses[-count:])
    if last > first - HARDLY * abs(first):
        return [("hardly fell", {})]
    before = fmean(losses[-3 * count : -2 * count] or losses[:1])
    return [("still falling", {})] if last < before - SAME * abs(before) else []


def verdict(records: list[Record], facts: dict[str, Any]) -> str:
    """One line for the end of a run."""
    return "; ".join(SENTENCES[key].format(**values) for key, values in verdict_sentences(records, facts))
