"""The server over HTTP, asked by the official openai client: a tiny model, and one whose answers are known."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import openai
import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling
from scripts.serve import limits
from scripts.serve.api import Access
from scripts.serve.models import Models
from scripts.serve_openai_api import OWN_NAMES
from tests.scripts.serve.servers import (
    CONTEXT,
    Script,
    load_tokenizer,
    scripted,
    serving,
    user,
    wait_for,
    web,
)

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TWO_TOOLS = [*TOOLS, {"type": "function", "function": {"name": "time"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Reedmarsh"}}\n</tool_call>'
CHAT, TEXTS = "v1/chat/completions", "v1/completions"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer()


@pytest.fixture(scope="module")
def tiny() -> Any:
    """Its weights are so large that its answers differ from prompt to prompt."""
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1, tie_word_embeddings=False)
    model = MiniMindForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.fixture(scope="module")
def real(tiny, tokenizer) -> Iterator[SimpleNamespace]:
    models = Models("tiny", Path("tiny.pth"), lambda path: (tiny, tokenizer))
    with serving(models, slots=16, max_new_tokens=100) as server:
        yield server


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[SimpleNamespace]:
    script = Script()
    with scripted(script, "key") as server:
        server.script = script
        server.decoder = next(iter(server.decoding.loaded.values())).decoder
        yield server


@pytest.fixture
def said(scripted_server) -> SimpleNamespace:
    """The scripted server as if it were new."""
    wait_for(lambda: scripted_server.decoder.free == 4)
    scripted_server.script.__init__()
    return scripted_server


def chat(server: SimpleNamespace, text: str, **fields: Any) -> Any:
    return server.client.chat.completions.create(model="tiny", messages=user(text), **fields)


def post(server: SimpleNamespace, body: Any, path: str = CHAT, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": "Bearer key"} | headers
    return web.post(server.address + path, content=content, headers=headers, timeout=60)


def begin(server: SimpleNamespace, body: bytes, length: int) -> socket.socket:
    """Send the head of a request, whose body has this length, and some of the body."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = (
        f"POST /{CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nContent-Length: {length}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


# --- answers


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_an_answer_is_greedily_that_of_transformers_whole_and_streamed(real, tiny, tokenizer, penalty):
    prompt = tokenizer.apply_chat_template(user("hello"), add_generation_prompt=True)["input_ids"]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    options |= {"repetition_penalty": penalty}
    extra = {"extra_body": {"repetition_penalty": penalty}}
    tokens = tiny.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    answer = chat(real, "hello", temperature=0, max_tokens=20, **extra)
    usage, (choice,) = answer.usage, answer.choices
    assert choice.message.content == expected and choice.finish_reason == "length"
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    counts = [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]
    assert counts == [len(prompt), 20, len(prompt) + 20]
    fields = {"stream_options": {"include_usage": True}, "max_completion_tokens": 20, "stream": True}
    *chunks, last = chat(real, "hello", temperature=0, **fields, **extra)
    assert {(chunk.id, chunk.object) for chunk in (*chunks, last)} == {(last.id, "chat.completion.chunk")}
    assert last.choices == [] and last.usage == usage and not any(chunk.usage for chunk in chunks)
    choices = [chunk.choices[0] for chunk in chunks]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [choice.finish_reason for choice in choices] == [None] * (len(chunks) - 1) + ["length"]
    assert "".join(choice.delta.content or "" for choice in choices) == expected and len(choices) > 10


def test_the_oldest_turns_are_dropped_if_the_client_asks_for_it(said):
    """As many as leave room for the answer, half of the context at most; the system prompt stays."""
    turns = [*user("first " * 40), {"role": "assistant", "content": "x"}] + user("middle " * 40) * 8
    messages = [{"role": "system", "content": "Be brief."}, *turns, *user("last")]
    body = {"messages": messages}
    assert post(said, body).json()["error"]["code"] == "context_length_exceeded"
    answer = post(said, body | {"truncation": "auto"})
    dropped = int(answer.headers["X-Dropped-Messages"])
    (prompt,) = said.script.prompts
    assert (
        "Be brief." in prompt and "first" not in prompt and prompt.count("middle " * 40) == 10 - dropped > 0
    )
    length = answer.json()["usage"]["prompt_tokens"]
    assert length <= 256 < length + 140  # one more would not have fitted
    short = post(said, {"messages": user("short"), "truncation": "auto"})
    assert short.status_code == 200 and "X-Dropped-Messages" not in short.headers
    long = {"messages": user("word " * 600), "truncation": "auto"}
    assert post(said, long).json()["error"]["code"] == "context_length_exceeded"
    assert post(said, body | {"truncation": "some"}).status_code == 400


def test_seeds_and_choices(real):
    def texts(**fields: Any) -> list[str]:
        return [choice.message.content for choice in chat(real, "hello", max_tokens=10, **fields).choices]

    assert texts(seed=1) == texts(seed=1) == texts(seed=1, n=3)[:1]
    assert len({*texts(seed=1, n=3), *texts(seed=2), *texts(), *texts()}) == 6
    assert len(set(texts(temperature=0, n=2))) == 1
    streamed = ["", "", ""]
    for chunk in chat(real, "hello", seed=1, n=3, max_tokens=10, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts(seed=1, n=3)


def test_completions(real):
    def complete(prompt: Any, **fields: Any) -> Any:
        return real.client.completions.create(model="tiny", prompt=prompt, temperature=0, **fields)

    answer = complete(["The river", "山"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.object == "text_completion"
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert answer.usage.completion_tokens <= 64  # 16 for each, as OpenAI's default is
    chunks = list(complete("The river", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts[0]
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_an_answer_is_as_long_as_fits_and_no_longer(real):
    assert chat(real, "x", max_tokens=10**6).usage.completion_tokens <= 100
    words = "harbour " * 120
    assert chat(real, words, seed=1).usage.total_tokens <= CONTEXT
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            chat(real, words * 3, stream=stream)
        assert error.value.code == "context_length_exceeded" and error.value.param == "messages"


def test_what_a_request_leaves_out_is_the_models_default(said, monkeypatch):
    asked, add = [], said.decoder.add
    monkeypatch.setattr(said.decoder, "add", lambda *given: asked.extend(given[1]) or add(*given))
    chat(said, "x", seed=3)
    chat(said, "x", seed=3, top_p=0.5, temperature=0, extra_body={"top_k": -1})
    chat(
        said, "x", seed=3, frequency_penalty=0.5, presence_penalty=-1, extra_body={"repetition_penalty": 1.1}
    )
    assert asked[:2] == [Sampling(0.7, 50, 0.9, seed=3), Sampling(0.0, 0, 0.5, seed=3)]
    assert asked[2] == Sampling(0.7, 50, 0.9, 3, 1.1, 0.5, -1.0)
    (card,) = said.client.models.list().data
    assert card.sampling == {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.0}
    assert card.loaded
    assert said.client.models.retrieve("tiny").owned_by == "minimind"
    health = web.get(f"{said.address}health").json()
    assert health == {"status": "ok", "alive": True, "writing": 0, "waiting": 0, "slots": 4}


# --- what is in an answer


@pytest.mark.parametrize(("stop", "stream"), [(", th", False), ([" four", ", th"], True)])
def test_stop_strings_end_the_text_and_are_left_out(said, stop, stream):
    said.script.says["list"] = "one, two, three, four"
    answer = chat(said, "list", stop=stop, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    texts = [(choice.delta if stream else choice.message).content or "" for choice in choices]
    assert "".join(texts) == "one, two" and choices[-1].finish_reason == "stop"
    assert said.decoder.free == 4


def test_a_whole_round_of_a_tool(said):
    said.script.says["weather"] = f"Let me look.\n{CALL}"
    said.script.says["<tool_response>\nrain"] = "It rains in Reedmarsh."

    def ask(messages: list[Any], **fields: Any) -> Any:
        return said.client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, **fields)

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
    assert f"Let me look.\n{CALL}<|im_end|>" in said.script.prompts[-1]
    unasked = ask(user("weather?"), tool_choice="none").choices[0].message
    assert unasked.content == f"Let me look.\n{CALL}" and unasked.tool_calls is None
    assert "Tools" not in said.script.prompts[-1]


def test_a_tool_that_must_be_called(said):
    """The server writes its name, too, where there is no choice. A malformed call is the text of the answer."""
    said.script.says['{"name": "'] = 'time", "arguments": {}}\n</tool_call>'
    choice = chat(said, "x", tools=TWO_TOOLS, tool_choice="required").choices[0]
    assert choice.message.tool_calls[0].function.name == "time" and choice.message.content is None
    said.script.says['{"name": "weather", "arguments": {'] = '"city": "A"}}\n</tool_call> so'
    forced = {"type": "function", "function": {"name": "weather"}}
    message = chat(said, "x", tools=TOOLS, tool_choice=forced).choices[0].message
    assert message.tool_calls[0].function.arguments == '{"city": "A"}' and message.content == " so"
    said.script.says['{"name": "weather", "arguments": {'] = "fire"
    (choice,) = chat(said, "x", tools=TOOLS, tool_choice="required").choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == '<tool_call>\n{"name": "weather", "arguments": {fire'


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_stands_beside_the_content(said, stream):
    said.script.says["<think>"] = "\nHm.\n</think>\n\nYes."
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = chat(said, "x", stream=stream, extra_body=thinking)
    choices = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    reasoning = "".join(getattr(choice, "reasoning_content", None) or "" for choice in choices)
    assert (reasoning, "".join(choice.content or "" for choice in choices)) == ("Hm.", "Yes.")


def test_requests_as_minimind_sends_them_are_answered(said):
    """Of its chat_api.py, its eval_toolcall.py and the curl command of its README."""
    said.script.says["<think>"] = "\nHm.\n</think>\n\nYes."
    fields = {"temperature": 0.8, "max_tokens": 2048, "top_p": 0.8, "messages": user("世界上最高的山？")}
    fields |= {"frequency_penalty": 0, "stop": "", "min_p": 0.0, "repetition_penalty": 1, "seed": None}
    thinking = {"chat_template_kwargs": {"open_thinking": True}, "reasoning_effort": "medium"}
    for name, more in {
        "minimind-local:latest": thinking,
        "jingyaogong/minimind-3:latest": {"tools": TOOLS},
        "model-identifier": {"open_thinking": True},
    }.items():
        answer = post(said, fields | more | {"model": name}).json()
        assert answer["model"] == "tiny"
        message, thinks = answer["choices"][0]["message"], "tools" not in more
        assert message["content"] == ("Yes." if thinks else "You said: 世界上最高的山？")
        assert message.get("reasoning_content") == ("Hm." if thinks else None)
    with pytest.raises(openai.NotFoundError):
        said.client.chat.completions.create(model="full_sft_512", messages=user("hi"))


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"type": "object"}}}
PROGRAMS = {  # fields as the program sends them: which of them are unknown here, or None and the refused one
    "Open WebUI": ({"stream": True, "params": {}, "chat_id": "c", "session_id": "s", "metadata": {}}, 4),
    "LibreChat": (
        {
            "stream": True,
            "user": "u",
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "temperature": 1,
            "top_p": 1,
        },
        1,
    ),
    "LangChain": (
        {"n": 1, "stream": False, "max_completion_tokens": 9, "tools": TOOLS, "tool_choice": "auto"},
        0,
    ),
    "LangChain, structured output": ({"response_format": SCHEMA, "parallel_tool_calls": False}, 0),
    "OpenAI's agents": ({"store": False, "tools": TOOLS, "parallel_tool_calls": False}, 1),
    "Continue": ({"stream": True, "max_tokens": 9, "reasoning_effort": "high"}, "reasoning_effort"),
    "MiniMind's web_demo.py": ({"stream": True, "max_tokens": 99, "top_p": 0.9, "open_thinking": False}, 0),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_requests_as_other_programs_send_them(said, program):
    fields, wanted = PROGRAMS[program]
    if "response_format" in fields:
        pytest.importorskip("llguidance")
    answer = post(said, {"model": "tiny", "messages": user("hello")} | fields)
    if isinstance(wanted, str):
        assert answer.status_code == 400 and answer.json()["error"]["param"] == wanted
        return
    ignored = answer.headers.get("X-Ignored-Fields")
    assert answer.status_code == 200 and len(ignored.split(", ") if ignored else []) == wanted


# --- mistakes of the client


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "king", "content": ""}]}, 400, "messages"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"n": 5}, 400, "n"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"stop": ["a" * 129]}, 400, "stop.0"),
        ({"tools": [{"type": "function"}]}, 400, None),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fire"}}}, 400, None),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"model": "other"}, 404, "model"),
    ],
)
def test_what_the_client_does_wrong_is_told_in_openais_form(said, fields, status, param):
    answer = post(said, {"model": "tiny", "messages": user("hello")} | fields)
    assert answer.status_code == status and set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("guided_json", {"type": "object"}, "use response_format"),
        ("guided_regex", "a+", "llama-server or vLLM"),
        ("grammar", "root ::= x", "llama-server or vLLM"),
        ("json_schema", {"type": "object"}, "use response_format"),
        ("format", "json", "use response_format"),
        ("repeat_penalty", 1.1, "use repetition_penalty"),
        ("no_repeat_ngram_size", 3, "leave it out"),
        ("bad_words", ["x"], "leave it out"),
        ("allowed_token_ids", [1], "leave it out"),
        ("max_new_tokens", 10, "use max_tokens"),
        ("num_predict", 10, "use max_tokens"),
        ("do_sample", False, "use temperature 0"),
        ("num_beams", 2, "leave it out"),
        ("chat_template", "{{ messages }}", "leave it out"),
        ("logprobs", 0, "use transformers"),
        ("logprobs", 5, "use transformers"),
        ("modalities", ["text", "audio"], "leave it out"),
        ("min_p", 0.1, "leave it out"),
        ("min_length", 5, "leave it out"),
        ("max_length", 5, "use max_tokens"),
        ("n_predict", 5, "use max_tokens"),
        ("dry_multiplier", 0.8, "leave it out"),
        ("xtc_probability", 0.5, "leave it out"),
        ("dynatemp_range", 0.5, "leave it out"),
        ("top_n_sigma", 1.0, "leave it out"),
        ("typ_p", 0.9, "leave it out"),
        ("samplers", ["top_k"], "leave it out"),
        ("top_a", 0.2, "leave it out"),
        ("thinking", {"type": "disabled"}, '"chat_template_kwargs": {"enable_thinking"'),
        ("think", False, '"chat_template_kwargs": {"enable_thinking"'),
        ("reasoning", {"effort": "high"}, '"chat_template_kwargs": {"enable_thinking"'),
        ("reasoning_effort", "none", '"chat_template_kwargs": {"enable_thinking"'),
        ("verbosity", "low", "leave it out"),
        ("system", "Be brief.", "a message of the role 'system'"),
        ("instructions", "Be brief.", "a message of the role 'system'"),
        ("stop_sequences", ["x"], "use stop"),
        ("random_seed", 1, "use seed"),
        ("num_return_sequences", 2, "use n"),
        ("extra_body", {"top_k": 1}, "write its fields beside the others"),
        ("function_call", {"name": "f"}, "use tools and tool_choice"),
        ("web_search_options", {"search_context_size": "low"}, "leave it out"),
        ("skip_special_tokens", False, "leave it out"),
        ("add_generation_prompt", False, "leave it out"),
        ("enable_search", True, "leave it out"),
        ("guidance_scale", 1.5, "leave it out"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_with_what_to_use(said, name, value, instead):
    for body, path in (({"messages": user("x")}, CHAT), ({"prompt": "x"}, TEXTS)):
        answer = post(said, body | {name: value}, path)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == name and instead in error["message"]


def test_values_without_an_effect_are_accepted_and_unknown_fields_come_back_by_name(said, capfd):
    neutral = {
        "logprobs": False,
        "top_logprobs": None,
        "min_p": 0.0,
        "modalities": ["text"],
        "do_sample": True,
    }
    neutral |= {
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "logit_bias": {},
        "suffix": "",
    }
    # as the pages of llama.cpp and text-generation-webui send them if nothing is set
    neutral |= {"dry_multiplier": 0, "xtc_probability": 0.0, "dynatemp_range": 0, "typ_p": 1, "samplers": []}
    neutral |= {"top_n_sigma": -1, "repeat_penalty": 1.0, "mirostat": 0, "n_probs": 0, "max_tokens": -1}
    neutral |= {"top_a": 0, "tfs": 1, "smoothing_factor": 0, "temperature_last": False, "thinking": None}
    neutral |= {
        "reasoning_format": "auto",
        "function_call": "auto",
        "system": "",
        "skip_special_tokens": True,
    }
    answer = post(said, {"messages": user("x")} | neutral)
    assert answer.status_code == 200 and "X-Ignored-Fields" not in answer.headers
    tuning = {"dry_base": 1.75, "xtc_threshold": 0.1, "mirostat_tau": 5, "cache_prompt": True}
    answer = post(said, {"messages": user("x")} | tuning)
    assert answer.status_code == 200 and answer.headers["X-Ignored-Fields"] == ", ".join(tuning)
    capfd.readouterr()
    for _ in range(2):
        for stream in (False, True):
            unknown = {"safety_identifier": 1, "wärme\r\n": 2, "stream": stream}
            answer = post(said, {"messages": user("x")} | unknown)
            assert answer.headers["X-Ignored-Fields"] == "safety_identifier, w\\xe4rme\\r\\n"
    logged = capfd.readouterr().err
    assert logged.count("'safety_identifier' of a request is unknown") == 1 and len(logged.splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a ", "a\\x20"),
        (" a", "\\x20a"),
        (" ", "\\x20"),
        ("\t", "\\t"),
        ("\u3000", "\\u3000"),
        ("a, b", "a\\x2c\\x20b"),
        ("", ""),
        ("a" * 63 + " b", "a" * 63 + "\\"),
        ("\r\nSet-Cookie: a=b", "\\r\\nSet-Cookie:\\x20a=b"),
        ("\x00\x7f\xff", "\\x00\\x7f\\xff"),
    ],
)
def test_any_name_of_a_field_comes_back_in_the_header(said, capfd, name, shown):
    for stream in (False, True):
        answer = post(said, {"messages": user("x"), name: 1, "last": 2, "stream": stream})
        assert answer.status_code == 200 and answer.headers["X-Ignored-Fields"] == f"{shown}, last"
    alone = post(said, {"messages": user("x"), name: 1})
    assert alone.status_code == 200 and alone.headers["X-Ignored-Fields"] == shown
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_an_answer_ends_with_its_first_call(said, stream):
    said.script.says["weather"] = f"Let me look.\n{CALL}\n{CALL} so"

    def calls(**fields: Any) -> tuple[list[Any], str, str]:
        body = {"messages": user("weather?"), "tools": TOOLS, "stream": stream} | fields
        answer = post(said, body)
        if not stream:
            (choice,) = answer.json()["choices"]
            message = choice["message"]
            return message.get("tool_calls", []), message["content"], choice["finish_reason"]
        lines = [json.loads(line[6:]) for line in answer.text.strip().split("\n\n")[:-1]]
        deltas = [line["choices"][0]["delta"] for line in lines]
        called = [call for delta in deltas for call in delta.get("tool_calls", [])]
        text = "".join(delta.get("content") or "" for delta in deltas)
        return called, text, lines[-1]["choices"][0]["finish_reason"]

    (call,), text, finish = calls(parallel_tool_calls=False)
    assert json.loads(call["function"]["arguments"]) == {"city": "Reedmarsh"}
    assert (text, finish) == ("Let me look.", "tool_calls")
    for fields in ({}, {"parallel_tool_calls": True}, {"parallel_tool_calls": None}):
        both, text, finish = calls(**fields)
        assert (len(both), text, finish) == (2, "Let me look. so", "tool_calls")
    none, text, _ = calls(parallel_tool_calls=False, tool_choice="none")
    assert none == [] and text == f"Let me look.\n{CALL}\n{CALL} so"
    assert calls(parallel_tool_calls=False, tools=[])[0] == []
    for value in ("", [], {}):
        assert post(said, {"messages": user("x"), "parallel_tool_calls": value}).status_code == 400


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chat_template_kwargs": {"thinking": True}}, "'chat_template_kwargs.thinking' is not supported"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "schema belongs in json_schema"),
        ({"messages": [{"role": "assistant", "content": "So", "prefix": True}]}, "message 1 has 'prefix'"),
        ({"messages": [*user("x"), {"role": "assistant", "partial": True}]}, "message 2 has 'partial'"),
        ({"messages": [{"role": "user", "content": [1]}]}, "message 1 has the part 1 instead of"),
        ({"messages": user([{"type": "input_text", "text": "x"}])}, "'input_text', of the Responses API"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "send these tools alone"),
        ({"max_tokens": 0}, "must be at least 1, or -1 for as many as fit"),
    ],
)
def test_messages_say_what_to_do(said, fields, message):
    answer = post(said, {"messages": user("x")} | fields)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_max_tokens_minus_one_is_as_many_as_fit(real):
    for path, body in ((CHAT, {"messages": user("hello")}), (TEXTS, {"prompt": "hello"})):
        usage = post(real, body | {"max_tokens": -1, "seed": 1}, path).json()["usage"]
        assert usage["completion_tokens"] == 100  # this server's longest answer


def test_head_and_a_bearer_in_any_case(said):
    headers = {"Authorization": "bearer key"}
    for path in ("", "health", "v1/models", "v1/models/tiny", "api/runs"):
        got, head = (web.request(method, said.address + path, headers=headers) for method in ("GET", "HEAD"))
        assert (head.status_code, head.content) == (200, b"") and got.status_code == 200
    assert post(said, {"messages": user("x")}, Authorization="BEARER key").status_code == 200
    assert post(said, {"messages": user("x")}, Authorization="Basic key").status_code == 401


def test_bodies_that_are_no_requests(said, monkeypatch):
    half = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    for body in (b"", b"{", b"[]", b"\xff\xfe", half, b'{"temperature": NaN, "messages": [{}]}'):
        assert post(said, body).status_code == 400, body
    for prompt in ([], [1, 2], [""], {}):
        assert post(said, {"prompt": prompt}, TEXTS).status_code == 400
    assert post(said, {}, "v1/nothing").status_code == 404
    assert b" 413 " in begin(said, b"", limits.max_body(CONTEXT) + 1).recv(100)
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.5)
    assert b" 408 " in begin(said, b" ", 9_000).recv(100)


# --- who may ask


@pytest.mark.parametrize("key", ["Bearer wrong", ""])
def test_the_key(said, key):
    for path in ("v1/models", "api/runs"):
        answer = web.get(said.address + path, headers={"Authorization": key})
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert post(said, {"messages": user("x")}, Authorization=key).status_code == 401
    assert web.get(said.address).status_code == 200  # the page asks for it


@pytest.mark.parametrize(
    ("origins", "is_allowed"), [((), False), (("https://good.example",), True), (("*",), True)]
)
def test_pages_of_other_sites_may_use_it_only_if_they_are_named(origins, is_allowed):
    """A browser sends the origin with what a page asks, and asks before it sends JSON."""
    allows, origin = "access-control-allow-origin", {"Origin": "https://good.example"}
    preflight = origin | {"Access-Control-Request-Method": "POST"}
    with scripted(Script(), access=Access("key", origins=origins)) as server:
        asked = web.options(server.address + CHAT, headers=preflight)
        assert (asked.status_code == 200 and allows in asked.headers) == is_allowed
        answer = post(server, {"messages": user("hello")}, **origin)
        assert (answer.status_code == 200 and allows in answer.headers) == is_allowed
        other = post(server, {"messages": user("hello")}, Origin="https://evil.example")
        assert other.status_code == (200 if origins == ("*",) else 403)
        no_url = post(server, {"messages": user("hello")}, Origin="http://[")
        assert no_url.status_code == (200 if origins == ("*",) else 403)
        own = post(server, {"messages": user("hello")}, Origin=server.address.rstrip("/"))
        assert own.status_code == 200


def test_a_server_for_this_machine_answers_to_its_own_names_only(capfd):
    own = ("127.0.0.1:8000", "localhost", "[::1]:8000", "my.localhost:1")
    others = ("evil.example", "127.0.0.1.evil.example:8000", "192.168.0.7", "[", "[::1")
    wanted = dict.fromkeys(own, 200) | dict.fromkeys(others, 400)
    with scripted(Script(), access=Access(hosts=OWN_NAMES)) as server:
        url = f"{server.address}v1/models"
        assert {host: web.get(url, headers={"Host": host}).status_code for host in wanted} == wanted
        for _ in range(3):
            answer = web.get(url, headers={"Host": "host.docker.internal:8000"})
        assert answer.json()["error"]["code"] == "unknown_host"
        assert "--allow_host host.docker.internal" in answer.json()["error"]["message"]
    assert capfd.readouterr().err.count("start with --allow_host host.docker.internal") == 1
    named = Access(hosts=(*OWN_NAMES, "host.docker.internal"))
    with scripted(Script(), access=named) as server:
        answer = web.get(server.address + "v1/models", headers={"Host": "HOST.docker.internal:8000"})
        assert answer.status_code == 200


# --- load and failures


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_place(said, stream):
    """Also one that only waits for a place."""
    said.script.says["long"], said.script.pause = "word " * 200, 0.02
    body = json.dumps({"messages": user("long"), "stream": stream}).encode()
    sockets = [begin(said, body, len(body)) for _ in range(6)]
    counts = lambda: [said.decoding.health()[name] for name in ("writing", "waiting")]  # noqa: E731
    wait_for(lambda: counts() == [4, 2])
    for connection in sockets:
        connection.close()
    wait_for(lambda: counts() == [0, 0] and said.decoder.free == 4)


def test_a_prompt_that_cannot_be_read_ends_its_request_alone(said, monkeypatch, capfd):
    def failing_add(*_: Any) -> Any:
        raise RuntimeError("not enough memory")

    said.script.says["long"], said.script.pause = "word " * 60, 0.01
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(chat, said, "long")
        wait_for(lambda: said.decoding.health()["writing"] == 1)
        with monkeypatch.context() as patch:
            patch.setattr(said.decoder, "add", failing_add)
            for stream in (False, True):
                with pytest.raises(openai.APIError, match="not enough memory"):
                    list(chat(said, "x", stream=stream))
        assert long.result().choices[0].message.content == "word " * 60
    assert "a request failed while its answer was generated: not enough memory" in capfd.readouterr().err


def test_a_model_of_no_finite_outputs_answers_with_an_error(tokenizer):
    torch.manual_seed(0)
    broken = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=1)).eval()
    with torch.no_grad():
        broken.model.norm.weight[3] = float("nan")
    with serving(Models("tiny", Path("tiny.pth"), lambda path: (broken, tokenizer))) as server:
        with pytest.raises(openai.InternalServerError, match="not finite numbers"):
            chat(server, "hello", seed=1, n=2)
        with pytest.raises(openai.APIError, match="not finite numbers"):
            list(chat(server, "hello", stream=True))
