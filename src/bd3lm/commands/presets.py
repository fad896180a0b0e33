"""`bd3lm presets`: list the named recipes."""

from dataclasses import dataclass

from bd3lm.commands.shared.command import Command
from bd3lm.io.terminal import say


@dataclass(frozen=True)
class Presets(Command):
    """List the presets for `bd3lm train`, and how to get their data."""

    kind = "presets"

    def run(self) -> int:
        from bd3lm.runs.presets import DATA, PRESETS

        width = max(map(len, PRESETS))
        for name, preset in PRESETS.items():
            afterwards = "; then measures the models and writes report.html" if preset.report else ""
            say(f"{name:{width}}  {preset.description}{afterwards}")
        say("\nPresets without the built-in corpus read token shards from --data.path or these folders:")
        for folder, command in DATA.items():
            say(f"{folder:{width}}  {command}")
        return 0
