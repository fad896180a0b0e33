"""The one model that a command needs, where a run of several stages is named."""

import sys
from pathlib import Path

from bd3lm import interop
from bd3lm.io.files import local_path


def one_model(source: str | Path) -> str | Path:
    """The source itself; for a run of several stages its last one, which is said on standard error."""
    folder = local_path(source)
    models = (folder, folder / interop.RUN_MODEL)
    if source in ("", interop.BOX) or not folder.is_dir():
        return source
    if any((model / interop.CONFIG_NAME).is_file() for model in models):
        return source
    from bd3lm.runs.stages import STAGES_FILE, run_stages  # brings all of training with it

    if not (folder / STAGES_FILE).is_file():
        return source
    stage = run_stages(folder)[-1]
    print(f"{source} is a run of several stages: taking the last that was begun, {stage}", file=sys.stderr)
    return stage
