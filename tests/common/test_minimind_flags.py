"""Every flag of MiniMind's programs is one here, or is refused with what to use."""

import re
import sys

import pytest

from common.arguments import parse_args
from common.command_line import OTHER_NAMES, USE_INSTEAD
from common.errors import UserError
from scripts import chat, convert_model, serve_openai_api
from trainer import (
    train_agent,
    train_distillation,
    train_dpo,
    train_full_sft,
    train_grpo,
    train_lora,
    train_ppo,
    train_pretrain,
)

ALL = "save_dir epochs batch_size learning_rate device dtype num_workers accumulation_steps "
ALL += "grad_clip log_interval save_interval max_seq_len data_path from_resume use_wandb wandb_project use_compile "
SHAPE = "hidden_size num_hidden_layers use_moe "
STAGE = ALL + SHAPE + "from_weight "
SAMPLED = STAGE + "save_weight max_gen_len reward_model_path thinking_ratio "
SAMPLED += "debug_mode debug_interval rollout_engine "
SAMPLED += "sglang_base_url sglang_model_path sglang_shared_path "
GROUPS = SAMPLED + "num_generations beta loss_type epsilon epsilon_high "
TOOL = SHAPE + "load_from save_dir weight device "
FLAGS = {  # of MiniMind-3, commit d65ef2c
    train_pretrain: STAGE + "save_weight",
    train_full_sft: STAGE + "save_weight",
    train_lora: STAGE + "lora_name",
    train_dpo: STAGE + "save_weight beta",
    train_distillation: ALL
    + "save_weight student_hidden_size student_num_layers student_use_moe teacher_hidden_size "
    "teacher_num_layers teacher_use_moe from_student_weight from_teacher_weight alpha temperature",
    train_grpo: GROUPS,
    train_agent: GROUPS + "max_total_len",
    train_ppo: SAMPLED
    + "critic_learning_rate clip_epsilon vf_coef kl_coef gamma lam cliprange_value ppo_update_iters "
    "early_stop_kl mini_batch_size debug_log_ratio",
    chat: TOOL + "lora_weight inference_rope_scaling max_new_tokens temperature top_p open_thinking historys "
    "show_speed backend api_base_url api_key api_model stream",  # of eval_llm.py and eval_toolcall.py
    serve_openai_api: TOOL + "lora_weight max_seq_len inference_rope_scaling",
}


def refusal(program, line: list[str], monkeypatch) -> str:
    """What a program says of a command line that it does not take."""
    monkeypatch.setattr(sys, "argv", ["program", *line])
    try:
        parse_args(program.Args, None) if hasattr(program, "Args") else program.parse_args()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("program", FLAGS, ids=lambda program: program.__name__)
def test_a_flag_is_taken_or_refused_with_what_to_use(program, monkeypatch):
    for name in FLAGS[program].split():
        told = refusal(program, [f"--{name}", "1"], monkeypatch)
        if f"--{name} is unknown" in told:
            assert f"; {USE_INSTEAD[name]}" in told and "\n" not in told


def test_each_hint_is_for_a_flag_of_minimind_and_names_flags_that_there_are(monkeypatch):
    assert set(USE_INSTEAD) <= set(" ".join(FLAGS.values()).split())
    for flag in {flag for hint in USE_INSTEAD.values() for flag in re.findall(r"--\w+", hint)}:
        told = [refusal(program, [flag, "1"], monkeypatch) for program in (train_ppo, chat, convert_model)]
        assert any(f"{flag} is unknown" not in text for text in told), flag


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_usual_names_of_other_programs_are_answered(name, monkeypatch):
    """With a flag that there is, or a word on torchrun; also written with dashes or alone."""
    for line in ([f"--{name}", "1"], [f"--{name.replace('_', '-')}=1"], [f"--{name}"]):
        told = refusal(train_ppo, line, monkeypatch)
        assert f"{line[0].partition('=')[0]} is unknown; {OTHER_NAMES[name]}" in told and "\n" not in told
    for flag in re.findall(r"--\w+", OTHER_NAMES[name]):
        assert f"{flag} is unknown" not in refusal(train_ppo, [flag, "1"], monkeypatch)
    assert OTHER_NAMES["resume"] not in refusal(chat, ["--resume", "1"], monkeypatch)  # it has no such flag


def test_the_reward_model_under_minimind_s_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", "--reward_model_path", "judge"])
    assert parse_args(train_ppo.Args, None).reward_model == "judge"
