"""Request fields of other servers and clients that would change an answer and are not supported here, each
with the values that have no effect. Two kinds of fields are not listed: those that change only speed, logs or
caches (`user`, `cache_prompt`, `prediction`), and those that tune a refused field (`dry_base`,
`mirostat_tau`), because they do nothing while that field is off."""

from typing import Any

# name -> values without an effect; null and empty values never have one
REFUSED: dict[str, list[Any]] = {
    # OpenAI
    "audio": [],
    "best_of": [1],
    "echo": [False],
    "function_call": ["auto", "none"],
    "functions": [],
    "logit_bias": [],
    "logprobs": [False],
    "top_logprobs": [0],
    "modalities": [["text"]],
    "reasoning_effort": ["medium"],
    "suffix": [],
    "verbosity": ["medium"],
    "web_search_options": [],
    # its Responses API
    "instructions": [],
    "max_output_tokens": [],
    "reasoning": [],
    # Anthropic
    "output_format": [],
    "stop_sequences": [],
    "system": [],
    "thinking": [],
    # vLLM, SGLang
    "add_generation_prompt": [True],
    "add_special_tokens": [],
    "allowed_token_ids": [],
    "bad_words": [],
    "chat_template": [],
    "continue_final_message": [False],
    "custom_logit_processor": [],
    "documents": [],
    "ebnf": [],
    "guided_choice": [],
    "guided_grammar": [],
    "guided_json": [],
    "guided_regex": [],
    "ignore_eos": [False],
    "include_reasoning": [True],
    "include_stop_str_in_output": [False],
    "length_penalty": [1],
    "logits_processors": [],
    "lora_path": [],
    "min_p": [0],
    "min_tokens": [0],
    "no_stop_trim": [False],
    "prompt_embeds": [],
    "prompt_logprobs": [],
    "regex": [],
    "return_token_ids": [False],
    "return_tokens_as_token_ids": [False],
    "sampling_params": [],
    "separate_reasoning": [True],
    "skip_special_tokens": [True],
    "stop_regex": [],
    "stop_token_ids": [],
    "structural_tag": [],
    "structured_outputs": [],
    "thinking_token_budget": [],
    "truncate_prompt_tokens": [],
    "use_beam_search": [False],
    # llama.cpp, ollama
    "adaptive_target": [-1],
    "dry_multiplier": [0],
    "dynatemp_range": [0],
    "format": [],
    "grammar": [],
    "ignore_eos_token": [False],
    "input_prefix": [],
    "input_suffix": [],
    "json_schema": [],
    "lora": [],
    "mirostat": [0],
    "n_probs": [0],
    "n_predict": [-1],
    "num_predict": [-1],
    "options": [],
    "parse_tool_calls": [True],
    "raw": [False],
    "reasoning_budget": [-1],
    "reasoning_format": ["auto", "deepseek", "parsed"],
    "repeat_penalty": [1],
    "samplers": [],
    "t_max_predict_ms": [0, -1],
    "template": [],
    "tfs_z": [1],
    "think": [],
    "thinking_budget_tokens": [-1],
    "thinking_forced_open": [False],
    "top_n_sigma": [0, -1],
    "typ_p": [1],
    "typical_p": [1],
    "xtc_probability": [0],
    # transformers, TGI
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "do_sample": [True],
    "encoder_no_repeat_ngram_size": [0],
    "encoder_repetition_penalty": [1],
    "eos_token_id": [],
    "epsilon_cutoff": [0],
    "eta_cutoff": [0],
    "exponential_decay_length_penalty": [],
    "force_words_ids": [],
    "forced_bos_token_id": [],
    "forced_eos_token_id": [],
    "generation_config": [],
    "guidance_scale": [1],
    "max_length": [],
    "max_new_tokens": [],
    "max_time": [0],
    "min_length": [0],
    "min_new_tokens": [0],
    "no_repeat_ngram_size": [0],
    "num_beams": [1],
    "num_return_sequences": [1],
    "parameters": [],
    "penalty_alpha": [0],
    "return_full_text": [False],
    "sequence_bias": [],
    "suppress_tokens": [],
    "top_h": [],
    "truncate": [],
    "watermark": [False],
    "watermarking_config": [],
    # text-generation-webui, KoboldAI, TabbyAPI
    "add_bos_token": [True],
    "ban_eos_token": [False],
    "banned_strings": [],
    "banned_tokens": [],
    "custom_token_bans": [],
    "dynamic_temperature": [False],
    "grammar_string": [],
    "sampler_order": [],
    "sampler_priority": [],
    "smoothing_factor": [0],
    "temperature_last": [False],
    "tfs": [1],
    "top_a": [0],
    "typical": [1],
    # DeepSeek, Qwen, Mistral, Groq, OpenRouter, xAI
    "deferred": [False],
    "enable_search": [False],
    "extra_body": [],
    "plugins": [],
    "prompt_mode": [],
    "random_seed": [],
    "safe_prompt": [False],
    "search_parameters": [],
    "thinking_budget": [],
    "transforms": [],
}
WEIGHTS_ELSEWHERE = "export the weights (scripts/convert_model.py) and use llama-server or vLLM"
INSTEAD = {
    "do_sample": "use temperature 0",
    "logprobs": "export the weights (scripts/convert_model.py) and use transformers",
    "num_return_sequences": "use n",
    "random_seed": "use seed",
    "repeat_penalty": "use repetition_penalty",
}
LENGTHS = ("max_length", "max_new_tokens", "max_output_tokens", "n_predict", "num_predict")
INSTEAD |= dict.fromkeys(LENGTHS, "use max_tokens")
THOUGHTS = ("reasoning", "reasoning_budget", "reasoning_effort", "think", "thinking", "thinking_budget")
THOUGHTS += ("thinking_budget_tokens", "thinking_forced_open", "thinking_token_budget", "include_reasoning")
INSTEAD |= dict.fromkeys(THOUGHTS, 'use "chat_template_kwargs": {"enable_thinking": true} or false')
INSTEAD |= dict.fromkeys(("instructions", "system"), "use a message of the role 'system'")
INSTEAD |= dict.fromkeys(("stop_regex", "stop_sequences", "stop_token_ids"), "use stop")
HOLDERS = ("extra_body", "generation_config", "options", "parameters", "sampling_params")
INSTEAD |= dict.fromkeys(HOLDERS, "write its fields beside the others")
INSTEAD |= dict.fromkeys(("functions", "function_call"), "use tools and tool_choice")
SCHEMAS = ("format", "guided_choice", "guided_json", "json_schema", "output_format", "structured_outputs")
INSTEAD |= dict.fromkeys(SCHEMAS, "use response_format with a JSON schema")
CONSTRAINTS = (
    "ebnf",
    "grammar",
    "grammar_string",
    "guided_grammar",
    "guided_regex",
    "regex",
    "structural_tag",
)
INSTEAD |= dict.fromkeys((*CONSTRAINTS, "structural_tag"), WEIGHTS_ELSEWHERE)
# fields of a message that holds the beginning of the answer: DeepSeek and Mistral, Moonshot
PREFILLS = ("prefix", "partial")


def has_no_effect(value: Any, harmless: list[Any]) -> bool:
    """Whether the value of a field is empty or one of the harmless ones. A number does not equal a truth
    value: `"logprobs": 0` asks for log-probabilities."""
    is_bool = isinstance(value, bool)
    return value in (None, "", [], {}) or any(
        value == each and is_bool == isinstance(each, bool) for each in harmless
    )
