"""A model in three lines of Python, as the manual has them; and what people of MiniMind type."""

import re
import runpy

import pytest
import torch

import minimind
from common.errors import UserError
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT
from trainer.weights.files import save_weights

MESSAGE = "Where does Pepa live?"


@pytest.fixture
def folder(tmp_path):
    """Weights of pretraining and of SFT."""
    for seed, name in enumerate(("pretrain", "full_sft")):
        torch.manual_seed(seed)
        config = MiniMindConfig(hidden_size=32, num_hidden_layers=1, max_position_embeddings=64)
        save_weights(MiniMindForCausalLM(config), tmp_path / f"{name}_32.pth")
    return tmp_path


def greedy_answer(model: MiniMindForCausalLM, prompt: list[int], new: int) -> str:
    """What transformers' generate adds."""
    written = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
    return load_tokenizer(ROOT / "model").decode(written[0, len(prompt) :], skip_special_tokens=True)


@pytest.mark.parametrize("page", ["docs/using.md", "docs/zh/using.md"])
def test_the_lines_of_the_manual(page, folder, capsys):
    (lines,) = re.findall(
        r"```python\n(from minimind import load\n.*?)```", (ROOT / page).read_text(), re.DOTALL
    )
    exec(lines.replace('"out/demo"', repr(str(folder))), variables := {})
    answer = variables["model"].generate(MESSAGE)
    assert answer and capsys.readouterr().out.endswith(answer + "\n")


def test_an_answer_is_that_of_the_chat_template_and_transformers(folder):
    model, tokenizer = minimind.load(folder), load_tokenizer(ROOT / "model")
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": MESSAGE}]
    for messages in (talk, talk[1:]):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        asked = messages if len(messages) > 1 else MESSAGE
        assert model.generate(asked, 8, temperature=0) == greedy_answer(model.model, prompt, 8)
    room = 64 - len(prompt)  # the context ends before the answer
    assert model.generate(MESSAGE, temperature=0) == greedy_answer(model.model, prompt, room)
    assert (
        model.generate(MESSAGE, seed=1) == model.generate(MESSAGE, seed=1) != model.generate(MESSAGE, seed=2)
    )


def test_weights_of_pretraining_continue_a_text(folder):
    tokenizer = load_tokenizer(ROOT / "model")
    prompt = [tokenizer.bos_token_id, *tokenizer("Pepa lives in").input_ids]
    for model in (minimind.load(folder, weight="pretrain"), minimind.load(folder / "pretrain_32.pth")):
        assert model.generate("Pepa lives in", 8, temperature=0) == greedy_answer(model.model, prompt, 8)


def test_mistakes_are_named(folder):
    with pytest.raises(TypeError, match=r"load\(\) knows no temperature"):
        minimind.load(folder, temperature=1)
    with pytest.raises(UserError, match=r"found there: full_sft_32\.pth, pretrain"):
        minimind.load(folder, weight="dpo")
    model = minimind.load(folder)
    for prompt, line in ((MESSAGE * 9, "context holds 64"), ([{"role": "x"}], "template")):
        with pytest.raises(UserError, match=line):
            model.generate(prompt)


@pytest.mark.parametrize("name", ["eval_llm.py", "scripts/web_demo.py"])
def test_a_script_of_minimind_names_ours(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--weight", "full_sft"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1
    (script,) = re.findall(r"python (\S+)", line)
    assert (ROOT / script).is_file()
