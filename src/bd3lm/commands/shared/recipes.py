"""What training commands share: `--any.field value` among their flags, and the stages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tyro.conf import Suppress

from bd3lm.commands.shared.command import Command, flags_of
from bd3lm.io.terminal import say
from bd3lm.words import advice_in_recipes

if TYPE_CHECKING:
    from bd3lm.runs.recipe import Recipe


@dataclass(frozen=True)
class RecipeCommand(Command):
    """A command that trains by a recipe, every field of which is also a flag: --any.field value."""

    overrides: Suppress[tuple[str, ...]] = field(default=(), kw_only=True)
    """The pairs --any.field value, which tyro does not see."""

    @classmethod
    def set_aside(cls, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Split the words: its own flags for tyro, and the pairs --any.field value for `overrides`."""
        kept, overrides = _without_overrides(cls, words)
        return kept, {"overrides": overrides}

    @classmethod
    def advice(cls, flag: str) -> str | None:
        return advice_in_recipes(flag)


def _without_overrides(command: type[Command], words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The command's own words, and the --any.field value pairs, wherever they stand."""
    flags = flags_of(command)
    opposites = [f"--no-{each.name.removeprefix('--')}" for each in flags if each.has_opposite]
    own = {"--help", *(each.name for each in flags), *opposites}
    kept: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word.partition("=")[0] in own:
            kept.append(word)
            continue
        overrides.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return kept, tuple(overrides)


def check_later_stages(stages: "Sequence[tuple[str, Recipe]]") -> None:
    """Refuse settings of later stages that would be ignored: another start, or other processes."""
    (first, one), *later = stages
    earlier = [first]
    for name, recipe in later:
        if recipe.start_from not in (None, one.start_from, *earlier):
            raise ValueError(
                f"{name}.start_from must be an earlier stage ({', '.join(earlier)}; default: the last of "
                f"them), got {recipe.start_from}; --from {recipe.start_from} runs only the last stage, from "
                "there"
            )
        earlier.append(name)
        if recipe.parallel != one.parallel:
            raise ValueError(
                f"parallel must be the same for all stages, which share their processes, got {one.parallel} "
                f"for {first} and {recipe.parallel} for {name}: set --parallel without a stage"
            )


def show(stages: "Sequence[tuple[str, Recipe]]") -> None:
    """Print the recipes as a file that --config takes."""
    import yaml

    from bd3lm.runs.stages import stages_to_dict

    say(yaml.safe_dump(stages_to_dict(stages), sort_keys=False).rstrip("\n"))
