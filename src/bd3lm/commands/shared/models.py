"""Which model a command uses: the checks that are possible before torch is loaded."""

import sys
from collections.abc import Iterable
from pathlib import Path

from bd3lm import interop
from bd3lm.io.files import local_path
from bd3lm.io.places import STAGES_FILE
from bd3lm.io.terminal import say
from bd3lm.limits import check_device, check_lean

SUFFIX = ".jsonl"
PLAIN_TEXT = ".txt"


def check_models(
    sources: Iterable[str | Path], *, device: str | None = None, lean: float | None = None
) -> None:
    """Refuse, before torch is loaded, a source that is no model, an invalid device or an invalid lean."""
    if device is not None:
        check_device(device, "--device")
    if lean is not None:
        check_lean(lean, "--lean")
    for source in sources:
        folder = local_path(source)
        if not (folder / STAGES_FILE).is_file():  # for such a run `one_model` takes the last stage
            interop.check_source(source)


def one_model(source: str | Path) -> str | Path:
    """The source itself; for a run of several stages the last one begun, with a line on standard error."""
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
    say(f"{source} is a run of several stages: using the last one begun, {stage}", to=sys.stderr)
    return stage


def is_file_of_samples(source: str) -> bool:
    """Whether a source names a file of samples, rather than a model."""
    return source.endswith((SUFFIX, PLAIN_TEXT))
