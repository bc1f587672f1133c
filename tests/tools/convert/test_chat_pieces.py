"""What a chat template writes around messages, against the template itself."""

import pytest

from common.errors import UserError
from tests.tools.convert.pages import shipped_tokenizer
from tools.convert.chat_pieces import LAST_LINE, chat_pieces

# as Qwen3's: no earlier thoughts, and empty ones where thinking is switched off
LIKE_QWEN3 = """{%- for m in messages -%}
{{- "<|im_start|>" + m.role + "\\n" + m.content + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- "<think>\\n\\n</think>\\n\\n" -}}{%- endif -%}
{%- endif -%}"""


def test_the_shipped_template():
    tokenizer = shipped_tokenizer()
    pieces = chat_pieces(tokenizer)
    assert pieces.start == "<|im_start|>user\n" and pieces.answer_form == LAST_LINE
    assert pieces.end == pieces.answer == "<|im_end|>\n<|im_start|>assistant\n"
    assert pieces.thoughts == ("<think>\n", "\n</think>\n\n")
    chat = [
        {"role": "user", "content": "  one\n"},
        {"role": "assistant", "content": "\n\t\n  two", "reasoning_content": ""},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "\nfour\n", "reasoning_content": "hm"},
        {"role": "user", "content": ""},
    ]
    wanted = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert pieces.render(chat) == wanted and "\t" not in wanted


def test_a_template_that_drops_earlier_thoughts():
    tokenizer = shipped_tokenizer()
    tokenizer.chat_template = LIKE_QWEN3
    pieces = chat_pieces(tokenizer)
    assert pieces.thoughts is None and pieces.end.endswith("<think>\n\n</think>\n\n")
    assert pieces.answer == "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "has no chat template"),
        ("{{ messages | length }}", "it does not write each message once"),
        ("{{ raise_exception('no') }}", "no"),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content | upper }}{% endfor %}", "once"),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}", "does more than put"),
    ],
)
def test_what_is_more_than_texts_around_messages_is_refused(template, expected):
    tokenizer = shipped_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=expected):
        chat_pieces(tokenizer)
