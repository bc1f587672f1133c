"""How many held-out questions the model answers right. They are asked before the first update and at each
evaluation, and answered with the likeliest tokens. `dataset/right_answer.py` decides what is right. Training
is not affected."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dataset.lm_dataset import SFTDataset, StageDataset
from dataset.mixing import MixedDataset
from dataset.right_answer import is_right
from dataset.token_cache import load_tokenizer
from trainer.callbacks.base import Callback
from trainer.callbacks.samples import prompt_text, write
from trainer.callbacks.train_state import TrainState
from trainer.devices.process_group import Logger, all_gather, is_main_process
from trainer.devices.wrapping import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# questions that are asked, at most and at least; the longest reference answer, in tokens: a longer one is
# hardly ever met word by word
MAX_QUESTIONS, MIN_QUESTIONS, MAX_REFERENCE = 60, 3, 96
MAX_SEARCHED = 20_000  # training conversations, at most, that are searched for the same answers
SHOWN = 6  # wrong answers in a record


class Question(NamedTuple):
    """A held-out question, and the answer that the data give."""

    text: str
    input_ids: list[int]
    reference: str
    reference_length: int  # in tokens
    is_new: bool = False  # no training conversation gives this answer


def answer_callbacks(state: TrainState, data: Any) -> list[Callback]:
    """The callback that asks held-out questions. There is none unless the stage learns conversations, some of
    them are held out, and this process has whole weights. data: the training data."""
    held_out = getattr(state.eval_loader, "dataset", None)
    if not isinstance(held_out, StageDataset) or held_out.kind != "sft" or is_sharded(state.model):
        return []
    tokenizer = load_tokenizer(state.args.tokenizer_path)
    questions = held_out_questions(tokenizer, held_out, data)
    return [RightAnswers(questions, tokenizer)] if questions else []


def held_out_questions(
    tokenizer: "PreTrainedTokenizerBase", held_out: StageDataset, data: Any = None
) -> list[Question]:
    """The first questions of held-out conversations, evenly chosen among those whose answer has at most
    MAX_REFERENCE tokens; none if these are fewer than MIN_QUESTIONS. Without training data, or with more
    than MAX_SEARCHED training conversations, no question is marked as new."""
    found = []
    for index in range(len(held_out)):
        sample = held_out[index][0]
        begin, end = next(answers(sample), (0, 0))
        if begin and end - begin <= MAX_REFERENCE:
            found.append((sample["input_ids"][:begin].tolist(), sample["input_ids"][begin:end].tolist()))
    if len(found) < MIN_QUESTIONS:
        return []
    count = min(len(found), MAX_QUESTIONS)
    trained = trained_answers(data)
    questions = []
    for prompt, answer in (found[i * len(found) // count] for i in range(count)):
        reference = str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
        is_new = trained is not None and tuple(answer) not in trained
        questions.append(Question(prompt_text(tokenizer, prompt), prompt, reference, len(answer), is_new))
    return questions


def answers(sample: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """The first and the last token, exclusive, of each answer of a conversation."""
    is_target = np.concatenate([[False], sample["loss_weight"] != 0, [False]])
    changes = np.flatnonzero(is_target[1:] != is_target[:-1]).tolist()
    return zip(changes[::2], changes[1::2], strict=True)


def trained_answers(data: Any) -> set[tuple[int, ...]] | None:
    """The tokens of all answers of the training conversations; None if there are more than MAX_SEARCHED
    conversations, or none."""
    sources = data.datasets if isinstance(data, MixedDataset) else [data]
    sources = [source for source in sources if isinstance(source, SFTDataset)]  # not the replayed texts
    if not sources or sum(source.cache.num_samples for source in sources) > MAX_SEARCHED:
        return None
    found = set()
    for source in sources:
        for sample in map(source.sample, range(source.cache.num_samples)):
            found |= {tuple(sample["input_ids"][begin:end].tolist()) for begin, end in answers(sample)}
    return found


def max_new_tokens(questions: list[Question]) -> int:
    """The longest answer that is generated, in tokens: a quarter longer than the longest reference."""
    longest = max((question.reference_length for question in questions), default=0)
    return longest + longest // 4


class RightAnswers(Callback):
    """Asks held-out questions on rank 0. The record of an evaluation gets the share of right answers
    (`eval_answers`), the number of questions (`asked`) and some wrong answers. Some questions may have an
    answer that no training conversation gives; then it also gets their number (`new_asked`) and the share of
    right answers to them (`eval_new_answers`). The first record also has the share before the first update
    (`initial_eval_answers`)."""

    def __init__(self, questions: list[Question], tokenizer: "PreTrainedTokenizerBase"):
        self.questions, self.tokenizer = questions, tokenizer
        self.before: dict[str, Any] = {}  # of the first record
        self.found: dict[str, Any] = {}  # of the evaluation whose record is not written yet

    def on_train_start(self, state: Any) -> None:
        if state.resumed_update is None:
            share = self.ask(state).get("eval_answers")
            self.before = {} if share is None else {"initial_eval_answers": share}
            Logger(
                f"at the start: {share or 0:.0%} of {len(self.questions)} held-out questions answered right"
            )

    def on_validation_start(self, state: Any) -> None:
        self.found = self.ask(state)

    def on_log(self, state: Any, record: dict[str, Any]) -> None:
        record |= self.before | self.found
        self.before, self.found = {}, {}

    def ask(self, state: TrainState) -> dict[str, Any]:
        """The fields of a record about all questions, the same on all ranks; empty if the run has
        diverged."""
        found: dict[str, Any] = {}
        if is_main_process():
            found = self.answer(state)
        (found, *_) = all_gather(found)
        return found

    def answer(self, state: TrainState) -> dict[str, Any]:
        """Ask all questions."""
        from model.sampling import Sampling

        prompts = [question.input_ids for question in self.questions]
        greedy = [[Sampling(temperature=0.0)]] * len(prompts)
        written = write(state, self.tokenizer, prompts, greedy, max_new_tokens(self.questions))
        if not written:
            return {}
        texts = self.tokenizer.batch_decode([tokens for (tokens,) in written], skip_special_tokens=True)
        wrong, new = [], []
        for question, text in zip(self.questions, map(str.strip, texts), strict=True):
            right = is_right(question.text, question.reference, text)
            if not right:
                wrong.append({"question": question.text, "answer": text, "right": question.reference})
            if question.is_new:
                new.append(right)
        asked = len(prompts)
        found = {"eval_answers": 1 - len(wrong) / asked, "asked": asked, "wrong_answers": wrong[:SHOWN]}
        return found | ({"eval_new_answers": sum(new) / len(new), "new_asked": len(new)} if new else {})
