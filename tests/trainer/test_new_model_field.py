"""A reader adds two fields to the model, LayerNorm and a sliding window: three files change, and nothing is
wrong in silence. The change is made in a copy of the repository, which then trains, resumes, answers and
exports."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from tests.conftest import ROOT
from trainer.weights.for_tools import load_path

EDITS = {
    "common/settings.py": [
        (
            "    dropout: float = setting(",
            '    layer_norm: bool = setting(False, "1: LayerNorm instead of RMSNorm")\n'
            '    sliding_window: int = setting(0, "how far back attention sees; 0: everything", "tokens", ge=0)\n'
            "    dropout: float = setting(",
        )
    ],
    "model/model_minimind.py": [
        (
            "    dropout: float = 0.0",
            "    layer_norm: bool = False\n    sliding_window: int = 0\n    dropout: float = 0.0",
        ),
        ("RMSNorm(config.hidden_size, config.rms_norm_eps)", "norm(config)"),
        (
            "class MiniMindBlock(",
            "def norm(config):\n    kind = nn.LayerNorm if config.layer_norm else RMSNorm\n"
            "    return kind(config.hidden_size, config.rms_norm_eps)\n\n\nclass MiniMindBlock(",
        ),
        (
            "        self.layer_idx = layer_idx\n",
            "        self.layer_idx, self.window = layer_idx, config.sliding_window\n",
        ),
        ("flat_attention(q, k, v, flat)", "flat_attention(q, k, v, flat, self.window)"),
        (
            "        self.rotary_emb = ",
            "        self.window = config.sliding_window\n        self.rotary_emb = ",
        ),
        ("    @staticmethod\n    def visible(positions: Tensor", "    def visible(self, positions: Tensor"),
        (
            "return torch.arange(end, device=positions.device) <= positions[..., None]",
            "back = positions[..., None] - torch.arange(end, device=positions.device)\n"
            "        return (back >= 0) & ((back < self.window) if self.window else True)",
        ),
        (
            "import create_causal_mask  # brings in the compiler",
            "import create_causal_mask, create_sliding_window_causal_mask\n\n"
            "        create = create_sliding_window_causal_mask if self.config.sliding_window else create_causal_mask",
        ),
        ("mask = create_causal_mask(", "mask = create("),
    ],
    "model/fused.py": [
        ("v: Tensor, spans: Spans)", "v: Tensor, spans: Spans, window: int = 0)"),
        ("window_size=(-1, 0)", "window_size=(window - 1, 0)"),
        ("seen.host_cu_seqlens)", "seen.host_cu_seqlens, window)"),
        ("cu_seqlens_k: Tensor) -> Tensor:", "cu_seqlens_k: Tensor, window: int = 0) -> Tensor:"),
        ("sample_attention(*sample)", "sample_attention(*sample, window)"),
        ("def sample_attention(q: Tensor, k: Tensor, v: Tensor)", "def sample_attention(q, k, v, window)"),
        ("if len(q) > 1 and before >= len(q):", "if window or (len(q) > 1 and before >= len(q)):"),
        (".tril(before)", ".tril(before).triu(before + 1 - (window or len(k)))"),
    ],
}
STEPS = """
import os, sys
from pathlib import Path
sys.path.insert(0, {copy!r})
import torch
from common.command_line import one_line_errors
from common.errors import UserError
from model.generation import generate
from model.sampling import Sampling
from scripts import convert_model
from trainer import train_pretrain
from trainer.weights.for_tools import load_path

def run(main, *argv):
    sys.argv = ["run", *map(str, argv)]
    if (child := os.fork()) == 0:
        with one_line_errors():
            main()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

folder = Path({folder!r})
places = ["--save_dir", folder / "out", "--checkpoint_dir", folder / "ck", "--cache_dir", folder / "cache"]
flags = ["--data_path", {data!r}, *places, "--hidden_size", 32, "--num_hidden_layers", 2, "--max_seq_len", 64]
flags += ["--batch_size", 8, "--learning_rate", 0.01, "--device", "cpu"]
new = ["--layer_norm", 1, "--sliding_window", 4]
assert run(train_pretrain.main, *flags, *new, "--epochs", 1) == 0
assert run(train_pretrain.main, *flags, *new, "--epochs", 2, "--extend_epochs", 1, "--from_resume", 1) == 0
assert run(train_pretrain.main, *flags, "--epochs", 3, "--extend_epochs", 1, "--from_resume", 1) == 2
again = ["--save_weight", "again", "--from_weight", "pretrain", "--epochs", 1]
assert run(train_pretrain.main, *flags, *again) == 0  # without the flags: the weights say them

for weight in ("pretrain", "again"):
    model, _ = load_path(folder / f"out/{{weight}}_32.pth")
    assert (model.config.layer_norm, model.config.sliding_window) == (True, 4)
    assert type(model.model.norm) is torch.nn.LayerNorm
    ids = torch.randint(6, 6400, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        padded = model(ids).logits[0]
        borders = torch.tensor([0, 20], dtype=torch.int32)
        flat = model(ids[0], position_ids=torch.arange(20), cu_seqlens=borders, max_seqlen=20).logits
        other = ids.clone()
        other[0, 0] = 5
        far = model(other).logits[0]
    assert torch.allclose(padded, flat, atol=1e-4)
    assert torch.allclose(padded[10:], far[10:], atol=1e-5) and not torch.equal(padded[2], far[2])  # two layers see back 6 tokens
    written = generate(model, [ids[0].tolist()], [[Sampling(0.0)]], 6, ())[0][0].tokens
    context = ids[0].tolist()
    for token in written:
        with torch.no_grad():
            assert token == int(model(torch.tensor([context])).logits[0, -1].argmax())
        context.append(token)
for form, name in (("hf", "folder"), ("gguf", "w.gguf")):
    model_flags = ["--model", folder / "out/pretrain_32.pth", "--to", form, "--output", folder / name]
    assert run(convert_model.main, *model_flags) == 2
    assert not (folder / name).exists()
print("done")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("copy")
    for name in ("common", "model", "dataset", "trainer", "scripts", "tools"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("cache", "__pycache__", "*.pth")
        )
    for name, edits in EDITS.items():
        text = (copy / name).read_text()
        for old, new in edits:
            assert old in text, f"{name}: {old}"
            text = text.replace(old, new)
        (copy / name).write_text(text)
    return copy


def test_two_new_fields_of_the_model(copy, corpus, tmp_path):
    code = STEPS.format(copy=str(copy), folder=str(tmp_path), data=str(corpus["pretrain"]))
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout[-2000:] + done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    # other flags
    assert all(change in lines[0] for change in ("layer_norm: True -> False", "sliding_window: 4 -> 0"))
    assert (
        all("stock Qwen3 has no layer_norm True, sliding_window 4; " in line for line in lines[1:])
        and len(lines) == 3
    )
    with pytest.raises(
        UserError, match="of a model with layer_norm True, sliding_window 4, which this version"
    ):
        load_path(tmp_path / "out/pretrain_32.pth")
