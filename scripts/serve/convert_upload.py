"""A program that makes a file of conversations of an uploaded chat export.

    python scripts/serve/convert_upload.py EXPORT OUTPUT SPEAKER BYTES SECONDS

Like look_at_file.py it runs apart from the server, with limits. OUTPUT is written only if the speaker answers
somebody. SPEAKER: the speaker who is the assistant, as JSON, so that any name is one argument. BYTES and
SECONDS: the limits.
"""

import json
import sys
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dataset.chat_exports import read_export, to_conversations, write_conversations
from scripts.serve.look_at_file import set_limits


def main() -> None:
    """Write the conversations."""
    path, output, speaker, memory, seconds = sys.argv[1:]
    set_limits(int(memory), int(seconds))
    conversations = list(to_conversations(read_export(path).chats, json.loads(speaker)))
    if conversations:
        write_conversations(Path(output), conversations)


if __name__ == "__main__":
    main()
