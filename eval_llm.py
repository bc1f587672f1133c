"""MiniMind's name for the chat. This file only says what to run here."""

import sys

if __name__ == "__main__":
    hint = "python scripts/chat.py --weight full_sft (docs/from_minimind.md has MiniMind's other names)"
    print(f"error: eval_llm.py has another name here: {hint}", file=sys.stderr)
    sys.exit(2)
