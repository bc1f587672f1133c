"""OpenAI's protocol: what a request may hold, and the form of errors. Null counts as not given. A field that
would change the answer and has no effect here is refused; others that the server does not know are ignored.

A request comes from anybody, so its size is looked at before it is validated: pydantic builds an error for
every wrong item of a list, a hundred times as large as the item.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

MAX_ANSWERS = 128  # of one request
MAX_LOGPROBS = 20  # likeliest tokens beside each
MAX_BRACKETS = 1 << 16  # of a body, in its texts as well
MAX_NAMED = 100  # unknown fields
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Name = Annotated[str, Field(max_length=256)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]

# Fields of OpenAI, vLLM, SGLang and llama.cpp that would change the answer and are not done here -> their
# values without an effect; with any other one but null the request is refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "frequency_penalty", "presence_penalty", "logit_bias", "suffix", "echo",
            "functions", "audio", "web_search_options", "documents", "chat_template",
            "min_p", "mirostat", "n_predict", "dynatemp_range", "dry_multiplier", "lora",
            "xtc_probability", "use_beam_search", "min_tokens", "ignore_eos", "stop_token_ids",
            "bad_words", "allowed_token_ids", "logits_processors", "prompt_embeds",
            "continue_final_message", "include_stop_str_in_output", "truncate_prompt_tokens",
            "guided_json", "guided_regex", "guided_choice", "guided_grammar",
            "structured_outputs", "json_schema", "grammar", "regex", "ebnf", "stop_regex",
            "no_stop_trim", "lora_path", "custom_logit_processor",
        ),
        (False, "", [], {}),  # 0 equals False
    ),
    "repetition_penalty": (0, 1),
    "repeat_penalty": (0, 1),
    "typical_p": (0, 1),
    "tfs_z": (0, 1),
    "best_of": (0, 1),
    "top_n_sigma": (-1, False, "", [], {}),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "modalities": (["text"], []),
    "response_format": ({"type": "text"},),
}  # fmt: skip
# other names of fields, and fields that cannot change an answer; they are not named in the log
OTHERS = {"max_completion_tokens", "open_thinking", "add_special_tokens"}
OTHERS |= {"user", "metadata", "store", "service_tier", "parallel_tool_calls"}


class ApiError(Exception):
    """An error that is sent to the client, in OpenAI's form."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class Lenient(BaseModel):
    """Objects in which null means not given and unknown fields mean nothing."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(Lenient):
    """How to stream."""

    include_usage: bool = False


class TemplateSettings(Lenient):
    """Settings of the chat template. Only this one, under Qwen's or MiniMind's name: others could replace
    it."""

    enable_thinking: bool | None = Field(
        None, validation_alias=AliasChoices("enable_thinking", "open_thinking")
    )


class Request(Lenient):
    """What both kinds of requests hold."""

    model: Name | None = None
    max_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=2)  # None: the model's default
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    seed: Seed | None = None
    stop: tuple[StopString, ...] = ()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("stop", mode="before")
    @classmethod
    def _some_stops(cls, stop: Any) -> Any:
        if isinstance(stop, list) and len(stop) > 16:
            raise ValueError(f"at most 16 stop strings, not {len(stop)}")
        if isinstance(stop, str):
            return [stop] if stop else []
        return stop


class NamedFunction(Lenient):
    """A function by its name."""

    name: str


class ToolChoice(Lenient):
    """The tool that must be called."""

    function: NamedFunction


class ChatRequest(Request, TemplateSettings):
    """The body of /v1/chat/completions."""

    messages: list[Any] = Field(min_length=1)
    max_tokens: Count | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    chat_template_kwargs: TemplateSettings = TemplateSettings()

    @model_validator(mode="after")
    def _tools_have_names(self) -> "ChatRequest":
        for number, tool in enumerate(self.tools):
            function = tool.get("function")
            if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
                raise ValueError(f"tools.{number} has no function with a name")
            if len(function["name"]) > 128:
                raise ValueError(f"the name of tools.{number} has more than 128 characters")
        if not {*self.forced_tools} <= {*self.tool_names}:
            raise ValueError("tool_choice names a tool that is not among the tools")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice is 'required', but there are no tools")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason first, if the client says so."""
        inner = self.chat_template_kwargs.enable_thinking
        return self.enable_thinking if inner is None else inner

    @property
    def tool_names(self) -> list[str]:
        """Names of the tools that may be called."""
        return [] if self.tool_choice == "none" else [tool["function"]["name"] for tool in self.tools]

    @property
    def forced_tools(self) -> list[str]:
        """Names of the tools one of which must be called; none if no tool has to be called."""
        if isinstance(self.tool_choice, ToolChoice):
            return [self.tool_choice.function.name]
        return self.tool_names if self.tool_choice == "required" else []

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens to name beside each token; None: no log-probabilities at all."""
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(Request):
    """The body of /v1/completions."""

    prompt: Any  # a list of prompts, each as text or as tokens
    add_special_tokens: Literal[True] = True
    max_tokens: Count | None = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # how many of the likeliest tokens beside each

    @field_validator("prompt")
    @classmethod
    def _as_list(cls, prompt: Any) -> list[str | list[int]]:
        prompts = [prompt] if isinstance(prompt, str) or is_tokens(prompt) else prompt
        if isinstance(prompts, list) and len(prompts) > MAX_ANSWERS:
            raise ValueError(f"more than {MAX_ANSWERS} prompts in one request")
        are_texts = isinstance(prompts, list) and all(isinstance(one, str) for one in prompts)
        if not prompts or not (are_texts or all(map(is_tokens, prompts))):
            raise ValueError("must be a text, a list of token numbers, or a list of either")
        return prompts

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, value: Any) -> Any:
        return None if value is False else value

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens to name beside each token; None: no log-probabilities at all."""
        return self.logprobs


def is_tokens(prompt: Any) -> bool:
    """Whether this is a list of token numbers."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(type(token) is int and token >= 0 for token in prompt)


def unknown_fields(kind: type[Request], data: dict[str, Any]) -> list[str]:
    """Some of the fields of a request, and of its settings of the chat template, that are not looked at."""
    known = kind.model_fields.keys() | REFUSED.keys() | OTHERS
    unknown = [name for name, value in data.items() if value is not None and name not in known]
    if kind is ChatRequest:
        for name, value in (data.get("chat_template_kwargs") or {}).items():
            if value is not None and name not in ("enable_thinking", "open_thinking"):
                unknown.append(f"chat_template_kwargs.{name}")
    return unknown[:MAX_NAMED]


def refuse_unsupported(data: dict[str, Any]) -> None:
    """Raise ApiError for a field that would change the answer and has no effect here."""
    for name, harmless_values in REFUSED.items():
        value = data.get(name)
        is_harmless = value is None or value in harmless_values
        if name == "best_of" and value == data.get("n"):  # all of them
            is_harmless = True
        if not is_harmless:
            raise ApiError(f"'{name}' is not supported; leave it out", param=name, code="invalid_value")


Body = TypeVar("Body", bound=Request)


def parse(kind: type[Body], body: bytes) -> tuple[Body, list[str]]:
    """A request from the body of its HTTP request, and some of the fields that are ignored because they are
    unknown. Raises ApiError if it is no JSON, or not such a request."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise ApiError("The request has too many parts.", code="invalid_value")
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"The body of the request is no JSON: {error}", code="invalid_value") from error
    if not isinstance(data, dict):
        raise ApiError("The body of the request must be a JSON object.", code="invalid_value")
    refuse_unsupported(data)
    try:
        return kind.model_validate(data), unknown_fields(kind, data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # without the kinds of a union
        place = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
        message = first["msg"].removeprefix("Value error, ")
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        raise ApiError(f"{place}: {message}" if place else message, param=place or None, code=code) from error
