"""`bd3lm train` and `bd3lm presets`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, Suppress, arg

from bd3lm.cli.flags import DeviceFlag


@dataclass(frozen=True)
class Train:
    """Train a preset, or a recipe of your own. `--any.field value` sets any field of the recipe.

    Under torchrun it trains on all processes. `bd3lm train PRESET --show` prints the resolved recipe.
    """

    preset: Positional[str | None] = None
    """A named run; `bd3lm presets` lists them. Without one the config file says everything."""
    out: Path | None = None
    """Where to write the run; by default runs/PRESET."""
    config: Path | None = None
    """A YAML file with what differs from the preset."""
    resume: bool = False
    """Go on with the run in --out."""
    start_from: Annotated[str | None, arg(name="from")] = None
    """A run, model folder or hub id whose weights to start from, with a fresh optimizer."""
    device: DeviceFlag = None
    show: bool = False
    """Print the resolved recipe and stop."""
    overrides: Suppress[tuple[str, ...]] = ()
    """The words --any.field value, which `main` sets aside before tyro sees them."""

    def run(self) -> int:
        from bd3lm.recipe import parse_overrides
        from bd3lm.runs import is_run, resolve_stages, train_stages

        if self.preset is None and self.config is None:
            raise ValueError("a preset or --config must be given; `bd3lm presets` lists the presets")
        stages = resolve_stages(
            self.preset,
            config=self.config,
            overrides=parse_overrides(self.overrides),
            start_from=self.start_from,
        )
        if self.show:
            _show(stages)
            return 0
        out = self.out or Path("runs") / (self.preset or (self.config.stem if self.config else "run"))
        if self.resume and not is_run(out):
            raise ValueError(f"--resume needs a run to go on with, but {out} holds none")
        runs = train_stages(stages, out, resume=self.resume, device=self.device)
        last = runs[-1].trainer
        if last.stopped_by == "signal":
            return 130
        if last.engine.is_main:
            print(f"wrote {runs[-1].out / 'model'}")
            if self.preset in ("demo", "demo-paper"):
                from bd3lm.commands.demo import report

                report(runs, out)
        return 0


def _show(stages: Sequence[tuple[str, Any]]) -> None:
    """Print recipes as a file that --config takes: one as it is, several each under its stage."""
    import yaml

    from bd3lm.recipe import recipe_to_dict

    recipes = {name: recipe_to_dict(recipe) for name, recipe in stages}
    print(
        yaml.safe_dump(recipes if len(recipes) > 1 else next(iter(recipes.values())), sort_keys=False), end=""
    )


@dataclass(frozen=True)
class Presets:
    """List the named runs."""

    def run(self) -> int:
        from bd3lm.presets import PRESETS

        width = max(map(len, PRESETS))
        for name, preset in PRESETS.items():
            print(f"{name:{width}}  {preset.description}")
        return 0


def set_aside_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Split `train`'s words into its own flags and the --any.field value pairs, wherever they stand."""
    if words[:1] != ["train"]:
        return words, []
    own = {
        "--out",
        "--config",
        "--resume",
        "--no-resume",
        "--from",
        "--device",
        "--show",
        "--no-show",
        "--help",
    }
    kept, overrides, rest = ["train"], [], words[1:]
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word.partition("=")[0] in own:
            kept.append(word)
            continue
        overrides.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return kept, overrides
