"""Chat from a pipe, with --prompt and on a terminal; the model is a small random one, or one that says its
lines."""

import io
import json
import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest

from dataset.token_cache import load_tokenizer
from model.generation import Answer
from model.sampling import Sampling
from scripts import chat
from scripts.chat import MAX_ROUNDS
from scripts.terminal import DIM, NORMAL
from tests.conftest import ROOT
from tests.stage_process import Faults, StageProcess


class ScriptedAnswer:
    """Stands in for the decoder: one answer, of the tokens that `tokens_of` gives, one in each step."""

    def __init__(self, model, slots, length, end_ids):
        self.end_ids, self.answers = end_ids, []

    def tokens_of(self, prompt, max_new_tokens):
        raise NotImplementedError

    def add(self, prompt, samplings, max_new_tokens):
        self.answers = [Answer(samplings[0], max_new_tokens)]
        self.tokens = iter(self.tokens_of(prompt, max_new_tokens))
        return self.step()

    def step(self):
        (answer,) = self.answers
        answer.tokens.append(next(self.tokens))
        if answer.tokens[-1] in self.end_ids:
            answer.finish, self.answers = "stop", []
        return [answer]


@pytest.fixture
def weights(weights) -> list[str]:
    """Flags that name a saved model and ask for short answers."""
    return [*weights, "--max_new_tokens", "12"]


@pytest.fixture
def pipe(monkeypatch, call):
    """pipe(text, *args): what the chat makes of this text on stdin."""

    def run(text: bytes, *args):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        return call(chat, *args)

    return run


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What the model says next, turn by turn. `said.prompts` are the texts of the prompts that it was given,
    `said.samplings` how its answers were drawn."""

    class Said(list):
        def __init__(self):
            super().__init__()
            self.prompts, self.samplings = [], []

    lines, tokenizer = Said(), load_tokenizer(ROOT / "model")

    class Speaker(ScriptedAnswer):
        def add(self, prompt, samplings, max_new_tokens):
            lines.prompts.append(tokenizer.decode(prompt))
            lines.samplings += samplings
            return super().add(prompt, samplings, max_new_tokens)

        def tokens_of(self, prompt, max_new_tokens):
            return [*tokenizer(lines.pop(0))["input_ids"][: max_new_tokens - 1], tokenizer.eos_token_id]

    monkeypatch.setattr(chat, "Decoder", Speaker)
    return lines


def test_one_prompt_is_repeatable(weights, call):
    greedy = [*weights, "--prompt", "hello", "--temperature", "0"]
    shape = ("--hidden_size", "32", "--num_hidden_layers", "1")  # may be given
    first, second = call(chat, *greedy), call(chat, *greedy, *shape, "--seed", "5")
    assert "model: " in first.stderr and first.stdout == second.stdout  # a pipe is for answers alone
    assert "cut after 12 tokens by --max_new_tokens" in first.stderr
    sampled = [call(chat, *weights, "--prompt", "hello", "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert sampled[0] == sampled[1] != sampled[2]
    assert "--top_k" in call(chat, "--help").stdout


def test_the_models_own_sampling_is_the_default(weights, call, said, tmp_path):
    said += ["a"] * 6
    call(chat, *weights, "--prompt", "x")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "top_k": 5}')
    call(chat, *weights, "--prompt", "x")
    call(chat, *weights, "--prompt", "x", "--top_k", "0")
    call(chat, *weights, "--prompt", "x", "--repetition_penalty", "1.1", "--presence_penalty", "-0.5")
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.2}')
    call(chat, *weights, "--prompt", "x")
    call(chat, *weights, "--prompt", "x", "--repetition_penalty", "1", "--frequency_penalty", "0.1")
    wanted = [Sampling(*values, seed=42) for values in ((0.7, 50, 0.9), (0.2, 5, 0.9), (0.2, 0, 0.9))]
    wanted.append(Sampling(0.2, 5, 0.9, seed=42, repetition_penalty=1.1, presence_penalty=-0.5))
    wanted.append(Sampling(0.7, 50, 0.9, seed=42, repetition_penalty=1.2))
    wanted.append(Sampling(0.7, 50, 0.9, seed=42, frequency_penalty=0.1))
    assert said.samplings == wanted


def test_a_pipe_gives_an_answer_for_each_line(weights, pipe, said):
    """Also for one that begins as a command: commands are for who types."""
    said += ["Hello!", "<think>\nhm\n</think>\n\nYes <tool_call>x</tool_call>", "a"]
    done = pipe(b"hi\n\n  \nand /then?\n/exit\n", *weights, "--max_new_tokens", "60", "--system", "be brief")
    assert done.stdout == "Hello!\n<think>\nhm\n</think>\n\nYes <tool_call>x</tool_call>\na\n"
    assert [prompt.count("<|im_start|>user") for prompt in said.prompts] == [1, 2, 3]
    assert all("be brief" in prompt for prompt in said.prompts)
    assert "/exit" in said.prompts[2] and "<think>\nhm\n</think>\n\nYes" in said.prompts[2]


def test_a_text_is_continued_as_a_document(weights, pipe, call, said):
    """Each line alone, without the chat template, begun as in pretraining."""
    said += ["a river.", "a hill.", " and on"]
    done = pipe(b"There was\n\n<|im_start|>There\n", *weights, "--form", "text")
    assert done.stdout == "a river.\na hill.\n"
    call(chat, *weights, "--form", "text", "--prompt", "Two\nlines")
    assert said.prompts == [f"<|im_start|>{text}" for text in ("There was", "There", "Two\nlines")]
    said.prompts.clear()
    said += ["a hill.", "an answer"]
    saved = Path(weights[1]) / "full_sft_32.json"
    saved.write_text('{"stage": "train_pretrain.py"}')  # such weights cannot answer
    call(chat, *weights, "--prompt", "Once")
    call(chat, *weights, "--prompt", "Once", "--form", "chat")
    assert said.prompts[0] == "<|im_start|>Once" and "<|im_start|>user\nOnce" in said.prompts[1]
    done = call(chat, *weights, "--prompt", "Once", "--system", "Be brief.")
    assert done.returncode == 2 and "or give --form chat: full_sft_32.pth was pretrained only" in done.stderr
    saved.unlink()
    done = pipe(b"x " * 200, *weights, "--form", "text", "--max_seq_len", "64")
    assert done.returncode == 2
    assert (
        "line 1 of stdin: the text is too long: it has 202 tokens, and there is room for 52 of the 64"
        in done.stderr
    )


def test_a_line_of_a_pipe_that_cannot_be_answered_is_named(weights, pipe, said):
    said += ["One."]
    done = pipe(b"one\n\xff\xfe\n", *weights)
    assert done.returncode == 2 and "line 2 of stdin is not UTF-8" in done.stderr and done.stdout == "One.\n"
    done = pipe(b"x" * 2000, *weights, "--max_seq_len", "64")
    assert done.returncode == 2 and "line 1 of stdin: the message is too long" in done.stderr


@pytest.mark.parametrize("flag", ["--prompt", "--system"])
def test_a_text_of_the_command_line_that_is_not_utf8_is_one_line(weights, call, flag):
    done = call(chat, *weights, flag, "caf\udce9", *(["--prompt", "x"] if flag == "--system" else []))
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: ")
    assert "is not UTF-8: 'caf\\udce9'; rename or convert it" in done.stderr


def test_the_screen_dims_reasoning_and_shows_calls(weights, call, said, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    call_text = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
    broken = "<tool_call>f()</tool_call> <tool_call>cut"
    said += [f"\nhm\n</think>\n\nA \x1b[31m moment.\n{call_text}", "5", broken]
    asked = [*weights, "--max_new_tokens", "99", "--tools", "calculator", "--prompt", "x"]
    done = call(chat, *asked, "--open_thinking", "1")
    shown = done.stdout.replace(NORMAL + DIM, "")
    assert f"{DIM}hm{NORMAL}\nA \\x1b[31m moment.\n[call] calculate" in shown
    assert '[call] calculate {"expression": "2 + 3"}\n' in shown and "result of calculate: 5" in done.stderr
    plain = call(chat, *asked).stdout
    assert said == [] and broken in plain  # no call: as it was written
    assert "Tools you can call" in said.prompts[2]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--weight", "nothing"], "nothing_*.pth do not exist"),
        (["--temperature", "-1"], "--temperature must be at least 0, not -1"),
        (["--top_p", "0"], "--top_p must be above 0 and at most 1"),
        (["--frequency_penalty", "3"], "--frequency_penalty must be -2 to 2, not 3.0"),
        (["--form", "text", "--tools", "calculator"], "--form text has no conversation; leave"),
        (["--tools", "no_module:Nothing"], "--tools no_module:Nothing"),
        (["--questions", "nowhere.txt"], "--questions nowhere.txt cannot be read (No such file"),
        (["--questions", "/dev/null"], "--questions /dev/null has no question"),
        (["--questions", "auto", "--prompt", "hi"], "not allowed with argument"),
    ],
)
def test_mistakes(weights, error_line, args, told):
    assert told in error_line(chat, *weights, *args)


def test_a_model_without_its_tokenizer(weights, error_line, tmp_path):
    """Of a folder that holds only the config of a model transformers makes an empty tokenizer."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    told = error_line(chat, *weights, "--tokenizer_path", tmp_path, "--prompt", "hi")
    assert "holds no tokenizer that transformers can load (there is no tokenizer.json)" in told


def test_tools_that_run_are_executed_for_some_rounds(weights, pipe, said):
    """The model calls, the environment answers, the model goes on; a call of another tool gets an error as
    reply."""

    def calls(name: str, **arguments: str) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    flags = [*weights, "--max_new_tokens", "60", "--tools", "calculator"]
    said += [calls("calculate_math", expression="12 * 34"), "It is 408.", calls("launch"), "I cannot."]
    done = pipe(b"12 * 34?\nlaunch\n", *flags)
    assert "It is 408." in done.stdout and "result of calculate_math: 408" in done.stderr
    for number, result in ((1, "408"), (3, "error: no tool named launch")):
        assert f"<tool_response>\n{result}\n</tool_response>" in said.prompts[number]
    said += [calls("calculate", expression="1 / 0")] * 20
    done = pipe(b"1 / 0?\n", *flags)
    assert done.stderr.count("division by zero") == MAX_ROUNDS and "stopped after 8 rounds" in done.stderr


# --- on a terminal: a process with a pseudo-terminal of its own

JOIN = """
from scripts import chat
from tests.scripts.test_chat import slowly
os.setsid()
screen = os.open({path!r}, os.O_RDWR)  # becomes the terminal of the new session
for number in (0, 1, 2):
    os.dup2(screen, number)
sys.stdin = os.fdopen(0)
chat.Decoder = slowly({answers!r})
"""


class Terminal:
    """The chat in a terminal, with a model that gives `answers` first and then speaks slowly and without
    end."""

    def __init__(self, args: list[str], answers: list[str]):
        self.seen = ""
        self.screen, self.inner = pty.openpty()
        join = Faults(script=JOIN.format(path=os.ttyname(self.inner), answers=answers))
        argv = [*args, "--max_new_tokens", "100000"]
        self.process = StageProcess("scripts.chat", argv, join, TERM="xterm").process

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def expect(self, text: str) -> str:
        """Read until a text appears; returns what came before it."""
        end = time.monotonic() + 120
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            if select.select([self.screen], [], [], 1)[0]:
                self.seen += os.read(self.screen, 4096).decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def leave(self) -> int:
        """Press Ctrl-D until the chat has ended (it counts only while the chat waits for a key); its exit
        status."""
        end = time.monotonic() + 120
        while self.process.exitcode is None:
            assert time.monotonic() < end, "the chat does not end"
            self.type("\x04")
            while select.select([self.screen], [], [], 0.2)[0]:
                os.read(self.screen, 4096)
        os.close(self.screen)
        os.close(self.inner)
        return self.process.exitcode


def slowly(answers: list[str]) -> type:
    """A decoder that gives the answers, and then one without end."""

    class Slow(ScriptedAnswer):
        def tokens_of(self, prompt, max_new_tokens):
            tokenizer = load_tokenizer(ROOT / "model")
            if answers:
                yield from [*tokenizer(answers.pop(0))["input_ids"], tokenizer.eos_token_id]
            while True:
                time.sleep(0.01)
                yield tokenizer.encode(" on")[0]

    return Slow


def test_a_terminal_session(weights):
    """Ctrl-C ends an answer, not the program; a paste is one message."""
    started = Terminal(weights, ["It is noon."])
    started.expect("\x1b[?2004h> ")  # the terminal is asked to mark what is pasted
    started.type("what time?\n")
    started.expect("It is noon.")
    started.expect("> ")
    started.type("\x1b[200~pasted line\nand another\x1b[201~\n")  # as a terminal pastes
    started.expect(" on on on")
    started.type("\x03")  # the answer ends
    started.expect("(stopped)")
    started.expect("> ")
    started.type("/nonsense\n")
    started.expect("/system TEXT")
    started.type("/system be brief\n")
    started.expect("(a new conversation)")
    assert started.leave() == 0


def test_questions_are_answered_each_by_itself(said, pipe, weights, tmp_path):
    """Those of a file, or with `auto` eight that come with the program; the speed is no part of an
    answer."""
    said += ["blue", "four"]
    (tmp_path / "q.txt").write_text("What color?\n\nTwo and two?\n", encoding="utf-8")
    done = pipe(b"", *weights, "--questions", tmp_path / "q.txt", "--show_speed", "1")
    assert done.stdout == "> What color?\nblue\n\n> Two and two?\nfour\n\n"
    assert done.stderr.count(" tokens/s") == 2
    first, second = said.prompts
    assert "What color?" in first and "What color?" not in second
    for tools in ([], ["--tools", "mock_tools"]):
        said += ["yes"] * 8
        done = pipe(b"", *weights, "--questions", "auto", *tools)
        assert (done.returncode, done.stdout.count("> ")) == (0, 8)
