"""Runs and tools whose data and weights lie on a hub."""

import re

import pytest
from transformers import AutoTokenizer

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT
from tests.fake_hub import FRESH, Hub
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import flags, records


@pytest.fixture
def hub(corpus, tmp_path):
    """The corpus as a dataset, and a model, also on the disk."""
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1)
    MiniMindForCausalLM(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(ROOT / "model").save_pretrained(tmp_path / "model")
    data = {corpus[name].name: corpus[name].read_bytes() for name in corpus if name != "cache"}
    model = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    found = Hub({"datasets/a/data": data, "models/a/tiny": model})
    yield found
    found.close()


def test_a_run_on_a_hub_is_the_run_on_its_files(corpus, tmp_path, hub):
    """Mixture with the first file of a pattern, held-out data and start weights; two ranks, each file
    downloaded once. It resumes without the hub, and notices other data."""
    local = corpus["pretrain_eval"]
    settings = {"epochs": 1, "num_hidden_layers": 1, "cache_dir": tmp_path / "cache"}
    remote = settings | {
        "data_path": f"hf://datasets/a/data/p*.jsonl[:1]:2,{local}:1",
        "eval_data_path": "hf://datasets/a/data/pe.jsonl",
        "from_weight": "hf://a/tiny",
    }
    own = settings | {"data_path": f"{corpus['pretrain']}:2,{local}:1", "from_weight": tmp_path / "model"}
    fresh, env = Faults(script=FRESH), hub.environment(tmp_path / "hub")
    done = run("pretrain", flags(corpus, tmp_path / "a", "pretrain", **remote), fresh, ranks=2, **env)
    assert done.out.count("hf://datasets/a/data/p*.jsonl[:1]: ") == 1
    gets = [path for method, path, *_ in hub.requests if method == "GET" and "/resolve/" in path]
    assert len(gets) == len(set(gets))
    run("pretrain", flags(corpus, tmp_path / "b", "pretrain", **own), ranks=2)
    assert records(tmp_path / "a") == records(tmp_path / "b")

    more = remote | {"epochs": 2, "from_resume": 1, "extend_epochs": 1}
    hub.requests.clear()
    resume = flags(corpus, tmp_path / "a", "pretrain", **more)
    run("pretrain", resume, fresh, **env, HF_HUB_OFFLINE="1")
    assert records(tmp_path / "a")[-1][1] == 1 and hub.requests == []
    hub.repositories["datasets/a/data"]["p.jsonl"] += b'{"text": "one more"}\n'
    assert re.search("another run.*data: ", run("pretrain", resume, fresh, status=2, **env).err)


def test_tools_take_models_and_data_on_a_hub(corpus, tmp_path, hub):
    asked = ("--model", "hf://a/tiny", "--task", "loss", "--data_path", "hf://datasets/a/data/se.jsonl")
    env = hub.environment(tmp_path / "hub")
    assert "tiny" in run("scripts.evaluate", asked, Faults(script=FRESH), **env).out.splitlines()[-3]
