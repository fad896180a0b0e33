"""`bd3lm train`: train a preset or a recipe."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from bd3lm.commands.shared.flags import DeviceFlag, OptionalFile, OptionalFolder, named
from bd3lm.commands.shared.recipes import RecipeCommand, check_later_stages, show
from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from bd3lm.runs.recipe import Recipe

_MOST_SECONDS = 10**6  # eleven days


@dataclass(frozen=True)
class Train(RecipeCommand):
    """Train a preset or your own recipe.

    Set any field of the recipe with `--any.field value`. `bd3lm train PRESET --show` prints the resolved
    recipe. Under torchrun all processes train one model. After training, the presets `demo` and `demo-paper`
    also measure the models and write report.html.
    """

    kind = "train"

    preset: Positional[Annotated[str | None, named("[PRESET]")]] = None
    """A named recipe; `bd3lm presets` lists them. Without it, --config must hold a whole recipe."""
    out: OptionalFolder = None
    """Folder of the run. Default: runs/PRESET."""
    config: OptionalFile = None
    """YAML file: changes to the preset or, without one, a whole recipe (or one per stage, by name)."""
    resume: bool = False
    """Continue the run in --out, with its own recipe or with a preset that computes the same."""
    start_from: Annotated[str | None, named("MODEL"), arg(name="from")] = None
    """Start from the weights of this run, model folder, GGUF file or hub id, with a fresh optimizer."""
    device: DeviceFlag = None
    join_timeout: Annotated[float | None, named("SECONDS")] = None
    """Under torchrun or a scheduler: how long processes wait for the last one to join. Default: 300."""
    show: bool = False
    """Print the resolved recipe and stop."""

    def run(self) -> int:
        out = self.out or Path("runs") / (self.preset or (self.config.stem if self.config else "run"))
        self._check(out)

        from bd3lm.runs.recipe import parse_overrides  # this import loads torch
        from bd3lm.runs.train import train_stages

        stages = self._stages(parse_overrides(self.overrides))
        check_later_stages(stages)
        if self.show:
            show(stages)
            return 0
        if self._wants_report() and os.environ.get("RANK", "0") == "0":  # one of several processes says it
            say(f"after training, {self.preset} measures its models and writes {out / 'report.html'}")
        runs = train_stages(
            stages, out, resume=self.resume, device=self.device, join_timeout=self.join_timeout
        )
        last = runs[-1].trainer
        if last.stopped_by == "signal":
            return 130
        if last.engine.is_main:
            say(f"wrote {runs[-1].out / 'model'}")
            if self._wants_report():
                from bd3lm.commands.demo.results import show_results

                show_results(runs, out)
        return 0

    def _check(self, out: Path) -> None:
        """Refuse what is wrong before torch is loaded."""
        if self.join_timeout is not None and not 0.0 < self.join_timeout < _MOST_SECONDS:
            raise ValueError(
                f"--join-timeout must be a number of seconds above 0, below {_MOST_SECONDS:,}, got "
                f"{self.join_timeout}"
            )
        from bd3lm.commands.shared.models import check_models
        from bd3lm.runs.folders import begun_stages, check_not_begun, is_run
        from bd3lm.runs.outline import check_outline
        from bd3lm.runs.presets import preset
        from bd3lm.runs.reading import read_settings

        if self.preset is not None:
            preset(self.preset)  # raises if it does not exist
        elif self.config is None and (not self.resume or self.out is None):
            raise ValueError(
                "a preset or --config must be given, or --resume with the --out of a run; `bd3lm presets` "
                "lists the presets"
            )
        if self.config is not None and not self.config.exists():
            raise ValueError(f"--config must be a YAML file, and {self.config} does not exist")
        begins = not self.resume and not self.show
        check_models([self.start_from] if self.start_from and begins else [], device=self.device)
        if self.resume and not (is_run(out) or begun_stages(out)):
            raise ValueError(f"--resume needs a run to continue, and {out} holds none")
        if begins:
            check_not_begun(out)
        if self.preset is not None:
            check_outline(
                preset(self.preset).stages,
                self.overrides,
                where=f"preset {self.preset}",
                config=self.config,
                start_from=self.start_from,
                reads_data=begins,
            )
        elif self.config is not None and self.config.is_file():  # a pipe can be read once, for the recipe
            read_settings(self.config)

    def _wants_report(self) -> bool:
        from bd3lm.runs.presets import preset

        return self.preset is not None and preset(self.preset).report

    def _stages(self, overrides: Mapping[str, Any]) -> "list[tuple[str, Recipe]]":
        from bd3lm.commands.shared.models import one_model
        from bd3lm.runs.stages import resolve_stages, saved_stages

        if self.preset is None and self.config is None and self.out is not None:
            if self.start_from is not None:
                raise ValueError(
                    f"--from starts a new run, and --resume continues {self.out}: give only one of them"
                )
            return saved_stages(self.out, overrides)
        start = None if self.start_from is None else str(one_model(self.start_from))
        return resolve_stages(self.preset, config=self.config, overrides=overrides, start_from=start)
