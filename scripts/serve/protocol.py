"""OpenAI's protocol: the fields of a request and the form of errors. Null counts as not given. Unknown fields
are ignored, and the response lists their names. Fields that are known to change an answer are refused."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from model.answers import END_CALL
from scripts.serve.fields import INSTEAD, REFUSED, has_no_effect
from scripts.serve.limits import (
    MAX_ANSWERS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOOLS,
    RETRY_AFTER,
    max_answers,
    max_characters,
)

Text = Annotated[str, Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]

VARIABLES = "chat_template_kwargs."  # of a chat template, of which one alone is known
IGNORED_NAMES, IGNORED_CHARACTERS = 16, 64  # of unknown fields, that come back


class ApiError(Exception):
    """An error that is sent to the client, in OpenAI's form. values: for the page's own sentence about the
    code."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        **values: Any,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.values = status, param, code, values

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error | ({"values": self.values} if self.values else {})}

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response."""
        return {"Retry-After": str(RETRY_AFTER)} if self.status == 429 else {}


class Lenient(BaseModel):
    """Objects in which null means not given. Unknown fields are kept in `model_extra`."""

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


class NamedSchema(Lenient):
    """A JSON schema. Its name and `strict` have no effect."""

    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Lenient):
    """The form of an answer: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs json_schema with a schema")
        if "schema" in (self.model_extra or {}):  # llama.cpp's place, beside json_object
            raise ValueError("schema belongs in json_schema, with the type json_schema")
        return self


class TemplateSettings(Lenient):
    """Settings of the chat template: whether to reason first, under Qwen's or MiniMind's name."""

    enable_thinking: bool | None = Field(
        None, validation_alias=AliasChoices("enable_thinking", "open_thinking")
    )


class GenerationRequest(Lenient):
    """The fields that both kinds of requests have."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = Field(None, ge=0, le=2)  # None: the model's default
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    stop: Annotated[list[StopString], FailFast()] = Field([], max_length=MAX_STOPS)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat()

    @field_validator("stop", "prompt", mode="before", check_fields=False)
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """One text counts as a list of one text."""
        if isinstance(value, str):
            return [value] if value else []
        return value

    @field_validator("max_tokens")
    @classmethod
    def _all_that_fit(cls, value: int | None) -> int | None:
        """-1 sets no limit, as in llama.cpp and other servers."""
        if value is not None and value < 1 and value != -1:
            raise ValueError("must be at least 1, or -1 for as many as fit")
        return None if value == -1 else value

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that an answer must follow; None if it may be any text."""
        form = self.response_format
        if form.type == "json_schema" and form.json_schema is not None:
            return form.json_schema.json_schema
        return {"type": "object"} if form.type == "json_object" else None

    @property
    def ignored_fields(self) -> list[str]:
        """Names of unknown fields, in the form that a list in a header can have."""
        unknown = [name for name in self.model_extra or {} if name not in REFUSED]
        return [in_a_header(name)[:IGNORED_CHARACTERS] for name in unknown[:IGNORED_NAMES]]

    @property
    def last_words(self) -> tuple[str, ...]:
        """Texts that end an answer, besides its stop strings, and stay part of it."""
        return ()

    def check_size(self, context: int, slots: int) -> None:
        """Refuse a request that is too large to be answered, by sizes alone, before any work is done for it.
        Raises ApiError."""
        if self.n > max_answers(slots):
            message = f"n must be {max_answers(slots)} or less, the most that this server generates together"
            raise ApiError(message, param="n")


class ChatRequest(GenerationRequest, TemplateSettings):
    """The body of /v1/chat/completions."""

    messages: list[Any] = Field(min_length=1)
    max_tokens: int | None = Field(None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    tools: Annotated[list[dict[str, Any]], FailFast()] = Field([], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True  # False: an answer ends with its first call
    chat_template_kwargs: TemplateSettings = TemplateSettings()
    # of OpenAI's Responses API; auto: if the context is full, the oldest turns are dropped
    truncation: Literal["auto", "disabled"] = "disabled"

    @model_validator(mode="after")
    def _tools_have_names(self) -> "ChatRequest":
        for number, tool in enumerate(self.tools):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"tools.{number} has no function with a name")
        if isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "allowed_tools":
            raise ValueError("tool_choice 'allowed_tools' is not supported; send these tools alone")
        is_forced = self.tool_choice not in ("none", "auto")
        if is_forced and not {*self.forced_tools} & {*self.tool_names}:
            raise ValueError("tool_choice names a tool that is not among the tools")
        return self

    @model_validator(mode="after")
    def _schema_is_alone(self) -> "ChatRequest":
        if self.schema_of_answer is None:
            return self
        if self.tool_names:
            raise ValueError("response_format excludes tools; leave one out, or send tool_choice 'none'")
        if self.thinks:
            raise ValueError("response_format excludes reasoning; leave one out")
        return self

    def check_size(self, context: int, slots: int) -> None:
        super().check_size(context, slots)
        if len(self.messages) > context:  # each has at least a token
            message = f"{len(self.messages)} messages do not fit into the context of {context} tokens."
            raise ApiError(message, param="messages", code="context_length_exceeded")
        # a template may leave out a field, but each field takes time
        check_length(least_length(self.messages, context, False), context, "messages", "values")
        if self.tool_names:
            check_length(least_length(self.tools, context), context, "tools")

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason first; None if the client does not say."""
        inner = self.chat_template_kwargs.enable_thinking
        return self.enable_thinking if inner is None else inner

    @property
    def tool_names(self) -> list[str]:
        """Names of the tools that may be called."""
        return [] if self.tool_choice == "none" else [tool["function"]["name"] for tool in self.tools]

    @property
    def forced_tools(self) -> list[str]:
        """Names of the tools of which one must be called; empty if no call is required."""
        if isinstance(self.tool_choice, dict):
            function = self.tool_choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            return [name] if isinstance(name, str) else []
        return self.tool_names if self.tool_choice == "required" else []

    @property
    def last_words(self) -> tuple[str, ...]:
        return (END_CALL,) if self.tool_names and not self.parallel_tool_calls else ()


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Annotated[list[Text], FailFast()] = Field(min_length=1, max_length=MAX_ANSWERS)
    max_tokens: int | None = 16

    def check_size(self, context: int, slots: int) -> None:
        super().check_size(context, slots)
        if len(self.prompt) * self.n > MAX_ANSWERS:
            message = f"{len(self.prompt)} prompts x n {self.n} are more than {MAX_ANSWERS} answers"
            raise ApiError(f"{message}; send several requests", param="n")
        for text in self.prompt:
            check_length(len(text), context, "prompt")


def least_length(value: Any, context: int, with_texts: bool = True) -> int:
    """The least number of characters that a JSON value has in any form of writing. Each value in it counts as
    a separator and one more character, or, `with_texts`, as many as its text has. Counting stops once the
    limit is exceeded."""
    length, left = 0, [value]
    while left and length <= max_characters(context):
        part = left.pop()
        length += 1 + (len(part) if with_texts and isinstance(part, str) and part else 1)
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
    return length


def check_length(length: int, context: int, param: str, unit: str = "characters") -> None:
    """Refuse a prompt that is too long for the context, before it is rendered or tokenised. Raises
    ApiError."""
    most = max_characters(context)
    if length > most:
        message = f"The prompt has more than {most} {unit}: too long for the context of {context} tokens."
        raise ApiError(message, param=param, code="context_length_exceeded")


def in_a_header(text: str) -> str:
    """A client's text as an item of a list in a header: visible ASCII without commas, with everything else
    escaped. A blank at the end would make the header invalid."""
    return ascii(text)[1:-1].replace(" ", "\\x20").replace(",", "\\x2c")


Body = TypeVar("Body", bound=GenerationRequest)


def parse(kind: type[Body], body: bytes) -> Body:
    """A request from the body of its HTTP request. Raises ApiError if it is not JSON, or not such a
    request."""
    try:
        params = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # without the member names of a union
        place = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(f"{place}: {message}" if place else message, param=place or None) from error
    fields = (params.model_extra or {}).items()
    variables = getattr(params, "chat_template_kwargs", TemplateSettings()).model_extra or {}
    refused = [name for name, value in fields if name in REFUSED and not has_no_effect(value, REFUSED[name])]
    refused += [f"{VARIABLES}{name}" for name, value in variables.items() if not has_no_effect(value, [])]
    if refused:
        name = refused[0]
        advice = INSTEAD.get(name.removeprefix(VARIABLES), "leave it out")
        raise ApiError(f"'{name}' is not supported; {advice}", param=name)
    return params
