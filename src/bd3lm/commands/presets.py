"""`bd3lm presets`: the named runs."""

from dataclasses import dataclass

from bd3lm.commands.shared.command import Command
from bd3lm.io.terminal import say


@dataclass(frozen=True)
class Presets(Command):
    """List the named runs, and how to get the text that they read."""

    kind = "presets"

    def run(self) -> int:
        from bd3lm.runs.presets import DATA, PRESETS

        width = max(map(len, PRESETS))
        for name, preset in PRESETS.items():
            afterwards = "; then measures it and writes report.html" if preset.report else ""
            say(f"{name:{width}}  {preset.description}{afterwards}")
        say("\nBut for the built-in corpus presets read tokens of yours, by --data.path or in these folders:")
        for folder, command in DATA.items():
            say(f"{folder:{width}}  {command}")
        return 0
