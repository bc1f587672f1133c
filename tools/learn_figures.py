"""The pictures of docs/learn, drawn from the quickstart's result: one function for each chapter.

    python -m tools.learn_figures            all of them
    python -m tools.learn_figures 4 9        those of two chapters

To be run in the repository's folder. Some train for seconds, as the snippets of their chapters do. The
pictures have a white background of their own, so they can be read on a dark page as well.
"""

import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
import torch
from torch import nn

from common.settings import ROOT
from dataset.lm_dataset import DPODataset, PretrainDataset, SFTDataset
from dataset.token_cache import load_tokenizer
from model.generation import generate
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.prompts import prompt_tokens
from model.sampling import Sampling
from trainer.data.order import epoch_loader
from trainer.objectives import lora
from trainer.objectives.next_token import Batch, next_token_loss
from trainer.objectives.policy import group_advantages
from trainer.objectives.ppo import token_advantages
from trainer.objectives.preference import answer_log_probs, preference_loss
from trainer.weights.for_tools import load_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODELS, DATA = Path("out/demo"), Path("dataset/demo")  # of the quickstart
BLUE, ORANGE, GREEN, GRAY, LIGHT = "#3b6fb6", "#d9822b", "#3f8f5b", "#8a8f98", "#e3e6ea"
LENGTH = 128  # tokens of a sample at most, as in the quickstart


def new_figure(height: float, columns: int = 1) -> "tuple[Figure, list[Axes]]":
    """A figure of the pages' width, in inches, and its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained", facecolor="white")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def draw_boxes(axis: "Axes", y: float, texts: list[str], widths: list[float], colors: list[str]) -> None:
    """A row of boxes with texts, from the left."""
    x = 0.0
    for text, width, color in zip(texts, widths, colors, strict=True):
        axis.barh(y, width, left=x, height=0.7, color=color, edgecolor="white", linewidth=1.5)
        axis.text(x + width / 2, y, text, ha="center", va="center", fontsize=8)
        x += width


def pretraining_batches(count: int, tokenizer: Any, skip: int = 0) -> Iterator[Batch]:
    """The first micro-batches of the quickstart's pretraining data, without those to skip."""
    data = PretrainDataset(str(DATA / "pretrain.jsonl"), tokenizer, LENGTH)
    loader = epoch_loader(data, batch_size=8, seed=0, epoch=0, skip_batches=skip)
    return (batch for _, batch in zip(range(skip, count), loader, strict=False))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One update on a batch."""
    loss, aux_loss, _ = next_token_loss(model, batch)
    (loss / len(batch["targets"]) + aux_loss / len(batch["input_ids"])).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- one for each chapter


def tokens(updates: int) -> "Figure":
    """1: a sentence as bytes and as tokens."""
    text, tokenizer = "Pepa lives in Reedmarsh.", load_tokenizer("model")
    ids = tokenizer(text).input_ids
    pieces = [str(tokenizer.decode([token_id])) for token_id in ids]
    figure, (axis,) = new_figure(1.7)
    draw_boxes(axis, 2, list(text.replace(" ", "␣")), [1.0] * len(text), [LIGHT] * len(text))
    widths = [float(len(piece)) for piece in pieces]
    draw_boxes(axis, 1, [piece.replace(" ", "␣") for piece in pieces], widths, ["#bcd2ee"] * len(pieces))
    draw_boxes(axis, 0, [str(token_id) for token_id in ids], widths, ["#f3d5b0"] * len(pieces))
    axis.set_yticks([2, 1, 0], ["bytes", "tokens", "ids"])
    axis.set_xticks([])
    axis.spines[["left", "bottom"]].set_visible(False)
    return figure


def shapes(updates: int) -> "Figure":
    """2: the way of a token through the model, with the shapes."""
    model, _ = load_path(MODELS / "full_sft_256.pth")
    config = model.config
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    groups = config.num_key_value_heads
    figure, (axis,) = new_figure(3.4)
    axis.set(xlim=(0, 104), ylim=(0, 46))
    axis.axis("off")

    def box(x: float, y: float, text: str, color: str, size: tuple[float, float] = (18, 10)) -> None:
        axis.add_patch(_rounded(x - size[0] / 2, y - size[1] / 2, size, color))
        axis.text(x, y, text, ha="center", va="center", fontsize=7.5)

    def line(*points: tuple[float, float]) -> None:
        axis.plot(*zip(*points[:-1], strict=True), color=GRAY, linewidth=1)
        style = {"arrowstyle": "-|>", "color": GRAY, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", points[-1], points[-2], arrowprops=style)

    axis.add_patch(_rounded(17, 1, (70, 44), "#f6f7f9"))
    text = f"each of {config.num_hidden_layers} layers"
    axis.text(19, 4, text, va="center", fontsize=8, weight="bold")
    line((8, 11), (8, 22), (96, 22), (96, 33))
    box(8, 6, f"ids  [N]\nembedding\n{config.vocab_size} x {width}", "#f3d5b0", (14, 10))
    box(
        96,
        38,
        f"norm, head\n{width} x {config.vocab_size}\nlogits [N, {config.vocab_size}]",
        "#f3d5b0",
        (15, 10),
    )
    axis.text(9, 23.5, f"x  [N, {width}]", fontsize=7.5)
    query, key = heads * config.head_dim, groups * config.head_dim
    parts = [
        (
            20,
            f"q_proj {width} x {query}\nk_proj {width} x {key}\nv_proj {width} x {key}",
            f"attention\no_proj {query} x {width}",
        ),
        (
            54,
            f"gate_proj {width} x {inner}\nup_proj {width} x {inner}",
            f"silu(gate) · up\ndown_proj {inner} x {width}",
        ),
    ]
    for x, first, second in parts:
        line((x, 22), (x, 34), (x + 2, 34))
        box(x + 5, 34, "norm", LIGHT, (6, 6))
        line((x + 8, 34), (x + 9, 34), (x + 10, 34))
        box(x + 19, 34, first, "#bcd2ee")
        line((x + 19, 29), (x + 19, 23), (x + 19, 17))
        box(x + 19, 12, second, "#bcd2ee")
        line((x + 28, 12), (x + 31, 12), (x + 31, 20.5))
        axis.plot(x + 31, 22, "o", color="white", markeredgecolor=GRAY, markersize=11)
        axis.text(x + 31, 21.8, "+", ha="center", va="center", fontsize=10, weight="bold")
    return figure


def _rounded(x: float, y: float, size: tuple[float, float], color: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=1"
    return FancyBboxPatch((x, y), *size, boxstyle=style, facecolor=color, edgecolor="none")


def flat_batches(updates: int) -> "Figure":
    """3: four samples padded to a rectangle, and the same four end to end."""
    data = PretrainDataset(str(DATA / "pretrain.jsonl"), load_tokenizer("model"), LENGTH)
    lengths = [len(data[i][0]["input_ids"]) for i in range(4)]
    colors = ["#bcd2ee", "#f3d5b0", "#bfe0c8", "#e0c8e6"]
    figure, (axis,) = new_figure(2.2)
    for row, (length, color) in enumerate(zip(lengths, colors, strict=True)):
        texts, widths = [f"{length} tokens"], [float(length)]
        if length < max(lengths):
            texts, widths = [*texts, "padding"], [*widths, float(max(lengths) - length)]
        draw_boxes(axis, 5.2 - row * 0.8, texts, widths, [color, LIGHT][: len(texts)])
    draw_boxes(axis, 0.6, [str(length) for length in lengths], [float(length) for length in lengths], colors)
    ends = [sum(lengths[:count]) for count in range(5)]
    axis.set_xticks(ends, [str(end) for end in ends])
    axis.set_yticks([4, 0.6], [f"padded\n{4 * max(lengths)} tokens", f"flat\n{sum(lengths)} tokens"])
    axis.set_xlabel("cu_seqlens", fontsize=8)
    axis.tick_params(labelsize=8, length=0)
    axis.spines[["left", "bottom"]].set_visible(False)
    return figure


def pretraining(updates: int) -> "Figure":
    """4: the loss of the quickstart's pretraining."""
    lines = (MODELS / "pretrain_256_metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    held_out = [record for record in records if record.get("eval_loss") is not None]
    guess = math.log(len(load_tokenizer("model")))
    figure, (axis,) = new_figure(2.4)
    axis.axhline(guess, color=GRAY, linestyle=":", linewidth=1)
    axis.text(
        records[-1]["update"],
        guess - 0.15,
        f"ln 6,400 = {guess:.2f}",
        ha="right",
        va="top",
        fontsize=8,
        color=GRAY,
    )
    axis.plot(
        [0, *(record["update"] for record in records)],
        [guess, *(record["mean_loss"] for record in records)],
        color=BLUE, label="training, mean since the last point",
    )  # fmt: skip
    x, y = [record["update"] for record in held_out], [record["eval_loss"] for record in held_out]
    axis.plot(x, y, "o", color=ORANGE, markersize=4, label="held-out texts")
    axis.set(xlabel="update", ylabel="loss", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8, loc="center right")
    return figure


def mask(updates: int) -> "Figure":
    """5: the tokens of a conversation, those that are trained in color."""
    tokenizer = load_tokenizer("model")
    sample = SFTDataset(str(DATA / "sft.jsonl"), tokenizer, LENGTH)[1][0]
    figure, (axis,) = new_figure(1.4)
    x, row = 0.0, 2
    for token_id, is_target in zip(sample["input_ids"], sample["loss_mask"], strict=True):
        text = str(tokenizer.decode([token_id])).replace(" ", "␣").replace("\n", "\\n")
        width = len(text) + 1.5
        color = "#f3d5b0" if is_target else LIGHT
        axis.barh(row, width, left=x, height=0.75, color=color, edgecolor="white", linewidth=1.5)
        axis.text(x + width / 2, row, text, ha="center", va="center", fontsize=8)
        x += width
        if "\n" in str(tokenizer.decode([token_id])) and x > 40:
            x, row = 0.0, row - 1
    axis.text(x + 1, row, "orange: a target", va="center", fontsize=8, color=ORANGE)
    axis.axis("off")
    return figure


def adapters(updates: int) -> "Figure":
    """6: a matrix and the two thin ones beside it, and the parameters that are trained, by rank."""
    figure, (left, right) = new_figure(2.4, 2)
    left.add_patch(_rounded(0, 0, (10, 10), LIGHT))
    left.text(5, 5, "W\n256 x 256\nfrozen", ha="center", va="center", fontsize=8)
    left.text(11.5, 5, "+", ha="center", va="center", fontsize=14)
    left.add_patch(_rounded(13, 0, (1.6, 10), "#f3d5b0"))
    left.text(13.8, -1.2, "B  256 x r", ha="center", va="center", fontsize=8)
    left.add_patch(_rounded(15.4, 8.4, (10, 1.6), "#f3d5b0"))
    left.text(20.4, 7.3, "A  r x 256", ha="center", va="center", fontsize=8)
    left.set(xlim=(-0.5, 26), ylim=(-2, 10.5), aspect="equal")
    left.axis("off")
    model, _ = load_path(MODELS / "full_sft_256.pth")
    ranks, total = (1, 4, 8, 16, 32), sum(parameter.numel() for parameter in model.parameters())
    shares = []
    for rank in ranks:
        adapted = copy.deepcopy(model)
        lora.add_adapters(adapted, rank, 2 * rank, 0.0, lora.TARGETS)
        shares.append(sum(p.numel() for p in adapted.parameters() if p.requires_grad) / total)
    bars = right.bar(
        [str(rank) for rank in ranks], [100 * share for share in shares], color=ORANGE, width=0.6
    )
    right.bar_label(bars, [f"{share:.1%}" for share in shares], fontsize=8)
    right.set(xlabel="rank r", ylabel="trained, % of the model")
    return figure


def preferences(updates: int) -> "Figure":
    """7: log-probabilities of chosen and rejected answers while DPO trains."""
    model, tokenizer = load_path(MODELS / "full_sft_256.pth")
    reference = copy.deepcopy(model).requires_grad_(False)
    data = DPODataset(str(DATA / "terse.jsonl"), tokenizer, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    loader = epoch_loader(data, batch_size=8, seed=0, epoch=0, collate_fn=data.collate)
    chosen, rejected, losses = [], [], []
    for _, batch in zip(range(updates), loader, strict=False):
        log_probs, before = answer_log_probs(model, batch)[0], answer_log_probs(reference, batch)[0]
        loss = preference_loss(log_probs, before, beta=0.1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        chosen.append(log_probs[::2].mean().item())
        rejected.append(log_probs[1::2].mean().item())
        losses.append(loss.item())
    figure, (left, right) = new_figure(2.4, 2)
    left.plot(chosen, color=GREEN, label="chosen: “lives in Reedmarsh.”")
    left.plot(rejected, color=ORANGE, label="rejected: “Pepa lives in ...”")
    left.set(xlabel="update", ylabel="log-probability of an answer")
    left.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    right.plot(losses, color=BLUE)
    right.axhline(math.log(2), color=GRAY, linestyle=":", linewidth=1)
    right.text(updates - 1, math.log(2), "ln 2", ha="right", va="bottom", fontsize=8, color=GRAY)
    right.set(xlabel="update", ylabel="loss", ylim=(0, 0.8))
    return figure


def rewards(updates: int) -> "Figure":
    """8: rewards and advantages of a group (GRPO), and of an answer's tokens (PPO)."""
    model, tokenizer = load_path(MODELS / "full_sft_256.pth")
    prompt = prompt_tokens(tokenizer, [{"role": "user", "content": "Where does Kamo live?"}])
    samplings = [Sampling(1.3, seed=seed) for seed in range(8)]
    (group,) = generate(model, [prompt], [samplings], 16, [tokenizer.eos_token_id])
    texts = [tokenizer.decode(answer.tokens) for answer in group]
    marks = torch.tensor([["Mistford" in text for text in texts]]).float()
    advantages = group_advantages(marks)[0].tolist()
    values, reward = [0.5, 0.6, 0.2, 0.9], 1.0
    figure, (left, right) = new_figure(2.5, 2)
    numbers = list(range(1, 9))
    left.bar(numbers, advantages, color=[GREEN if value > 0 else ORANGE for value in advantages], width=0.6)
    left.plot(numbers, marks[0].tolist(), "o", color=GRAY, markersize=4, label="reward")
    left.axhline(marks.mean().item(), color=GRAY, linestyle=":", linewidth=1, label="mean of the group")
    left.axhline(0, color="black", linewidth=0.6)
    left.set_xticks(numbers)
    left.set(xlabel="answer", ylabel="advantage (bars)", title="GRPO: against the group")
    left.legend(frameon=False, fontsize=7, loc="lower left")
    steps = [1, 2, 3, 4]
    by_token = token_advantages(values, reward, gamma=1.0, lam=0.0)
    right.bar(steps, by_token, color=[GREEN if value > 0 else ORANGE for value in by_token], width=0.6)
    right.plot(
        [*steps, 5], [*values, reward], "o-", color=GRAY, markersize=4, linewidth=1, label="critic's value"
    )
    right.axhline(0, color="black", linewidth=0.6)
    right.set_xticks([*steps, 5], [*map(str, steps), "reward"])
    right.set(xlabel="token", title="PPO: against the critic")
    right.legend(frameon=False, fontsize=7, loc="lower right")
    for axis in (left, right):
        axis.title.set_fontsize(9)
    return figure


def experts(updates: int) -> "Figure":
    """9: shares of the experts of a layer by update, without and with the load-balancing loss."""
    tokenizer = load_tokenizer("model")
    figure, axes = new_figure(2.4, 2)
    for axis, factor in zip(axes, (0.0, 5e-4), strict=True):
        torch.manual_seed(0)
        shape: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "use_moe": True}
        model = MiniMindForCausalLM(MiniMindConfig(**shape, router_aux_loss_coef=factor))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        counter, rows = model.model.layers[1].mlp.tokens_per_expert, []
        for batch in pretraining_batches(updates, tokenizer):
            counter.zero_()
            update(model, optimizer, batch)
            rows.append((counter / counter.sum()).tolist())
        axis.stackplot(
            range(len(rows)),
            *zip(*rows, strict=True),
            colors=[BLUE, GREEN, ORANGE, GRAY],
            labels=["1", "2", "3", "4"],
        )
        axis.set(xlabel="update", ylim=(0, 1), title=f"factor {factor:g}")
        axis.title.set_fontsize(9)
    axes[0].set_ylabel("share of the tokens")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        title="expert",
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        loc="outside right center",
    )
    return figure


def resuming(updates: int) -> "Figure":
    """10: how far the weights are from those of the uninterrupted run, if nothing, the optimizer's memory or
    the place in the data is forgotten in the middle."""
    model, tokenizer = load_path(MODELS / "pretrain_256.pth")
    batches = list(pretraining_batches(updates, tokenizer))
    middle = updates // 2

    def train(state: tuple[nn.Module, torch.optim.Optimizer], batches: list[Batch]) -> Iterator[tuple]:
        state = copy.deepcopy(state)
        for batch in batches:
            update(*state, batch)
            yield state

    start = model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    whole = [_weights(state[0]) for state in train(start, batches)]
    *_, half = train(start, batches[:middle])
    forgetful = half[0], torch.optim.AdamW(half[0].parameters(), lr=1e-4)
    figure, (axis,) = new_figure(2.4)
    for label, state, rest, color in (
        ("everything saved", half, batches[middle:], GREEN),
        ("without the optimizer's memory", forgetful, batches[middle:], ORANGE),
        ("data from the beginning again", half, batches[: updates - middle], BLUE),
    ):
        distances = [
            (_weights(resumed[0]) - weights).abs().mean().item()
            for resumed, weights in zip(train(state, rest), whole[middle:], strict=True)
        ]
        axis.plot(range(middle, updates + 1), [0.0, *distances], color=color, label=label)
    axis.plot([0, middle], [0, 0], color=GREEN)
    axis.axvline(middle, color=GRAY, linestyle=":", linewidth=1)
    axis.set_xticks(range(0, updates + 1, 2))
    axis.set(xlabel="update", ylabel="mean distance of a weight")
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# name of the file -> function, and updates that it trains, if it does
FIGURES: dict[str, tuple[Callable[[int], "Figure"], int]] = {
    "01_tokens": (tokens, 0),
    "02_model": (shapes, 0),
    "03_loss": (flat_batches, 0),
    "04_pretraining": (pretraining, 0),
    "05_sft": (mask, 0),
    "06_lora": (adapters, 0),
    "07_dpo": (preferences, 41),
    "08_rewards": (rewards, 0),
    "09_moe": (experts, 60),
    "10_resume": (resuming, 20),
}


def main() -> None:
    """Draw the figures."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("chapters", nargs="*", type=int, help="numbers; all of them if none is given")
    args = parser.parse_args()
    folder = ROOT / "docs/images/learn"
    folder.mkdir(parents=True, exist_ok=True)
    for name, (draw, updates) in FIGURES.items():
        if not args.chapters or int(name[:2]) in args.chapters:
            draw(updates).savefig(folder / f"{name}.png", dpi=110)
            print(f"{folder / name}.png")


if __name__ == "__main__":
    with one_line_errors():
        main()
