"""`/docs`: the server's routes and fields as a page, made from its OpenAPI schema. It needs no network."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

Schema = Mapping[str, Any]

_LIMITS = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "more than {}"),
    ("maximum", "at most {}"),
    ("exclusiveMaximum", "less than {}"),
    ("maxLength", "at most {} characters"),
    ("maxItems", "at most {} entries"),
)


@dataclass(frozen=True)
class Field:
    """One field of a request."""

    name: str
    type: str
    default: str
    about: str


@dataclass(frozen=True)
class Route:
    """One route, with the fields of its request."""

    method: str
    path: str
    about: str
    fields: tuple[Field, ...]
    errors: tuple[tuple[str, str], ...]
    """The status of each error, and what it means."""


def reference_page(openapi: Schema) -> str:
    """The page, as HTML. All text in it is escaped."""
    environment = Environment(
        loader=PackageLoader("bd3lm.serving", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    template = environment.get_template("reference.html.j2")
    return template.render(about=openapi["info"]["description"], routes=list(routes(openapi)))


def routes(openapi: Schema) -> Iterator[Route]:
    """The routes, in the order of the schema."""
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            asked = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            yield Route(
                method.upper(),
                path,
                operation.get("description", ""),
                tuple(_fields(_resolved(asked.get("schema", {}), openapi), openapi)),
                tuple(
                    (status, answer["description"])
                    for status, answer in sorted(operation["responses"].items())
                    if status >= "400" and status != "422"  # the server answers 400 in its place
                ),
            )


def _fields(schema: Schema, openapi: Schema) -> Iterator[Field]:
    required = schema.get("required", ())
    for name, each in schema.get("properties", {}).items():
        default = "required" if name in required else _value(each.get("default"))
        yield Field(name, _type(each, openapi), default, each.get("description", ""))


def _resolved(schema: Schema, openapi: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    found: Schema = openapi["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _type(schema: Schema, openapi: Schema) -> str:
    """What a field may hold, in words."""
    schema = _resolved(schema, openapi)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            parts = [_type(each, openapi) for each in schema[several] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(parts))
    if "const" in schema:
        return _value(schema["const"])
    if "enum" in schema:
        return " or ".join(map(_value, schema["enum"]))
    kind = str(schema.get("type", "any value"))
    if kind == "array":
        kind = f"list of ({_type(schema.get('items', {}), openapi)})"
    elif kind == "object" and schema.get("properties"):
        inner = (f"{name}: {_type(each, openapi)}" for name, each in schema["properties"].items())
        kind = f"{{{', '.join(inner)}}}"
    limits = [words.format(_number(schema[key])) for key, words in _LIMITS if key in schema]
    return ", ".join([kind, *limits])


def _value(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if value == "" else str(value)


def _number(value: float) -> str:
    if value >= 2**31:
        return f"2^{round(value).bit_length() - 1}"
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"
