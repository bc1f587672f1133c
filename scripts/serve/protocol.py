"""OpenAI's protocol: what a request may hold, and the form of errors. Null counts as not given; fields that
are unknown here are ignored, but a few that would change the answer are refused."""

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

MAX_ANSWERS = 128  # to one prompt, and prompts of a request
MAX_STOPS = 16
Text = Annotated[str, Field(min_length=1)]

# fields that would change the answer -> their value without an effect; null and empty ones have none, either
REFUSED: dict[str, Any] = {
    "logprobs": False,
    "logit_bias": {},
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "functions": [],
    "response_format": {"type": "text"},
    "ignore_eos": False,  # of vLLM, from here on
    "min_tokens": 0,
    "stop_token_ids": [],
    "guided_json": {},
    "structured_outputs": {},
    "continue_final_message": False,
}


class ApiError(Exception):
    """An error that is sent to the client, in OpenAI's form."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Lenient(BaseModel):
    """Objects in which null means not given; unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

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
    """Settings of the chat template: whether to reason first, under Qwen's or MiniMind's name."""

    enable_thinking: bool | None = Field(
        None, validation_alias=AliasChoices("enable_thinking", "open_thinking")
    )


class GenerationRequest(Lenient):
    """What both kinds of requests hold."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)  # None: the model's default
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: list[Text] = Field([], max_length=MAX_STOPS)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("stop", "prompt", mode="before", check_fields=False)
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """One text stands for a list of one."""
        if isinstance(value, str):
            return [value] if value else []
        return value


class ChatRequest(GenerationRequest, TemplateSettings):
    """The body of /v1/chat/completions."""

    messages: list[Any] = Field(min_length=1)
    max_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    chat_template_kwargs: TemplateSettings = TemplateSettings()

    @model_validator(mode="after")
    def _tools_have_names(self) -> "ChatRequest":
        for number, tool in enumerate(self.tools):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"tools.{number} has no function with a name")
        is_forced = self.tool_choice not in ("none", "auto")
        if is_forced and not {*self.forced_tools} & {*self.tool_names}:
            raise ValueError("tool_choice names a tool that is not among the tools")
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
        if isinstance(self.tool_choice, dict):
            function = self.tool_choice.get("function")
            return [str(function.get("name"))] if isinstance(function, dict) else []
        return self.tool_names if self.tool_choice == "required" else []


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: list[Text] = Field(min_length=1, max_length=MAX_ANSWERS)
    max_tokens: int | None = Field(16, ge=1)


Body = TypeVar("Body", bound=GenerationRequest)


def parse(kind: type[Body], body: bytes) -> Body:
    """A request from the body of its HTTP request. Raises ApiError if it is no JSON, or not such a
    request."""
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # without the kinds of a union
        place = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(f"{place}: {message}" if place else message, param=place or None) from error
    for name, value in (asked.model_extra or {}).items():
        if name in REFUSED and value and value != REFUSED[name]:
            raise ApiError(f"'{name}' is not supported; leave it out", param=name)
    return asked
