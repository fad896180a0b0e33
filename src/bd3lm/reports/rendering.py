"""Templates that treat every value as text and escape it, so none can forget to.

Markup comes only from a template itself, or from a filter that returns `Markup`.
"""

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bd3lm.reports.readable import readable


def environment(text: Callable[[str], str] = readable, **filters: Callable[[Any], Any]) -> Environment:
    """Templates that pass each value through `text`, then escape it for HTML and XML, except `Markup`."""

    def as_text(value: Any) -> str:
        return value if isinstance(value, Markup) else text(str(value))

    made = Environment(
        loader=PackageLoader("bd3lm.reports"),
        autoescape=True,
        finalize=as_text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    made.filters |= filters
    return made
