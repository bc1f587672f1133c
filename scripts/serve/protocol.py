"""OpenAI's protocol: what a request may hold, and the form of errors. Unknown fields are ignored, null counts as not
given, and what is known but cannot be done is refused rather than ignored."""

from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
REFUSED = {  # known fields that are not supported -> the values that ask for nothing
    "logprobs": (False, None),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
}


class ApiError(Exception):
    """An error that the client is told, in OpenAI's shape."""

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
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Lenient):
    """How to stream."""

    include_usage: bool = False


class TemplateSettings(Lenient):
    """Settings of the chat template. Only this one: others could replace the template."""

    enable_thinking: bool | None = None


class Request(Lenient):
    """What both kinds of requests hold."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)  # None: the model's default
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    n: int = Field(1, ge=1, le=128)
    seed: Seed | None = None
    stop: tuple[str, ...] = Field((), max_length=16)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        return stop

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        for name, nothing in REFUSED.items() if isinstance(data, dict) else ():
            if data.get(name) is not None and data[name] not in nothing:
                raise ValueError(f"'{name}' is not supported; leave it out")
        return data


class ChatRequest(Request):
    """The body of /v1/chat/completions."""

    messages: list[Any] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    response_format: dict[str, Any] = {"type": "text"}
    chat_template_kwargs: TemplateSettings = TemplateSettings()

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("type") != "text":
            raise ValueError("only answers of type 'text' are supported")
        return value

    @model_validator(mode="after")
    def _tools_have_names(self) -> "ChatRequest":
        for number, tool in enumerate(self.tools):
            function = tool.get("function")
            if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
                raise ValueError(f"tools.{number} has no function with a name")
        if isinstance(self.tool_choice, dict) and self.forced_tool not in self.tool_names:
            raise ValueError("tool_choice names a tool that is not among the tools")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice is 'required', but there are no tools")
        return self

    @property
    def tool_names(self) -> list[str]:
        """Names of the tools that may be called."""
        return [] if self.tool_choice == "none" else [tool["function"]["name"] for tool in self.tools]

    @property
    def forced_tool(self) -> str | None:
        """Name of the tool that must be called."""
        function = self.tool_choice.get("function") if isinstance(self.tool_choice, dict) else None
        return function.get("name") if isinstance(function, dict) else None

    @property
    def limit(self) -> int | None:
        """The longest answer, if the client sets one."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Request):
    """The body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as tokens."""
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return cast(list[str | list[int]], self.prompt if several else [self.prompt])

    @property
    def limit(self) -> int | None:
        """The longest answer, if the client sets one."""
        return self.max_tokens


Body = TypeVar("Body", bound=Request)


def parse(kind: type[Body], body: bytes) -> Body:
    """A request from the body of its HTTP request.

    Raises:
        ApiError: it is no JSON, or not such a request.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        if first["type"] == "json_invalid":
            place, message = "", f"The body of the request is no JSON: {message.removeprefix('Invalid JSON: ')}"
        raise ApiError(f"{place}: {message}" if place else message, param=place or None, code=code) from error
