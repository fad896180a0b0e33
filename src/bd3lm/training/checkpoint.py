"""A run's checkpoints: complete or absent, checked before use. The store keeps the last and the best.

    step-00001234/
      state.json                              the run's state, and what is in which file, with digests
      tensors.safetensors                     or, for sharded parameters, one file per process:
      tensors-00000-of-00002.safetensors

A checkpoint is written under another name, forced to disk and renamed. A run that is killed at any moment
therefore leaves only complete checkpoints, and leftovers that the next save removes. All processes of a run
must see the same folder. An error in one process is reported to all.
"""

import errno
import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bd3lm.io.files import sync_folder
from bd3lm.training.distributed import Engine
from bd3lm.training.index import Damaged, read_index
from bd3lm.training.tensor_files import (
    DTYPES,
    check_file,
    check_match,
    read_tensors,
    write_index,
    write_tensors,
)

Groups = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group ("model", "ema", "exp_avg", ..) and name, whole or sharded."""


class CheckpointStore:
    """A folder of checkpoints. It keeps the last few, and the best few by score (lower is better)."""

    def __init__(self, folder: Path | str, *, keep_last: int = 2, keep_best: int = 1) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        if keep_best < 0:
            raise ValueError(f"keep_best must not be negative, got {keep_best}")
        self.folder = Path(folder)
        self.keep_last, self.keep_best = keep_last, keep_best

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, intact or damaged, in ascending order."""
        return sorted(self._found())

    def latest(self) -> int | None:
        """The step of the newest checkpoint, or None if there is none."""
        return max(self._found(), default=None)

    def save(
        self,
        step: int,
        tensors: Groups,
        state: Mapping[str, Any],
        *,
        engine: Engine,
        score: float | None = None,
    ) -> Path:
        """Write a checkpoint, then remove the ones that should not be kept. Every process must call this.

        `state` must be JSON and comes back as JSON returns it: tuples as lists, keys as strings. An existing
        checkpoint of the same step is replaced. If one process cannot write, all processes raise the same
        OSError, and the existing checkpoints remain.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        named = _named(tensors)
        plain = _as_json(state)
        final = self.folder / f"step-{step:08d}"
        draft = self.folder / f"tmp-{final.name}"

        def finish() -> None:
            write_index(draft, named, parts, step=step, score=score, state=plain)
            self._put_in_place(draft, final)
            self._rotate(step)

        try:
            _on_main(engine, lambda: self._begin(draft))
            parts = _on_all(engine, lambda: write_tensors(draft, named, engine))
            _on_main(engine, finish)
        except OSError as error:
            if engine.is_main:
                shutil.rmtree(draft, ignore_errors=True)
            raise OSError(
                error.errno,
                f"the checkpoint of step {step} could not be written to {self.folder}: {error.strerror}; "
                "earlier checkpoints are intact",
            ) from None
        return final

    def load_into(
        self,
        tensors: Groups,
        *,
        engine: Engine,
        step: int | None = None,
        required: bool = True,
        check_state: Callable[[int, dict[str, Any]], object] = lambda step, state: None,
    ) -> dict[str, Any] | None:
        """Fill tensors in place from the newest intact checkpoint, or from that of `step`. Returns its state.

        The requested groups must match the stored ones name by name; other groups are not read. A damaged
        checkpoint is skipped, with a warning, in favor of the one before it. Without `required`, a folder
        without checkpoints returns None. A folder with only damaged checkpoints is always an error: otherwise
        the run would silently start over. Nothing is filled before everything is checked, including by
        `check_state`, which gets the step and the state and raises `Damaged` if no run can continue from it.
        Every process must call this.
        """
        named = _named(tensors)
        found: list[int] = json.loads(engine.broadcast_text(json.dumps(self.steps())))
        if step is not None:
            if step not in found:
                raise ValueError(
                    f"step must have a checkpoint in {self.folder}, which has {found}, got {step}"
                )
            found = [step]
        elif not found and not required:
            return None
        problems = []
        for candidate in reversed(found):
            folder = self._found().get(candidate, self.folder / f"step-{candidate:08d}")
            problem = _problem(folder, engine, check_state)
            if problem is None:
                index = read_index(folder)
                check_match(named, index, folder)
                read_tensors(folder, named, index)
                return index.state
            problems.append(f"{folder.name}: {problem}")
            if engine.is_main:
                warnings.warn(f"skipping the damaged checkpoint {folder}: {problem}", stacklevel=2)
        raise ValueError(
            f"{self.folder} holds no intact checkpoint ({'; '.join(problems) or 'it holds none'})"
        )

    def _found(self) -> dict[int, Path]:
        """Each step with its folder. A checkpoint set aside for replacement counts while its place is
        empty."""
        found: dict[int, Path] = {}
        for prefix in ("old-step-", "step-"):
            for path in self.folder.glob(f"{prefix}*"):
                number = path.name.removeprefix(prefix)
                if re.fullmatch(r"\d{8,}", number) and path.is_dir():
                    found[int(number)] = path
        return found

    def sweep_up(self) -> None:
        """Remove what an interrupted save left behind, and restore what it had set aside. For the one writing
        process."""
        for path in self.folder.glob("tmp-*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        for path in self.folder.glob("old-step-*"):
            place = self.folder / path.name.removeprefix("old-")
            if place.exists():
                worse = place if _damage(place) and not _damage(path) else path
                self._discard(worse)
            if not place.exists():
                path.rename(place)

    def _begin(self, draft: Path) -> None:
        """Start a draft in an empty place."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            sync_folder(self.folder.parent)
        self.sweep_up()
        draft.mkdir()

    def _put_in_place(self, draft: Path, final: Path) -> None:
        aside = self.folder / f"old-{final.name}"
        if final.exists():  # a folder cannot be renamed over another; `_found` covers the moment in between
            final.rename(aside)
        draft.rename(final)
        sync_folder(self.folder)
        if aside.exists():
            self._discard(aside)

    def _rotate(self, newest: int) -> None:
        """Remove checkpoints that are neither among the last nor among the best.

        Checkpoints of later steps stay: a run that went back must not destroy another run's work.
        """
        found = {step: path for step, path in sorted(self._found().items()) if step <= newest}
        scores = {step: _score(path) for step, path in found.items()}
        ranked = sorted((score, step) for step, score in scores.items() if score is not None)
        kept = {*list(found)[-self.keep_last :], *(step for _, step in ranked[: self.keep_best])}
        for step in found.keys() - kept:
            self._discard(found[step])

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint so that nobody sees it half removed. If the removal fails, it only costs
        space."""
        litter = self.folder / f"tmp-removed-{path.name}"
        try:
            path.rename(litter)
            shutil.rmtree(litter)
        except OSError as error:
            warnings.warn(f"{path} could not be removed: {error.strerror}", stacklevel=2)


def optimizer_groups(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """AdamW's state as groups of named tensors: "exp_avg", "exp_avg_sq" and "optimizer_step".

    These are the optimizer's own tensors: to restore it, let `CheckpointStore.load_into` fill them. An
    optimizer that has not stepped yet first gets the zeros it would start with.
    """
    groups: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}, "optimizer_step": {}}
    settings = {id(member): group for group in optimizer.param_groups for member in group["params"]}
    for name, parameter in parameters.items():
        if id(parameter) not in settings:
            raise ValueError(f"parameters must be the optimizer's own, but {name!r} is not")
        group = settings[id(parameter)]
        state = optimizer.state[parameter]
        if not state:
            counted_on = parameter.device if group["fused"] or group["capturable"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=counted_on)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for kind, key in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), ("optimizer_step", "step")):
            groups[kind][name] = state[key]
    return groups


def _named(groups: Groups) -> dict[str, Tensor]:
    """Every tensor by its stored name, "group/name"."""
    named = {}
    for group, tensors in groups.items():
        if not group or "/" in group:
            raise ValueError(f"a group's name must not be empty or contain '/', got {group!r}")
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise ValueError(
                    f"{group}/{name} must have one of the dtypes {', '.join(map(str, DTYPES))}, "
                    f"got {tensor.dtype}"
                )
            named[f"{group}/{name}"] = tensor
    return named


def _as_json(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(state)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"state must be JSON: {error}") from None
    return plain


def _score(folder: Path) -> float | None:
    """The score of a checkpoint; None if it has no score that can be read and compared."""
    try:
        score = read_index(folder).score
    except ValueError:
        return None
    return score if score is not None and math.isfinite(score) else None


def _problem(
    folder: Path, engine: Engine, check_state: Callable[[int, dict[str, Any]], object]
) -> str | None:
    """What is wrong with a checkpoint. Each process checks some of the files, and all get the same answer."""

    def look() -> str | None:
        return _damage(folder, check_state, rank=engine.rank, world=engine.world)

    return next((problem for problem in _on_all(engine, look) if problem is not None), None)


def _damage(
    folder: Path,
    check_state: Callable[[int, dict[str, Any]], object] = lambda step, state: None,
    *,
    rank: int = 0,
    world: int = 1,
) -> str | None:
    """What is wrong with a checkpoint, as far as the files tell that this process checks."""
    try:
        index = read_index(folder)
        check_state(index.step, index.state)
        for name in sorted(index.files)[rank::world]:
            check_file(folder / name, index)
    except Damaged as problem:
        return str(problem)
    return None


def _on_all(engine: Engine, work: Callable[[], Any]) -> list[Any]:
    """Run work on every process and exchange the results as JSON. An OSError on one process is raised on
    all."""
    answer: dict[str, Any]
    try:
        answer = {"result": work()}
    except OSError as error:
        answer = {"errno": error.errno or errno.EIO, "reason": error.strerror or str(error)}
    answers = [json.loads(text) for text in engine.gather_text(json.dumps(answer))]
    for rank, given in enumerate(answers):
        if "errno" in given:
            where = f" (process {rank} of {engine.world})" if engine.world > 1 else ""
            raise OSError(given["errno"], f"{given['reason']}{where}")
    return [given["result"] for given in answers]


def _on_main(engine: Engine, work: Callable[[], None]) -> None:
    """Run work on the main process while the others wait for its result."""
    _on_all(engine, work if engine.is_main else lambda: None)
