"""The hostile client, for some seconds: the server answers the honest ones as if it were not there."""

import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.scripts.serve import hostile
from trainer.run.paths import weight_path
from trainer.weights.files import save_weights


def test_honest_answers_beside_a_hostile_client_are_those_of_a_quiet_server(tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1)
    save_weights(MiniMindForCausalLM(config), weight_path(tmp_path, "full_sft", config))
    monkeypatch.setattr(hostile, "STREAMS", 8)
    monkeypatch.setattr(hostile, "CONNECTIONS", 100)
    monkeypatch.setattr("sys.argv", ["hostile.py", "--save_dir", str(tmp_path), "--seconds", "2"])
    found = hostile.measure(hostile.parse_args())
    assert found["wrong"] == [] and found["exit_status"] == 0 and "Traceback" not in found["log"]
    assert found["answers"] >= 8 and found["attacks"] > 0
    early, late = found["memory_mb"]
    assert late < early + hostile.CACHE
