"""The server's page, which shows a text while it is written. Only files of this folder are served."""

from importlib.resources import files
from types import MappingProxyType

from fastapi.responses import Response
from starlette.exceptions import HTTPException

_KINDS = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
_HEADERS = MappingProxyType(
    {
        "cache-control": "no-cache",  # so that a new version shows at once
        # The page only shows texts as text. This policy blocks any that would run as code.
        "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
)


def page_file(name: str) -> Response:
    """A file of the page as an HTTP response."""
    found = next((each for each in files(__name__).iterdir() if each.name == name), None)
    ending = next((ending for ending in _KINDS if name.endswith(ending)), None)
    if found is None or ending is None:
        raise HTTPException(404, f"the page has no file {name}")
    return page_response(found.read_bytes(), ending)


def page_response(content: str | bytes, ending: str) -> Response:
    """What a file of the page with this ending holds, as an HTTP response."""
    return Response(content, headers={**_HEADERS, "content-type": _KINDS[ending]})
