"""MiniMind's eight stages, on files of its forms under its names, by its launch lines; and what its files
cannot be."""

import json
import re
from pathlib import Path

from tests.conftest import write_jsonl
from tests.trainer.test_stage_as_typed import clone, typed  # noqa: F401 (a fixture)
from trainer.report.metrics import read_metrics

TOOL = {"type": "function", "function": {"name": "calculate_math", "description": "", "parameters": {}}}
SMALL = "--hidden_size 32 --num_hidden_layers 1 --max_seq_len 96 --epochs 1"
ROLLOUTS = "--max_gen_len 4 --batch_size 4"
STAGES = {  # stage -> its flags, and the weights that it writes
    "pretrain": ("--accumulation_steps 1", "pretrain_32.pth"),
    "full_sft": ("", "full_sft_32.pth"),
    "lora": ("--lora_name lora_identity --data_path ../dataset/lora_identity.jsonl", "lora_identity_32"),
    "dpo": ("", "dpo_32.pth"),
    "distillation": ("--student_hidden_size 32 --from_student_weight full_sft", "full_dist_32.pth"),
    "grpo": (f"{ROLLOUTS} --num_generations 2 --reward length,repetition", "grpo_32.pth"),
    "ppo": (f"{ROLLOUTS} --ppo_update_iters 2 --kl_coef 0.02 --reward length,repetition", "ppo_actor_32.pth"),
    "agent": (f"{ROLLOUTS} --num_generations 2 --max_seq_len 400", "agent_32.pth"),
}


def turn(role: str, content: str, **others: str | None) -> dict:
    """A message with all of MiniMind's fields."""
    return {
        "role": role,
        "content": content,
        "reasoning_content": None,
        "tools": None,
        "tool_calls": None,
    } | others


def write_data(folder: Path, old_names: bool = False) -> None:
    """Files of MiniMind's forms, under its present or its earlier names."""
    calls = json.dumps([{"name": "calculate_math", "arguments": {"expression": "2 * 3"}}])
    with_tools = [turn("system", "# Tools ...", tools=json.dumps([TOOL])), turn("user", "2 乘以 3 等于多少")]
    called = [*with_tools, turn("assistant", "", tool_calls=calls), turn("tool", '{"result": "6"}')]
    chats = [[turn("user", f"{i} 是什么？"), turn("assistant", f"{i} 是一个数。")] for i in range(12)]
    thought = [turn("user", "你好"), turn("assistant", "你好！", reasoning_content="先问好。")]
    sft = [*chats, [*called, turn("assistant", "等于 6。")], thought]
    files = {
        ("pretrain_t2t_mini", "pretrain_hq"): [
            {"text": f"{i} 之后是 {i + 1}，再之后是 {i + 2}。"} for i in range(24)
        ],
        ("sft_t2t_mini", "sft_mini_512"): [{"conversations": chat} for chat in sft],
        ("lora_identity", "lora_medical"): [{"conversations": chat} for chat in chats],
        ("dpo", "dpo"): [
            {"chosen": chat, "rejected": [chat[0], turn("assistant", "不知道")]} for chat in chats
        ],
        ("rlaif", "rlaif-mini"): [
            {"conversations": [chat[0], turn("assistant", ("", "无")[i % 2])]} for i, chat in enumerate(chats)
        ],
        ("agent_rl", "agent_rl"): [{"conversations": [*with_tools, turn("assistant", "")], "gt": ["6"]}] * 8,
    }
    for names, records in files.items():
        write_jsonl(folder / f"{names[old_names]}.jsonl", records)


def test_eight_stages_and_their_files(clone):  # noqa: F811
    write_data(clone / "dataset")
    for stage, (flags, weights) in STAGES.items():
        done = typed(clone, f"train_{stage}.py {SMALL} {flags}")
        assert "done: " in done.out and (clone / "out" / weights).exists(), (stage, done.out, done.err)
        records = read_metrics(next((clone / "out").glob(f"{weights.split('_32')[0]}_32_metrics.jsonl")))
        assert all(record["loss"] is not None for record in records), stage
    assert read_metrics(clone / "out/grpo_32_metrics.jsonl")[-1]["completion_length"] > 0


def test_its_earlier_names_of_files(clone):  # noqa: F811
    write_data(clone / "dataset", old_names=True)
    flags = STAGES["grpo"][0]
    assert "done: " in typed(clone, f"train_grpo.py {SMALL} {flags} --from_weight none").out


def test_blank_answers_are_no_reference(clone):  # noqa: F811
    """They would reward silence."""
    write_data(clone / "dataset")
    (line,) = typed(clone, f"train_grpo.py {SMALL} {ROLLOUTS} --from_weight none", status=2).error_lines
    assert re.search(r"rlaif.jsonl:\d+: .*no reference answer: add one, or give --reward length,repet", line)
