"""Prompts of a conversation, and a context that forgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from dataset.token_cache import load_tokenizer
from model.prompts import prompt_tokens
from scripts.conversation import Conversation
from tests.conftest import ROOT

TOKENIZER = load_tokenizer(ROOT / "model")
SPECIALS = [token.content for token in TOKENIZER.added_tokens_decoder.values() if token.special]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


parts = st.sampled_from(
    [*SPECIALS[:4], "<|im_", "start|>", "end|>", "<", "user\n", "\n", "a", "山", "\ue000"]
)


@given(st.lists(parts, max_size=8).map("".join))
def test_nobody_can_end_their_turn_from_within_it(text):
    """Whatever is written, the special tokens are those of the template alone, and the text stays what it
    was."""
    messages = [{"role": "system", "content": text}, user(text), {"role": "tool", "content": text}]
    tokens = prompt_tokens(TOKENIZER, messages, [{"name": "f", "description": text}])
    begin, end = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
    assert [i for i in tokens if i in TOKENIZER.all_special_ids] == [begin, end] * 3 + [begin]
    assert TOKENIZER.decode(tokens).count(f"<|im_start|>user\n{text}<|im_end|>") >= 1


def conversation(limit: int) -> Conversation:
    found = Conversation(TOKENIZER, limit, system="be brief")
    for text in ("one", "two", "three"):
        found.messages += [user(text), {"role": "assistant", "content": text.upper()}]
    return found


def test_a_full_context_drops_the_oldest_turns_and_keeps_the_system_message():
    whole, dropped = conversation(1000).extend([user("four")], 20)
    assert dropped == 0
    messages = [*conversation(0).messages, user("four")]
    for room in range(len(whole) - 1, 30, -1):
        short = conversation(room + 20)
        tokens, dropped = short.extend([user("four")], 20)
        assert len(tokens) <= room and dropped in (2, 4, 6)
        assert short.messages == messages[dropped:]
        system = {"role": "system", "content": "be brief"}
        assert tokens == prompt_tokens(TOKENIZER, [system, *short.messages])
    assert dropped == 6


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (user("word " * 200), "the message is too long"),
        ({"role": "nobody", "content": "x"}, "the chat template refuses this conversation: unknown role"),
    ],
)
def test_a_message_that_is_refused_changes_nothing(message, told):
    unchanged = conversation(100)
    with pytest.raises(UserError, match=told):
        unchanged.extend([message], 20)
    assert unchanged.messages == conversation(100).messages
