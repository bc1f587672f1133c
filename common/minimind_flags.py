"""MiniMind's flags that are no flags here, and what to use; those that mean the same are `aliases` of a
setting."""

SHOWN = "leave it out: two completions with their rewards are shown at every --log_interval"
SERVER = "leave it out: here the model itself is run; any OpenAI client talks to serve_openai_api.py"
USE_INSTEAD = {
    "thinking_ratio": "use --open_thinking 1 (every completion begins with thoughts) or 0 (none)",
    "mini_batch_size": "use --batch_size: an update takes --batch_size x --accumulation_steps completions",
    **dict.fromkeys(("debug_mode", "debug_interval"), SHOWN),
    "debug_log_ratio": "leave it out: approx_kl and clip_ratio stand in the metrics file",
    "rollout_engine": "leave it out: the trainer samples, so that a resumed run has the same completions",
    **dict.fromkeys(("sglang_base_url", "sglang_model_path", "sglang_shared_path"), "leave it out, too"),
    "load_from": "use --model PATH (a .pth or a Hugging Face folder), for a stage --from_weight PATH",
    "lora_weight": "use --lora PATH, such as --lora out/lora_medical_768.pth",
    "historys": "leave it out: the chat keeps what fits into --max_seq_len, and /reset begins anew",
    "show_speed": "leave it out: the page of serve_openai_api.py shows tokens per second",
    "inference_rope_scaling": "convert with --to hf, write rope_scaling into config.json, and use that folder",
    **dict.fromkeys(("backend", "api_base_url", "api_key", "api_model", "stream"), SERVER),
}
