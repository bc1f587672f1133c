"""Batched decoding against transformers' own generate, and against itself in any other company."""

import random

import pytest
import torch

from model import generation
from model.generation import READ_AT_ONCE, Answer, Decoder, KeyValueCache, NotFinite, generate
from model.layout import padded_layout
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling, draw
from tests.model.test_model_minimind import VOCAB, build, flat_batch, ragged, stock
from trainer.devices.wrapping import decoding_model

END = 2
GREEDY = Sampling(temperature=0)


@pytest.fixture(params=["CPU", "GPU"])
def form(request, monkeypatch) -> str:
    """Decoding in the form of a CPU and of a GPU: prompts are read together, keys are seen in multiples."""
    gpu = generation.GPU._replace(read_at_once=40, batch_tokens=400, key_multiple=16)
    monkeypatch.setattr(generation, "CPU", {"CPU": generation.CPU, "GPU": gpu}[request.param])
    return request.param


def prompts_of(*lengths: int) -> list[list[int]]:
    return [sample.tolist() for sample in ragged(list(lengths))]


def reference(model, prompt: list[int], new: int, **options) -> list[int]:
    """What transformers' generate adds, greedily."""
    options |= {"max_new_tokens": new, "do_sample": False, "eos_token_id": END, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def tokens_of(groups: list[list[Answer]]) -> list[list[list[int]]]:
    return [[answer.tokens for answer in group] for group in groups]


@pytest.mark.parametrize("shape", ["dense", "moe_top2"])
def test_greedy_answers_are_those_of_transformers(shape, form):
    """One slot, fewer slots than prompts, all at once; a prompt that is read in several parts."""
    model = build(shape)
    prompts = prompts_of(3, 70, 17, 1, READ_AT_ONCE + 40)
    expected = [[reference(stock(model), prompt, 24)] for prompt in prompts]
    for slots in (1, 3, 64):
        groups = generate(model, prompts, [[GREEDY]] * len(prompts), 24, [END], slots)
        assert tokens_of(groups) == expected
        assert {answer.finish for (answer,) in groups} <= {"stop", "length"}


@pytest.mark.parametrize("penalty", [1.3, 0.8, 5.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty, form):
    """Of prompt and answer, for each answer its own, beside others without one."""
    model = build("dense")
    prompts = prompts_of(3, 70, 17)
    expected = [reference(stock(model), prompt, 24, repetition_penalty=penalty) for prompt in prompts]
    sampling = Sampling(temperature=0, repetition_penalty=penalty)
    groups = generate(model, prompts, [[sampling, GREEDY]] * 3, 24, [END])
    assert [penalised for penalised, _ in tokens_of(groups)] == expected
    assert tokens_of(groups) != [[tokens, tokens] for tokens in expected]
    plain = [reference(stock(model), prompt, 24) for prompt in prompts]
    assert [greedy for _, greedy in tokens_of(groups)] == plain


def test_allowed_tokens_are_those_of_transformers(form):
    """Depending on the answer so far, beside one that may have all tokens."""
    model = build("dense")
    prompts = prompts_of(3, 70, 17)

    def after(tokens: list[int]) -> list[int]:
        return [END + 1 + (len(tokens) + sum(tokens) + i) % (VOCAB - 3) for i in range(5)]

    expected = []
    for prompt in prompts:

        def allowed(row: int, ids: torch.Tensor, begin: int = len(prompt)) -> list[int]:
            return after(ids[begin:].tolist())

        expected.append(reference(stock(model), prompt, 24, prefix_allowed_tokens_fn=allowed))
    sampling = Sampling(temperature=0, allowed=lambda tokens: torch.tensor(after(list(tokens))))
    groups = tokens_of(generate(model, prompts, [[sampling, GREEDY]] * 3, 24, [END]))
    assert [bound for bound, _ in groups] == expected
    assert [free for _, free in groups] == [reference(stock(model), prompt, 24) for prompt in prompts]


def test_a_seed_gives_the_same_answer_in_any_company(form):
    model = build("dense")
    prompts = prompts_of(5, 40, 12, 90, 1)
    samplings = [
        Sampling(1.0, seed=3),
        Sampling(0.8, top_k=20, top_p=0.9, seed=4),
        Sampling(1.3, top_p=0.95, seed=-5),
        GREEDY,
    ]
    alone = [[generate(model, [p], [[s]], 20, [END], 1)[0][0].tokens for s in samplings] for p in prompts]
    for slots in (4, 7, 64):
        together = generate(model, prompts, [samplings] * len(prompts), 20, [END], slots)
        assert tokens_of(together) == alone
    assert len({tuple(tokens) for group in alone for tokens in group}) > 14
    other = generate(model, prompts[:1], [[Sampling(1.0, seed=4)]], 20, [END])
    assert tokens_of(other)[0][0] != alone[0][0]


def test_each_token_is_drawn_with_a_number_of_its_own():
    model, (prompt,), sampling = build("dense"), prompts_of(6), Sampling(1.0, seed=5)
    ((answer,),) = generate(model, [prompt], [[sampling]], 12, [VOCAB])
    tokens = list(prompt)
    for number in range(12):
        logits = model(torch.tensor([tokens])).logits[:, -1]
        tokens += draw(logits, [sampling], [number])[0].tolist()
    assert answer.tokens == tokens[6:]


def test_many_prompts_with_one_answer_each_end_at_any_time(form):
    """As PPO writes: 16 prompts of 20 to 90 tokens, answers that end while others begin."""
    model, rng = build("dense"), random.Random(0)
    prompts = prompts_of(*(rng.randrange(20, 90) for _ in range(16)))
    new = [rng.randrange(1, 12) for _ in prompts]
    samplings = [[Sampling(seed=seed)] for seed in range(16)]
    alone = [generate(model, [p], [s], n, [END])[0] for p, s, n in zip(prompts, samplings, new, strict=True)]
    for slots in (1, 5, 16):
        assert tokens_of(generate(model, prompts, samplings, new, [END], slots)) == tokens_of(alone)


def test_answers_that_leave_do_not_disturb_the_others():
    """Any of them at any step, while others join."""
    model, rng = build("dense"), random.Random(0)
    prompts = prompts_of(30, 6, 14, 80, 22, 3, 45, 9)
    samplings = [Sampling(seed=1), Sampling(seed=2)]
    alone = tokens_of(generate(model, prompts, [samplings] * len(prompts), 16, [END]))
    for _ in range(4):
        decoder, waiting = Decoder(model, 6, 100, [END]), list(enumerate(prompts))
        kept, left = {}, set()
        while waiting or decoder.answers:
            if waiting and decoder.free >= 2:
                number, prompt = waiting.pop(0)
                for i, answer in enumerate(decoder.add(prompt, samplings, 16)):
                    kept[answer] = alone[number][i]
            if decoder.answers and rng.random() < 0.3:
                answer = rng.choice(decoder.answers)
                decoder.remove(answer)
                decoder.remove(answer)  # nothing more
                left.add(answer)
            if decoder.answers:
                decoder.step()
        assert decoder.free == 6 and len(left) > 2
        for answer, expected in kept.items():
            assert answer.tokens == (expected[: len(answer.tokens)] if answer in left else expected)


def test_a_prompt_is_read_once_for_all_its_answers(monkeypatch):
    model, widths = build("dense"), []
    embed = model.model.embed_tokens.forward
    watched = lambda tokens: widths.append(tuple(tokens.shape)) or embed(tokens)  # noqa: E731
    monkeypatch.setattr(model.model.embed_tokens, "forward", watched)
    generate(model, prompts_of(20), [[Sampling(seed=seed) for seed in range(8)]], 3, [VOCAB])
    assert widths == [(1, 20), (8, 1), (8, 1)]


def test_on_a_gpu_prompts_are_read_together_and_keys_come_in_multiples(monkeypatch):
    """Up to so many tokens, filled up; the answers of later ones begin once a quarter of the slots is
    free."""
    monkeypatch.setattr(generation, "CPU", generation.GPU._replace(batch_tokens=100))
    model, widths, ends = build("dense"), [], set()
    embed, seek = model.model.embed_tokens.forward, KeyValueCache.seek
    watched = lambda tokens: widths.append(tuple(tokens.shape)) or embed(tokens)  # noqa: E731
    noted = lambda cache, *where: ends.add(where[-1]) or seek(cache, *where)  # noqa: E731
    monkeypatch.setattr(model.model.embed_tokens, "forward", watched)
    monkeypatch.setattr(KeyValueCache, "seek", noted)
    samplings = [[Sampling(seed=2 * i), Sampling(seed=2 * i + 1)] for i in range(6)]
    generate(model, prompts_of(20, 30, 10, 40, 50, 8), samplings, [3, 9, 3, 3, 3, 3], [VOCAB], 8)
    read, steps = [(3, 30), (1, 40), (2, 50)], [(8, 1), (6, 1), (2, 1)]
    assert widths == [*read[:2], *steps[:1] * 2, read[2], *steps[1:2] * 2, *steps[2:] * 4]
    assert ends == {30, 40, 50, 128}


def test_what_does_not_fit_is_refused():
    decoder = Decoder(build("dense"), 2, 20, [END])
    for prompt, many, new in (([], 1, 5), ([3] * 16, 1, 5), ([3], 3, 5), ([3], 0, 5), ([3], 1, 0)):
        with pytest.raises(ValueError, match=r"fit the cache|there is room for 2"):
            decoder.add(prompt, [GREEDY] * many, new)
    assert len(decoder.add([3] * 15, [GREEDY] * 2, 5)) == 2  # nothing was kept of those


@pytest.mark.parametrize("call", ["add", "step"])
def test_a_call_that_fails_changes_nothing(call, monkeypatch):
    model, (prompt, other) = build("dense"), prompts_of(20, 5)
    expected = tokens_of(generate(model, [prompt, other], [[GREEDY]] * 2, 8, [VOCAB]))
    decoder = Decoder(model, 6, 64, [VOCAB])
    answers = [decoder.add(prompt, [GREEDY], 8)]
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(model.model.norm, "forward", lambda x: x * torch.nan)
        with pytest.raises(NotFinite, match="the model's outputs are not finite numbers"):
            decoder.step() if call == "step" else decoder.add(other, [GREEDY], 8)
    answers.append(decoder.add(other, [GREEDY], 8))
    while decoder.answers:
        decoder.step()
    assert tokens_of(answers) == expected


def test_logprobs_are_those_of_the_whole_sequence():
    model, prompts = build("dense"), prompts_of(7, 30)
    samplings = [Sampling(0.7, top_p=0.9, seed=1), Sampling(0.0), Sampling(1.0, seed=9)]
    groups = generate(model, prompts, [samplings] * 2, 12, [END])
    for prompt, answers in zip(prompts, groups, strict=True):
        for answer in answers:
            tokens = torch.tensor([prompt + answer.tokens])
            logits = model(tokens).logits[0, len(prompt) - 1 : -1] / (answer.sampling.temperature or 1.0)
            expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)


def test_the_type_of_the_weights_is_that_of_the_cache():
    model: MiniMindForCausalLM = build("dense").to(torch.bfloat16)
    ((answer,),) = generate(model, prompts_of(9), [[GREEDY]], 5, [END])
    assert 1 <= len(answer.tokens) <= 5
    assert Decoder(model, 1, 8, [END]).cache.tensor.dtype == torch.bfloat16


def test_the_autocast_of_the_caller_does_not_reach_the_decoder(form):
    """An objective decodes within its loss: the answers are those without autocast, and the gradients of the
    loss those without an answer."""
    model, prompts, batch = build("dense"), prompts_of(7, 50), flat_batch(ragged([9, 30]))
    samplings = [[Sampling(seed=1), GREEDY]] * 2
    expected = generate(model, prompts, samplings, 12, [VOCAB])
    grads = []
    for decodes in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            if decodes:
                answers = generate(model, prompts, samplings, 12, [VOCAB])
            loss = model(**batch).loss
        grads.append(torch.autograd.grad(loss, model.parameters()))
    assert tokens_of(answers) == tokens_of(expected)
    for group, wanted in zip(answers, expected, strict=True):
        assert [answer.logprobs for answer in group] == [answer.logprobs for answer in wanted]
    assert all(map(torch.equal, *grads))


def test_the_residual_stream_of_float16_may_exceed_its_range():
    """As in training: 65504 is float16's largest number, and layers add up to more."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB, "tie_word_embeddings": False}
    model = MiniMindForCausalLM(MiniMindConfig(**shape)).eval().requires_grad_(False)
    model.model.embed_tokens.weight.sign_().mul_(40_000)
    prompt = list(range(5, 15))
    positions = torch.arange(10)[None]
    rotary, layout = model.model.rotary_emb(positions), padded_layout(positions)
    x = model.model.embed_tokens(torch.tensor([prompt]))
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.mul_(50)
        layer.mlp.up_proj.weight.mul_(50)
        added = layer.mlp(layer.post_attention_layernorm(x)).abs().max()
        layer.mlp.down_proj.weight.mul_(30_000 / added)
        x, _ = layer(x, rotary, layout)
    assert x.abs().max() > 65_504
    ((answer,),) = generate(decoding_model(model, torch.float16), [prompt], [[GREEDY]], 6, [VOCAB])
    ((expected,),) = generate(model, [prompt], [[GREEDY]], 6, [VOCAB])
    assert answer.tokens == expected.tokens
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=0.02)
