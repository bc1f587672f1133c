"""The load of experts: counted right, summed over ranks, read at log points, and the same after a resume."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.stage_process import run
from tests.trainer.devices.test_wrapping import flat_batch
from tests.trainer.stage_flags import flags
from trainer.callbacks.experts import ExpertLoad, balance_metrics, token_counters
from trainer.report.metrics import read_metrics
from trainer.report.trackers import drawable

# counts by layer -> expert_load, expert_max_min, dead_experts
TABLE = [([[8, 2], [5, 5]], [0.65, 0.35], 4.0, 0), ([[10, 0], [2, 8]], [0.6, 0.4], None, 1)]
TABLE += [([[0, 0], [0, 0]], [0.0, 0.0], None, 4)]


@pytest.mark.parametrize(("counts", "shares", "ratio", "dead"), TABLE)
def test_the_figures_of_counts(counts, shares, ratio, dead):
    found = balance_metrics(torch.tensor(counts))
    assert found["expert_load"] == pytest.approx(shares)
    assert (found["expert_max_min"], found["dead_experts"]) == (ratio, dead)


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_model_counts_what_stock_transformers_routes(top_k):
    """Sample by sample in Qwen3MoeForCausalLM; rows that only fill the batch up are not counted."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 6400, "num_attention_heads": 4}
    shape |= {"head_dim": 8}
    shape |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": top_k}
    shape |= {"moe_intermediate_size": 64}
    config = MiniMindConfig(**shape, use_moe=True)
    model = MiniMindForCausalLM(config)
    stock_config = Qwen3MoeConfig(**shape, norm_topk_prob=True, rope_parameters=config.rope_parameters)
    stock_config.tie_word_embeddings = True
    stock = Qwen3MoeForCausalLM.from_pretrained(
        None, config=stock_config, state_dict=model.state_dict()
    ).eval()
    # no file ever holds a counter
    assert not [key for key in model.state_dict() if key.endswith("tokens_per_expert")]
    batch = flat_batch(0, [7, 1, 30])
    flat = batch.model_inputs()
    wanted = torch.zeros(2, 4, dtype=torch.int64)
    for ids in batch["input_ids"].split([7, 1, 30]):
        routed = stock(ids[None], output_router_logits=True).router_logits
        wanted += torch.stack([torch.bincount(x.topk(top_k).indices.flatten(), minlength=4) for x in routed])
    model.train()(**flat)
    assert torch.equal(torch.stack(token_counters(model)), wanted)
    model.eval()(**flat)  # evaluation does not count
    saved = ExpertLoad(model).state_dict()
    model.train()(**flat)
    kept = ExpertLoad(model)
    kept.load_state_dict(saved)
    # read before a signal, and counted after the resume
    record: dict = {}
    kept.on_log(None, record)
    assert record == balance_metrics(2 * wanted)
    assert not any(counter.any() for counter in token_counters(model))
    assert token_counters(torch.nn.Linear(2, 2)) == []


def test_ranks_change_nothing(corpus, tmp_path):
    settings = {"use_moe": 1, "log_interval": 4, "save_interval": 1000, "eval_interval": 0, "epochs": 1}
    for ranks in (1, 2):
        argv = flags(corpus, tmp_path / str(ranks), "pretrain", **settings, batch_size=8 // ranks)
        run("pretrain", argv, ranks=ranks)
    one_rank, two = (
        read_metrics(tmp_path / name / "out/pretrain_32_moe_metrics.jsonl") for name in ("1", "2")
    )
    assert len(one_rank) == len(two) >= 2
    for one, other in zip(one_rank, two, strict=True):
        assert len(one["expert_load"]) == 4 and sum(one["expert_load"]) == pytest.approx(1.0)
        # a rounding may turn a token
        assert one["expert_load"] == pytest.approx(other["expert_load"], abs=0.02)
        assert {"expert_max_min", "dead_experts"} <= other.keys()


def test_a_tracker_draws_each_expert():
    record = {"update": 3, "loss": None, "expert_load": [0.25, 0.75], "expert_max_min": 3.0}
    record |= {"skipped": [{"update": 2}]}
    drawn = {"expert_load/0": 0.25, "expert_load/1": 0.75, "expert_max_min": 3.0}
    assert drawable(record, leave_out=("update",)) == drawn
