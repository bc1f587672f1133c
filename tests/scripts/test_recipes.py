"""The recipes of docs/training.md, "By machine": files that --config reads, with the shapes of the table."""

import re

import pytest
import torch

from common.arguments import parse_args
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindForCausalLM
from tests.conftest import ROOT
from trainer import train_pretrain
from trainer.weights.config import model_config

RECIPES = sorted((ROOT / "scripts" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("page", ["docs/training.md", "docs/zh/training.md"])
def test_the_table_shows_each_recipe_with_its_shape_and_size(page):
    rows = re.findall(
        r"\| (\d+) x (\d+) \| ([\d.]+) M \| .*`(\w+\.yaml)` \|", (ROOT / page).read_text("utf-8")
    )
    assert sorted(name for *_, name in rows) == [path.name for path in RECIPES]
    for width, depth, millions, name in rows:
        path = str(ROOT / "scripts" / "recipes" / name)
        args = parse_args(train_pretrain.Args, None, ["--config", path])
        assert (args.hidden_size, args.num_hidden_layers) == (int(width), int(depth))
        with torch.device("meta"):
            model = MiniMindForCausalLM(model_config(load_tokenizer(args.tokenizer_path), args))
        assert round(model.num_parameters() / 1e6, 2) == float(millions), name


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_commands_of_its_own(path):
    text = path.read_text("utf-8")
    args = parse_args(train_pretrain.Args, None, ["--config", str(path)])
    shape = f"--hidden_size {args.hidden_size} --num_hidden_layers {args.num_hidden_layers} "
    assert f"--config scripts/recipes/{path.name} " in text
    assert f"train_full_sft.py {shape}" in text
