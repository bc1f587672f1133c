"""The reward model of `--reward_model`: a network that scores a conversation."""

from pathlib import Path
from typing import Any

import torch

from common.errors import UserError, reason
from dataset.token_cache import load_tokenizer
from trainer.components.language_model import check_tokenizer, scalar_head
from trainer.components.model_files import fill, read_model
from trainer.components.rewards import RewardFn
from trainer.components.run_files import tokenizer_folder


def reward_model(path: str, device: torch.device) -> RewardFn:
    """The score that a model gives to a conversation. It is a Hugging Face folder with a sequence classifier of one
    output, or a weights file of this program whose head gives one number (`scalar_head`), here at the last position.

    Raises:
        UserError: it is no such model.
    """
    if not Path(path).exists():
        raise UserError(f"--reward_model {path}: no such file or folder")
    model, tokenizer = _scalar_model(Path(path)) if Path(path).is_file() else _sequence_classifier(path)
    model = model.eval().to(device)

    def score(prompt: list[dict], completion: str, record: dict) -> float:
        messages = [*prompt, {"role": "assistant", "content": completion}]
        inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True).to(device)
        with torch.inference_mode():
            return float(model(**inputs).logits.flatten()[-1])  # [1, 1], or [1, T, 1]

    return score


def _sequence_classifier(folder: str) -> tuple[Any, Any]:
    """The model and its tokenizer in a Hugging Face folder; code in it is not run."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        options = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        options |= {"num_labels": 1, "output_loading_info": True}
        model, loading = AutoModelForSequenceClassification.from_pretrained(folder, **options)
    except Exception as error:  # transformers raises errors of any type for untrusted files
        raise UserError(f"--reward_model {folder} holds no sequence classifier ({reason(error)})") from error
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"--reward_model {folder} holds no sequence classifier: its weights lack {', '.join(missing[:3])}, which "
            "would be random numbers; give a model that was trained to score answers"
        )
    return model, tokenizer


def _scalar_model(path: Path) -> tuple[Any, Any]:
    """The model and its tokenizer of a weights file."""
    from model.model_minimind import MiniMindForCausalLM

    weights, config = read_model(path)
    outputs = len(weights["lm_head.weight"])
    if outputs != 1:
        raise UserError(f"--reward_model {path}: its head has {outputs} outputs instead of one; it scores no answers")
    folder = tokenizer_folder(path)
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, folder, config)
    model = scalar_head(MiniMindForCausalLM(config), bias="lm_head.bias" in weights)
    fill(model, weights, path, config)
    return model, tokenizer
