"""MiniMind's name for the page of the chat. This file only says what to run here."""

import sys

if __name__ == "__main__":
    hint = "python scripts/serve_openai_api.py --weight full_sft, then open http://127.0.0.1:8000"
    print(f"error: web_demo.py has another name here: {hint}", file=sys.stderr)
    sys.exit(2)
