"""The routes: a request becomes texts of the engine, and these become the response."""

import hmac
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import bd3lm
from bd3lm.lm.prompts import text_seeds
from bd3lm.parsing import template_parts
from bd3lm.serving import answers
from bd3lm.serving.asks import NOT_HERE, Ask, ChatAsk, CompletionAsk
from bd3lm.serving.engine import ClientGone, Full, Gone, Group, RemoteEngine
from bd3lm.serving.limits import Limits
from bd3lm.serving.link import Line
from bd3lm.serving.metrics import Metrics
from bd3lm.serving.middleware import BodyLimit, Counted, CutOff, Timed
from bd3lm.serving.page import page_file, page_response
from bd3lm.serving.reference import reference_page

_ABOUT = (
    "Texts from one model, with OpenAI's routes. A field that would have no effect is refused. Fields marked "
    '"ours" are extensions: in OpenAI\'s Python client, pass them as extra_body.'
)


_UNREADABLE = (
    "the body must be JSON in UTF-8, not nested hundreds deep and without numbers of thousands of digits"
)
_FILLS = 16  # for each text that a request may have
_SLACK = 10.0  # seconds to send an answer, beyond those to write its texts


class Refused(Exception):
    """A request that cannot be answered, and why."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def body(self) -> dict[str, Any]:
        return answers.error(self.message, self.status, param=self.param, code=self.code)


def build_app(engine: RemoteEngine, *, key: str | None = None, origins: Sequence[str] = ()) -> FastAPI:
    """The server of an engine, which it also closes. With a `key`, clients must send it. Pages of other
    `origins` may use the server only if you list them."""
    metrics = Metrics(engine)
    limits = engine.limits

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(
        title="bd3lm",
        version=bd3lm.__version__,
        description=_ABOUT,
        lifespan=life,
        docs_url=None,  # FastAPI's own pages load their scripts from the internet
        redoc_url=None,
    )
    app.state.engine, app.state.metrics = engine, metrics
    app.add_middleware(BodyLimit, most=limits.body)
    app.add_middleware(Counted, metrics=metrics)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    app.add_middleware(CutOff)
    _say_errors(app)

    async def allowed(request: Request) -> None:
        kind, _, said = request.headers.get("authorization", "").partition(" ")
        is_key = key is not None and hmac.compare_digest(said.strip().encode(), key.encode())
        if key is not None and not (is_key and kind.lower() == "bearer"):
            raise Refused(
                "the key must be the server's, sent as Authorization: Bearer KEY", 401, code="invalid_api_key"
            )

    guarded = [Depends(allowed)]
    wrong: dict[int | str, dict[str, Any]] = {
        status: {"description": what, "content": {"application/json": {"schema": {"type": "object"}}}}
        for status, what in (
            (400, "The request is invalid or cannot be written."),
            (401, "The key is missing or wrong."),
            (404, "There is no model of this name."),
            (413, "The request is too large."),
            (429, "Too many texts are waiting."),
            (503, "The model is not available."),
            (504, "The request took too long."),
        )
    }

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        """The served model."""
        return {"object": "list", "data": [_model(engine)]}

    @app.get("/v1/models/{name:path}", dependencies=guarded, responses=wrong)
    async def model(name: str) -> dict[str, Any]:
        """The served model, by name."""
        _check_model(engine, name)
        return _model(engine)

    @app.post("/v1/completions", dependencies=guarded, responses=wrong)
    async def completions(ask: CompletionAsk, request: Request) -> Response:
        """Continue a text, or fill its gaps."""
        return await _Answer(engine, metrics, request, ask, "completion").given(_completions(ask, limits))

    @app.post("/v1/chat/completions", dependencies=guarded, responses=wrong)
    async def chat(ask: ChatAsk, request: Request) -> Response:
        """Answer in a conversation, with the model's chat template."""
        if ask.max_tokens is not None and ask.max_completion_tokens is not None:
            raise Refused("give only one of max_tokens and max_completion_tokens", param="max_tokens")
        if ask.top_logprobs is not None and not ask.logprobs:
            raise Refused("top_logprobs needs logprobs", param="top_logprobs")
        _check_characters([each.text for each in ask.messages], "messages", limits)
        prompt = {"messages": [{"role": each.speaker, "content": each.text} for each in ask.messages]}
        most = ask.max_tokens or ask.max_completion_tokens
        return await _Answer(engine, metrics, request, ask, "chat").given([_line(ask, prompt, most)])

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page that shows a text while it is written. It holds no text and needs no key."""
        return page_file("index.html")

    @app.get("/docs", include_in_schema=False)
    async def reference() -> Response:
        """The routes and their fields."""
        return page_response(reference_page(app.openapi()), ".html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part_of_page(name: str) -> Response:
        return page_file(name)

    @app.get("/health")
    async def health() -> Response:
        """200 while the model is available, else 503 with the reason."""
        if engine.state.model is None:
            return JSONResponse({"status": "unavailable", "why": engine.state.why}, 503)
        return JSONResponse({"status": "ok", "texts": len(engine)})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def measured() -> Response:
        """Metrics in Prometheus' format."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


# --- from requests to lines ---


def _line(ask: Ask, prompt: Any, max_new_tokens: int | None) -> Line:
    return {
        "prompt": prompt,
        "max_new_tokens": max_new_tokens,
        "settings": ask.settings(),
        "law": ask.law,
        "lean": ask.lean,
        "echo": False,
        "events": ask.events,
        "alternatives": ask.alternatives,
        "logprobs": ask.tops,
    }


def _check_characters(texts: Sequence[str], field: str, limits: Limits) -> None:
    """Refuse text that is too long before it is tokenized, since all other requests would wait."""
    number = sum(map(len, texts))
    if number > limits.characters:
        raise Refused(
            f"{field} must have at most {limits.characters:,} characters here, got {number:,}", param=field
        )


def _completions(ask: CompletionAsk, limits: Limits) -> list[Line]:
    """A line for each prompt."""
    if ask.logprobs is not None and ask.echo:
        raise Refused(
            "echo and logprobs cannot be combined: only written tokens have log-probabilities here, and "
            "bd3lm score measures given ones",
            param="logprobs",
        )
    if ask.template is not None:
        if ask.prompt != "" or ask.suffix is not None or ask.echo:
            raise Refused("template cannot be combined with prompt, suffix or echo", param="template")
        _check_characters([ask.template], "template", limits)
        try:
            parts = template_parts(ask.template, "template")
        except ValueError as error:
            raise Refused(str(error), param="template") from None
        filled = [{"gap": part} if isinstance(part, int) else part for part in parts]
        return [_line(ask, filled, None)]
    if ask.fills is not None and ask.suffix is None:
        raise Refused("fills is for suffix and template, which leave gaps", param="fills")
    prompts: list[Any] = (
        [ask.prompt] if isinstance(ask.prompt, str) or isinstance(ask.prompt[0], int) else list(ask.prompt)
    )
    for prompt in prompts:
        _check_characters([each for each in (prompt, ask.suffix) if isinstance(each, str)], "prompt", limits)
    if ask.suffix is None:
        return [_line(ask, prompt, ask.max_tokens) | {"echo": ask.echo} for prompt in prompts]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise Refused("suffix needs a text as prompt, got token ids", param="suffix")
    if not ask.suffix:
        raise Refused("suffix must not be empty", param="suffix")
    if ask.echo:
        raise Refused("echo and suffix cannot be combined", param="suffix")
    return [
        _line(ask, [*([prompt] if prompt else []), {"gap": ask.max_tokens}, ask.suffix], None)
        for prompt in prompts
    ]


def _check_model(engine: RemoteEngine, name: str | None) -> None:
    if name is not None and name != engine.served.name:
        raise Refused(
            f"model must be {engine.served.name!r}, which is served here, got {name!r}",
            404,
            param="model",
            code="model_not_found",
        )


def _model(engine: RemoteEngine) -> dict[str, Any]:
    told = engine.state.model or {}
    ours = {name: value for name, value in told.items() if name != "is"}
    return {"id": engine.served.name, "object": "model", "created": 0, "owned_by": "bd3lm", "bd3lm": ours}


# --- from lines to answers ---


class _Answer:
    """The response to one request."""

    def __init__(self, engine: RemoteEngine, metrics: Metrics, request: Request, ask: Ask, kind: str) -> None:
        self.engine, self.metrics, self.request, self.ask = engine, metrics, request, ask
        self.head = answers.Head(kind, engine.served.name)
        self.began = time.monotonic()
        self.prompts = 1
        self.lines: list[Line] = []
        self.done: dict[int, Line] = {}
        self._early: list[tuple[int, Line]] = []  # about some texts before others have begun

    async def given(self, prompts: Sequence[Line]) -> Response:
        """Write n texts for each prompt."""
        _check_model(self.engine, self.ask.model)
        number = len(prompts) * self.ask.n
        fills = getattr(self.ask, "fills", None) or 1
        if number * fills > _FILLS * self.engine.limits.texts:
            raise Refused(
                f"prompts times n times fills must be at most {_FILLS * self.engine.limits.texts} here, got "
                f"{number * fills}",
                param="fills",
            )
        if number > self.engine.limits.texts:
            raise Refused(
                f"prompts times n must be at most {self.engine.limits.texts} here, got {number}", param="n"
            )
        seed = secrets.randbits(63) if self.ask.seed is None else self.ask.seed
        if self.ask.events and not self.ask.stream:
            raise Refused("events needs stream, which sends them as they happen", param="events")
        if self.ask.alternatives is not None and not self.ask.events:
            raise Refused(
                "alternatives needs events, which carry them; use logprobs to get them with a text",
                param="alternatives",
            )
        is_told = self.ask.stream and not any(
            isinstance(each, dict) for line in prompts for each in line["prompt"]
        )
        pieces = is_told and not self.ask.events
        is_watched = self.ask.events or self.ask.tops is not None
        tell = "passes" if is_watched else "pieces" if pieces else "end"
        every = [line for line in prompts for _ in range(self.ask.n)]
        self.prompts = len(prompts)
        self.lines = [
            line | {"settings": line["settings"] | {"seed": each}, "tell": tell, "pieces": pieces}
            for line, each in zip(every, text_seeds(seed, number), strict=True)
        ]
        group = self.engine.write(self.lines)
        told = group.told(self.engine.limits.seconds, self.request.is_disconnected)
        try:
            begun = await self._begun(told)
        except BaseException:
            group.leave()
            raise
        if self.ask.stream:
            return Timed(
                self.engine.limits.seconds + _SLACK,
                self._streamed(group, told, begun),
                media_type="text/event-stream",
                headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            )
        return JSONResponse(await self._whole(group, told))

    async def _begun(self, told: AsyncIterator[tuple[int, Line]]) -> list[Line]:
        """Wait until all texts have begun, so that an error in one comes before any output of another."""
        begun: dict[int, Line] = {}
        while len(begun) < len(self.lines):
            index, line = await self._next(told)
            if line["is"] == "begun":
                begun[index] = line
            else:
                self._early.append((index, line))
        return [begun[index] for index in range(len(self.lines))]

    async def _next(self, told: AsyncIterator[tuple[int, Line]]) -> tuple[int, Line]:
        """The next line. Raises `Refused` if a text has failed."""
        try:
            index, line = await anext(told)
        except TimeoutError:
            raise Refused(
                f"a request may take {self.engine.limits.seconds:g} seconds here, and this one took longer",
                504,
            ) from None
        match line["is"]:
            case "refused":
                raise Refused(line["why"])
            case "failed":
                raise Refused(line["why"], 500)
            case "lost":
                raise Refused(line["why"], 503)
        if line["is"] == "done":
            line["asked_seed"] = self.lines[index]["settings"]["seed"]
            self.metrics.finished(line)
            self.done[index] = line
        return index, line

    async def _whole(self, group: Group, told: AsyncIterator[tuple[int, Line]]) -> dict[str, Any]:
        try:
            while len(self.done) < len(self.lines):
                await self._next(told)
        finally:
            group.leave()
        done = [self.done[index] for index in range(len(self.lines))]
        choices = [
            self.head.choice(index, self._text(line), line, self._logprobs(line["chances"], line))
            for index, line in enumerate(done)
        ]
        self.metrics.whole.observe(time.monotonic() - self.began)
        return self.head.body(choices) | {"usage": answers.usage(done, self.prompts)}

    def _logprobs(self, chances: Sequence[Line], done: Line | None) -> dict[str, Any] | None:
        """The log-probabilities of some tokens. If the whole text is returned at once, `done` tells how much
        of it comes before the first of them."""
        if self.ask.tops is None:
            return None
        is_whole = isinstance(self.ask, CompletionAsk) and self.ask.template is not None
        return self.head.logprobs(chances, before=done["before"] if done is not None and is_whole else 0)

    def _text(self, done: Line) -> str:
        """The text that a client gets of a finished line."""
        completion: str = done["more"]
        if not isinstance(self.ask, CompletionAsk):
            return completion
        if self.ask.template is not None or self.ask.echo:
            return str(done["whole"])
        return completion if self.ask.suffix is None else completion.removesuffix(self.ask.suffix)

    async def _streamed(
        self, group: Group, told: AsyncIterator[tuple[int, Line]], begun: Sequence[Line]
    ) -> AsyncGenerator[str, None]:
        try:
            for index, line in enumerate(begun):
                if self.head.is_chat:
                    yield self._chunk([self.head.piece(index, "", first=True)])
                elif line.get("prompt"):
                    yield self._chunk([self.head.piece(index, line["prompt"])])
            is_first = True
            async for found in self._batches(group, told):
                choices = self._pieces(found)
                if choices:
                    if is_first:
                        self.metrics.first.observe(time.monotonic() - self.began)
                    is_first = False
                    yield self._chunk(choices)
            if self.ask.stream_options is not None and self.ask.stream_options.include_usage:
                done = [self.done[index] for index in range(len(self.lines))]
                yield answers.event(
                    self.head.body([], is_chunk=True) | {"usage": answers.usage(done, self.prompts)}
                )
            self.metrics.whole.observe(time.monotonic() - self.began)
            yield answers.DONE
        except Refused as refused:  # too late for an HTTP status
            self.metrics.answers.labels(refused.status).inc()
            yield answers.event(refused.body())
        except (ClientGone, Gone):
            return
        finally:
            group.leave()

    async def _batches(
        self, group: Group, told: AsyncIterator[tuple[int, Line]]
    ) -> AsyncIterator[list[tuple[int, Line]]]:
        """Lines in batches of all that are waiting, so that under load several pieces become one."""
        if self._early:
            yield self._early
        while len(self.done) < len(self.lines):
            found = [await self._next(told)]
            while not group.lines.empty():
                found.append(await self._next(told))
            yield found

    def _pieces(self, found: Sequence[tuple[int, Line]]) -> list[dict[str, Any]]:
        """A piece for each text with news."""
        choices = []
        for index in sorted({index for index, _ in found}):
            lines = [line for place, line in found if place == index and line["is"] in ("more", "done")]
            steps = [step for place, line in found if place == index for step in line.get("steps", ())]
            last = lines[-1] if lines and lines[-1]["is"] == "done" else None
            text = "".join(line.get("more", "") for line in lines)
            if last is not None and not self.lines[index]["pieces"]:
                text = self._text(last)
            chances = [each for line in lines for each in line.get("chances", ())]
            if text or steps or chances or last is not None:
                logprobs = self._logprobs(chances, last) if chances else None
                piece = self.head.piece(index, text, finished=last, logprobs=logprobs)
                choices.append(piece | {"events": steps} if self.ask.events else piece)
        return choices

    def _chunk(self, choices: list[dict[str, Any]]) -> str:
        return answers.event(self.head.body(choices, is_chunk=True))


# --- errors ---


def _say_errors(app: FastAPI) -> None:
    """Give all errors the same shape."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return JSONResponse(error.body(), error.status)

    @app.exception_handler(Full)
    async def full(request: Request, error: Full) -> Response:
        return JSONResponse(answers.error(str(error), 429), 429, headers={"retry-after": "1"})

    @app.exception_handler(Gone)
    async def gone(request: Request, error: Gone) -> Response:
        return JSONResponse(answers.error(str(error), 503), 503, headers={"retry-after": "1"})

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        # FastAPI says no more than this about a body that makes Python's JSON parser give up.
        is_body = error.detail == "There was an error parsing the body"
        why = _UNREADABLE if is_body else str(error.detail)
        return JSONResponse(answers.error(why, error.status_code), error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        param, message = _first_problem(error)
        return JSONResponse(answers.error(message, 400, param=param), 400)


def _first_problem(error: RequestValidationError) -> tuple[str | None, str]:
    """The field and its error. If there are several, an unknown field comes first."""
    problems = error.errors()
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    is_extra = problem["type"] == "extra_forbidden"
    place = list(problem["loc"])
    said = [str(place.pop())[:80]] if is_extra else []  # the client's own word, whatever it is
    # The path also holds the names of types that a field may have.
    path = [str(each) for each in place if str(each).isidentifier() or isinstance(each, int)]
    path = [
        each for each in path if each not in ("body", "str", "int", "float", "bool", "list", "dict")
    ] + said
    name = ".".join(path)
    if problem["type"] == "json_invalid":
        return None, f"the body must be JSON: {problem.get('ctx', {}).get('error', problem['msg'])}"
    if is_extra:
        return (
            name,
            f"{name} is not a field of this server: {NOT_HERE.get(path[-1], 'see /docs for its fields')}",
        )
    got = "" if problem["type"] == "missing" else f", got {problem.get('input')!r:.80}"
    return name or None, f"{name or 'the body'}: {problem['msg'].removeprefix('Value error, ')}{got}"
