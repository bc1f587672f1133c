"""Chat with a trained model in the terminal; answers are streamed. On a pipe: each line is a message, answers
out.

python scripts/chat.py --weight full_sft
python scripts/chat.py --model out/demo/full_sft_256.pth --open_thinking 1
python scripts/chat.py --weight agent --tools calculator              the model's calls are executed
python scripts/chat.py --weight full_sft --prompt "Who are you?"      a single answer
python scripts/chat.py --weight full_sft --questions auto             answers questions, each by itself
python scripts/chat.py --weight pretrain --form text                  continues texts: for a pretrained model
"""

import argparse
import json
import re
import sys
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors
from common.errors import UserError, printable, reason
from model.answers import THINK, TextStream, answer_message
from model.generation import Decoder
from model.prompts import document_tokens
from model.sampling import DEFAULTS, default_sampling
from scripts.conversation import Conversation
from scripts.terminal import Screen, Stop, line_editing, utf8_text
from trainer.rollouts.environments import IN_OTHER_FILES, SHIPPED, Toolbox
from trainer.rollouts.mock_tools import cases
from trainer.weights.for_tools import add_trained_model_flags, load_model

QUESTIONS = Path(__file__).with_name("questions.txt")  # for a model that was trained on a bit of everything
DRAWN = ("temperature", "top_p", "top_k")
LEAST = {"temperature": 0, "top_k": 0, "max_new_tokens": 1, "max_seq_len": 16}
ROUNDS = 8  # of tool calls and results to one question
HELP = """/reset          start a new conversation
/system TEXT    set the system prompt (without TEXT: none) and start a new conversation
/save FILE      append this conversation to FILE as a record that SFT can train on
/help           this list
/exit           leave; so does Ctrl-D. Ctrl-C ends an answer, or discards the line being typed"""


def parse_args() -> argparse.Namespace:
    """The command line. Raises UserError if a value is out of range."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    add_trained_model_flags(parser)
    flag("--prompt", help="answer this one message and exit")
    text = "answer each line of a file by itself and exit; auto: questions that come with this program"
    flag("--questions", metavar="FILE", help=text)
    text = "chat, or text: continue each message as a document, without chat template, for pretrained weights"
    flag("--form", choices=("chat", "text"), default="chat", help=text)
    flag("--system", default="", help="system prompt")
    shipped = ", ".join([*SHIPPED, *IN_OTHER_FILES])
    flag("--tools", help=f"tools that the model may call: {shipped} or module:Class, separated by commas")
    text = "1: have the model reason before it answers"
    flag("--open_thinking", type=int, choices=(0, 1), default=0, help=text)
    flag("--show_speed", type=int, choices=(0, 1), default=0, help="1: tokens per second of each answer")
    flag("--max_new_tokens", type=int, default=512, help="longest answer, in tokens")
    text = "longest conversation, in tokens (default: the model's max_position_embeddings)"
    flag("--max_seq_len", type=int, help=text)
    default = "(default: the model's generation_config.json, else {})"
    text = "0: always the likeliest token " + default.format(DEFAULTS.temperature)
    flag("--temperature", type=float, help=text)
    text = "sample from the smallest set of tokens with this probability " + default.format(DEFAULTS.top_p)
    flag("--top_p", type=float, help=text)
    text = "sample from so many of the likeliest tokens; 0: from all " + default.format(DEFAULTS.top_k)
    flag("--top_k", type=int, help=text)
    flag("--seed", type=int, default=42, help="random seed of the first answer; each further one counts up")
    args = parser.parse_args()
    check_args(args)
    args.system = utf8_text(args.system, "--system")
    args.prompt = None if args.prompt is None else utf8_text(args.prompt, "--prompt")
    return args


def check_args(args: argparse.Namespace) -> None:
    """Raise UserError with all values that are out of range or contradict each other."""
    mistakes = []
    if args.prompt is not None and args.questions is not None:
        mistakes.append("--prompt and --questions both say what to answer; leave one of them out")
    of_chats = [f"--{name}" for name in ("system", "tools", "open_thinking") if getattr(args, name)]
    if args.form == "text" and of_chats:
        mistakes.append(f"--form text is no conversation; leave {', '.join(of_chats)} out")
    for name, least in LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            mistakes.append(f"--{name} must be at least {least}")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        mistakes.append("--top_p must be above 0 and at most 1")
    if mistakes:
        raise UserError("; ".join(mistakes))


class Chat:
    """A conversation with a model, and what the user may do with it."""

    def __init__(self, args: argparse.Namespace, is_terminal: bool):
        self.toolbox = Toolbox([name.strip() for name in args.tools.split(",")] if args.tools else [])
        with redirect_stdout(sys.stdout if is_terminal else sys.stderr):  # on a pipe, stdout is for answers
            self.model, self.tokenizer = load_model(args)
        given = {name: getattr(args, name) for name in DRAWN if getattr(args, name) is not None}
        self.sampling = replace(default_sampling(self.model), **given)
        self.args, self.is_terminal = args, is_terminal
        self.screen, self.count = Screen(is_terminal), -1  # answers so far, but the first
        self.start(args.system)

    def start(self, system: str) -> None:
        """A new conversation."""
        longest = self.model.config.max_position_embeddings
        limit = min(self.args.max_seq_len or longest, longest)
        thinking = {"enable_thinking": bool(self.args.open_thinking)}
        self.conversation = Conversation(self.tokenizer, limit, system, self.toolbox.tools, thinking)

    def say(self, text: str) -> None:
        """Stream the answer to a message, or with `--form text` how a document goes on that begins with it.
        The answer's calls of tools are executed, and their results answered in turn. Raises UserError if the
        text is too long, or the chat template refuses it."""
        if self.args.form == "text":
            self.continue_text(text)
            return
        answer = self.reply([{"role": "user", "content": text}])
        if not self.toolbox.tools:
            return
        for _ in range(ROUNDS):
            calls = [call["function"] for call in answer.get("tool_calls", [])]
            if not calls or self.stop.asked:
                return
            results = self.toolbox.reply(calls)
            for call, result in zip(calls, results, strict=True):
                self.screen.note(f"result of {call['name']}: {result['content']}")
            answer = self.reply(results)
        if answer.get("tool_calls"):
            self.screen.note(f"stopped after {ROUNDS} rounds of calls")

    def continue_text(self, text: str) -> None:
        """Stream how a document goes on that begins with this text."""
        tokens, limit = document_tokens(self.tokenizer, text), self.conversation.limit
        room = limit - min(self.args.max_new_tokens, limit // 2)
        if len(tokens) > room:
            raise UserError(
                f"the text is too long: {len(tokens)} tokens, and {room} of the {limit} are for it"
            )
        self.answer(tokens)

    def reply(self, messages: list[dict]) -> dict[str, Any]:
        """Add messages to the conversation, stream the answer, add and return it; without an answer, `{}`,
        the messages are not added."""
        self.conversation.messages += messages
        answer: dict[str, Any] = {}
        try:
            tokens, dropped = self.conversation.prompt(self.args.max_new_tokens)
            if dropped:
                self.screen.note(f"the context is full: the oldest {dropped} messages were dropped")
            answer = self.answer(tokens)
        finally:
            if not answer:
                del self.conversation.messages[-len(messages) :]
        if answer:
            self.conversation.messages.append(answer)
        return answer

    def answer(self, tokens: list[int]) -> dict[str, Any]:
        """Stream the answer to a prompt; returns its message, `{}` if Ctrl-C came before its first text."""
        args, self.stop, self.count = self.args, Stop(), self.count + 1
        room = min(args.max_new_tokens, self.conversation.limit - len(tokens))
        decoder = Decoder(self.model, 1, len(tokens) + room, [self.tokenizer.eos_token_id])
        start = time.perf_counter()
        text, thinks = TextStream(self.tokenizer), bool(args.open_thinking)
        self.screen.begin(thinks)
        with self.stop.listening() if self.is_terminal else nullcontext():
            (answer,) = decoder.add(tokens, [replace(self.sampling, seed=args.seed + self.count)], room)
            self.screen.write(text.take(answer))
            while decoder.answers and not self.stop.asked:
                decoder.step()
                self.screen.write(text.take(answer))
        self.screen.write(text.end(), is_last=True)
        if args.show_speed:
            seconds = time.perf_counter() - start
            self.screen.note(f"{len(answer.tokens)} tokens, {len(answer.tokens) / seconds:.1f} tokens/s")
        if self.stop.asked:
            self.screen.note("stopped")
        elif answer.finish == "length":
            limit = "--max_new_tokens" if room == args.max_new_tokens else "the context"
            self.screen.note(f"the answer was cut after {room} tokens by {limit}")
        written = str(self.tokenizer.decode(answer.tokens, skip_special_tokens=True))
        if self.stop.asked and not written:
            return {}
        return answer_message(THINK + written if thinks else written)

    def take(self, line: str) -> None:
        """Obey a typed line that is a command, else answer it, or continue its text; a blank one is skipped.

        Raises:
            UserError: it cannot be done.
            EOFError: it was /exit.
        """
        name, _, rest = line.strip().partition(" ")
        if name == "/exit":
            raise EOFError
        if self.args.form == "text" and name in ("/reset", "/system", "/save"):
            raise UserError(f"{name} is for conversations, not for --form text")
        if name == "/help":
            print(HELP)
        elif name in ("/reset", "/system"):
            self.start(rest.strip() if name == "/system" else self.conversation.system)
            self.screen.note("a new conversation")
        elif name == "/save":
            self.save(rest.strip())
        elif re.fullmatch(r"/\w+", name):
            raise UserError(f"there is no command {name}; /help lists them")
        elif line.strip():
            self.say(line)

    def save(self, path: str) -> None:
        """Append the conversation to a JSONL file. Raises UserError if there is no answer yet, or the file
        cannot be written."""
        if not path:
            raise UserError("/save needs a FILE, such as /save chats.jsonl")
        if not self.conversation.messages:
            raise UserError("there is nothing to save")
        try:
            with open(Path(path).expanduser(), "a", encoding="utf-8") as file:
                file.write(json.dumps(self.conversation.record(), ensure_ascii=False) + "\n")
        except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
            raise UserError(f"/save {path}: {reason(error)}; give another file") from error
        self.screen.note(f"appended to {path}")


def questions_of(args: argparse.Namespace) -> list[str]:
    """The questions of --questions. Raises UserError if the file cannot be read or has none."""
    if args.questions == "auto" and args.tools:
        return [case["prompt"] for case in cases()]
    path = QUESTIONS if args.questions == "auto" else Path(args.questions)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or reason(error)
        raise UserError(f"--questions {path} cannot be read ({why})") from error
    questions = [line.strip() for line in text.splitlines() if line.strip()]
    if not questions:
        raise UserError(f"--questions {path} has no question; write one a line")
    return questions


def answer_each(chat: Chat, questions: list[str]) -> None:
    """Answer each question in a conversation of its own."""
    for question in questions:
        print(f"> {printable(question)}", flush=True)
        chat.start(chat.args.system)
        chat.say(question)
        print(flush=True)
        if chat.stop.asked:
            return


def on_terminal(chat: Chat) -> None:
    """Chat until the user leaves."""
    print("Type a message; /help lists the commands.")
    line_editing()
    while True:
        try:
            chat.take(utf8_text(input("> "), "the line"))
        except UserError as error:
            chat.screen.note(str(error))
        except UnicodeDecodeError:
            chat.screen.note("that was not UTF-8")
        except KeyboardInterrupt:  # at the prompt: discard the line
            print()
        except EOFError:
            print()
            return


def on_pipe(chat: Chat) -> None:
    """Answer each line of stdin, in one conversation, or continue each alone; blank lines are skipped.
    Commands are for who types: a line of a file is a message, whatever it says. Raises UserError if a line
    is not UTF-8, or cannot be answered."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
            if text.strip():
                chat.say(text)
        except UnicodeDecodeError:
            raise UserError(f"line {number} of stdin is not UTF-8; convert the input") from None
        except UserError as error:
            raise UserError(f"line {number} of stdin: {error}") from error


def main() -> None:
    """Answer one message, or chat until the input ends."""
    args = parse_args()
    questions = questions_of(args) if args.questions is not None else []
    is_typed = sys.stdin.isatty()
    is_asked = args.prompt is not None or args.questions is not None
    chat = Chat(args, is_terminal=sys.stdout.isatty() and (is_asked or is_typed))
    if questions:
        answer_each(chat, questions)
    elif args.prompt is not None:
        chat.say(args.prompt)
    elif is_typed:
        on_terminal(chat)
    else:
        on_pipe(chat)


if __name__ == "__main__":
    with one_line_errors():
        main()
