"""Stands in for the decoder where a test must know what the model says: it says what `SAYS` has for the
prompt."""

import time
from typing import Any

from model.generation import Answer
from model.sampling import Sampling, TokenLogprob

SAYS: dict[str, str] = {}  # text that occurs in the prompt -> the answer
PACE = {"seconds": 0.0}  # of a step
END = 2


class ScriptedDecoder:
    """A decoder with the same interface, a token of each answer in each step."""

    def __init__(self, model: Any, slots: int, length: int, end_ids: set[int]):
        self.tokenizer, self.slots, self.length, self.end_ids = model.tokenizer, slots, length, end_ids
        self.saying: dict[Answer, list[int]] = {}  # what each has still to say
        self.prompts: list[str] = []

    @property
    def answers(self) -> list[Answer]:
        return list(self.saying)

    @property
    def free(self) -> int:
        return self.slots - len(self.saying)

    def add(
        self, prompt: list[int], samplings: list[Sampling], max_new_tokens: int, top: int | None = None
    ) -> list[Answer]:
        text = self.tokenizer.decode(prompt)
        self.prompts.append(text)
        said = next((answer for key, answer in reversed(SAYS.items()) if key in text), "Well.")
        tokens = [*self.tokenizer.encode(said, add_special_tokens=False), END]
        answers = [Answer(sampling, max_new_tokens, top=top) for sampling in samplings]
        self.saying |= {answer: list(tokens) for answer in answers}
        self.write(answers)
        return answers

    def remove(self, answer: Answer) -> None:
        self.saying.pop(answer, None)

    def step(self) -> list[Answer]:
        time.sleep(PACE["seconds"])
        answers = self.answers
        self.write(answers)
        return answers

    def write(self, answers: list[Answer]) -> None:
        """The next token of each."""
        for answer in answers:
            answer.tokens.append(self.saying[answer].pop(0))
            if answer.top is not None:
                answer.details.append(TokenLogprob(answer.tokens[-1], -len(answer.tokens) / 2, []))
            if answer.tokens[-1] == END:
                answer.finish = "stop"
            elif len(answer.tokens) == answer.max_new_tokens:
                answer.finish = "length"
            if answer.finish:
                self.remove(answer)
