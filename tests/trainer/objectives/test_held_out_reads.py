"""What a stage declares of its held-out metrics, against what changes them: each of its settings in turn gets
another value."""

import pytest
import torch

from dataset.batch import collate_shared
from dataset.opening import open_prompts
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT, write_jsonl
from tests.trainer.devices.test_wrapping import flat_batch
from tests.trainer.objectives.test_distillation import small_teacher
from tests.trainer.objectives.test_preference import objective_of, pairs
from trainer import train_agent, train_distillation, train_dpo, train_grpo, train_ppo
from trainer.rollouts.settings import make_rollouts

CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=1)


@pytest.fixture(scope="module")
def models() -> list[MiniMindForCausalLM]:
    torch.manual_seed(0)
    made = [MiniMindForCausalLM(CONFIG) for _ in range(3)]
    with torch.no_grad():
        for model in made:
            model.model.embed_tokens.weight.mul_(4)
    return made


def declared(objective) -> set[tuple[str, str]]:
    """(metric, setting) of each setting that a metric is declared to depend on."""
    reads = objective.held_out_reads.items()
    return {(metric, setting) for metric, settings in reads for setting in settings.split()}


def differing(before: dict, now: dict, setting: str) -> set[tuple[str, str]]:
    """The metrics that a setting changes."""
    return {(name, setting) for name in before if not torch.equal(before[name], now[name])}


def test_of_dpo(models):
    model, reference, other_reference = models
    batch = collate_shared(pairs([(2 + i % 5, 2 + i % 7) for i in range(24)]))
    objective = objective_of(reference)
    before = objective.held_out(model, batch, train_dpo.Args())
    found = set()
    for setting, value in {"beta": 0.5, "rpo_alpha": 1.0}.items():
        now = objective.held_out(model, batch, train_dpo.Args(**{setting: value}))
        found |= differing(before, now, setting)
    now = objective_of(other_reference).held_out(model, batch, train_dpo.Args())
    found |= differing(before, now, "from_weight")  # the start weights are the reference
    assert found == declared(train_dpo.Objective)


def test_of_distillation(models):
    batch, teachers = flat_batch(3, [9, 30, 5]), [small_teacher(48), small_teacher(32)]
    objective = train_distillation.Objective()
    objective.teachers = teachers[:1]
    before = objective.held_out(models[0], batch, train_distillation.Args())
    found = set()
    for setting, value in {"alpha": 0.2, "temperature": 3.0}.items():
        now = objective.held_out(models[0], batch, train_distillation.Args(**{setting: value}))
        found |= differing(before, now, setting)
    objective.teachers = teachers[1:]
    now = objective.held_out(models[0], batch, train_distillation.Args())
    # which one teaches is said by all flags of the teachers
    flags = train_distillation.distillation.TeacherArgs.may_change.split()
    found |= {change for flag in flags for change in differing(before, now, flag)}
    assert found == declared(train_distillation.Objective)


OTHER = {"temperature": 0.3, "reward": "repetition", "max_gen_len": 4, "beta": 0.1, "num_iterations": 2}
OTHER |= {"open_thinking": True, "thinking_ratio": 1.0, "reward_timeout": 20.0, "seed": 5}
GROUPS = {"num_generations": 3, "scale_rewards": False, "loss_type": "grpo"}


@pytest.mark.parametrize("script", [train_grpo, train_ppo, train_agent])
def test_of_rewards(script, models, tmp_path):
    """Without a reward model and the flags of an environment, whose replies need a model that calls tools."""
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{word}?"} for word in ("fox", "red", "sea")])
    (tmp_path / "scores.py").write_text("def score(messages, text, record):\n    return float(len(text))\n")
    tokenizer = load_tokenizer(ROOT / "model")

    def held_out(**settings) -> dict:
        settings = {
            "reward": f"{tmp_path / 'scores.py'}:score",
            "max_gen_len": 9,
            "eval_data_path": str(data),
        } | settings
        args = script.Args(data_path=str(data), **settings)
        _, held_out_set = open_prompts(args, tokenizer)
        objective = make_rollouts(script.Objective, args, tokenizer, torch.device("cpu"))
        model = objective.extend_model(models[0], args)
        batch = held_out_set.collate([held_out_set[i] for i in range(len(held_out_set))])
        return {"reward": objective.held_out(model, batch, args)["reward"]}

    before, found = held_out(), set()
    for setting, value in (OTHER | (GROUPS if script is not train_ppo else {})).items():
        found |= differing(before, held_out(**{setting: value}), setting)
    untried = {"reward_model", "environment", "max_turns", "max_total_len"}
    expected = {setting for _, setting in declared(script.Objective)} - untried
    assert {setting for _, setting in found} == expected
    assert ("", "environment") in declared(train_agent.Objective)
