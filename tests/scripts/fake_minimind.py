"""A checkout with MiniMind's folders and names, around transformers' own Qwen3: what the benchmark's peer
code expects of the real one, and a reference for the losses that nobody here wrote."""

from pathlib import Path

FILES = {
    "model/__init__.py": "",
    "model/model_minimind.py": """
from transformers import Qwen3Config, Qwen3ForCausalLM

def MiniMindConfig(hidden_size, num_hidden_layers, use_moe, **shape):
    return Qwen3Config(hidden_size=hidden_size, num_hidden_layers=num_hidden_layers, rope_theta=1e6,
                       tie_word_embeddings=True, **shape)

MiniMindForCausalLM = Qwen3ForCausalLM
""",
    "dataset/__init__.py": "",
    "dataset/lm_dataset.py": """
import torch

class SFTDataset(torch.utils.data.Dataset):
    def __init__(self, path, tokenizer, max_length):
        raise AssertionError("its samples must be ours")
""",
    "trainer/trainer_utils.py": """
from model.model_minimind import MiniMindForCausalLM
from transformers import AutoTokenizer

def init_model(lm_config, from_weight, tokenizer_path="../model", device="cpu"):
    return MiniMindForCausalLM(lm_config).to(device), AutoTokenizer.from_pretrained(tokenizer_path)

def SkipBatchSampler(indices, batch_size, skip=0):
    indices = list(indices)
    return [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)][skip:]
""",
    "trainer/train_full_sft.py": """
import argparse
import random
import torch
from torch.utils.data import DataLoader
from dataset.lm_dataset import SFTDataset
from model.model_minimind import MiniMindConfig
from trainer.trainer_utils import SkipBatchSampler, init_model

parser = argparse.ArgumentParser()
for name in "hidden_size num_hidden_layers use_moe batch_size accumulation_steps max_seq_len epochs".split():
    parser.add_argument("--" + name, type=int)
for name in "log_interval save_interval learning_rate grad_clip".split():
    parser.add_argument("--" + name, type=float)
for name in "device from_weight data_path save_dir".split():
    parser.add_argument("--" + name)
args = parser.parse_args()
print("this is no answer")
config = MiniMindConfig(hidden_size=args.hidden_size, num_hidden_layers=args.num_hidden_layers, use_moe=args.use_moe)
model, tokenizer = init_model(config, args.from_weight, device=args.device)
data = SFTDataset(args.data_path, tokenizer, args.max_seq_len)
order = random.sample(range(len(data)), len(data))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
for step, (ids, labels) in enumerate(DataLoader(data, batch_sampler=SkipBatchSampler(order, args.batch_size)), 1):
    (model(ids, labels=labels).loss / args.accumulation_steps).backward()
    if step % args.accumulation_steps == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
""",
}


def make_checkout(folder: Path, **changed: str) -> Path:
    """Write the checkout; `changed` replaces files by their stem."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed.get(path.stem, text), encoding="utf-8")
    return folder
