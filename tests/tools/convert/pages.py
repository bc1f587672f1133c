"""Pages to send for the tests, of models with random weights, and the code of a page in Node."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT
from tools.convert.page_check import find_node
from tools.convert.page_file import write_page

MOE = {"use_moe": True, "num_experts": 3, "num_experts_per_tok": 2}
# The worker of a page, as in run_in_node.js; `body` runs where its functions and classes are.
SCRIPT = """
const fs = require("node:fs");
const { page, body, value } = JSON.parse(fs.readFileSync(0, "utf8"));
const text = fs.readFileSync(page, "utf8");
const element = (id) => text.match(new RegExp(`<script [^>]*id="${id}">([^]*?)</script>`))[1];
const weights = [...text.matchAll(/<script [^>]*class="weights">([^]*?)<\\/script>/g)].map((match) => match[1]);
const given = { spec: JSON.parse(element("spec")), weights, products: element("products") };
const code = `${element("worker")}; const messages = []; function postMessage(data) { messages.push(data); }
  return (async () => { await load(given); messages.length = 0; ${body} })();`;
new Function("self", "given", "value", code)({}, given, value)
  .then((result) => console.log(JSON.stringify(result)));
"""


def random_model(scale: float = 0.1, **shape: Any) -> MiniMindForCausalLM:
    """A model with random weights, far enough from zero that mistakes show."""
    torch.manual_seed(0)
    config = MiniMindConfig(**{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | shape)
    model = MiniMindForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data += scale * torch.randn_like(parameter)
    return model


def shipped_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "model")


def write(
    path: Path, bits: int = 8, tokenizer: Any = None, change: Any = None, **shape: Any
) -> MiniMindForCausalLM:
    """Write a page; returns the model that it has, with rounded weights. change: of the model before."""
    options = {key: shape.pop(key) for key in ("name", "continues_text") if key in shape}
    model = random_model(**shape)
    if change:
        change(model)
    options = {"name": "tiny", "continues_text": False} | options
    write_page(path, model=model, tokenizer=tokenizer or shipped_tokenizer(), bits=bits, **options)
    return model


def in_node(page: Path, body: str, value: Any = None) -> Any:
    """What JavaScript returns that runs inside the worker of a page. `messages`: what the worker sent."""
    node = find_node()
    if node is None:
        pytest.skip("needs Node 18 or newer")
    given = json.dumps({"page": str(page), "body": body, "value": value})
    done = subprocess.run(
        [node, "-e", SCRIPT], input=given, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
