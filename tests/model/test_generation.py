"""Batched decoding against transformers' own generate, and against itself in any other company."""

import random
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from model import generation
from model.generation import Answer, Decoder, generate
from model.model_minimind import MiniMindForCausalLM
from model.sampling import Sampling
from tests.model.test_model_minimind import VOCAB, build, ragged, stock
from tests.model.test_sampling import draw_tokens

END = 2
GREEDY = Sampling(temperature=0)


def prompts_of(*lengths: int) -> list[list[int]]:
    return [sample.tolist() for sample in ragged(list(lengths))]


def reference(model, prompt: list[int], new: int) -> list[int]:
    """What transformers' generate adds, greedily."""
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": END, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def tokens_of(groups: list[list[Answer]]) -> list[list[list[int]]]:
    return [[answer.tokens for answer in group] for group in groups]


@pytest.mark.parametrize("shape", ["dense", "moe_top2"])
def test_greedy_answers_are_those_of_transformers(shape):
    """In every order and company: one slot, fewer slots than prompts, prompts in chunks, all at once."""
    model = build(shape)
    prompts = prompts_of(3, 70, 17, 1, 8)
    expected = [[reference(stock(model), prompt, 24)] for prompt in prompts]
    for slots in (1, 3, 64):
        assert tokens_of(generate(model, prompts, [[GREEDY]] * len(prompts), 24, [END], slots)) == expected
    decoder = Decoder(model, 4, 100, [END], prefill_tokens=16)
    waiting, answers = list(prompts), []
    while waiting or decoder.rows:
        while waiting and decoder.free:
            answers += [decoder.add(waiting.pop(0), [GREEDY], 24)]
        decoder.step()
    assert tokens_of(answers) == expected
    finishes = {answer.finish for (answer,) in answers}
    assert finishes <= {"stop", "length"} and decoder.free == 4


@pytest.mark.parametrize("half", ["decode", "prefill"])
def test_half_a_step_that_fails_changes_nothing(half, monkeypatch):
    """It can be repeated with some of the rows or with all, and the answers are the same."""
    model = build("dense")
    prompts = prompts_of(20, 5, 9)
    samplings = [Sampling(seed=1), Sampling(seed=2)]
    expected = tokens_of(generate(model, prompts, [samplings] * 3, 12, [END]))
    decoder = Decoder(model, 6, 64, [END], prefill_tokens=8)
    groups = [decoder.add(prompt, samplings, 12) for prompt in prompts]
    details, failures = decoder._details, iter(range(10**6))

    def failing(*args):
        if next(failures) % 2:
            raise MemoryError
        return details(*args)

    monkeypatch.setattr(decoder, "_details", failing)
    while decoder.rows:
        for part, others in ((decoder.decode, half == "decode"), (decoder.prefill, half == "prefill")):
            try:
                part()
            except MemoryError:
                for group in groups if others else ():
                    with suppress(MemoryError):
                        part(group)
    assert tokens_of(groups) == expected


def test_a_seed_gives_the_same_answer_in_any_company(monkeypatch):
    model = build("dense")
    prompts = prompts_of(5, 40, 12, 90, 1)
    samplings = [
        Sampling(1.0, seed=3),
        Sampling(0.8, top_k=20, top_p=0.9, seed=4),
        Sampling(1.3, top_p=0.95, seed=-5),
    ]
    alone = [[generate(model, [p], [[s]], 20, [END], 1)[0][0].tokens for s in samplings] for p in prompts]
    for slots, burst in ((3, 1), (7, 8), (64, 5), (64, 100)):  # tokens between two looks
        monkeypatch.setattr(generation, "BURST", {"cpu": burst})
        together = generate(model, prompts, [samplings] * len(prompts), 20, [END], slots)
        assert tokens_of(together) == alone
    assert len({tuple(tokens) for group in alone for tokens in group}) > 10
    other = generate(model, prompts[:1], [[Sampling(1.0, seed=4)]], 20, [END])
    assert tokens_of(other)[0][0] != alone[0][0]


def test_each_token_is_drawn_with_noise_of_its_own():
    model, (prompt,), sampling = build("dense"), prompts_of(6), Sampling(1.0, seed=5)
    ((answer,),) = generate(model, [prompt], [[sampling]], 12, [VOCAB])
    tokens = list(prompt)
    for number in range(12):
        logits = model(torch.tensor([tokens])).logits[:, -1]
        tokens += draw_tokens(logits, [sampling], [number]).tolist()
    assert answer.tokens == tokens[6:]


def test_padding_behind_the_end_of_the_cache_changes_nothing():
    """The rest of a prompt that nearly fills its row is read beside a longer one."""
    model, prompts = build("dense"), prompts_of(18, 8)
    decoder = Decoder(model, 2, 20, [VOCAB], prefill_tokens=16)
    answers = [decoder.add(prompt, [GREEDY], 2)[0] for prompt in prompts]
    while decoder.rows:
        decoder.step()
    expected = tokens_of(generate(model, prompts, [[GREEDY]] * 2, 2, [VOCAB]))
    assert [[answer.tokens] for answer in answers] == expected


def test_answers_that_leave_do_not_disturb_the_others():
    """Any of them at any step, while others still read their prompts."""
    model, rng = build("dense"), random.Random(0)
    prompts = prompts_of(30, 6, 14, 80, 22, 3, 45, 9)
    samplings = [Sampling(seed=1), Sampling(seed=2)]
    alone = tokens_of(generate(model, prompts, [samplings] * len(prompts), 16, [END]))
    for _ in range(4):
        decoder, waiting = Decoder(model, 6, 100, [END], prefill_tokens=20), list(enumerate(prompts))
        kept, left = {}, set()
        while waiting or decoder.rows:
            while waiting and decoder.free >= 2:
                number, prompt = waiting.pop(0)
                for i, answer in enumerate(decoder.add(prompt, samplings, 16)):
                    kept[answer] = alone[number][i]
            if rng.random() < 0.3:
                answer = rng.choice([answer for answer in kept if not answer.finish])
                decoder.remove(answer)
                left.add(answer)
            with torch.inference_mode():
                decoder._settle()
            assert {row.slot for row in decoder.answers} == set(range(len(decoder.answers)))
            assert {row.slot for row in decoder.rows} == set(range(len(decoder.rows)))
            decoder.step(rng.choice([1, 1, 3]))
        assert decoder.free == 6
        for answer, expected in kept.items():
            assert answer.tokens == (expected[: len(answer.tokens)] if answer in left else expected)


def test_logprobs_are_those_of_the_whole_sequence():
    model = build("dense")
    prompts, samplings = (
        prompts_of(7, 30),
        [Sampling(0.7, top_p=0.9, seed=1), Sampling(0.0), Sampling(1.0, seed=9)],
    )
    groups = generate(model, prompts, [samplings] * 2, 12, [END], with_logprobs=True)
    for prompt, answers in zip(prompts, groups, strict=True):
        for answer in answers:
            tokens = torch.tensor([prompt + answer.tokens])
            logits = model(tokens).logits[0, len(prompt) - 1 : -1] / (answer.sampling.temperature or 1.0)
            expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)


def test_a_long_prompt_does_not_hold_up_the_others(monkeypatch):
    """While it is read, in chunks, every answer under way gets a token with each of them."""
    model, widths = build("dense"), []
    decoder = Decoder(model, 4, 300, [VOCAB], prefill_tokens=32)  # no token ends an answer
    embed = model.model.embed_tokens.forward

    def watched(tokens: Tensor) -> Tensor:
        widths.append(tokens.numel())
        return embed(tokens)

    monkeypatch.setattr(model.model.embed_tokens, "forward", watched)
    (running,) = decoder.add([5, 6, 7], [GREEDY], 100)
    decoder.step()
    (late,) = decoder.add([9] * 200, [GREEDY], 2)
    steps = 0
    while not late.tokens:
        decoder.step()
        steps += 1
        assert len(running.tokens) == 1 + steps
    assert steps == 7 and max(widths) <= 32


def test_the_type_of_the_weights_is_that_of_the_cache():
    model: MiniMindForCausalLM = build("dense").to(torch.bfloat16)
    ((answer,),) = generate(model, prompts_of(9), [[GREEDY]], 5, [END])
    assert 1 <= len(answer.tokens) <= 5
    assert Decoder(model, 1, 8, [END]).steps.cache.tensor.dtype == torch.bfloat16
