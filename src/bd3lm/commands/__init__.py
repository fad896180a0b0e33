"""The commands of `bd3lm`, a file each: it is named as the command is typed and holds its flags and its work.

Importing one is cheap: what brings torch is imported when the command runs. A command with much work is a
package, with its flags in `__init__` and the work in files beside it. `shared` has what several commands use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bd3lm.commands.shared.command import Command

COMMANDS = (
    "train",
    "adapt",
    "tune",
    "data",
    "sample",
    "chat",
    "serve",
    "presets",
    "eval",
    "zeroshot",
    "score",
    "judge",
    "lengths",
    "harness",
    "variance",
    "acceptance",
    "report",
    "bench",
    "convert",
    "export",
    "demo",
    "prove",
)
"""In the order of `bd3lm --help`."""


def every_command() -> "dict[str, type[Command]]":
    """By the words that are typed: ours, and then those of plugins."""
    from bd3lm.commands.shared.command import Command
    from bd3lm.kinds import why_unusable

    for name in COMMANDS:
        import_module(f"{__name__}.{name}")
    members = Command.members()
    for name, member in members.items():
        if (why := why_unusable(member)) is not None:
            raise ValueError(f"the command {name} of {member.__module__} {why}")
    return {name: members[name] for name in COMMANDS} | dict(members)
