"""Make conversations for SFT of an exported chat, with one of its speakers as the assistant.

    python scripts/convert_chats.py --export chat.txt                                   who speaks in it
    python scripts/convert_chats.py --export chat.txt --assistant Anna --output data/anna.jsonl
    python trainer/train_full_sft.py --data_path data/anna.jsonl

Reads WhatsApp's chat.txt, Telegram's result.json, the JSON of DiscordChatExporter, message_1.json of
Instagram or Messenger, and ChatGPT's conversations.json, in which the assistant is known. Nothing leaves
this machine. But a model can repeat what it has read, so ask the others before you give it away.
"""

import sys
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors
from common.errors import UserError, say
from dataset.chat_exports import PAUSE_HOURS, read_export, to_conversations, write_conversations
from dataset.report import counted


def main() -> None:
    """Convert, or say who speaks."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    flag("--export", required=True, help="file that the chat program wrote")
    flag("--assistant", help="speaker whose answers the model learns; without it the speakers are listed")
    flag("--output", type=Path, help="JSON Lines file to write, with a conversation in each line")
    flag(
        "--pause_hours",
        type=float,
        default=PAUSE_HOURS,
        help=f"hours without a message after which a new conversation begins (default: {PAUSE_HOURS:g})",
    )
    args = parser.parse_args()
    if not args.pause_hours > 0:
        raise UserError(f"--pause_hours {args.pause_hours} must be above 0")
    if args.output and args.output.resolve() == Path(args.export).resolve():
        raise UserError(f"--output {args.output} is the export itself; give another name")
    export = read_export(args.export)
    speakers = export.speakers()
    assistant = args.assistant or export.assistant
    if assistant not in dict(speakers):
        named = ", ".join(f"{name!r} ({counted(count, 'messages')})" for name, count in speakers[:20])
        unknown = f"nobody is called {args.assistant!r} there; " if args.assistant else ""
        raise UserError(f"{args.export}: {unknown}give --assistant, one of {named}")
    conversations = list(to_conversations(export.chats, assistant, args.pause_hours))
    if not conversations:
        raise UserError(f"{args.export}: {assistant!r} answers nobody; choose another --assistant")
    made, read = counted(len(conversations), "conversations"), counted(len(export.chats), "chats")
    say(f"{made} of {read}; {assistant!r} is the assistant. The first one:")
    for message in conversations[0]:
        say(f"  {message['role']}: {message['content']}")
    if args.output is None:
        raise UserError("give --output FILE.jsonl to write them")
    write_conversations(args.output, conversations)
    say(f"wrote {args.output}; next: python trainer/train_full_sft.py --data_path {args.output}")


if __name__ == "__main__":
    with one_line_errors():
        main()
