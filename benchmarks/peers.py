"""Another trainer's loop, controlled through a pipe: `scripts/benchmark.py` starts this file in that
trainer's Python.

The first line of stdin is a JSON object of settings; every further line is a number of micro-batches to train
on, which is answered by one JSON line: seconds, the tokens, targets and loss of every micro-batch, and
whether the run is over; or `evaluate`, which is answered by the held-out loss. The end of stdin ends the
process. The time before the first micro-batch is not measured.

Nothing of this project is imported here: `model`, `dataset` and `trainer` are packages of the other trainer.
"""

import functools
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EVAL_BATCH = 32


class Gate:
    """Pauses a training loop before each micro-batch until stdin requests more."""

    def __init__(self, device: str, pad_id: int):
        self.cuda, self.pad_id = device.startswith("cuda"), pad_id
        self.replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # keep the trainer's output out of the replies
        self.left, self.start, self.seen = 0, None, []
        self.evaluate: Callable[[], None] = lambda: None  # has `note` called for the held-out samples

    def next(self) -> None:
        """Called before a micro-batch is fetched. Returns when one is requested; SystemExit at the end of
        stdin."""
        if self.left == 0:
            self.wait(is_over=False)
        self.left -= 1

    def wait(self, is_over: bool) -> None:
        """Answer the block that is done and evaluate when asked, until more micro-batches are requested."""
        if self.start is not None:
            seconds = self._now() - self.start
            self._answer({"seconds": seconds, "is_over": is_over} | self._seen())
        while (line := sys.stdin.readline()) == "evaluate\n":
            self.evaluate()
            seen = self._seen()
            losses = zip(seen["loss"], seen["targets"], strict=True)
            self._answer({"loss": sum(loss * count for loss, count in losses) / sum(seen["targets"])})
        if not line:
            raise SystemExit
        self.left, self.start = int(line), self._now()

    def note(self, input_ids: Tensor, labels: Tensor, loss: Tensor) -> None:
        """Called after a micro-batch: tokens and labels [B, T], and the mean loss over its labels."""
        tokens, targets = (input_ids != self.pad_id).sum(), (labels[:, 1:] != -100).sum()
        self.seen.append((tokens, targets, loss.detach()))

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _seen(self) -> dict[str, list[float]]:
        tokens, targets, losses = ([float(x) for x in column] for column in zip(*self.seen, strict=True))
        self.seen = []
        return {"tokens": tokens, "targets": targets, "loss": losses}

    def _answer(self, reply: dict[str, Any]) -> None:
        print(json.dumps(reply), file=self.replies, flush=True)


def samples_of(path: str) -> list[dict[str, list[int]]]:
    """Tokens and labels of our samples."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def minimind(settings: dict[str, Any], gate: Gate) -> None:
    """Run jingyaogong/minimind's training script of the stage unmodified, with its own defaults.

    Patched are: our initial weights and tokenizer, a dataset of the tokens and labels of our samples, padded
    as its own are, their order, and the gate around its loader. Batch size, learning rate and the like are
    ours, and the rate constant, or, with `own_flags`, its own.
    """
    import torch.utils.data

    import model.model_minimind as its_model
    import trainer.trainer_utils as its_utils
    from dataset import lm_dataset

    build, sampler, loader = its_utils.init_model, its_utils.SkipBatchSampler, torch.utils.data.DataLoader

    def init_model(lm_config, *_, device="cpu", **__):
        model, tokenizer = build(lm_config, "none", tokenizer_path=settings["tokenizer"], device=device)
        model.load_state_dict(torch.load(settings["weights"], map_location=device, weights_only=True))
        model.register_forward_hook(
            lambda _, args, kwargs, out: gate.note(args[0], kwargs["labels"], out.loss), with_kwargs=True
        )
        gate.evaluate = lambda: evaluate(model, device)
        return model, tokenizer

    @torch.no_grad()
    def evaluate(model, device):
        model.eval()
        rows = padded(settings["held_out"], None, settings["flags"]["max_seq_len"])
        for start in range(0, len(rows), EVAL_BATCH):
            batch = zip(*rows[start : start + EVAL_BATCH], strict=True)
            ids, labels = (torch.stack(column).to(device) for column in batch)
            model(ids, labels=labels)
        model.train()

    class GatedLoader(loader):
        def __iter__(self):
            batches = super().__iter__()
            for _ in range(len(self)):
                gate.next()
                yield next(batches)

    def padded(path, _, max_length):
        def row(tokens, fill):
            return torch.tensor(tokens + [fill] * (max_length - len(tokens)))

        return [
            (row(sample["input_ids"], settings["pad_id"]), row(sample["labels"], -100))
            for sample in samples_of(path)
        ]

    its_model.MiniMindConfig = functools.partial(its_model.MiniMindConfig, **settings["shape"])
    its_utils.init_model = init_model
    its_utils.SkipBatchSampler = lambda indices, *rest: sampler(range(len(indices)), *rest)
    torch.utils.data.DataLoader = GatedLoader
    lm_dataset.PretrainDataset = lm_dataset.SFTDataset = padded
    script = {"pretrain": "train_pretrain.py", "sft": "train_full_sft.py"}[settings["stage"]]
    never = 10**9  # writes nothing; as a number of epochs it keeps the learning rate at its start
    flags = settings["flags"] | {"log_interval": never, "save_interval": never}
    if settings["own_flags"] is None:
        flags["epochs"] = never
    flags |= {"from_weight": "none", "data_path": settings["data"], "save_dir": settings["folder"]}
    sys.argv = [script, *(part for key, value in flags.items() for part in (f"--{key}", str(value)))]
    sys.argv += settings["own_flags"] or []  # the last of two holds
    runpy.run_path(str(Path(settings["path"], "trainer", script)), run_name="__main__")


def trl(settings: dict[str, Any], gate: Gate) -> None:
    """Run TRL's SFTTrainer on transformers' Qwen3 model with the same weights, in the precision of ours: each
    batch is padded to its longest sample, no activation checkpointing. Its data are the tokens of our
    samples."""
    import transformers
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    flags, kind = settings["flags"], "Qwen3Moe" if settings["flags"]["use_moe"] else "Qwen3"
    config = getattr(transformers, f"{kind}Config")(**settings["stock"])
    weights = torch.load(settings["weights"], map_location="cpu", weights_only=True)
    stock = getattr(transformers, f"{kind}ForCausalLM")
    model = stock.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)

    class Timed(SFTTrainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, *args, num_items_in_batch=None, **kwargs):
            labels = inputs["labels"]
            loss = super().compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)
            own = (labels[:, 1:] != -100).sum()
            of_update = own if num_items_in_batch is None else num_items_in_batch
            gate.note(inputs["input_ids"], labels, loss.detach() * of_update / own)
            return loss

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            for _ in range(flags["accumulation_steps"]):
                gate.next()

    options = SFTConfig(
        output_dir=settings["folder"],
        per_device_train_batch_size=flags["batch_size"],
        gradient_accumulation_steps=flags["accumulation_steps"],
        learning_rate=flags["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=flags["grad_clip"],
        max_steps=10**6,
        max_length=flags["max_seq_len"],
        gradient_checkpointing=False,
        bf16=settings["bf16"],
        use_cpu=not gate.cuda,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = Dataset.from_list(samples_of(settings["data"]))
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    Timed(
        model=model, args=options, train_dataset=data, processing_class=tokenizer, callbacks=[Steps()]
    ).train()


PEERS = {"minimind": minimind, "trl": trl}


def main() -> None:
    """Read the settings and run the peer."""
    settings = json.loads(sys.stdin.readline())
    gate = Gate(settings["flags"]["device"], settings["pad_id"])
    PEERS[settings["peer"]](settings, gate)
    gate.wait(is_over=True)


if __name__ == "__main__":
    main()
