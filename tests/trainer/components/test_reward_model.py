"""Reward models: classifiers in Hugging Face folders, and what a stage of one's own writes."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from common.errors import UserError
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT
from trainer.components.language_model import scalar_head, target_logits
from trainer.components.model_files import save_weights
from trainer.components.reward_model import reward_model

CPU = torch.device("cpu")


def test_a_folder_without_a_classifier(tmp_path):
    with pytest.raises(UserError, match=f"--reward_model {tmp_path} holds no sequence classifier"):
        reward_model(str(tmp_path), CPU)


def test_a_causal_language_model_is_no_reward_model(tmp_path):
    """Its head would be random. A classifier scores."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen3Config(vocab_size=6400, head_dim=16, num_key_value_heads=1, num_labels=1, pad_token_id=0, **shape)
    for name, kind in (("lm", Qwen3ForCausalLM), ("classifier", Qwen3ForSequenceClassification)):
        kind(config).save_pretrained(tmp_path / name)
        load_tokenizer(ROOT / "model").save_pretrained(tmp_path / name)
    with pytest.raises(UserError, match=r"lm holds no sequence classifier: its weights lack score.weight"):
        reward_model(str(tmp_path / "lm"), CPU)
    score = reward_model(str(tmp_path / "classifier"), CPU)
    assert isinstance(score([{"role": "user", "content": "1+1?"}], "2", {}), float)


@pytest.mark.parametrize("bias", [True, False])
def test_a_stage_that_trains_a_reward_model_writes_what_is_read_here(tmp_path, bias):
    """Its model has one number per position for a head; its weights file is written like any other."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(ROOT / "model")
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1)
    save_weights(MiniMindForCausalLM(config), tmp_path / "sft_32.pth")
    model = scalar_head(MiniMindForCausalLM(config), bias).eval()
    assert not any(parameter.any() for parameter in model.lm_head.parameters())
    torch.nn.init.normal_(model.lm_head.weight)
    save_weights(model, tmp_path / "judge_32.pth")
    prompt = [{"role": "user", "content": "1+1?"}]
    score = reward_model(str(tmp_path / "judge_32.pth"), CPU)(prompt, "2", {})
    text = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": "2"}], tokenize=False)
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    batch = {"input_ids": tokens, "position_ids": torch.arange(len(tokens)), "max_seqlen": len(tokens)}
    batch |= {"cu_seqlens": torch.tensor([0, len(tokens)], dtype=torch.int32), "targets": tokens[:1]}
    values, _ = target_logits(model, batch | {"target_index": torch.tensor([len(tokens) - 1])})
    assert score == pytest.approx(values.item(), rel=1e-2) and score != 0
    with pytest.raises(UserError, match="its head has 6400 outputs instead of one"):
        reward_model(str(tmp_path / "sft_32.pth"), CPU)
