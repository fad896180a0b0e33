"""Resolve a model source (a folder, a file or a hub id) to a local path, and check what the folder holds."""

import difflib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

from bd3lm.io.files import local_path, read_text
from bd3lm.io.hub import FILE_SUFFIXES, PICKLE_SUFFIXES, hub_reason, is_hub_id
from bd3lm.io.places import BOX, RUN_MODEL, STAGES_FILE, box_folder
from bd3lm.io.settings_text import MOST_BYTES, load_settings
from bd3lm.parsing import did_you_mean, shown

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"  # the index of weights in several files
HUB = "hf://"  # marks a hub id that could be taken for a path
LIGHTNING_SUFFIX, GGUF_SUFFIX = ".ckpt", ".gguf"

_FILES = f"a {LIGHTNING_SUFFIX} or {GGUF_SUFFIX} file"
_ALLOWED = f"an existing folder, {_FILES}, a hub id 'owner/name' or {BOX!r}"

_PATTERNS = ("*.json", "*.safetensors", "*.jinja")  # the only files ever downloaded: none of them can run
_OTHER_COPIES = ("*/*", "consolidated*.safetensors")  # copies of the weights for other programs

_MOST_CONFIG = 10**6  # bytes; those of known models have some thousands
_MOST_INDEX = 10**8  # bytes; a hundred thousand tensors need about 10 million
_LISTED = 5  # how many files an error names

_OTHER_OPTIONS = ("device", "dtype", "lightning", "tokenizer")  # options of load itself

_NO_PICKLES = (
    "pickles are not loaded, because they can run any code. Load it once with the program that wrote it, and "
    "save its tensors with safetensors.torch.save_file"
)


class HubOptions(TypedDict, total=False):
    """How to download from the hub. Local sources ignore these options."""

    revision: str | None
    cache_dir: str | Path | None
    token: str | bool | None
    force_download: bool
    local_files_only: bool


def resolve(source: str | Path, **hub: Unpack[HubOptions]) -> Path:
    """The local path of a source. For a training run's folder, the path of its model; for a run of several
    stages, that of the last stage with a model.

    "box" is the model that comes with this package; for a folder of that name write ./box, or pass a Path.
    Only a hub id is ever downloaded: "hf://owner/name", or "owner/name" if no local folder has that name.
    """
    _check_options(hub)
    path = _here(source)
    if path is not None:
        if hub.get("revision") is not None:
            raise ValueError(f"revision must be None for a local path, got {hub['revision']!r} with {path}")
        return next(filter(_holds_config, (path / RUN_MODEL, path, *_stage_models(path))), path)
    asked = hub_id("source", source, allowed=_ALLOWED, names=(BOX,))
    try:
        patterns = {"allow_patterns": list(_PATTERNS), "ignore_patterns": list(_OTHER_COPIES)}
        return Path(snapshot_download(asked, **patterns, **hub))
    except Exception as error:  # the hub's client has many: offline, not found, no access, bad revision
        here = _not_here("source", source, (BOX,))
        it = f"source {source!r}" if asked != source else f"{here} As a hub id it"
        raise ValueError(f"{it} could not be downloaded: {hub_reason(error)}") from error


def _holds_config(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file()


def _stage_models(run: Path) -> list[Path]:
    """Where the stages of a run keep their models, the last stage first; none for other folders."""
    file = run / STAGES_FILE
    if not file.is_file():
        return []
    try:
        stages = load_settings(read_text(file, most=MOST_BYTES))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    names = reversed(stages) if isinstance(stages, dict) else ()
    # A bare name, so that no path leads out of the run.
    bare = [name for name in names if isinstance(name, str) and name != ".." and Path(name).name == name]
    return [run / name / RUN_MODEL for name in bare]


def snapshot_download(repo_id: str, **options: Any) -> str:
    """The function of the hub's client. It is imported late, so that a mistyped name need not wait for it."""
    from huggingface_hub import snapshot_download as download

    return str(download(repo_id, **options))


def check_source(source: str | Path) -> None:
    """Refuse what `resolve` would refuse, and a folder or file that holds no model, without a download.

    This is quick: the error for a mistyped name need not wait for torch.
    """
    if _here(source) is None:
        hub_id("source", source, allowed=_ALLOWED, names=(BOX,))
        return
    path = resolve(source)
    if path.is_dir():
        read_config(path)
    elif path.suffix not in (LIGHTNING_SUFFIX, GGUF_SUFFIX):
        raise refuse_file(path)


def _here(source: str | Path) -> Path | None:
    """The path that a source names; None if nothing is there, so it can only be a hub id."""
    if not isinstance(source, str | Path):
        raise ValueError(f"source must be {_ALLOWED}, got {source!r}")
    path = box_folder("source") if source == BOX else local_path(source)
    # The path of an empty string would be the working folder.
    return path if source != "" and path.exists() else None


def hub_id(
    argument: str,
    source: str | Path,
    *,
    allowed: str,
    names: Collection[str] = (),
    needs_owner: bool = True,
) -> str:
    """The hub id in a source that is not a local path. A mistyped path is refused, without asking the hub.

    `names` are other valid values, which may be what was meant.
    """
    asked = "" if isinstance(source, Path) else source.removeprefix(HUB)
    if not is_hub_id(asked, needs_owner=needs_owner):
        if str(source).startswith(HUB):
            shapes = f"'{HUB}owner/name'" if needs_owner else f"'{HUB}owner/name' or '{HUB}name'"
            raise ValueError(
                f"{argument}: a hub id must look like {shapes} without a file name, got {source!r}"
            )
        raise ValueError(f"{_not_here(argument, source, names)} It must be {allowed}")
    if asked == source and (Path(asked).parent.is_dir() or _nearest_folder(Path(asked))):
        raise ValueError(
            f"{_not_here(argument, source, names)} To load it from the Hugging Face hub, write '{HUB}{asked}'"
        )
    return asked


def check_folder(argument: str, folder: Path) -> None:
    """Refuse a source that is not a local folder, where only a folder will do."""
    if not folder.is_dir():
        raise ValueError(f"{_not_here(argument, folder)} It must be an existing folder")


def _check_options(hub: Mapping[str, object]) -> None:
    """Refuse keywords that are not options of the hub: a local source would ignore them silently."""
    options = tuple(HubOptions.__annotations__)
    for name in hub:
        if name not in options:
            hint = did_you_mean(name, (*_OTHER_OPTIONS, *options)) or ","
            raise ValueError(
                f"{name} is not an option for loading{hint} "
                f"allowed are {', '.join((*_OTHER_OPTIONS, *options))}"
            )


def _not_here(argument: str, source: str | Path, names: Collection[str] = ()) -> str:
    """The sentence that nothing is there, with the nearest existing folder or the nearest of some names."""
    near = _nearest_folder(local_path(source))
    hint = did_you_mean(str(source).lower(), names) or "." if near is None else f", did you mean '{near}'?"
    kind = "file" if str(source).endswith(FILE_SUFFIXES) else "folder"
    return f"{argument}: there is no {kind} {str(source)!r} here{hint}"


def _nearest_folder(path: Path) -> Path | None:
    """The existing folder with nearly this path, if each part of it is near; None without one."""
    found = Path(path.anchor)
    for part in path.relative_to(found).parts:
        if not (found / part).is_dir():
            folders = [each.name for each in found.iterdir() if each.is_dir()]
            near = difflib.get_close_matches(part, folders, n=1)
            if not near:
                return None
            part = near[0]
        found /= part
    return found if path.parts else None


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        stages = sorted(model.parent.parent for model in folder.glob(f"*/{RUN_MODEL}/{CONFIG_NAME}"))
        if stages:
            names = ", ".join(stage.name for stage in stages)
            raise ValueError(
                f"folder {folder} holds a run with the stages {names}: name one of them, such as {stages[-1]}"
            )
        if (folder / "checkpoints").is_dir():
            raise ValueError(
                f"folder {folder} holds a run without a model: it is still training, or was stopped before "
                "it could write one; `bd3lm train --resume` continues it"
            )
        weights_file(folder)  # refuses a folder of pickles first
        raise ValueError(f"folder {folder} must hold a {CONFIG_NAME}, got none")
    text = read_text(path, most=_MOST_CONFIG)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError if it is nested too deeply
        raise ValueError(f"{path} must be valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, got {shown(data)}")
    return data


def weights_file(folder: Path) -> Path:
    """The folder's model.safetensors. A folder with pickles instead is refused."""
    path = folder / WEIGHTS_NAME
    if path.is_file():
        return path
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ValueError(
            f"folder {folder} must hold a {WEIGHTS_NAME}, got {', '.join(pickles)}: {_NO_PICKLES}"
        )
    raise ValueError(f"folder {folder} must hold a {WEIGHTS_NAME}, got none (other weights are not loaded)")


def weights_files(folder: Path) -> list[Path]:
    """The folder's model.safetensors, or the shards that its index names. The error names missing shards."""
    if (folder / WEIGHTS_NAME).is_file() or not (folder / INDEX_NAME).is_file():
        return [weights_file(folder)]
    names = sorted(set(read_index(folder).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise ValueError(
            f"folder {folder} must hold all {len(names)} files that its {INDEX_NAME} names, missing: "
            f"{', '.join(missing[:_LISTED])}{more}"
        )
    return [folder / name for name in names]


def read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor, from the index of weights in several files."""
    path = folder / INDEX_NAME
    try:
        data = json.loads(read_text(path, most=_MOST_INDEX))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be valid JSON: {error}") from error
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path} must hold a weight_map of tensors and their files, got {shown(files)}")
    for name in files.values():
        bare = isinstance(name, str) and re.fullmatch(r"\w[\w.-]{0,200}\.safetensors", name)
        if not bare:
            raise ValueError(
                f"files in {path} must be bare names that end in .safetensors, got {shown(name)}"
            )
    return files


def refuse_file(path: Path) -> ValueError:
    """The error for a file that is not a checkpoint of a known kind."""
    allowed = f"source must be a folder, {_FILES} or a hub id"
    if path.suffix in PICKLE_SUFFIXES:
        return ValueError(f"{allowed}, got {path}: {_NO_PICKLES}")
    return ValueError(f"{allowed}, got the file {path}; try its folder")
