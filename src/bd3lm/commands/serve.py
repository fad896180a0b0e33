"""`bd3lm serve`: serve a model over HTTP, with OpenAI's API."""

import os
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import UseAppendAction, arg

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    DeviceFlag,
    LawFlag,
    ModelOrBox,
    OwnTemplateFlag,
    SamplingDTypeFlag,
    TokenizerFlag,
    named,
)

_KEY = "BD3LM_API_KEY"


@dataclass(frozen=True)
class Serve(Command):
    """Serve a model over HTTP with OpenAI's API: completions, chat, streaming.

    Needs pip install "bd3lm[serve]". The server documents its routes at /docs. If the environment variable
    BD3LM_API_KEY is set, clients must send that key.
    """

    kind = "serve"

    model: ModelOrBox = None
    name: Annotated[str | None, named("NAME")] = None
    """Name of the model for clients. Default: the last part of MODEL."""
    host: Annotated[str, named("ADDRESS")] = "127.0.0.1"
    """Address to listen on. Default: 127.0.0.1; 0.0.0.0 is every address of this machine."""
    port: Annotated[int, arg(help="Port to listen on.")] = 8000
    law: LawFlag = None
    chat_template: OwnTemplateFlag = None
    seats: int = 32
    """Texts written in parallel. More seats: higher throughput, slower single texts."""
    queue: int = 256
    """Texts that may wait. Clients beyond that get status 429."""
    most_tokens: int = 4096
    """Most tokens of a text, its prompt included."""
    most_seconds: float = 600.0
    """Longest time for a request, in seconds."""
    most_body: int = 1 << 20
    """Largest request, in bytes."""
    grace: float = 30.0
    """Seconds that running requests get to finish when the server is stopped."""
    cors: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="ORIGIN")]] = ()
    """Allow web pages of this origin, such as https://example.org. Repeat the flag for several."""
    log: bool = False
    """Log a line for each request, without its text."""
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: SamplingDTypeFlag = None

    def run(self) -> int:
        from bd3lm.io.extras import require

        for module in ("fastapi", "uvicorn", "prometheus_client"):
            require(module, "serve", "bd3lm serve")

        from pathlib import PurePath

        from bd3lm import interop
        from bd3lm.commands.shared.models import check_models, one_model
        from bd3lm.commands.shared.writing import sampling_dtype
        from bd3lm.data.templates import named_template
        from bd3lm.io.terminal import say
        from bd3lm.serving import Limits
        from bd3lm.serving.server import serve
        from bd3lm.serving.worker import Served

        key = os.environ.get(_KEY)
        if key is not None and (not key.strip() or not key.isascii()):
            raise ValueError(
                f"{_KEY} must hold ASCII characters that are not blank, or not be set, got an empty or "
                "invalid key"
            )
        template = None if self.chat_template is None else named_template(self.chat_template)
        limits = Limits(
            seats=self.seats,
            queue=self.queue,
            tokens=self.most_tokens,
            seconds=self.most_seconds,
            body=self.most_body,
            grace=self.grace,
        )
        check_models([] if self.model is None else [self.model], device=self.device)
        source = interop.BOX if self.model is None else one_model(self.model)
        path = interop.BOX_FOLDER if self.model is None else interop.resolve(source)
        served = Served(
            str(path),
            self.name or PurePath(self.model or source).name,
            device=self.device,
            dtype=sampling_dtype(self.dtype, self.device),
            law=self.law,
            tokenizer=self.tokenizer,
            chat_template=template,
        )
        serve(
            served,
            host=self.host,
            port=self.port,
            key=key,
            origins=self.cors,
            limits=limits,
            log=self.log,
            notes=say,
        )
        return 0
