"""What a plan says: its table, and what is unwise about it."""

from common.settings import ModelConfig
from scripts.planning import rules
from scripts.planning.choice import Plan
from scripts.planning.stages import START, bytes_per_token
from scripts.text_table import text_table
from trainer.report.metrics import duration

FEW_BYTES = 2.5  # of text per token


def describe(plan: Plan) -> list[str]:
    """The plan as a table with a column for each stage, and what its times are."""
    columns = [
        ["", "tokens of the data", "tokens held out", "passes over the data", "tokens to train", "updates",
         "tokens of an update", "learning rate", "time", "memory, at least", "disk"]
    ]  # fmt: skip
    for stage in plan.stages:
        column = [
            stage.args.save_weight,
            f"{stage.data.num_tokens:,}",
            f"{stage.held_out.num_tokens:,}",
            f"{stage.passes:.3g}",
            f"{stage.tokens:,}",
            f"{stage.updates:,}",
            f"{stage.tokens / stage.updates:,.0f}",
            f"{stage.args.learning_rate:g}",
            duration(stage.seconds),
            f"{stage.memory / 1e9:.1f} GB",
            # fp16 weights twice, two checkpoints
            f"{26 * stage.cost.parameters / 1e9:.2f} GB",
        ]
        columns.append(column)
    first = plan.stages[0]
    size = f"{first.args.hidden_size} x {first.args.num_hidden_layers}, "
    size += f"{first.cost.parameters / 1e6:.2f} M parameters"
    lines = [f"plan: {size}; {duration(plan.seconds)} in all; limited by the {plan.limit}"]
    table = text_table([list(row) for row in zip(*columns, strict=True)])
    lines += [f"  {line}" for line in table.split("\n")]
    lines.append(
        f"  time: updates and evaluations; beside it some {START:.0f} s to start a stage. The data are "
        "tokenised already, and saving takes no time of its own"
    )
    if len(plan.stages) > 1 and first.args.data_path == plan.stages[1].args.data_path:
        lines.append("  the same data are read by both stages: first as text, then as conversations")
    return lines


def unwise(plan: Plan) -> list[str]:
    """What to think about again, one line each."""
    first, lines = plan.stages[0], []
    for stage in plan.stages:
        if stage.updates < rules.FEW_UPDATES:
            advice = "more time helps" if plan.limit == "hours" else "more data help"
            lines.append(f"{stage.args.save_weight}: {stage.updates} updates teach little; {advice}")
    weights = rules.layer_weights(first.args.num_hidden_layers)
    if first.args.num_hidden_layers > 1 and first.tokens < rules.TOKENS_PER_WEIGHT * weights:
        lines.append(
            f"{first.tokens:,} tokens for {weights:,.0f} weights of layers: a smaller model learns as much"
        )
    spelt = bytes_per_token(first)
    if spelt < FEW_BYTES and first.args.tokenizer_path == ModelConfig().tokenizer_path:
        lines.append(f"{spelt:.1f} bytes per token: the vocabulary was made for other text (docs/data.md)")
    return lines
