"""Chat from a pipe, with --prompt and on a terminal; the model is a small random one, or one that says its
lines."""

import io
import json
import os
import pty
import select
import sys
import time
from types import SimpleNamespace

import pytest

from dataset.records import to_chat
from dataset.token_cache import load_tokenizer
from model.generation import Answer
from model.sampling import Sampling
from scripts import chat
from scripts.chat import ROUNDS
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


class Keyboard(io.TextIOWrapper):
    """Text that somebody types."""

    def isatty(self):
        return True


@pytest.fixture
def pipe(monkeypatch, call):
    """pipe(text, *args): what the chat makes of this text on stdin, from a file or, with stdin=Keyboard,
    typed."""

    def run(text: bytes, *args, stdin=io.TextIOWrapper):
        monkeypatch.setattr(sys, "stdin", stdin(io.BytesIO(text)))
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
    said += ["a"] * 3
    call(chat, *weights, "--prompt", "x")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "top_k": 5}')
    call(chat, *weights, "--prompt", "x")
    call(chat, *weights, "--prompt", "x", "--top_k", "0")
    wanted = [(0.7, 50, 0.9), (0.2, 5, 0.9), (0.2, 0, 0.9)]
    assert said.samplings == [Sampling(*values, seed=42) for values in wanted]


def test_a_pipe_gives_an_answer_for_each_line(weights, pipe, said, tmp_path):
    """Also for one that begins as a command: what comes from a file may be anybody's, and must not write
    files."""
    said += ["Hello!", "<think>\nhm\n</think>\n\nYes <tool_call>x</tool_call>", "Fresh.", "a", "b", "c"]
    text = f"hi\n\n  \nand /then?\n/save {tmp_path}/chats.jsonl\n/system obey\n/exit\n/reset\n"
    done = pipe(text.encode(), *weights, "--max_new_tokens", "60", "--system", "be brief")
    assert done.stdout == "Hello!\n<think>\nhm\n</think>\n\nYes <tool_call>x</tool_call>\nFresh.\na\nb\nc\n"
    assert [prompt.count("<|im_start|>user") for prompt in said.prompts] == [1, 2, 3, 4, 5, 6]
    assert all("be brief" in prompt for prompt in said.prompts)
    assert f"/save {tmp_path}/chats.jsonl" in said.prompts[2] and not (tmp_path / "chats.jsonl").exists()
    assert "<think>\nhm\n</think>\n\nYes" in said.prompts[2]


def test_texts_that_are_no_utf_8(weights, call, error_line, said):
    """Bytes of the command line or the keyboard that the locale does not know: UTF-8 is read, other is one
    line."""
    said += ["Well."]
    assert call(chat, *weights, "--prompt", "h\udcc3\udca9").stdout == "Well.\n"
    assert "h\u00e9<|im_end|>" in said.prompts[0]
    for flags in (["--prompt", "\udcff"], ["--prompt", "x", "--system", "a\ud83d"]):
        assert error_line(chat, *weights, *flags).startswith(f"error: {flags[-2]} is not UTF-8")


def test_a_text_is_continued_as_a_document(weights, pipe, call, said):
    """Each line alone, without the chat template, begun as in pretraining."""
    said += ["a river.", "a hill.", " and on"]
    done = pipe(b"There was\n\n<|im_start|>There\n", *weights, "--form", "text")
    assert done.stdout == "a river.\na hill.\n"
    call(chat, *weights, "--form", "text", "--prompt", "Two\nlines")
    assert said.prompts == [f"<|im_start|>{text}" for text in ("There was", "There", "Two\nlines")]
    done = pipe(b"x " * 200, *weights, "--form", "text", "--max_seq_len", "64")
    assert done.returncode == 2
    assert "line 1 of stdin: the text is too long: 202 tokens, and 52 of the 64" in done.stderr
    done = pipe(b"/system be brief\n", *weights, "--form", "text", stdin=Keyboard)
    assert done.returncode == 0 and "/system is for conversations" in done.stderr


def test_a_line_of_a_pipe_that_cannot_be_answered_is_named(weights, pipe, said):
    said += ["One."]
    done = pipe(b"one\n\xff\xfe\n", *weights)
    assert done.returncode == 2 and "line 2 of stdin is not UTF-8" in done.stderr and done.stdout == "One.\n"
    done = pipe(b"x" * 2000, *weights, "--max_seq_len", "64")
    assert done.returncode == 2 and "line 1 of stdin: the message is too long" in done.stderr


def test_the_screen_dims_reasoning_and_shows_calls(weights, call, said, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    call_text = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
    broken = "<tool_call>f()</tool_call> <tool_call>cut"
    said += [f"\nhm\n</think>\n\nA \x1b[31m moment.\n{call_text}", "5", broken]
    asked = [*weights, "--max_new_tokens", "99", "--tools", "calculator", "--prompt", "x"]
    lines = call(chat, *asked, "--open_thinking", "1").stdout
    assert f"{DIM}hm{NORMAL}\nA \\x1b[31m moment.\n[call] calculate" in "".join(lines.split(NORMAL + DIM))
    assert '[call] calculate {"expression": "2 + 3"}\n' in lines and "result of calculate: 5" in lines
    plain = call(chat, *asked).stdout
    assert said == [] and broken in plain  # no call: as it was written
    assert "Tools you can call" in said.prompts[2]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--weight", "nothing"], "nothing_*.pth do not exist"),
        (["--temperature", "-1", "--top_p", "0"], "--temperature must be at least 0; --top_p must be above"),
        (["--form", "text", "--system", "x", "--tools", "calculator"], "leave --system, --tools out"),
        (["--tools", "no_module:Nothing"], "--tools no_module:Nothing"),
        (["--questions", "nowhere.txt"], "--questions nowhere.txt cannot be read (No such file"),
        (["--questions", "/dev/null"], "--questions /dev/null has no question"),
        (["--questions", "auto", "--prompt", "hi"], "--prompt and --questions both say what to answer"),
    ],
)
def test_mistakes(weights, error_line, args, told):
    assert told in error_line(chat, *weights, *args)


def test_tools_that_run_are_executed_for_some_rounds(weights, pipe, said, tmp_path, monkeypatch):
    """The model calls, the environment answers, the model goes on; a call of another tool gets an error as
    reply."""

    def calls(name: str, **arguments: str) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    said += [calls("calculate_math", expression="12 * 34"), "It is 408.", calls("launch"), "I cannot."]
    text = f"12 * 34?\nlaunch\n/save {tmp_path}/chats.jsonl\n"
    done = pipe(text.encode(), *weights, "--max_new_tokens", "60", "--tools", "calculator", stdin=Keyboard)
    assert "It is 408." in done.stdout and "result of calculate_math: 408" in done.stderr
    record = to_chat(json.loads((tmp_path / "chats.jsonl").read_text(encoding="utf-8")))
    roles = ["user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in record.messages] == roles * 2 and len(record.tools) == 1
    assert [record.messages[at]["content"] for at in (2, 6)] == ["408", "error: no tool named launch"]
    said += [calls("calculate", expression="1 / 0")] * 20
    done = pipe(b"1 / 0?\n", *weights, "--max_new_tokens", "60", "--tools", "calculator")
    assert done.stderr.count("division by zero") == ROUNDS and "stopped after 8 rounds" in done.stderr
    monkeypatch.setattr(chat, "Stop", lambda: SimpleNamespace(asked=True))
    done = pipe(b"1 / 0?\n", *weights, "--max_new_tokens", "60", "--tools", "calculator")
    assert "stopped" in done.stderr and "division by zero" not in done.stderr


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
        self.process = StageProcess("scripts.chat", argv, join, TERM="xterm", NO_COLOR="1").process

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

    def discard_line(self) -> None:
        """Press Ctrl-C at the prompt until there is a new one: Python notices it only while it waits for a
        key."""
        for _ in range(20):
            self.type("\x03")
            time.sleep(0.2)
            if select.select([self.screen], [], [], 3)[0]:
                break
        self.expect("> ")

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


def test_a_terminal_session(weights, tmp_path):
    """Ctrl-C ends an answer and discards a line, neither ends the program; tools, commands."""
    call_text = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "3 * 4"}}\n</tool_call>'
    started = Terminal([*weights, "--tools", "calculator"], [call_text, "It is noon."])
    started.expect("\x1b[?2004h> ")  # the terminal is asked to mark what is pasted
    started.type("what time?\n")
    started.expect("[call] calculate")
    started.expect("(result of calculate: 12)")
    started.expect("It is noon.")
    started.expect("> ")
    started.type("go on\n")
    started.expect(" on on on")
    started.type("\x03")  # the answer ends
    started.expect("(stopped)")
    started.expect("> ")
    started.type("\x1b[200~pasted line\nand another\x1b[201~\n")  # as a terminal pastes: one message
    started.expect(" on on on")
    started.type("\x03")
    started.expect("(stopped)")
    started.expect("> ")
    started.type("half a li")
    started.expect("half a li")
    started.discard_line()
    started.type("/nonsense\n")
    started.expect("there is no command /nonsense")
    started.type(f"/save {tmp_path}/chats.jsonl\n")
    started.expect("appended to")
    assert started.leave() == 0
    messages = json.loads((tmp_path / "chats.jsonl").read_text())["messages"]
    roles = ["user", "assistant", "tool", "assistant", *["user", "assistant"] * 2]
    assert [message["role"] for message in messages] == roles
    assert messages[-2]["content"] == "pasted line\nand another"
    assert messages[2]["content"] == "12" and messages[-1]["content"].startswith(" on on")


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
