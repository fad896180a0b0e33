"""What `adapt` and `tune` share: resuming, training, and the summary at the end."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bd3lm.commands.shared.command import Command, flags_of
from bd3lm.commands.shared.recipes import check_later_stages, show
from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from bd3lm.data import Tokenizer
    from bd3lm.runs.plan import Run
    from bd3lm.runs.recipe import Recipe

_OF_EVERY_RUN = ("resume", "out", "device", "show", "overrides")


def train(stages: "Sequence[tuple[str, Recipe]]", out: Path, *, resume: bool, device: str | None) -> int:
    """Train and print the result; return the exit status."""
    from bd3lm.runs.train import train_stages

    runs = train_stages(stages, out, resume=resume, device=device)
    last = runs[-1]
    if last.trainer.stopped_by == "signal":
        return 130
    if last.trainer.engine.is_main:
        _say_what_it_is(last, out)
    return 0


def go_on(command: Any, *, hint: str) -> int:
    """Resume a run with its own recipes, for a command that has only --resume and --out."""
    from bd3lm.runs.folders import begun_stages, is_run

    resume: bool = command.resume
    out: Path | None = command.out
    if not resume or out is None:
        raise ValueError(f"MODEL must be given, or --resume with the --out of a run; {hint}")
    if given := _given(command, _OF_EVERY_RUN):
        raise ValueError(f"{given} is for a new run, which needs a MODEL, and none was given")
    if not (is_run(out) or begun_stages(out)):
        raise ValueError(
            f"--resume needs a run to continue, and {out} holds none: repeat the whole command if it stopped "
            "while it prepared its texts"
        )

    from bd3lm.runs.recipe import parse_overrides  # this import loads torch
    from bd3lm.runs.stages import saved_stages

    stages = saved_stages(out, parse_overrides(command.overrides))
    check_later_stages(stages)
    if command.show:
        show(stages)
        return 0
    return train(stages, out, resume=True, device=command.device)


def check_overrides(overrides: dict[str, Any], *, hint: str, text: str) -> None:
    """Refuse recipe fields for which these commands have flags."""
    if "start_from" in overrides:
        raise ValueError(f"--start_from is MODEL in this command: {hint}")
    if "path" in overrides.get("data", {}):
        raise ValueError(f"--data.path is --data in this command, or {text}")


def own_tokenizer(source: str, *, needed_by: str) -> "Tokenizer":
    """The tokenizer of a model, which its training text must use."""
    from bd3lm import interop

    path = interop.resolve(source)
    tokenizer = interop.tokenizer_for(path, interop.config_of(path))
    if tokenizer is None:
        raise ValueError(
            f"{source} was saved without a tokenizer, which {needed_by}: prepare text with the right one, "
            "and give it as --data"
        )
    return tokenizer


def show_with_memory(stages: "Sequence[tuple[str, Recipe]]", source: str) -> None:
    """Print the recipes and the memory that they need."""
    from bd3lm.runs.plan import memory_of

    for name, recipe in stages:
        say(f"# {name}: at least {memory_of(recipe, source)}")
    show(stages)


def _given(command: Command, others: Collection[str]) -> str | None:
    """The first flag, other than the excepted ones, that is not at its default."""
    return next(
        (
            each.name
            for each in flags_of(type(command))
            if each.field not in others and getattr(command, each.field) != each.default
        ),
        None,
    )


def _say_what_it_is(run: "Run", out: Path) -> None:
    """Say where the model is, which law it writes under, and what to do next."""
    method = run.config.method
    say(f"wrote {run.out / 'model'}")
    law = f"it writes under the {method.default_law} law"
    base = run.config.base
    if base is not None and method.trains_beside:
        law += f", which is exactly that of {base.source}"
    elif others := [each for each in method.laws if each != method.default_law]:
        law += f", and also has the {others[0]} law"
    say(law)
    chat = run.shards.meta.inputs.chat
    if chat is not None:
        say(f"next: bd3lm eval {out} measures the perplexity of held-out answers")
        if chat.template is not None:
            say(f"      bd3lm chat {out}")
    else:
        say(f"next: bd3lm sample {out}")
    if method.trains_beside or len(method.laws) > 1:
        say(f"      bd3lm acceptance {out} measures how often its drafts are accepted")
