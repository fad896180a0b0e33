"""The commands of `bd3lm`, one file each: named as it is typed, with its flags and its work.

Importing a command is cheap; imports that load torch happen when it runs. A command with much work is a
package: its flags are in `__init__`, the work is in the files next to it. Code for several commands is in
`shared`.
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
"""The order of `bd3lm --help`."""


def every_command() -> "dict[str, type[Command]]":
    """All commands by name: ours, then those of plugins."""
    from bd3lm.commands.shared.command import Command
    from bd3lm.kinds import why_unusable

    for name in COMMANDS:
        import_module(f"{__name__}.{name}")
    members = Command.members()
    for name, member in members.items():
        if (why := why_unusable(member)) is not None:
            raise ValueError(f"the command {name} of {member.__module__} {why}")
    return {name: members[name] for name in COMMANDS} | dict(members)
