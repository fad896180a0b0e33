"""Middleware around all responses: time limits, the largest request, and counts."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bd3lm.serving import answers
from bd3lm.serving.limits import PATIENCE
from bd3lm.serving.metrics import Metrics


class Timed(StreamingResponse):
    """A stream with a time limit: a client that stops reading is disconnected."""

    def __init__(self, seconds: float, content: AsyncGenerator[str, None], **options: Any) -> None:
        super().__init__(content, **options)
        self._seconds, self._content = seconds, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patient(message: Message) -> None:
            await asyncio.wait_for(send(message), PATIENCE)

        try:
            async with asyncio.timeout(self._seconds):
                await super().__call__(scope, receive, patient)
        except TimeoutError:
            return  # the response is incomplete, so the connection is closed
        finally:
            await self._content.aclose()


class CutOff:
    """Answers clients whose requests are cut off because the server stops."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not has_begun:
                await JSONResponse(answers.error("the server is stopping", 503), 503)(scope, receive, send)


class Counted:
    """Counts responses by status."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.answers.labels(message["status"]).inc()
            await send(message)

        is_text = scope["type"] == "http" and scope["method"] == "POST"
        await self.app(scope, receive, counting if is_text else send)


class BodyLimit:
    """Stops reading a request that is too large."""

    def __init__(self, app: ASGIApp, *, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.most:
            await self._refuse(scope, receive, send)
            return
        body, more = bytearray(), True
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        while more:
            try:
                message = await asyncio.wait_for(receive(), PATIENCE)
            except TimeoutError:
                message_of = "the body of a request must arrive within a minute"
                await JSONResponse(answers.error(message_of, 408), 408, headers={"connection": "close"})(
                    scope, receive, send
                )
                return
            if message["type"] != "http.request":
                return  # the client has gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.most:
                await self._refuse(scope, receive, send)
                return
        told = False

        async def replay() -> Message:
            nonlocal told
            if told:
                return await receive()
            told = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self.app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"a request must have at most {self.most:,} bytes here"
        await JSONResponse(answers.error(message, 413), 413, headers={"connection": "close"})(
            scope, receive, send
        )
