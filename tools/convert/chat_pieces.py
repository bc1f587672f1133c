"""What a chat template writes around the messages of a conversation, as a few texts.

A chat template is a program, which a page without Python cannot run. So the template is run here once, on
messages that are placeholders, and its texts are cut out between them. Then difficult conversations are
assembled from these texts and compared with the template's own output.
"""

from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.errors import UserError, reason

# placeholders of a question, an answer, thoughts and a second question: no template has such texts
QUESTION, ANSWER, THOUGHTS, SECOND = "\u2460q", "\u2461a", "\u2462t", "\u2463s"
LAST_LINE, AS_IT_IS = "last_line", "as_it_is"  # how a template treats the white space before an answer
DIFFICULT = [
    "",
    " ",
    "\n",
    "hi",
    " \n\n  indented\n",
    "\r\n\t\nDone. \n",
    "中文，\u3000标点\u2028",
    "{{ 1 + 1 }} {% raw %} <b>&amp;</b> 😀",
    "\x1c\x85 odd white space",
]


class ChatPieces(NamedTuple):
    """The texts of a template: start + question + answer + ANSWER + question' + ... . Here `answer` is the
    text between a question and its answer, `question` the text between an answer and the next question, and
    `end` the text after the last question, where the model continues.

    thoughts: texts before and after the thoughts of an earlier answer; None if the template leaves them out.
    answer_form: LAST_LINE if white space before an answer's first word is cut to its last line, otherwise
    AS_IT_IS.
    """

    start: str
    answer: str
    question: str
    end: str
    thoughts: tuple[str, str] | None
    answer_form: str

    def render(self, messages: list[dict[str, str]]) -> str:
        """The text of a conversation that ends with a question."""
        text = self.start
        for number, message in enumerate(messages, 1):
            content, thoughts = message["content"], message.get("reasoning_content")
            if message["role"] == "user":
                text += content + (self.end if number == len(messages) else self.answer)
                continue
            if thoughts and self.thoughts:
                text += self.thoughts[0] + thoughts + self.thoughts[1]
            elif self.answer_form == LAST_LINE:
                words = content.lstrip()
                blanks = content[: len(content) - len(words)]
                content = blanks.replace("\r", "\n").split("\n")[-1] + words
            text += content + self.question
        return text


def chat_pieces(tokenizer: PreTrainedTokenizerBase) -> ChatPieces:
    """The texts of a tokenizer's template, without tools and without a system prompt. Raises UserError if
    there is no template, or if it does more than putting texts around the messages."""
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template, which a page to send needs for a conversation")
    question, second = _user(QUESTION), _user(SECOND)
    try:
        start, answer, rest = _cut(
            _rendered(tokenizer, [question, _answer(ANSWER), second]), QUESTION, ANSWER
        )
        between, end = _cut(rest, SECOND)
        of_thoughts = _rendered(tokenizer, [question, _answer(ANSWER, THOUGHTS), second])
        thoughts = None
        if THOUGHTS in of_thoughts:
            _, before, behind, _ = _cut(of_thoughts, QUESTION, THOUGHTS, ANSWER)
            thoughts = before.removeprefix(answer), behind
        for form in (LAST_LINE, AS_IT_IS):
            pieces = ChatPieces(start, answer, between, end, thoughts, form)
            if all(pieces.render(chat) == _rendered(tokenizer, chat) for chat in difficult_chats()):
                return pieces
    except (TemplateError, TypeError, ValueError) as error:
        raise UserError(f"a page to send cannot have this chat template: {reason(error)}") from error
    raise UserError(
        "a page to send cannot have this chat template: it does more than put texts around the messages"
    )


def difficult_chats() -> list[list[dict[str, str]]]:
    """Conversations that a template might treat differently from simple ones."""
    chats = [[_user(text)] for text in DIFFICULT]
    for i, text in enumerate(DIFFICULT):
        other = DIFFICULT[i - 1]
        chats.append([_user(other), _answer(text), _user(text)])
        chats.append([_user(text), _answer(text, "thought"), _user("a"), _answer(other), _user(other)])
    return chats


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answer(text: str, thoughts: str = "") -> dict[str, str]:
    message = {"role": "assistant", "content": text}
    return message | {"reasoning_content": thoughts} if thoughts else message


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    # under both names, like `prompt_pieces`
    return str(tokenizer.apply_chat_template(messages, **options, enable_thinking=False, open_thinking=False))


def _cut(text: str, *marks: str) -> list[str]:
    """The parts of a text between marks, each of which stands in it once. Raises ValueError."""
    parts = []
    for mark in marks:
        if text.count(mark) != 1:
            raise ValueError("it does not write each message once")
        part, _, text = text.partition(mark)
        parts.append(part)
    return [*parts, text]
