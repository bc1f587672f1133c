"""Reward models: classifiers in Hugging Face folders."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from common.errors import UserError
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT
from trainer.rollouts.rewards import reward_model

CPU = torch.device("cpu")


def test_a_folder_without_a_classifier(tmp_path):
    with pytest.raises(UserError, match=f"--reward_model {tmp_path} holds no sequence classifier"):
        reward_model(str(tmp_path), CPU)


def test_a_causal_language_model_is_no_reward_model(tmp_path):
    """Its head would be random. A classifier scores."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen3Config(
        vocab_size=6400, head_dim=16, num_key_value_heads=1, num_labels=1, pad_token_id=0, **shape
    )
    for name, kind in (("lm", Qwen3ForCausalLM), ("classifier", Qwen3ForSequenceClassification)):
        kind(config).save_pretrained(tmp_path / name)
        load_tokenizer(ROOT / "model").save_pretrained(tmp_path / name)
    with pytest.raises(UserError, match=r"lm holds no sequence classifier: its weights lack score.weight"):
        reward_model(str(tmp_path / "lm"), CPU)
    score = reward_model(str(tmp_path / "classifier"), CPU)
    assert isinstance(score([{"role": "user", "content": "1+1?"}], "2", {}), float)
