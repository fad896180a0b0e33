"""Parses settings in YAML, written by hand or with bad intent, into plain values within limits.

With aliases, a few lines can stand for more values than fit in memory, or contain themselves. So nesting and
the number of values are limited, and each value counts as often as it is named.
"""

import re
from typing import Any

import yaml

MOST_BYTES = 1_000_000
_MOST_VALUES = 10_000
_MOST_LEVELS = 50
_MOST_SAID = 500  # characters of the parser's message, which quotes names in full
_MOST_BITS = 14_000  # about as many digits as Python reads and writes
_PREFIX = "tag:yaml.org,2002:"
_PLAIN = {f"{_PREFIX}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_DECIMAL = {
    f"{_PREFIX}int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"),
    f"{_PREFIX}float": re.compile(
        r"""(?:[-+]?(?:0|[1-9][0-9_]*)\.[0-9_]*(?:[eE][-+][0-9]+)?
            |\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?
            |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
}
_DATE = f"{_PREFIX}timestamp"


class NoYaml(ValueError):
    """A text that is not YAML, or has a value of a type that settings do not use."""


def load_settings(text: str) -> Any:
    """The value of a text; a ValueError in one line, `NoYaml` if it is not YAML."""
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise NoYaml(f"is not YAML: {' '.join(str(error).split()):.{_MOST_SAID}}") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with decimal numbers only, so 010 is not 8 and 1:30 is not 90, and without duplicate keys.

    It reads fewer texts as numbers than YAML 1.1, never more, so text from `yaml.safe_dump` keeps its values.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, _DECIMAL.get(tag, pattern)) for tag, pattern in resolvers if tag != _DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = self._read = 0
        self._extents: dict[yaml.Node, tuple[int, int]] = {}
        """The number of values and levels of each complete node, including those of its aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As in YAML. The size of a complete node is known, so an alias costs nothing."""
        line = self.peek_event().start_mark.line + 1
        if self.check_event(yaml.AliasEvent):
            named = super().compose_node(parent, index)
            if named not in self._extents:
                raise ValueError(f"a value must not contain itself, as in line {line}")
            return named
        self._level += 1
        self._read += 1
        self._check(self._read, self._level, line)
        node: Any = super().compose_node(parent, index)
        self._level -= 1
        inside = [self._extents[each] for each in _inside(node)]
        extent = 1 + sum(values for values, _ in inside), 1 + max((levels for _, levels in inside), default=0)
        self._check(*extent, line)
        self._extents[node] = extent
        return node

    def _check(self, values: int, levels: int, line: int) -> None:
        if levels > _MOST_LEVELS:
            raise ValueError(
                f"values must be nested at most {_MOST_LEVELS} levels deep, got more in line {line}"
            )
        if values > _MOST_VALUES:
            raise ValueError(
                f"there must be at most {_MOST_VALUES:,} values, each counted as often as it is named, got "
                f"more in line {line}"
            )

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ValueError(f"{key.value:.100} is given twice, again in line {key.start_mark.line + 1}")
            seen.add(key.value)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """A plain value; an exception of Python for an invalid one becomes an error of YAML."""
        kind = node.tag.removeprefix(_PREFIX)
        if node.tag not in _PLAIN:
            raise yaml.constructor.ConstructorError(
                None, None, f"settings cannot have values of type {kind[:100]}", node.start_mark
            )
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise ValueError(f"it has more than {_MOST_BITS:,} bits")
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"this is not a valid {kind}", node.start_mark
            ) from error
        return value


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
