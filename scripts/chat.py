"""Chat with a trained model in the terminal; answers are streamed.

If the input is a pipe, each line is a message, and the answers go to stdout.

python scripts/chat.py --weight full_sft
python scripts/chat.py --model out/demo/full_sft_256.pth --open_thinking 1
python scripts/chat.py --weight agent --tools calculator              the model's calls are executed
python scripts/chat.py --weight full_sft --prompt "Who are you?"      a single answer
python scripts/chat.py --weight full_sft --questions auto             answers questions, each by itself
python scripts/chat.py --weight pretrain                              pretrained weights continue each message
"""

import argparse
import io
import re
import sys
import time
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors
from common.errors import UserError, check_utf8, printable, reason
from model.answers import THINK, TextStream, answer_message
from model.generation import Decoder
from model.prompts import document_tokens
from model.sampling import DEFAULTS, default_sampling
from scripts.conversation import Conversation
from scripts.penalties import add_penalty_flags, check_penalties, with_penalties
from scripts.terminal import Screen
from trainer.rollouts.environments import IN_OTHER_FILES, SHIPPED, Toolbox
from trainer.rollouts.mock_tools import cases
from trainer.weights.for_tools import add_trained_model_flags, load_model, model_path
from trainer.weights.paths import is_pretrained_only

QUESTIONS = Path(__file__).with_name("questions.txt")  # of general kinds
MINIMUM = {"temperature": 0, "top_k": 0, "max_new_tokens": 1, "max_seq_len": 16}
MAX_ROUNDS = 8  # of tool calls and results to one message
HELP = """/reset          start a new conversation
/system TEXT    set the system prompt (without TEXT: none) and start a new conversation
/exit           leave; so does Ctrl-D. Ctrl-C ends an answer, or discards the line being typed"""


def parse_args() -> argparse.Namespace:
    """The command line. Raises UserError if a value is out of range."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    add_trained_model_flags(parser)
    input_group = parser.add_mutually_exclusive_group()
    input_group.add_argument("--prompt", help="answer this one message and exit")
    text = "answer each line of a file by itself and exit; auto: questions that come with this program"
    input_group.add_argument("--questions", metavar="FILE", help=text)
    text = "chat, or text: continue each message as a document, without chat template (default: text for "
    text += "weights of pretraining, which have not learnt to answer, else chat)"
    flag("--form", choices=("chat", "text"), help=text)
    flag("--system", default="", help="system prompt")
    shipped = ", ".join([*SHIPPED, *IN_OTHER_FILES])
    flag("--tools", help=f"tools that the model may call: {shipped} or module:Class, separated by commas")
    text = "1: have the model reason before it answers"
    flag("--open_thinking", type=int, choices=(0, 1), default=0, help=text)
    flag(
        "--show_speed",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: print the tokens per second of each answer",
    )
    flag("--max_new_tokens", type=int, default=512, help="maximum length of an answer, in tokens")
    text = "longest conversation, in tokens (default: the model's max_position_embeddings)"
    flag("--max_seq_len", type=int, help=text)
    default = "(default: the model's generation_config.json, else {})"
    text = "0: always the likeliest token " + default.format(DEFAULTS.temperature)
    flag("--temperature", type=float, help=text)
    text = "sample from the smallest set of tokens with this probability " + default.format(DEFAULTS.top_p)
    flag("--top_p", type=float, help=text)
    text = "sample from so many of the likeliest tokens; 0: from all " + default.format(DEFAULTS.top_k)
    flag("--top_k", type=int, help=text)
    add_penalty_flags(parser)
    flag(
        "--seed",
        type=int,
        default=42,
        help="random seed of the first answer; it grows by one with each answer",
    )
    args = parser.parse_args()
    for name, least in MINIMUM.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name} must be at least {least}, not {value}")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise UserError(f"--top_p must be above 0 and at most 1, not {args.top_p}")
    check_penalties(args)
    check_utf8("--system", args.system)
    return args


def continues_texts(args: argparse.Namespace, model: Path) -> bool:
    """Whether each message is continued as a text instead of answered. Raises UserError for flags that need a
    conversation."""
    is_pretrained = is_pretrained_only(model) and not args.lora
    form = args.form or ("text" if is_pretrained else "chat")
    if form == "text" and (args.system or args.tools or args.open_thinking):
        hint = "leave --system, --tools and --open_thinking out"
        if not args.form:
            hint += f", or give --form chat: {model.name} was pretrained only"
        raise UserError(f"--form text has no conversation; {hint}")
    return form == "text"


class Chat:
    """A conversation with a model. is_interactive: Ctrl-C ends an answer, not the program."""

    def __init__(self, args: argparse.Namespace, screen: Screen, is_interactive: bool):
        self.args, self.screen, self.is_interactive = args, screen, is_interactive
        self.continues_texts = continues_texts(args, model_path(args))
        names = args.tools.split(",") if args.tools else []
        self.toolbox = Toolbox([name.strip() for name in names])
        with redirect_stdout(sys.stderr):  # stdout is for answers
            self.model, self.tokenizer = load_model(args)
        names = ("temperature", "top_p", "top_k")
        overrides = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
        sampling = replace(default_sampling(self.model), seed=args.seed, **overrides)
        self.sampling = with_penalties(sampling, args)
        self.is_stopped = False
        self.start(args.system)

    def start(self, system: str) -> None:
        """A new conversation."""
        longest = self.model.config.max_position_embeddings
        limit = min(self.args.max_seq_len or longest, longest)
        thinking = {"enable_thinking": bool(self.args.open_thinking)}
        self.conversation = Conversation(self.tokenizer, limit, system, self.toolbox.tools, thinking)

    def say(self, text: str) -> None:
        """Stream the answer to a message, or with `--form text` the continuation of a document that begins
        with it. Tool calls in the answer are executed, and the model answers their results. Raises UserError
        if the text is too long or not UTF-8, or the chat template refuses it."""
        check_utf8("the message", text)
        if self.continues_texts:
            self.continue_text(text)
            return
        messages = [{"role": "user", "content": text}]
        for number in range(1 + MAX_ROUNDS):
            answer = self.reply(messages)
            calls = [call["function"] for call in answer.get("tool_calls", [])]
            if not calls or not self.toolbox.tools or self.is_stopped:
                return
            if number == MAX_ROUNDS:
                self.screen.note(f"stopped after {MAX_ROUNDS} rounds of calls")
                return
            messages = self.toolbox.reply(calls)
            for call, result in zip(calls, messages, strict=True):
                self.screen.note(f"result of {call['name']}: {result['content']}")

    def continue_text(self, text: str) -> None:
        """Stream the continuation of a document that begins with this text."""
        tokens, limit = document_tokens(self.tokenizer, text), self.conversation.limit
        room = limit - min(self.args.max_new_tokens, limit // 2)
        if len(tokens) > room:
            raise UserError(
                f"the text is too long: it has {len(tokens)} tokens, and there is room for {room} of the "
                f"{limit}"
            )
        self.answer(tokens)

    def reply(self, messages: list[dict]) -> dict[str, Any]:
        """Add messages to the conversation, stream the answer, add and return it."""
        tokens, dropped = self.conversation.extend(messages, self.args.max_new_tokens)
        if dropped:
            self.screen.note(f"the context is full: the oldest {dropped} messages were dropped")
        text = self.answer(tokens)
        answer = answer_message(THINK + text if self.args.open_thinking else text)
        self.conversation.messages.append(answer)
        return answer

    def answer(self, tokens: list[int]) -> str:
        """Stream the answer to a prompt; returns its text."""
        room = min(self.args.max_new_tokens, self.conversation.limit - len(tokens))
        decoder = Decoder(self.model, 1, len(tokens) + room, [self.tokenizer.eos_token_id])
        stream, start = TextStream(self.tokenizer), time.perf_counter()
        text, finish, count = "", None, 0
        self.is_stopped = False
        self.screen.begin(bool(self.args.open_thinking))
        try:
            (answer,) = decoder.add(tokens, [self.sampling], room)
            while True:
                piece = stream.take(answer)
                text += piece
                self.screen.write(piece)
                finish, count = answer.finish, len(answer.tokens)
                if finish:
                    break
                decoder.step()
        except KeyboardInterrupt:
            if not self.is_interactive:
                raise
            self.is_stopped = True
        self.screen.end()
        if self.is_stopped:
            self.screen.note("stopped")
        elif finish == "length":
            limit = "--max_new_tokens" if room == self.args.max_new_tokens else "the context"
            self.screen.note(f"the answer was cut after {room} tokens by {limit}")
        if self.args.show_speed:
            speed = count / (time.perf_counter() - start)
            self.screen.note(f"{count} tokens, {speed:.1f} tokens/s")
        self.sampling = replace(self.sampling, seed=self.sampling.seed + 1)
        return text

    def take(self, line: str) -> None:
        """Handle a typed line: a command, or a message to answer. Raises UserError if it cannot be answered,
        and EOFError for /exit."""
        name, _, rest = line.strip().partition(" ")
        if name == "/exit":
            raise EOFError
        if name in ("/reset", "/system"):
            self.start(rest.strip() if name == "/system" else self.conversation.system)
            self.screen.note("a new conversation")
        elif re.fullmatch(r"/\w+", name):
            print(HELP)
        elif line.strip():
            self.say(line)


def read_questions(args: argparse.Namespace) -> list[str]:
    """The questions of --questions. Raises UserError if the file cannot be read or contains none."""
    if args.questions == "auto" and args.tools:
        return [case["prompt"] for case in cases()]
    path = QUESTIONS if args.questions == "auto" else Path(args.questions)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or reason(error)
        raise UserError(f"--questions {path} cannot be read ({why})") from error
    questions = [line.strip() for line in lines if line.strip()]
    if not questions:
        raise UserError(f"--questions {path} has no question; write one per line")
    return questions


def answer_each(chat: Chat, questions: list[str]) -> None:
    """Answer each question in a conversation of its own."""
    for question in questions:
        print(f"> {printable(question)}", flush=True)
        chat.start(chat.args.system)
        chat.say(question)
        print(flush=True)


def on_terminal(chat: Chat) -> None:
    """Chat until the user leaves."""
    if chat.continues_texts:
        print("This model was pretrained only: it continues what you type. /help lists the commands.")
    else:
        print("Type a message; /help lists the commands.")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # half a character, where a terminal deletes single bytes
    with suppress(ImportError):  # some builds of Python lack it
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    while True:
        try:
            chat.take(input("> "))
        except UserError as error:
            chat.screen.note(str(error))
        except KeyboardInterrupt:  # at the prompt: discard the line
            print()
        except EOFError:
            print()
            return


def on_pipe(chat: Chat) -> None:
    """Answer each line of stdin in one conversation, or continue each alone; blank lines are skipped.
    Commands such as /reset only work when typed: a line of a file is always a message. Raises UserError if a
    line is not UTF-8, or cannot be answered."""
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
    questions = read_questions(args) if args.questions is not None else []
    is_interactive = args.prompt is None and not questions and sys.stdin.isatty()
    chat = Chat(args, Screen(sys.stdout.isatty()), is_interactive)
    if args.prompt is not None:
        chat.say(args.prompt)
    elif questions:
        answer_each(chat, questions)
    elif is_interactive:
        on_terminal(chat)
    else:
        on_pipe(chat)


if __name__ == "__main__":
    with one_line_errors():
        main()
