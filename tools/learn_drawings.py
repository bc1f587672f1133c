"""The pictures of docs/learn that show how something is made, and the style of all; learn_figures.py has the
others, and the command."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataset.lm_dataset import PretrainDataset, SFTDataset
from dataset.token_cache import load_tokenizer
from trainer.objectives import lora
from trainer.weights.for_tools import load_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODELS, DATA = Path("out/demo"), Path("dataset/demo")  # of the quickstart
LENGTH = 128  # tokens of a sample at most, as in the quickstart
BLUE, ORANGE, GREEN, GRAY = "#3b6fb6", "#d9822b", "#3f8f5b", "#8a8f98"
LIGHT, PALE_BLUE, PALE_ORANGE = "#e3e6ea", "#bcd2ee", "#f3d5b0"
CENTERED: dict[str, Any] = {"ha": "center", "va": "center"}
STYLE = {"legend.frameon": False, "legend.fontsize": 8, "legend.title_fontsize": 8, "axes.titlesize": 9}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white"}


def new_figure(height: float, columns: int = 1) -> "tuple[Figure, list[Axes]]":
    """A figure of the pages' width, in inches, and its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def draw_boxes(axis: "Axes", y: float, texts: list[str], widths: list[float], colors: list[str]) -> None:
    """A row of boxes with texts, from the left."""
    x = 0.0
    for text, width, color in zip(texts, widths, colors, strict=True):
        axis.barh(y, width, left=x, height=0.7, color=color, edgecolor="white", linewidth=1.5)
        axis.text(x + width / 2, y, text, fontsize=8, **CENTERED)
        x += width


def rounded_box(x: float, y: float, width: float, height: float, color: str) -> Any:
    """A box with round corners, from its lower left one."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=1"
    return FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor="none")


# --- one for each chapter


def tokens() -> "Figure":
    """1: a sentence as bytes and as tokens."""
    text, tokenizer = "Pepa lives in Reedmarsh.", load_tokenizer("model")
    ids = tokenizer(text).input_ids
    pieces = [str(tokenizer.decode([token_id])).replace(" ", "␣") for token_id in ids]
    widths = [float(len(piece)) for piece in pieces]
    figure, (axis,) = new_figure(1.7)
    draw_boxes(axis, 2, list(text.replace(" ", "␣")), [1.0] * len(text), [LIGHT] * len(text))
    draw_boxes(axis, 1, pieces, widths, [PALE_BLUE] * len(pieces))
    draw_boxes(axis, 0, [str(token_id) for token_id in ids], widths, [PALE_ORANGE] * len(pieces))
    axis.set_yticks([2, 1, 0], ["bytes", "tokens", "ids"])
    axis.set_xticks([])
    axis.spines[["left", "bottom"]].set_visible(False)
    return figure


def shapes() -> "Figure":
    """2: the way of a token through the model, with the shapes."""
    model, _ = load_path(MODELS / "full_sft_256.pth")
    config = model.config
    width, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    figure, (axis,) = new_figure(3.4)
    axis.set(xlim=(0, 104), ylim=(0, 46))
    axis.axis("off")

    def box(x: float, y: float, text: str, color: str, width: float = 18, height: float = 10) -> None:
        axis.add_patch(rounded_box(x - width / 2, y - height / 2, width, height, color))
        axis.text(x, y, text, fontsize=7.5, **CENTERED)

    def line(*points: tuple[float, float]) -> None:
        axis.plot(*zip(*points[:-1], strict=True), color=GRAY, linewidth=1)
        style = {"arrowstyle": "-|>", "color": GRAY, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", points[-1], points[-2], arrowprops=style)

    def block(x: float, first: str, second: str) -> None:
        line((x, 22), (x, 34), (x + 2, 34))
        box(x + 5, 34, "norm", LIGHT, 6, 6)
        line((x + 8, 34), (x + 9, 34), (x + 10, 34))
        box(x + 19, 34, first, PALE_BLUE)
        line((x + 19, 29), (x + 19, 23), (x + 19, 17))
        box(x + 19, 12, second, PALE_BLUE)
        line((x + 28, 12), (x + 31, 12), (x + 31, 20.5))
        axis.plot(x + 31, 22, "o", color="white", markeredgecolor=GRAY, markersize=11)
        axis.text(x + 31, 21.8, "+", fontsize=10, weight="bold", **CENTERED)

    axis.add_patch(rounded_box(17, 1, 70, 44, "#f6f7f9"))
    axis.text(19, 4, f"each of {config.num_hidden_layers} layers", va="center", fontsize=8, weight="bold")
    line((8, 11), (8, 22), (96, 22), (96, 33))
    box(8, 6, f"ids  [N]\nembedding\n{vocabulary} x {width}", PALE_ORANGE, 14)
    box(96, 38, f"norm, head\n{width} x {vocabulary}\nlogits [N, {vocabulary}]", PALE_ORANGE, 15)
    axis.text(9, 23.5, f"x  [N, {width}]", fontsize=7.5)
    projections = f"q_proj {width} x {query}\nk_proj {width} x {key}\nv_proj {width} x {key}"
    block(20, projections, f"attention\no_proj {query} x {width}")
    gates = f"gate_proj {width} x {inner}\nup_proj {width} x {inner}"
    block(54, gates, f"silu(gate) · up\ndown_proj {inner} x {width}")
    return figure


def flat_batches() -> "Figure":
    """3: four samples padded to a rectangle, and the same four end to end."""
    data = PretrainDataset(str(DATA / "pretrain.jsonl"), load_tokenizer("model"), LENGTH)
    lengths = [float(len(data[i][0]["input_ids"])) for i in range(4)]
    colors, longest = [PALE_BLUE, PALE_ORANGE, "#bfe0c8", "#e0c8e6"], max(lengths)
    figure, (axis,) = new_figure(2.2)
    for row, (length, color) in enumerate(zip(lengths, colors, strict=True)):
        texts, widths = [f"{length:.0f} tokens"], [length]
        if length < longest:
            texts.append("padding")
            widths.append(longest - length)
        draw_boxes(axis, 5.2 - row * 0.8, texts, widths, [color, LIGHT][: len(texts)])
    draw_boxes(axis, 0.6, [f"{length:.0f}" for length in lengths], lengths, colors)
    ends = [sum(lengths[:count]) for count in range(5)]
    axis.set_xticks(ends, [f"{end:.0f}" for end in ends])
    axis.set_yticks([4, 0.6], [f"padded\n{4 * longest:.0f} tokens", f"flat\n{ends[-1]:.0f} tokens"])
    axis.set_xlabel("cu_seqlens", fontsize=8)
    axis.tick_params(labelsize=8, length=0)
    axis.spines[["left", "bottom"]].set_visible(False)
    return figure


def mask() -> "Figure":
    """5: the tokens of a conversation, those that are trained in color."""
    tokenizer = load_tokenizer("model")
    sample = SFTDataset(str(DATA / "sft.jsonl"), tokenizer, LENGTH)[1][0]
    figure, (axis,) = new_figure(1.4)
    x, row = 0.0, 2
    for token_id, is_target in zip(sample["input_ids"], sample["loss_mask"], strict=True):
        text = str(tokenizer.decode([token_id])).replace(" ", "␣").replace("\n", "\\n")
        width = len(text) + 1.5
        color = PALE_ORANGE if is_target else LIGHT
        axis.barh(row, width, left=x, height=0.75, color=color, edgecolor="white", linewidth=1.5)
        axis.text(x + width / 2, row, text, fontsize=8, **CENTERED)
        x += width
        if "\\n" in text and x > 40:
            x, row = 0.0, row - 1
    axis.text(x + 1, row, "orange: a target", va="center", fontsize=8, color=ORANGE)
    axis.axis("off")
    return figure


def adapters() -> "Figure":
    """6: a matrix and the two thin ones beside it, and the parameters that are trained, by rank."""
    figure, (left, right) = new_figure(2.4, 2)
    left.add_patch(rounded_box(0, 0, 10, 10, LIGHT))
    left.text(5, 5, "W\n256 x 256\nfrozen", fontsize=8, **CENTERED)
    left.text(11.5, 5, "+", fontsize=14, **CENTERED)
    left.add_patch(rounded_box(13, 0, 1.6, 10, PALE_ORANGE))
    left.text(13.8, -1.2, "B  256 x r", fontsize=8, **CENTERED)
    left.add_patch(rounded_box(15.4, 8.4, 10, 1.6, PALE_ORANGE))
    left.text(20.4, 7.3, "A  r x 256", fontsize=8, **CENTERED)
    left.set(xlim=(-0.5, 26), ylim=(-2, 10.5), aspect="equal")
    left.axis("off")
    model, _ = load_path(MODELS / "full_sft_256.pth")
    total, shares = sum(parameter.numel() for parameter in model.parameters()), {}
    for rank in (1, 4, 8, 16, 32):
        adapted = copy.deepcopy(model)
        lora.add_adapters(adapted, rank, 2 * rank, 0.0, lora.TARGETS)
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        shares[str(rank)] = trained / total
    bars = right.bar([*shares], [100 * share for share in shares.values()], color=ORANGE, width=0.6)
    right.bar_label(bars, [f"{share:.1%}" for share in shares.values()], fontsize=8)
    right.set(xlabel="rank r", ylabel="trained, % of the model")
    return figure
