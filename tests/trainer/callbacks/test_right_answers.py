"""Held-out questions: which are asked, what is written of them, and that all ranks have the same figures."""

from types import SimpleNamespace

import pytest

from common.settings import ROOT
from dataset.lm_dataset import PretrainDataset, SFTDataset
from dataset.mixing import MixedDataset
from dataset.token_cache import load_tokenizer
from model.prompts import prompt_tokens
from tests.conftest import write_jsonl
from tests.stage_process import run
from tests.trainer.stage_flags import flags
from trainer.callbacks import right_answers
from trainer.callbacks.right_answers import RightAnswers, held_out_questions
from trainer.report.metrics import read_metrics
from trainer.report.warnings import answer_sentences


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "model")


def conversation(*texts: str) -> dict:
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def dataset(tmp_path, tokenizer, name, records, kind=SFTDataset):
    path = write_jsonl(tmp_path / f"{name}.jsonl", records)
    return kind(str(path), tokenizer, 512, cache_dir=str(tmp_path))


def questions_of(tmp_path, tokenizer, records, trained=None):
    data = dataset(tmp_path, tokenizer, "trained", trained) if trained else None
    return held_out_questions(tokenizer, dataset(tmp_path, tokenizer, "held_out", records), data)


def test_the_first_question_of_each_conversation_is_asked_as_a_chat_asks_it(tmp_path, tokenizer):
    records = [conversation(f"Who is {n}?", f"{n} is the smith.", "And Bo?", "The baker.") for n in "KLMN"]
    records.append(conversation("Tell me all.", "word " * 200))  # too long to be met word by word
    found = questions_of(tmp_path, tokenizer, records)
    assert [question.text for question in found] == [f"Who is {n}?" for n in "KLMN"]
    for question, n in zip(found, "KLMN", strict=True):
        assert question.reference == f"{n} is the smith."
        messages = [{"role": "user", "content": f"Who is {n}?"}]
        assert question.input_ids == prompt_tokens(tokenizer, messages, enable_thinking=False)


def test_of_many_sixty_are_asked_and_of_two_none(tmp_path, tokenizer):
    records = [conversation(f"What is {n}?", f"It is {n}.") for n in range(130)]
    found = questions_of(tmp_path, tokenizer, records)
    assert len({question.text for question in found}) == len(found) == 60
    assert questions_of(tmp_path, tokenizer, records[:2]) == []


def test_right_and_wrong_answers_are_counted(tmp_path, tokenizer, monkeypatch):
    records = [conversation(f"How old is {n}?", f"{n} is {n}{n} years old.") for n in (3, 4, 5, 6)]
    asked = RightAnswers(questions_of(tmp_path, tokenizer, records), tokenizer)
    said = ["3 is 33 years old.", "44", "five", "66"]
    written = [[tokenizer(text, add_special_tokens=False)["input_ids"]] for text in said]
    monkeypatch.setattr(right_answers, "write", lambda *args: written)
    state, record = SimpleNamespace(resumed_update=None), {}
    asked.on_train_start(state)
    asked.on_validation_start(state)
    asked.on_log(state, record)
    wrong = [{"question": "How old is 5?", "answer": "five", "right": "5 is 55 years old."}]
    assert record == {
        "initial_eval_answers": 0.75, "eval_answers": 0.75, "asked": 4, "wrong_answers": wrong
    }  # fmt: skip
    later: dict = {}
    asked.on_log(state, later)
    assert later == {}
    monkeypatch.setattr(right_answers, "write", lambda *args: [])  # the logits are not finite
    asked.on_validation_start(state)
    asked.on_log(state, later)
    assert later == {}


def test_questions_whose_answer_no_training_conversation_gives_are_counted_apart(
    tmp_path, tokenizer, monkeypatch
):
    records = [conversation(f"How old is {n}?", f"{n} is {n}{n} years old.") for n in (3, 4, 5, 6)]
    trained = [  # 3 in other words, 4 as a second answer; 6 is only asked about
        conversation("What is the age of 3?", "3 is 33 years old."),
        conversation("Hello.", "Hello.", "And 4?", "4 is 44 years old."),
        conversation("Is 6 is 66 years old. true?", "Yes."),
    ]
    found = questions_of(tmp_path, tokenizer, records, trained)
    assert [question.is_new for question in found] == [False, False, True, True]
    asked = RightAnswers(found, tokenizer)
    said = ["no", "44", "no", "66"]
    written = [[tokenizer(text, add_special_tokens=False)["input_ids"]] for text in said]
    monkeypatch.setattr(right_answers, "write", lambda *args: written)
    record = asked.ask(SimpleNamespace())
    assert (record["eval_answers"], record["asked"]) == (0.5, 4)
    assert (record["eval_new_answers"], record["new_asked"]) == (0.5, 2)
    records = [{"update": 1, "initial_eval_answers": 0.0, **record}]
    assert [key for key, _ in answer_sentences(records)] == ["answers now"]  # of two a share says little
    records[0] |= {"eval_answers": 0.5, "asked": 8, "eval_new_answers": 1 / 3, "new_asked": 3}
    assert answer_sentences(records) == [
        ("answers now", {"right": 4, "asked": 8, "before": 0}),
        ("answers known", {"right": 3, "asked": 5}),
        ("answers new", {"right": 1, "asked": 3}),
    ]
    all_new = record | {"new_asked": 4, "eval_new_answers": 0.5}
    assert [key for key, _ in answer_sentences([{"update": 1, **all_new}])] == ["answers"]
    monkeypatch.setattr(right_answers, "MAX_SEARCHED", 2)
    found = questions_of(tmp_path, tokenizer, records=[*map(conversation, "abc", "ABC")], trained=trained)
    assert not any(question.is_new for question in found)


def test_all_conversations_of_a_mixture_are_searched_and_no_text(tmp_path, tokenizer, monkeypatch):
    answers = [f"{n} is {n}{n} years old." for n in (3, 4, 5)]
    first, second = (
        dataset(tmp_path, tokenizer, f"mixed{i}", [conversation("Hello.", answers[i])]) for i in (0, 1)
    )
    texts = dataset(tmp_path, tokenizer, "texts", [{"text": answers[2]}], PretrainDataset)
    mixture = MixedDataset([("a", first), ("b", second), ("c", texts)], [0.4, 0.3, 0.3])
    records = [conversation("How old?", answer) for answer in answers]
    held_out = dataset(tmp_path, tokenizer, "of_mixture", records)
    found = held_out_questions(tokenizer, held_out, mixture)
    assert [question.is_new for question in found] == [False, False, True]
    monkeypatch.setattr(right_answers, "MAX_SEARCHED", 1)  # all conversations count
    found = held_out_questions(tokenizer, held_out, mixture)
    assert not any(question.is_new for question in found)
    texts_alone = MixedDataset([("c", texts)], [1.0])
    assert not any(question.is_new for question in held_out_questions(tokenizer, held_out, texts_alone))


def test_two_ranks_have_the_records_of_one_and_the_verdict_says_the_share(corpus, tmp_path):
    settings = {"from_weight": "none", "sample_prompts": "auto", "max_steps": 4, "num_hidden_layers": 1}
    found = []
    for ranks, batch in ((1, 8), (2, 4)):
        folder = tmp_path / str(ranks)
        argv = flags(corpus, folder, "sft", **settings | {"batch_size": batch})
        done = run("full_sft", argv, ranks=ranks)
        assert "verdict: answers 0 of 13 held-out questions right (0 before the first update)" in done.out
        found.append(read_metrics(folder / "out/full_sft_32_metrics.jsonl"))
    for one, two in zip(*found, strict=True):
        assert [one.get(name) for name in ("asked", "eval_answers")] == [
            two.get("asked"),
            two.get("eval_answers"),
        ]
    assert found[0][0]["initial_eval_answers"] == 0.0 and found[0][-1]["asked"] == 13
