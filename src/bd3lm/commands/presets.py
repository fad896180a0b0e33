"""`bd3lm presets`: the named runs."""

from dataclasses import dataclass

from bd3lm.commands.shared.command import Command


@dataclass(frozen=True)
class Presets(Command):
    """List the named runs."""

    kind = "presets"

    def run(self) -> int:
        from bd3lm.runs.presets import PRESETS

        width = max(map(len, PRESETS))
        for name, preset in PRESETS.items():
            print(f"{name:{width}}  {preset.description}")
        return 0
