"""The model that a command measures, with its run if it comes from one."""

import copy
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bd3lm import interop
from bd3lm.commands.shared.models import one_model
from bd3lm.commands.shared.records import FOLDER, weights_digest, why_not_writable
from bd3lm.lm import LanguageModel, load
from bd3lm.methods import Law
from bd3lm.models.devices import pick_device
from bd3lm.runs.folders import RECIPE_FILE

if TYPE_CHECKING:  # this import loads all of training, which `bd3lm sample box` does not need
    from bd3lm.data import TokenShards
    from bd3lm.runs.recipe import Recipe


@dataclass(frozen=True)
class Subject:
    """A named model. `run` is the folder of its run, with its recipe, or None."""

    name: str
    model: LanguageModel
    folder: Path
    run: Path | None
    unkept: list[dict[str, Any]] = field(default_factory=list, compare=False)
    """Records that could not be stored next to the run; they last as long as this process."""

    @classmethod
    def open(
        cls,
        source: str | Path,
        *,
        device: str | None = None,
        dtype: str | None = None,
        tokenizer: str | Path | None = None,
        lean: float | None = None,
        law: Law | None = None,
    ) -> "Subject":
        """Open a run, model folder, GGUF file or hub id to be measured.

        `lean` replaces a block model's lean, `law` a joint model's law. A run of several stages is opened at
        its last stage, under the name of that stage.
        """
        source = one_model(source)
        folder = interop.resolve(source)
        model = load(
            folder,
            device=pick_device(device),
            dtype=getattr(torch, dtype) if dtype else None,
            tokenizer=tokenizer,
        )
        is_run = folder.name == interop.RUN_MODEL and (folder.parent / RECIPE_FILE).is_file()
        subject = cls(str(source), model, folder, folder.parent if is_run else None)
        return subject.under(law, lean=lean)

    def under(self, law: Law | None = None, *, lean: float | None = None) -> "Subject":
        """The same model under another of its laws, with another lean if that law has an order."""
        model = self.model
        if law is not None:
            try:
                model = model.with_law(law)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from None
        if lean is not None and model.config.method.has_order:
            model = model.with_lean(lean)
        found = copy.copy(self)  # including what is cached about its weights and folder
        object.__setattr__(found, "model", model)
        return found

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> str:
        return str(self.model.network.dtype).removeprefix("torch.")

    @property
    def lean(self) -> float:
        """The lean of the order in which it reveals a block; 0 for a method without one."""
        return self.model.config.method.order_lean

    @property
    def law(self) -> Law:
        """The law that it writes and is measured under."""
        return self.model.law

    @property
    def laws(self) -> tuple[Law, ...]:
        """All its laws, its default law first."""
        method = self.model.record.method
        own = method.default_law
        return own, *(law for law in method.laws if law != own)

    @property
    def title(self) -> str:
        """The name of the method in tables."""
        return self.model.config.title

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer: perplexities per token are comparable only if it is the same."""
        return None if self.model.tokenizer is None else self.model.tokenizer.fingerprint

    @cached_property
    def weights(self) -> str:
        """sha256 of the weights; records name it."""
        return weights_digest(self.folder)

    @cached_property
    def can_keep(self) -> bool:
        """Whether records can be stored next to its run. If not, a warning says so once."""
        if self.run is None:
            return False
        place = self.run / FOLDER
        if (why := why_not_writable(place)) is not None:
            warnings.warn(
                f"measurements of {self.name} are shown but not stored, because {place} cannot be written "
                f"to: {why}",
                stacklevel=2,
            )
        return why is None

    @cached_property
    def recipe(self) -> "Recipe | None":
        """The recipe of its run."""
        from bd3lm.runs.stages import read_recipe

        return None if self.run is None else read_recipe(self.run)

    def shards(self) -> "TokenShards":
        """The data that its run was trained on."""
        from bd3lm.runs.plan import run_data

        if self.run is None or self.recipe is None:
            raise ValueError(
                f"{self.name} is not a training run, so its data is unknown: name the data with --data"
            )
        return run_data(self.recipe.data, self.run)


def tell_what_is_not_kept(subjects: Iterable[Subject]) -> None:
    """Warn before anything is measured, while there is still time to copy the run elsewhere."""
    for subject in subjects:
        _ = subject.can_keep


def check_lean_is_for(subjects: Iterable[Subject], lean: float | None) -> None:
    """Refuse a --lean that would affect none of the models."""
    subjects = list(subjects)
    if lean is None or any(subject.model.config.method.has_order for subject in subjects):
        return
    if any(subject.model.record.method.has_order for subject in subjects):
        raise ValueError(
            "--lean sets the order within a block, and no model here writes under the block law, got "
            f"{lean:g}; --law block selects it"
        )
    raise ValueError(
        f"--lean sets the order within a block, and no model here is a block diffusion model, got {lean:g}"
    )
