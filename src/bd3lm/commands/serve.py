"""`bd3lm serve`: a model behind HTTP, for every client that knows OpenAI's API."""

import os
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import DeviceFlag, LawFlag, SamplingDTypeFlag, TokenizerFlag, named

_KEY = "BD3LM_API_KEY"


@dataclass(frozen=True)
class Serve(Command):
    """Serve a model over HTTP, as OpenAI's clients expect it: completions, chat, streaming.

    Without a model it is box, the one that comes with bd3lm. Needs pip install "bd3lm[serve]". The routes and
    their fields are at /docs. Where the environment has BD3LM_API_KEY, clients must send it.
    """

    kind = "serve"

    model: Positional[Annotated[str | None, named("[MODEL]")]] = None
    """A run, model folder, GGUF file or hub id; by default box, the model that comes with bd3lm."""
    name: Annotated[str | None, named("NAME")] = None
    """What clients call the model; by default the last part of MODEL."""
    host: Annotated[str, named("ADDRESS")] = "127.0.0.1"
    """Where to listen; 0.0.0.0 is every address of this machine."""
    port: int = 8000
    law: LawFlag = None
    seats: int = 32
    """Texts written side by side. More is faster in all and slower for each."""
    queue: int = 256
    """Texts that may wait; beyond them clients get 429."""
    most_tokens: int = 4096
    """Tokens of a text at most, its prompt included."""
    most_seconds: float = 600.0
    """Seconds that a request may take."""
    most_body: int = 1 << 20
    """Bytes that a request may hold."""
    grace: float = 30.0
    """Seconds that running requests have once the server is told to stop."""
    cors: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="ORIGIN")]] = ()
    """Let pages of this origin ask, such as https://example.org. May be given several times."""
    log: bool = False
    """Write a line for each request, without its text."""
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
        from bd3lm.io.terminal import say
        from bd3lm.serving import Limits
        from bd3lm.serving.server import serve
        from bd3lm.serving.worker import Served

        key = os.environ.get(_KEY)
        if key is not None and (not key.strip() or not key.isascii()):
            raise ValueError(
                f"{_KEY} must be a key of ASCII characters, or not be set, got an empty or another one"
            )
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
