"""Which model a command is about, as far as that is known before torch is there to load it."""

import sys
from collections.abc import Iterable
from pathlib import Path

from bd3lm import interop
from bd3lm.io.files import local_path
from bd3lm.io.terminal import say
from bd3lm.limits import check_device, check_lean
from bd3lm.runs.folders import STAGES_FILE

SUFFIX = ".jsonl"
PLAIN_TEXT = ".txt"


def check_models(
    sources: Iterable[str | Path], *, device: str | None = None, lean: float | None = None
) -> None:
    """Refuse what is no model, as a mistyped name is none, what is no device to load it on, and what is no
    lean to give it: before torch is loaded, which takes seconds."""
    if device is not None:
        check_device(device, "--device")
    if lean is not None:
        check_lean(lean, "--lean")
    for source in sources:
        folder = local_path(source)
        if not (folder / STAGES_FILE).is_file():  # of such a run `one_model` takes the last stage
            interop.check_source(source)


def one_model(source: str | Path) -> str | Path:
    """The source itself; for a run of several stages the last that has begun, which standard error tells."""
    folder = local_path(source)
    models = (folder, folder / interop.RUN_MODEL)
    if source in ("", interop.BOX) or not folder.is_dir():
        return source
    if any((model / interop.CONFIG_NAME).is_file() for model in models):
        return source
    if not (folder / STAGES_FILE).is_file():
        return source
    from bd3lm.runs.stages import run_stages

    stage = run_stages(folder)[-1]
    say(f"{source} is a run of several stages: taking the last that was begun, {stage}", to=sys.stderr)
    return stage


def is_file_of_samples(source: str) -> bool:
    """Whether a source names a file of samples, rather than a model."""
    return source.endswith((SUFFIX, PLAIN_TEXT))
