"""What the stages load when they need it; the fork server of stage_process.py imports it, before it forks."""

import gc
import io
import sys
from functools import cache

import numpy as np
import numpy.ma
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig  # noqa: F401

from common.arguments import parse_args
from common.settings import ROOT
from dataset import tokenizing
from dataset.batch import FlatBatch
from dataset.token_cache import load_tokenizer
from llm.training import train  # noqa: F401
from model import model_minimind
from trainer import train_full_sft, train_pretrain
from trainer.checkpoint import run, same_run  # noqa: F401
from trainer.optim.build import build_optimizer
from trainer.rollouts import ppo, settings  # noqa: F401
from trainer.weights import config

# Tokenizers, as nearly every run loads two of this folder: each of them is given away once
FOLDER = ROOT / "model"
spare = [load_tokenizer(FOLDER) for _ in range(4)]
tokenizing.fingerprint(spare[0])  # keeps the text of the last tokenizer
from_pretrained = AutoTokenizer.from_pretrained


def spare_or_loaded(path, **options):
    """A tokenizer that the server has loaded, if it is of the repository's folder."""
    if str(path) == str(FOLDER) and spare:
        return spare.pop()
    return from_pretrained(path, **options)


AutoTokenizer.from_pretrained = spare_or_loaded


def use_once() -> None:
    """Do what is slow at its first use in a process: validate settings, train a model, save and load it, render a
    conversation."""
    for script in (train_pretrain, train_full_sft):
        args = parse_args(script.Args, script.__doc__, ["--hidden_size", "32", "--num_hidden_layers", "1"])
    with torch.random.fork_rng(devices=[]):
        model = model_minimind.MiniMindForCausalLM(config.model_config(spare[0], args)).train()
        optimizer = build_optimizer(model, 1e-3, 0.1, "muon")
        for sizes in ((9, 3), (40,)):
            common = {"sample_id": 0, "target_bytes": 1}
            samples = [common | {"input_ids": np.arange(n), "loss_weight": np.ones(n)} for n in sizes]
            batch = FlatBatch.from_samples(samples)
            out = model(**batch.model_inputs(), targets=batch["targets"])
            (out.loss + out.aux_loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    # keeps the compiled template
    spare[0].apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    torch.load(file, weights_only=True)


use_once()
# What a run computes of the repository's files and of its tokenizers, a sixth of a small run, is computed here, once
for module, names in (
    (same_run, ("code_version", "files_of_rooms", "file_hash", "is_installed")),
    (config, ("vocabulary_hash",)),
):
    for name in names:
        setattr(module, name, cache(getattr(module, name)))
same_run.code_of_run(torch.optim.SGD([torch.zeros(1)]))
for tokenizer in spare:
    config.vocabulary_hash(tokenizer)
texts, size = dict.fromkeys(spare, tokenizing.backend_text(spare[0])), len(spare[0])


def text_or_written(tokenizer, write=tokenizing.backend_text):
    """The backend of a tokenizer of the server, unless tokens were added to it."""
    return texts[tokenizer] if tokenizer in texts and len(tokenizer) == size else write(tokenizer)


tokenizing.backend_text = text_or_written
# Installed modules are no sources of a run. To look at 2,400 of them copies their pages into each forked process
INSTALLED = {
    name
    for name, module in sys.modules.items()
    if same_run.is_installed(str(getattr(module, "__file__", "")))
}
source_files = same_run.source_files
same_run.source_files = lambda: source_files(
    {name: sys.modules[name] for name in list(sys.modules) if name not in INSTALLED}
)
# Collections in the forked processes skip what is loaded here: a small run takes 0.85 instead of 0.95 CPU seconds
gc.collect()
gc.freeze()
# also the collection with which a rank ends, which would copy all of it
gc.freeze = gc.unfreeze = lambda: None
