"""The parts of a recipe that any method has, as plain values, which are checked without torch."""

from dataclasses import dataclass

from bd3lm.io.files import local_path
from bd3lm.runs.presets import how_to_prepare

BUILTIN = "builtin"
"""The path of the corpus that every Python carries."""


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Where the tokens are."""

    path: str = BUILTIN
    """A folder that `bd3lm data prepare` wrote; or builtin, prepared on the way."""
    context: int = 1024
    most_context: int | None = None
    """What the network can read at once, where its sequences in training are shorter."""
    bos_eos: bool = False
    """Put BOS and EOS at the ends of each sequence, as MDLM does."""
    skip: int | None = None
    """Sequences of the order to begin after. By default a stage begins where the one before it stopped."""
    builtin_vocabulary: int = 1024
    """Size of the BPE trained for the built-in corpus."""
    skip_long: bool = False
    """Leave out conversations that are longer than the context."""
    validation_sequences: int | None = None
    """How many held-out sequences to validate on; by default all."""
    validation_batch: int = 16

    @property
    def reads(self) -> int:
        """What the network can read at once."""
        return self.most_context or self.context

    def __post_init__(self) -> None:
        for name in ("context", "validation_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.builtin_vocabulary < 258:
            raise ValueError(
                "builtin_vocabulary must be at least 258 (256 bytes and two special tokens), "
                f"got {self.builtin_vocabulary}"
            )
        if self.validation_sequences is not None and self.validation_sequences < 1:
            raise ValueError(
                f"validation_sequences must be at least 1, or null for all, got {self.validation_sequences}"
            )
        if self.most_context is not None and self.most_context < self.context:
            raise ValueError(
                f"most_context must be at least the context of {self.context}, got {self.most_context}"
            )
        if self.skip is not None and self.skip < 0:
            raise ValueError(f"skip must not be negative, got {self.skip}")


@dataclass(frozen=True, kw_only=True)
class CheckpointRecipe:
    """How many checkpoints are kept."""

    keep_last: int = 2
    keep_best: int = 1


@dataclass(frozen=True, kw_only=True)
class TrackerRecipe:
    """Who is told besides metrics.csv."""

    tensorboard: bool = False
    wandb_project: str | None = None
    nelbo_variance_batches: int = 0
    """Measure the variance of the training loss over blocks on this many held-out batches; 0 does not."""
    gradient_variance_batches: int = 0
    """Measure the gradient's variance over this many batches at validation; 0 does not."""
    sample_texts: int = 0
    """Write this many texts at each validation, always of the same seeds, with the averaged weights; 0 writes
    none."""
    sample_prompts: tuple[str, ...] = ()
    """What they begin with, in turn; by default nothing."""
    sample_tokens: int | None = None
    """Tokens of each at most, its prompt included; by default 128, or one context where that is less."""

    def __post_init__(self) -> None:
        for name in ("nelbo_variance_batches", "gradient_variance_batches"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative (0 measures none), got {getattr(self, name)}")
        if self.sample_texts < 0:
            raise ValueError(f"sample_texts must not be negative (0 writes none), got {self.sample_texts}")
        if self.sample_tokens is not None and self.sample_tokens < 1:
            raise ValueError(f"sample_tokens must be at least 1, got {self.sample_tokens}")
        if len(self.sample_prompts) > self.sample_texts:
            raise ValueError(
                f"sample_texts must be at least the number of sample_prompts {len(self.sample_prompts)}, "
                f"got {self.sample_texts}"
            )
        if self.sample_tokens is not None and not self.sample_texts:
            raise ValueError(f"sample_tokens needs sample_texts, got {self.sample_tokens} and 0 texts")


def check_data(path: str) -> None:
    """Refuse a `data.path` that is no folder, and say how one is made."""
    if not local_path(path).is_dir():
        raise ValueError(
            f"data.path must be a folder of token shards, got {path}, which does not exist; make it with "
            f"{how_to_prepare(path)}; or, if it moved, say where: --data.path (train), --data (eval)"
        )
