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
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
import torch
from matplotlib import rc_context
from torch import nn

from common.settings import ROOT
from dataset.lm_dataset import DPODataset, PretrainDataset
from dataset.token_cache import load_tokenizer
from model.generation import generate
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.prompts import prompt_tokens
from model.sampling import Sampling
from tools import learn_drawings as drawings
from tools.learn_drawings import BLUE, DATA, GRAY, GREEN, LENGTH, MODELS, ORANGE, STYLE, new_figure
from trainer.data.datasets import epoch_loader, epoch_order
from trainer.objectives.next_token import Batch, next_token_loss
from trainer.objectives.policy import group_advantages
from trainer.objectives.ppo import token_advantages
from trainer.objectives.preference import answer_log_probs, preference_loss
from trainer.weights.for_tools import load_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def pretraining_batches(count: int, tokenizer: Any) -> Iterator[Batch]:
    """The first micro-batches of the quickstart's pretraining data."""
    data = PretrainDataset(str(DATA / "pretrain.jsonl"), tokenizer, LENGTH)
    return islice(epoch_loader(data, epoch_order(len(data), seed=0, epoch=0), batch_size=8), count)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One update on a batch."""
    loss, aux_loss, _ = next_token_loss(model, batch)
    (loss / len(batch["targets"]) + aux_loss / len(batch["input_ids"])).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- one for each chapter; those that train take their number of updates


def pretraining() -> "Figure":
    """4: the loss of the quickstart's pretraining."""
    lines = (MODELS / "pretrain_256_metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    held_out = [record for record in records if record.get("eval_loss") is not None]
    guess = math.log(len(load_tokenizer("model")))
    updates = [record["update"] for record in records]
    figure, (axis,) = new_figure(2.4)
    axis.axhline(guess, color=GRAY, linestyle=":", linewidth=1)
    place: dict[str, Any] = {"ha": "right", "va": "top"}
    axis.text(updates[-1], guess - 0.15, f"ln 6,400 = {guess:.2f}", fontsize=8, color=GRAY, **place)
    losses = [guess, *(record["mean_loss"] for record in records)]
    axis.plot([0, *updates], losses, color=BLUE, label="training, mean since the last point")
    x, y = [record["update"] for record in held_out], [record["eval_loss"] for record in held_out]
    axis.plot(x, y, "o", color=ORANGE, markersize=4, label="held-out texts")
    axis.set(xlabel="update", ylabel="loss", ylim=(0, None))
    axis.legend(loc="center right")
    return figure


def preferences(updates: int = 41) -> "Figure":
    """7: log-probabilities of chosen and rejected answers while DPO trains."""
    model, tokenizer = load_path(MODELS / "full_sft_256.pth")
    reference = copy.deepcopy(model).requires_grad_(False)
    data = DPODataset(str(DATA / "terse.jsonl"), tokenizer, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    loader = epoch_loader(
        data, epoch_order(len(data), seed=0, epoch=0), batch_size=8, collate_fn=data.collate
    )
    chosen, rejected, losses = [], [], []
    for batch in islice(loader, updates):
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
    left.legend(loc="lower left", bbox_to_anchor=(0, 1))
    right.plot(losses, color=BLUE)
    right.axhline(math.log(2), color=GRAY, linestyle=":", linewidth=1)
    right.text(updates - 1, math.log(2), "ln 2", ha="right", va="bottom", fontsize=8, color=GRAY)
    right.set(xlabel="update", ylabel="loss", ylim=(0, 0.8))
    return figure


def rewards() -> "Figure":
    """8: rewards and advantages of a group (GRPO), and of an answer's tokens (PPO)."""
    model, tokenizer = load_path(MODELS / "full_sft_256.pth")
    prompt = prompt_tokens(tokenizer, [{"role": "user", "content": "Where does Kamo live?"}])
    samplings = [Sampling(1.3, seed=seed) for seed in range(8)]
    (group,) = generate(model, [prompt], [samplings], 16, [tokenizer.eos_token_id])
    texts = [tokenizer.decode(answer.tokens) for answer in group]
    marks = torch.tensor([["Mistford" in text for text in texts]]).float()
    figure, (left, right) = new_figure(2.5, 2)

    def bars(axis: "Axes", advantages: list[float]) -> list[int]:
        numbers = list(range(1, len(advantages) + 1))
        colors = [GREEN if value > 0 else ORANGE for value in advantages]
        axis.bar(numbers, advantages, color=colors, width=0.6)
        axis.axhline(0, color="black", linewidth=0.6)
        return numbers

    answers = bars(left, group_advantages(marks)[0].tolist())
    left.plot(answers, marks[0].tolist(), "o", color=GRAY, markersize=4, label="reward")
    left.axhline(marks.mean().item(), color=GRAY, linestyle=":", linewidth=1, label="mean of the group")
    left.set_xticks(answers)
    left.set(xlabel="answer", ylabel="advantage (bars)", title="GRPO: against the group")
    left.legend(fontsize=7, loc="lower left")
    values, reward = [0.5, 0.6, 0.2, 0.9], 1.0
    steps = bars(right, token_advantages(values, reward, gamma=1.0, lam=0.0))
    points = [*steps, len(steps) + 1]
    line: dict[str, Any] = {"color": GRAY, "markersize": 4, "linewidth": 1, "label": "critic's value"}
    right.plot(points, [*values, reward], "o-", **line)
    right.set_xticks(points, [*map(str, steps), "reward"])
    right.set(xlabel="token", title="PPO: against the critic")
    right.legend(fontsize=7, loc="lower right")
    return figure


def experts(updates: int = 60) -> "Figure":
    """9: shares of the experts of a layer by update, without and with the load-balancing loss."""
    tokenizer = load_tokenizer("model")
    figure, axes = new_figure(2.4, 2)
    for axis, factor in zip(axes, (0.0, 5e-4), strict=True):
        torch.manual_seed(0)
        shape: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "use_moe": True}
        model = MiniMindForCausalLM(MiniMindConfig(**shape, router_aux_loss_coef=factor))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        counter, shares = model.model.layers[1].mlp.tokens_per_expert, []
        for batch in pretraining_batches(updates, tokenizer):
            counter.zero_()
            update(model, optimizer, batch)
            shares.append((counter / counter.sum()).tolist())
        of_experts = zip(*shares, strict=True)
        colors, labels = [BLUE, GREEN, ORANGE, GRAY], ["1", "2", "3", "4"]
        axis.stackplot(range(len(shares)), *of_experts, colors=colors, labels=labels)
        axis.set(xlabel="update", ylim=(0, 1), title=f"factor {factor:g}")
    axes[0].set_ylabel("share of the tokens")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, title="expert", loc="outside right center")
    return figure


def resuming(updates: int = 20) -> "Figure":
    """10: how far the weights are from those of the uninterrupted run, if nothing, the optimizer's memory or
    the place in the data is forgotten in the middle."""
    model, tokenizer = load_path(MODELS / "pretrain_256.pth")
    batches = list(pretraining_batches(updates, tokenizer))
    middle = updates // 2

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> tuple:
        """The model and the optimizer after these batches, copies, and the weights after each."""
        model, optimizer = copy.deepcopy((model, optimizer))
        weights = []
        for batch in batches:
            update(model, optimizer, batch)
            weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        return model, optimizer, weights

    start = model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    _, _, whole = train(*start, batches)
    half, memory, _ = train(*start, batches[:middle])
    forgetful = torch.optim.AdamW(half.parameters(), lr=1e-4)
    figure, (axis,) = new_figure(2.4)
    for label, optimizer, rest, color in (
        ("everything saved", memory, batches[middle:], GREEN),
        ("without the optimizer's memory", forgetful, batches[middle:], ORANGE),
        ("data from the beginning again", memory, batches[: updates - middle], BLUE),
    ):
        _, _, resumed = train(half, optimizer, rest)
        pairs = zip(resumed, whole[middle:], strict=True)
        distances = [0.0, *((ours - wanted).abs().mean().item() for ours, wanted in pairs)]
        axis.plot(range(middle, updates + 1), distances, color=color, label=label)
    axis.plot([0, middle], [0, 0], color=GREEN)
    axis.axvline(middle, color=GRAY, linestyle=":", linewidth=1)
    axis.set_xticks(range(0, updates + 1, 2))
    axis.set(xlabel="update", ylabel="mean distance of a weight")
    axis.legend(loc="upper left")
    return figure


FIGURES: dict[str, Callable[..., "Figure"]] = {
    "01_tokens": drawings.tokens,
    "02_model": drawings.shapes,
    "03_loss": drawings.flat_batches,
    "04_pretraining": pretraining,
    "05_sft": drawings.mask,
    "06_lora": drawings.adapters,
    "07_dpo": preferences,
    "08_rewards": rewards,
    "09_moe": experts,
    "10_resume": resuming,
}


def main() -> None:
    """Draw the figures."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("chapters", nargs="*", type=int, help="numbers; all of them if none is given")
    args = parser.parse_args()
    folder = ROOT / "docs/images/learn"
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        if not args.chapters or int(name[:2]) in args.chapters:
            with rc_context(STYLE):
                draw().savefig(folder / f"{name}.png", dpi=110)
            print(f"{folder / name}.png")


if __name__ == "__main__":
    with one_line_errors():
        main()
