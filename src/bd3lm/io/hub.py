"""The Hugging Face hub: which names can be ids, and what to say when it cannot be reached."""

import re
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
FILE_SUFFIXES = (*PICKLE_SUFFIXES, ".safetensors", ".json", ".gguf")

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")


def is_hub_id(text: str, *, needs_owner: bool = False) -> bool:
    """Whether this can be an id on the hub: "owner/name" or, unless it needs an owner, "name".

    A name that ends like a weights file is a wrong path, not an id.
    """
    if needs_owner and "/" not in text:
        return False
    return _ID.fullmatch(text) is not None and not text.endswith(FILE_SUFFIXES)


def unresolved_hub() -> str | None:
    """The hub's host if its name does not resolve; the hub's client would retry for half a minute.

    A proxy resolves names itself, so with a proxy this is unknown.
    """
    from huggingface_hub.constants import ENDPOINT

    host = urlsplit(ENDPOINT).hostname
    if host is None or getproxies().keys() & {"http", "https", "all"}:
        return None
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return host
    return None


def hub_reason(error: Exception) -> str:
    """The first line of an error from the hub's client or its network library."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
