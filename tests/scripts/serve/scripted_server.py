"""A server for the tests of the web page: its page and curves are the project's own, its answers are written
down here.

The last message says what the answer is like (`ANSWERS`). Every request that asks for an answer is kept in
`asked`.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from scripts.serve.curves import curves_router
from scripts.serve.tools import tools_router
from scripts.serve.web_page import add_page

MARKDOWN = """## Tides

The **moon** pulls, the *sea* follows; `g` is gravity. See [the almanac](https://example.org/a?b=c).

- high water
- low water
  1. nested

> quoted

| day | metres |
|---|---:|
| Monday | 3.2 |

```python
print("<b>1 < 2</b>")
```
"""
ATTACK = """<img src=x onerror="window.hacked = 1"> <script>window.hacked = 2</script>

<svg onload="window.hacked = 3"></svg>

[press](javascript:window.hacked=4) [data](data:text/html,<script>window.hacked=5</script>)
![](javascript:window.hacked=6) <a href="javascript:window.hacked=7">a</a>
<iframe srcdoc="<script>parent.hacked=8</script>"></iframe>
![picture](https://example.org/tracked.png) <javascript:window.hacked=9> [x]( java\tscript:window.hacked=10)

```html
<script>window.hacked = 11</script>
```

| <img src=x onerror="window.hacked = 12"> |
|---|
| <script>window.hacked = 13</script> |
"""
ANSWERS = {"markdown": MARKDOWN, "attack": ATTACK}
LIKELY = [{"token": "You", "logprob": -0.01, "top_logprobs": [{"token": "You", "logprob": -0.01}]}]
LIKELY += [{"token": " said", "logprob": -3.0, "top_logprobs": [{"token": "<b>", "logprob": -0.05}]}]
CALLS = {"tool": ("weather", '{"city": "Reedmarsh"}'), "sum": ("calculate", '{"expression": "12 * 34"}')}
CALLS["loop"] = CALLS["sum"]  # again and again


class Serving:
    """Serves an application on a free port of this machine in a thread of its own."""

    def __init__(self, app: FastAPI):
        self.server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1, timeout_keep_alive=60)
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/"
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join(20)


class Stream(StreamingResponse):
    """An answer; `ended(whole)` is called when it ends. Counted here, not in the generator: that one sees
    nothing of a hang-up while a chunk of its is being sent, until it is collected some time later."""

    def __init__(self, content: Any, ended: Callable[[bool], None]):
        super().__init__(content, media_type="text/event-stream")
        self.ended = ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        whole = False

        async def note(message: Any) -> None:
            nonlocal whole
            whole = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await super().__call__(scope, receive, note)
        finally:
            self.ended(whole)


class ScriptedServer(Serving):
    """The page and the curves of a folder, and written-down answers. `key`: what requests must bring, if any.

    asked: the requests for answers. hung_up: those that the client did not hear to the end.
    """

    def __init__(self, save_dir: Path, key: str = "", models: Sequence[str] = ("tiny", "small")):
        self.key, self.names = key, models
        self.asked: list[dict] = []
        self.hung_up: list[dict] = []
        app = FastAPI()
        add_page(app)
        app.include_router(curves_router(save_dir))
        app.include_router(tools_router())
        app.middleware("http")(self.check_key)
        app.get("/v1/models")(self.models)
        app.post("/v1/chat/completions")(self.chat)
        super().__init__(app)

    async def check_key(self, request: Request, call_next: Any) -> Any:
        needs = self.key and not request.url.path.startswith("/page/") and request.url.path != "/"
        if needs and request.headers.get("authorization") != f"Bearer {self.key}":
            error = {"message": "wrong key", "type": "invalid_request_error", "code": "invalid_api_key"}
            return JSONResponse({"error": error}, 401)
        return await call_next(request)

    async def models(self) -> dict:
        sampling = {"tiny": {"temperature": 0.7, "top_p": 0.9, "top_k": 50}, "small": {"temperature": 0.2}}
        return {
            "data": [
                {"id": name, "object": "model", "sampling": sampling.get(name, {})} for name in self.names
            ]
        }

    async def chat(self, request: Request) -> Any:
        body = await request.json()
        self.asked.append(body)
        last = body["messages"][-1]
        if last["content"] == "refuse":
            error = {"message": "max_tokens must be above 0", "type": "invalid_request_error", "code": None}
            return JSONResponse({"error": error}, 400)
        asked = [message["content"] for message in body["messages"] if message["role"] == "user"]
        said = "loop" if asked[-1] == "loop" else last["content"]
        return Stream(
            self.stream(said, body["model"]), lambda whole: None if whole else self.hung_up.append(body)
        )

    async def stream(self, said: str, model: str) -> Any:
        """The chunks of an answer, a few characters each; to "who", the model's name."""
        base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}

        def chunk(delta: dict, finish: str | None = None, **more: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
            return f"data: {json.dumps({**base, 'choices': [choice]}, ensure_ascii=False)}\n\n"

        yield chunk({"role": "assistant", "content": ""})
        if said == "long":  # until the client hangs up
            for number in range(2000):
                yield chunk({"content": f"{number} "})
                await asyncio.sleep(0.02)
        if said == "think":
            yield chunk({"reasoning_content": "First I count."})
        if said in CALLS:
            name, arguments = CALLS[said]
            call = {"index": 0, "id": "call_1", "type": "function"}
            call |= {"function": {"name": name, "arguments": ""}}
            yield chunk({"tool_calls": [call]})
            for piece in (arguments[:9], arguments[9:]):
                yield chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
            yield chunk({}, "tool_calls")
        else:
            text = model if said == "who" else ANSWERS.get(said, f"You said: {said}")
            if said == "likely":
                yield chunk({"content": text}, logprobs={"content": LIKELY})
                text = ""
            for start in range(0, len(text), 7):
                yield chunk({"content": text[start : start + 7]})
            if said == "break":
                return
            yield chunk({}, "length" if said == "cut" else "stop")
        usage = {"prompt_tokens": 5, "completion_tokens": 21, "total_tokens": 26}
        yield f"data: {json.dumps({**base, 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
