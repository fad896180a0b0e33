"""The parts of a recipe that every method shares, as plain values that are checked without torch."""

from dataclasses import dataclass

from bd3lm.io.files import local_path
from bd3lm.runs.presets import how_to_prepare

BUILTIN = "builtin"
"""The name of the corpus that comes with Python."""


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The data of a run."""

    path: str = BUILTIN
    """A folder that `bd3lm data prepare` wrote, or builtin, which is prepared by the run itself."""
    context: int = 1024
    most_context: int | None = None
    """The context of the network, if sequences in training are shorter."""
    bos_eos: bool = False
    """Put BOS and EOS at the ends of each sequence, as MDLM does."""
    skip: int | None = None
    """Sequences to skip at the start of the order. By default a stage begins where the one before it stopped.
    """
    builtin_vocabulary: int = 1024
    """Vocabulary of the BPE trained on the built-in corpus."""
    skip_long: bool = False
    """Leave out conversations that are longer than the context."""
    validation_sequences: int | None = None
    """Held-out sequences to validate on; by default all."""
    validation_batch: int = 16

    @property
    def reads(self) -> int:
        """The context of the network."""
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
    """How many checkpoints to keep."""

    keep_last: int = 2
    keep_best: int = 1


@dataclass(frozen=True, kw_only=True)
class TrackerRecipe:
    """Trackers besides metrics.csv."""

    tensorboard: bool = False
    wandb_project: str | None = None
    nelbo_variance_batches: int = 0
    """Measure the variance of the training loss over blocks on this many held-out batches; 0: do not."""
    gradient_variance_batches: int = 0
    """Measure the gradient's variance over this many batches at validation; 0: do not."""
    sample_texts: int = 0
    """Write this many texts at each validation, always with the same seeds, with the averaged weights; 0:
    none."""
    sample_prompts: tuple[str, ...] = ()
    """The prompts of these texts, used in turn; by default none."""
    sample_tokens: int | None = None
    """Most tokens of each text, its prompt included; by default 128, or one context if that is less."""

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
    """Refuse a `data.path` that is not a folder, and say how to make one."""
    if not local_path(path).is_dir():
        raise ValueError(
            f"data.path must be a folder of token shards, got {path}, which does not exist; make it with "
            f"{how_to_prepare(path)}; if it has moved, name it with --data.path (train) or --data (eval)"
        )
