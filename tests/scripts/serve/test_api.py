"""The server over HTTP, asked by the official openai client: a tiny model, and one whose answers are
known."""

import copy
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import ValidationError
from transformers import AutoTokenizer

from model.answers import TextStream
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling
from scripts.serve import bodies, models, prompt_writer, replies
from scripts.serve.api import create_app
from scripts.serve.models import Settings
from scripts.serve.protocol import ApiError, ChatRequest, CompletionRequest, parse
from scripts.serve_openai_api import OWN_NAMES
from tests.conftest import ROOT
from tests.scripts.serve.scripted_decoder import PACE, SAYS, ScriptedDecoder
from tests.scripts.serve.scripted_server import Serving

CONTEXT = 256
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TWO_TOOLS = [*TOOLS, {"type": "function", "function": {"name": "time"}}]
FORCED = ["required", {"type": "function", "function": {"name": "weather"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Reedmarsh"}}\n</tool_call>'


@contextmanager
def serving(model: Any, tokenizer: Any, settings: Settings) -> Iterator[SimpleNamespace]:
    """A server on a free port: its client, its port, and what it serves."""
    with serving_app(create_app(model, tokenizer, settings)) as server:
        yield server


@contextmanager
def serving_app(app: FastAPI) -> Iterator[SimpleNamespace]:
    offered = app.state.models
    with Serving(app) as server:
        client = openai.OpenAI(base_url=f"{server.address}v1", api_key="key", max_retries=0, timeout=60)
        with client:
            yield SimpleNamespace(client=client, port=server.port, model=offered.first, models=offered)
    assert not server.thread.is_alive() and not offered.health()["alive"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "model")


@pytest.fixture(scope="module")
def tiny() -> MiniMindForCausalLM:
    """Its weights are so large that its answers differ from prompt to prompt."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(
        MiniMindConfig(hidden_size=32, num_hidden_layers=1, tie_word_embeddings=False)
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.fixture(scope="module")
def real(tiny, tokenizer) -> Iterator[SimpleNamespace]:
    with serving(tiny, tokenizer, Settings("tiny", slots=16, context=CONTEXT, max_new_tokens=100)) as server:
        yield server


def scripted_app(tokenizer: Any, **fields: Any) -> FastAPI:
    """An application whose answers are those of SAYS."""
    settings = Settings("scripted", slots=4, context=CONTEXT, max_queue=3, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "Decoder", ScriptedDecoder)
        return create_app(SimpleNamespace(tokenizer=tokenizer), tokenizer, settings)


@pytest.fixture(scope="module")
def scripted_server(tokenizer) -> Iterator[SimpleNamespace]:
    with serving_app(scripted_app(tokenizer, api_key="key")) as server:
        yield server


@pytest.fixture
def scripted(scripted_server) -> SimpleNamespace:
    """The scripted server as if it were new."""
    wait_for(lambda: not scripted_server.model.scheduler.busy)
    scripted_server.model.decoder.prompts.clear()
    SAYS.clear()
    PACE["seconds"] = 0.0
    return scripted_server


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(server: SimpleNamespace, text: str, **fields: Any) -> Any:
    return server.client.chat.completions.create(model=server.model.name, messages=user(text), **fields)


def post(
    server: SimpleNamespace, body: bytes, path: str = "/v1/chat/completions"
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(
        "POST", path, body, {"Authorization": "Bearer key", "Content-Type": "application/json"}
    )
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def begin(server: SimpleNamespace, body: bytes, length: int) -> socket.socket:
    """Send the head of a request, whose body has this length, and some of the body."""
    one = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    one.sendall(head.encode() + body)
    return one


def wait_for(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it does not happen")


def test_what_a_request_leaves_out_is_the_models_default(real):
    default = Sampling(temperature=0.3, top_k=7, top_p=0.8)
    message = '"messages": [{"role": "user", "content": "x"}]'
    asked, _ = parse(ChatRequest, f'{{{message}, "top_p": 0.5, "top_k": -1, "seed": 3}}'.encode())
    assert replies.samplings_of(asked, default) == [Sampling(0.3, 0, 0.5, seed=3)]
    asked, _ = parse(CompletionRequest, b'{"prompt": "x", "temperature": 0, "seed": 3}')
    assert replies.samplings_of(asked, default) == [Sampling(0.0, 7, 0.8, seed=3)]
    assert real.client.models.list().data[0].sampling == {"temperature": 0.7, "top_p": 0.9, "top_k": 50}


# --- answers


def test_an_answer_is_greedily_that_of_transformers_whole_and_streamed(real, tiny, tokenizer):
    prompt = tokenizer.apply_chat_template(user("hello"), add_generation_prompt=True)["input_ids"]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    tokens = tiny.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    answer = chat(real, "hello", temperature=0, max_tokens=20)
    usage, (choice,) = answer.usage, answer.choices
    assert choice.message.content == expected and choice.finish_reason == "length"
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens] == [
        len(prompt), 20, len(prompt) + 20
    ]  # fmt: skip
    fields = {"stream_options": {"include_usage": True}, "max_completion_tokens": 20, "stream": True}
    *body, last = chat(real, "hello", temperature=0, **fields)
    assert {(chunk.id, chunk.model, chunk.object) for chunk in (*body, last)} == {
        (last.id, "tiny", "chat.completion.chunk")
    }
    assert last.choices == [] and last.usage == usage and not any(chunk.usage for chunk in body)
    choices = [chunk.choices[0] for chunk in body]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(body) - 1)
    assert [choice.finish_reason for choice in choices] == [None] * (len(body) - 1) + ["length"]
    assert "".join(choice.delta.content or "" for choice in choices) == expected and len(choices) > 10


def test_seeds_and_choices(real):
    def texts(**fields: Any) -> list[str]:
        return [choice.message.content for choice in chat(real, "hello", max_tokens=10, **fields).choices]

    assert texts(seed=1) == texts(seed=1) == texts(seed=1, n=3)[:1]
    assert len({*texts(seed=1, n=3), *texts(seed=2), *texts(), *texts()}) == 6
    assert len(set(texts(temperature=0, n=2))) == 1
    chunks = chat(real, "hello", seed=1, n=3, max_tokens=10, stream=True)
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts(seed=1, n=3)


def test_completions_of_texts_and_of_tokens(real, tokenizer):
    def complete(prompt: Any, **fields: Any) -> Any:
        return real.client.completions.create(model="tiny", prompt=prompt, temperature=0, **fields)

    answer = complete(["The river", "山"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.object == "text_completion"
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert answer.usage.completion_tokens <= 64  # 16 for each, as OpenAI's default is
    tokens = [[1, *tokenizer.encode(text, add_special_tokens=False)] for text in ("The river", "山")]
    assert [choice.text for choice in complete(tokens).choices] == texts[::2]
    chunks = list(complete(tokens[0], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts[0]
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_an_answer_is_as_long_as_fits_and_no_longer(real):
    answer = chat(real, "x", max_tokens=10**6)
    assert answer.usage.completion_tokens <= 100
    words = "harbour " * 60
    answer = chat(real, words, seed=1)
    assert answer.usage.total_tokens <= CONTEXT
    for request in (words * 3, "x" * 10**6):
        with pytest.raises(openai.BadRequestError) as error:
            chat(real, request)
        assert error.value.code == "context_length_exceeded" and error.value.param == "messages"


def test_models_and_health(real):
    assert real.client.models.retrieve("tiny").owned_by == "minimind"
    health = real.client.with_options(base_url=f"http://127.0.0.1:{real.port}").get("/health", cast_to=object)
    assert health == {"status": "ok", "alive": True, "writing": 0, "waiting": 0, "slots": 16}


# --- what is in an answer


@pytest.mark.parametrize("stop", [", th", [" four", ", th"]])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_and_are_left_out(scripted, stop, stream):
    SAYS["list"] = "one, two, three, four"
    answer = chat(scripted, "list", stop=stop, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    texts = [(choice.delta if stream else choice.message).content or "" for choice in choices]
    assert "".join(texts) == "one, two" and choices[-1].finish_reason == "stop"
    assert scripted.model.decoder.free == 4


def test_a_whole_round_of_a_tool(scripted):
    SAYS["<|im_start|>user"] = f"Let me look.\n{CALL}"
    SAYS["<tool_response>\nrain"] = "It rains in Reedmarsh."

    def ask(messages: list[Any], **fields: Any) -> Any:
        return scripted.client.chat.completions.create(
            model="scripted", messages=messages, tools=TOOLS, **fields
        )

    messages = user("What is the weather in Reedmarsh?")
    answer = ask(messages).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Let me look."
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Reedmarsh"}
    streamed = [chunk.choices[0] for chunk in ask(messages, stream=True)]
    assert streamed[-1].finish_reason == "tool_calls"
    (other,) = [call for choice in streamed for call in choice.delta.tool_calls or []]
    assert other.index == 0 and other.id != call.id
    assert other.function.model_dump() == call.function.model_dump()
    messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    final = ask(messages).choices[0].message
    assert final.content == "It rains in Reedmarsh." and final.tool_calls is None
    assert f"Let me look.\n{CALL}<|im_end|>" in scripted.model.decoder.prompts[-1]
    unasked = ask(user("weather?"), tool_choice="none").choices[0].message
    assert unasked.content == f"Let me look.\n{CALL}" and unasked.tool_calls is None
    assert "Tools" not in scripted.model.decoder.prompts[-1]


def test_a_tool_that_must_be_called(scripted):
    """The server writes its name, too, where there is no choice."""
    SAYS['{"name": "'] = 'time", "arguments": {}}\n</tool_call>'
    choice = chat(scripted, "x", tools=TWO_TOOLS, tool_choice="required").choices[0]
    assert choice.message.tool_calls[0].function.name == "time" and choice.message.content is None
    SAYS['{"name": "weather", "arguments": {'] = '"city": "A"}}\n</tool_call> so'
    for choice in FORCED:
        message = chat(scripted, "x", tools=TOOLS, tool_choice=choice).choices[0].message
        assert message.tool_calls[0].function.arguments == '{"city": "A"}' and message.content == " so"


@pytest.mark.parametrize("choice", FORCED)
def test_a_model_whose_template_has_no_calls_cannot_be_made_to_call(scripted, monkeypatch, choice):
    """Refused before anything is generated; by itself it may still write one."""
    monkeypatch.setattr(scripted.model.prompts.tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(openai.BadRequestError, match="no calls of tools") as error:
        chat(scripted, "x", tools=TOOLS, tool_choice=choice)
    assert error.value.param == "tool_choice" and scripted.model.decoder.prompts == []
    assert chat(scripted, "x", tools=TOOLS).choices[0].message.content == "Well."


@pytest.mark.parametrize(
    "said", ["fire", 'weather", "arguments": {"city', 'time", "arguments": [1]}</tool_call>']
)
@pytest.mark.parametrize("choice", FORCED)
def test_a_forced_call_that_is_malformed_is_the_text_of_the_answer(scripted, said, choice):
    """As with `auto`; other answers to the same request, and the log-probabilities, are not lost for it."""
    SAYS['{"name": "'] = said
    opening = '<tool_call>\n{"name": "' + ("" if choice == "required" else 'weather", "arguments": {')
    fields = {"tools": TWO_TOOLS, "tool_choice": choice, "logprobs": True, "n": 2}
    for answer in chat(scripted, "x", **fields).choices:
        assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
        assert answer.message.content == opening + said
        assert "".join(token.token for token in answer.logprobs.content) == said
    chunks = [chunk.choices[0] for chunk in chat(scripted, "x", stream=True, **fields)]
    for index in range(2):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.delta.content or "" for chunk in own) == opening + said
        assert own[-1].finish_reason == "stop" and not any(chunk.delta.tool_calls for chunk in own)
    cut = chat(scripted, "x", max_tokens=1, **fields).choices[0]
    assert cut.finish_reason == "length" and cut.message.content.startswith(opening)


def test_reasoning_stands_beside_the_content(scripted):
    SAYS["why"] = "<think>\nBecause.\n</think>\n\nSo."
    message = chat(scripted, "why").choices[0].message
    assert (message.reasoning_content, message.content) == ("Because.", "So.")
    SAYS["<think>"] = "\nHm.\n</think>\n\nYes."
    thinking = {"chat_template_kwargs": {"enable_thinking": True, "chat_template": "{{ evil }}"}}
    message = chat(scripted, "x", extra_body=thinking).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    deltas = [chunk.choices[0].delta for chunk in chat(scripted, "x", stream=True, extra_body=thinking)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


# --- log-probabilities


def log_softmax(model: Any, tokens: list[int]) -> torch.Tensor:
    """What transformers' forward says of the token behind each."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 2, "seed": 1, "extra_body": {"top_k": 1}}]
)
def test_log_probabilities_of_a_chat_are_those_of_transformers(real, tiny, tokenizer, sampling):
    """Whatever the temperature, of the model's own distribution."""
    tokens = list(tokenizer.apply_chat_template(user("hello"), add_generation_prompt=True)["input_ids"])
    fields = {"max_tokens": 12, "logprobs": True, "top_logprobs": 3} | sampling
    (choice,) = chat(real, "hello", **fields).choices
    entries = choice.logprobs.content
    assert len(entries) == 12
    for entry in entries:
        values, ids = log_softmax(tiny, tokens)[-1].topk(3)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
        assert entry.logprob == pytest.approx(values[0].item(), abs=1e-4)
        for one, token in zip(entry.top_logprobs, ids.tolist(), strict=True):
            text = tokenizer.decode([token])
            assert bytes(one.bytes).decode(errors="replace") == text
            assert one.token == text or ("\ufffd" in text and one.token.startswith("bytes:"))
        tokens.append(int(ids[0]))
    assert tokenizer.decode(tokens[-12:], skip_special_tokens=True) == choice.message.content
    logprobs = [chunk.choices[0].logprobs for chunk in chat(real, "hello", stream=True, **fields)]
    assert [entry for one in logprobs if one for entry in one.content] == entries
    assert chat(real, "hello", max_tokens=2).choices[0].logprobs is None


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_of_a_completion_are_those_of_transformers(real, tiny, tokenizer, top):
    """Beside each token those of the likeliest and its own, 0: its own alone; where it begins in the text."""
    prompt = [1, *tokenizer.encode("The river", add_special_tokens=False)]
    fields = {"model": "tiny", "prompt": [prompt], "max_tokens": 12, "logprobs": top, "seed": 3}
    fields |= {"temperature": 1.5}
    whole = real.client.completions.create(n=2, **fields).choices
    streamed: list[dict[str, list]] = [{}, {}]
    for chunk in real.client.completions.create(n=2, stream=True, **fields):
        for name, values in chunk.choices[0].logprobs.model_dump().items():
            streamed[chunk.choices[0].index].setdefault(name, []).extend(values)
    assert streamed == [choice.logprobs.model_dump() for choice in whole]
    for choice in whole:
        tokens, logprobs = list(prompt), choice.logprobs
        assert len(logprobs.tokens) == 12 and logprobs.text_offset[0] == 0
        for i, name in enumerate(logprobs.tokens):
            expected = log_softmax(tiny, tokens)[-1]
            drawn = [t for t in range(6400) if real.model.texts._entry(t, 0)["token"] == name]
            token = min(drawn, key=lambda t: abs(expected[t].item() - logprobs.token_logprobs[i]))
            assert logprobs.token_logprobs[i] == pytest.approx(expected[token].item(), abs=1e-4)
            best = {real.model.texts._entry(t, 0)["token"] for t in expected.topk(top).indices.tolist()}
            assert logprobs.top_logprobs[i].keys() == best | {name}
            # whole characters
            if not any(each.startswith("bytes:") for each in logprobs.tokens[: i + 1][-2:]):
                assert choice.text[logprobs.text_offset[i] :].startswith(name)
            tokens.append(token)
    assert real.client.completions.create(**(fields | {"logprobs": None})).choices[0].logprobs is None


def test_log_probabilities_end_where_the_text_does(scripted):
    SAYS["list"] = "one, two, three, four"
    for stream, stop in product((False, True), ("three", " three")):
        answer = chat(scripted, "list", logprobs=True, stop=stop, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        shown = "one, two, three".removesuffix(stop)
        *others, last = [entry.token for entry in entries]  # the last one may reach into the stop string
        assert len("".join(others)) < len(shown) and "".join([*others, last]).startswith(shown)
        assert [entry.logprob for entry in entries] == [-(i + 1) / 2 for i in range(len(entries))]
    SAYS["tool"] = f"So.\n{CALL}"
    for name, fields in (("list", {}), ("tool", {"tools": TOOLS})):
        content = chat(scripted, name, logprobs=True, **fields).choices[0].logprobs.content
        assert "".join(entry.token for entry in content) == SAYS[name]  # without the end token


def test_more_log_probabilities_than_one_may_ask_for(scripted):
    with pytest.raises(openai.BadRequestError, match="log-probabilities"):
        chat(scripted, "x", max_tokens=400, n=4, logprobs=True, top_logprobs=20)


# --- a model that is damaged


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_model_of_no_finite_outputs_answers_with_an_error(tiny, tokenizer, damage, capfd):
    broken = copy.deepcopy(tiny)
    with torch.no_grad():
        broken.model.norm.weight[3] = damage
    with serving(
        broken, tokenizer, Settings("broken", slots=4, context=CONTEXT, max_new_tokens=20)
    ) as server:
        for fields in ({"temperature": 0}, {"seed": 1, "n": 2}, {"logprobs": True}):
            with pytest.raises(openai.InternalServerError, match="not finite numbers"):
                chat(server, "hello", **fields)
        with pytest.raises(openai.APIError, match="not finite numbers"):
            list(chat(server, "hello", stream=True))
        with torch.no_grad():
            broken.model.norm.weight[3] = 1.0
        assert chat(server, "hello", temperature=0).choices[0].message.content
    assert "not finite numbers" in capfd.readouterr().err


# --- mistakes


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "king", "content": ""}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 1.5}, 400, "top_p"),
        ({"n": 5}, 400, "n"),
        ({"seed": 2**70}, 400, "seed"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"tools": [{"type": "function"}]}, 400, None),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fire"}}}, 400, None),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"min_p": 0.1}, 400, "min_p"),
        ({"guided_json": {"type": "object"}}, 400, "guided_json"),
        ({"ignore_eos": True}, 400, "ignore_eos"),
        ({"min_tokens": 1}, 400, "min_tokens"),
        ({"skip_special_tokens": False}, 400, "skip_special_tokens"),
        ({"echo": True}, 400, "echo"),
        ({"tools": [{"function": {"name": "x" * 129}}]}, 400, None),
        ({"model": "other"}, 404, "model"),
        *(
            ({name: 10**400}, 400, name)
            for name in ("max_tokens", "max_completion_tokens", "top_k", "n", "seed")
        ),
    ],
)
def test_what_the_client_does_wrong_is_told_in_openais_shape(scripted, fields, status, param):
    body = {"model": "scripted", "messages": user("hello")} | fields
    found, answer = post(scripted, json.dumps(body).encode())
    assert found == status and set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"} and answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["param"] == param
    assert chat(scripted, "still there?").choices[0].message.content == "Well."


def test_bodies_that_are_no_requests(scripted):
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    half = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    no_number = b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}'
    for body in (b"", b"{", b"[]", b"3", b"\xff\xfe", deep, half, no_number):
        status, answer = post(scripted, body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error", body[:50]
    for tokens in ([10**9], [-1], [], [[1], "x"], [1] * 400_000, ["x"] * 129):
        body = json.dumps({"prompt": tokens}).encode()
        assert post(scripted, body, "/v1/completions")[0] == 400
    assert post(scripted, b"x" * (9 << 20))[0] == 413
    assert post(scripted, b"{}", "/v1/nothing")[0] == 404


def test_fields_that_change_nothing_are_ignored(scripted):
    body = {"messages": user("hello"), "unheard_of": None, "user": "me", "frequency_penalty": 0, "stop": ""}
    body |= {"min_p": 0.0, "metadata": {"a": "b"}, "n": 2, "best_of": 2, "repetition_penalty": 1}
    body |= {"logit_bias": {}, "response_format": {"type": "text"}, "repeat_penalty": 1, "ignore_eos": False}
    status, answer = post(scripted, json.dumps(body).encode())
    assert status == 200 and [choice["message"]["content"] for choice in answer["choices"]] == ["Well."] * 2


def test_unknown_fields_are_named_once(tokenizer, capfd):
    """In the log, a hundred of them at most, in lines of bounded length."""
    requests = [{"reasoning_effort": "high", "\x1b[31m" + "x" * 999: 1, "user": "me", "unheard_of": None}]
    template = {"effort": 1, "enable_thinking": False}
    requests += [{"reasoning_effort": "low", "options": {}, "chat_template_kwargs": template}]
    requests += [{f"field{number}": 1} for number in range(200)]
    with TestClient(scripted_app(tokenizer)) as client:
        for fields in requests:
            body = {"messages": user("hello")} | fields
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    log = capfd.readouterr().err
    counts = [log.count(name) for name in ("'reasoning_effort'", "'options'", "'user'", "unheard_of")]
    assert counts == [1, 1, 0, 0]
    assert log.count("'chat_template_kwargs.effort'") == 1 and "thinking'" not in log
    assert "\\x1b[31mxxx" in log and len(max(log.splitlines(), key=len)) < 200
    assert log.count("is unknown here") == 100


def test_requests_as_minimind_sends_them_are_answered(scripted):
    """Of its chat_api.py, its eval_toolcall.py and the curl command of its README."""
    SAYS["<think>"] = "\nHm.\n</think>\n\nYes."
    fields = {"temperature": 0.8, "max_tokens": 2048, "top_p": 0.8}
    thinking = {"chat_template_kwargs": {"open_thinking": True}, "reasoning_effort": "medium"}
    for name, more in {
        "minimind-local:latest": thinking,
        "jingyaogong/minimind-3:latest": {"tools": TOOLS},
        "model-identifier": {"open_thinking": True},
    }.items():
        body = {"model": name, "messages": user("世界上最高的山是什么？")} | fields | more
        status, answer = post(scripted, json.dumps(body).encode())
        assert status == 200 and answer["model"] == "scripted"
        message = answer["choices"][0]["message"]
        thought = "tools" not in more
        assert message["content"] == ("Yes." if thought else "Well.")
        assert message.get("reasoning_content") == ("Hm." if thought else None)
    with pytest.raises(openai.NotFoundError):
        scripted.client.chat.completions.create(model="full_sft_512", messages=user("hi"))


def test_a_page_or_model_is_there_for_head(scripted):
    paths = ("/", "/page/app.js", "/health", "/v1/models", "/v1/models/scripted", "/api/runs")
    wanted = dict.fromkeys(paths, 200) | {"/v1/models/none": 404, "/v1/completions": 405}
    connection = http.client.HTTPConnection("127.0.0.1", scripted.port, timeout=60)
    for (path, status), method in product(wanted.items(), ("HEAD", "GET", "HEAD")):
        connection.request(method, path, headers={"Authorization": "Bearer key"})  # no body is left in it
        response = connection.getresponse()
        body = response.read()
        assert response.status == status and bool(body) == (method == "GET"), (method, path)
    connection.close()


@pytest.mark.parametrize("key", ["Bearer wrong", "Bearer ", "Bearer k\u00e9y", "Basic key", ""])
def test_the_key(scripted, key):
    connection = http.client.HTTPConnection("127.0.0.1", scripted.port)
    connection.request("GET", "/v1/models", headers={"Authorization": key.encode()})
    response = connection.getresponse()
    assert response.status == 401 and json.loads(response.read())["error"]["code"] == "invalid_api_key"
    connection.close()
    assert [model.id for model in scripted.client.models.list()] == ["scripted"]


# --- load


def large_bodies() -> Iterator[tuple[type, bytes]]:
    """Requests that would keep the event loop busy if they were looked at as a whole."""
    ask = json.dumps({"messages": user("hello")})[:-1].encode()
    for item, count in {b"{}": 60_000, b"[]": 90_000, b"[1]": 30_000, b'"a"': 200_000, b"1": 400_000}.items():
        items = b",".join([item] * count)
        yield CompletionRequest, b'{"prompt": [' + items + b"]}"
        for name in (b"stop", b"tools", b"logit_bias", b"metadata"):
            yield ChatRequest, ask + b', "' + name + b'": [' + items + b"]}"
        yield ChatRequest, ask + b', "stop": [' + b",".join([item] * 10_000) + b"]}"
    yield ChatRequest, ask + b', "tools": [{"function": ' + b'{"a":' * 90_000 + b"1" + b"}" * 90_002 + b"]}"
    yield ChatRequest, ask + b"," + b",".join(b'"k%d":0' % i for i in range(60_000)) + b"}"
    yield ChatRequest, json.dumps({"messages": user("hello") * 30_000}).encode()


def test_pydantic_does_not_build_an_error_for_every_item_of_a_large_body(tokenizer):
    """A field that means nothing may be large; messages are too long for the context then."""
    with pytest.raises(ApiError, match="too many parts"):
        parse(CompletionRequest, b'{"prompt": [' + b"[]," * 100_000 + b"[]]}")
    writer = prompt_writer.PromptWriter(tokenizer, CONTEXT)
    for kind, body in large_bodies():
        try:
            asked, _ = parse(kind, body)
            if kind is CompletionRequest:
                prompt_writer.check_length(asked.prompt[0], CONTEXT, "prompt")
            writer.chat(prompt_writer.turns_of(asked.messages), asked.tools)
        except ApiError as refused:
            assert refused.status == 400 and len(str(refused)) < 300, body[:80]
            cause = refused.__cause__
            assert not isinstance(cause, ValidationError) or cause.error_count() <= 4, body[:80]
        else:
            assert b"metadata" in body[:80] or b"k0" in body[:80], body[:80]


def test_large_texts_are_refused_before_they_are_turned_into_tokens(scripted, monkeypatch):
    monkeypatch.setattr(prompt_writer, "prompt_pieces", lambda *_, **__: pytest.fail("the template is run"))
    monkeypatch.setattr(prompt_writer, "document_tokens", lambda *_: pytest.fail("the text is read"))
    for text in ("<|im_start|>" * 90_000, "x" * 1_000_000):
        tool = {"function": {"name": "f", "parameters": {"a": [{"b": text}]}}}
        for body in ({"messages": user(text)}, {"messages": user("x"), "tools": [tool]}, {"prompt": text}):
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            status, answer = post(scripted, json.dumps(body).encode(), path)
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


def test_bodies_that_do_not_end(scripted, monkeypatch, caplog):
    """Others are answered meanwhile; one that comes too slowly or is too large is refused, one that is
    aborted leaves no trace."""
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
    monkeypatch.setattr(bodies, "BODY_SECONDS", 1)
    slow = begin(scripted, b" " * 80_000, 90_000)
    begin(scripted, b"{", 100).close()
    assert chat(scripted, "hello").choices[0].message.content == "Well."
    assert b" 408 " in slow.recv(100)
    for length in (10**15, 3 << 20):
        assert b" 413 " in begin(scripted, b"", length).recv(100)
    assert caplog.records == []


# --- who may ask


OTHER = "https://evil.example"


def test_pages_of_other_sites_may_not_use_it(tokenizer):
    """A browser asks before it lets a page send JSON to another site, and reads an answer only if it may."""
    ask, allows = {"messages": user("hello")}, "access-control-allow-origin"
    kinds = ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8")
    with TestClient(scripted_app(tokenizer)) as client:
        for kind, path in product(kinds, ("/v1/chat/completions", "/v1/completions", "/api/tools")):
            answer = client.post(path, json=ask, headers={"Content-Type": kind, "Origin": OTHER})
            assert (answer.status_code == 415) == ("json" not in kind) and allows not in answer.headers
        for origin in (OTHER, "null", "http://127.0.0.1:3000"):
            preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            asked = client.options("/v1/chat/completions", headers=preflight)
            assert asked.status_code >= 400 and allows not in asked.headers
            assert allows not in client.get("/v1/models", headers={"Origin": origin}).headers


@pytest.mark.parametrize("origins", [("https://good.example",), ("*",)])
def test_pages_that_are_named_may_use_it(tokenizer, origins):
    headers, allows = {"Origin": "https://good.example"}, "access-control-allow-origin"
    asked = {"Access-Control-Request-Method": "POST"}
    asked |= {"Access-Control-Request-Headers": "authorization,content-type"}
    with TestClient(scripted_app(tokenizer, origins=origins, api_key="key")) as client:
        preflight = client.options("/v1/chat/completions", headers=headers | asked)
        assert preflight.status_code == 200 and "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for key, status in (("key", 200), ("wrong", 401)):
            answer = client.get("/v1/models", headers=headers | {"Authorization": f"Bearer {key}"})
            assert answer.status_code == status and answer.headers[allows] in ("*", headers["Origin"])
        other = client.get("/v1/models", headers={"Origin": OTHER, "Authorization": "Bearer key"})
        assert (allows in other.headers) == (origins == ("*",))


def test_a_server_for_this_machine_answers_to_its_own_names_only(tokenizer):
    own = ("127.0.0.1:8000", "localhost", "[::1]:8000", "my.localhost:1")
    others = ("evil.example", "127.0.0.1.evil.example:8000", "", "192.168.0.7", "[", "]", "[::1")
    wanted = dict.fromkeys(own, 200) | dict.fromkeys(others, 400)
    with TestClient(scripted_app(tokenizer, hosts=OWN_NAMES), base_url="http://127.0.0.1") as client:
        found = {host: client.get("/v1/models", headers={"Host": host}).status_code for host in wanted}
    assert found == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_place(scripted, stream):
    """Also one that only waits for a place."""
    SAYS["long"] = "word " * 200
    PACE["seconds"] = 0.02
    body = json.dumps({"messages": user("long"), "stream": stream}).encode()
    sockets = [begin(scripted, body, len(body)) for _ in range(6)]
    scheduler = scripted.model.scheduler
    wait_for(lambda: len(scheduler.writing) == 4 and len(scheduler.waiting) == 2)
    for one in sockets:
        one.close()
    wait_for(lambda: not scheduler.writing and not scheduler.waiting and scripted.model.decoder.free == 4)


def test_a_full_queue_refuses_and_goes_on(scripted):
    SAYS["long"] = "word " * 50
    PACE["seconds"] = 0.01

    def ask(_: int) -> str:
        try:
            return chat(scripted, "long").choices[0].finish_reason
        except openai.RateLimitError as error:
            assert error.code == "queue_full" and error.response.headers["retry-after"]
            return "refused"

    with ThreadPoolExecutor(12) as pool:
        ends = list(pool.map(ask, range(12)))
    assert 5 <= ends.count("refused") <= 8 and ends.count("stop") == 12 - ends.count("refused")


def test_what_fails_ends_with_an_error_and_the_server_goes_on(scripted, monkeypatch, capfd):
    """A prompt that cannot be read and a text that cannot be decoded end their request alone; a step that
    fails ends all that are written."""
    decoder = scripted.model.decoder
    add, step, push = decoder.add, decoder.step, TextStream.push
    SAYS["long"], PACE["seconds"] = "word " * 60, 0.01
    SAYS["bad text"] = "Poison."
    failures = {1: RuntimeError("not enough memory"), 2: ValueError("a row")}  # by seed
    fails = threading.Event()

    def failing_add(prompt: Any, samplings: Any, *rest: Any) -> Any:
        if samplings[0].seed in failures:
            raise failures[samplings[0].seed]
        return add(prompt, samplings, *rest)

    def failing_step() -> Any:
        if fails.is_set():
            raise RuntimeError("the step failed")
        return step()

    def spelling(stream: TextStream, token: int) -> str:
        text = push(stream, token)
        if "P" in text:
            raise RuntimeError("no such text")
        return text

    monkeypatch.setattr(decoder, "add", failing_add)
    monkeypatch.setattr(decoder, "step", failing_step)
    monkeypatch.setattr(TextStream, "push", spelling)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(lambda: list(chat(scripted, "long", stream=True)))
        wait_for(lambda: scripted.model.scheduler.writing)
        for text, seed, status in (("x", 1, 503), ("x", 2, 500), ("bad text", 3, 500)):
            with pytest.raises(openai.InternalServerError) as error:
                chat(scripted, text, seed=seed)
            assert error.value.status_code == status and error.value.type == "server_error"
        with pytest.raises(openai.APIError):
            list(chat(scripted, "x", seed=2, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in long.result()) == "word " * 60
    fails.set()
    with pytest.raises(openai.InternalServerError):
        chat(scripted, "long")
    fails.clear()
    assert chat(scripted, "hello").choices[0].message.content == "Well."
    assert "a request failed while its answer was written: not enough memory" in capfd.readouterr().err
    assert decoder.free == 4
