"""The random numbers of a training or evaluation batch, drawn once for the whole (global) batch.

Estimators draw random numbers only here: every masking rule (`masking`) is a pure function of them. A rank or
a micro-batch takes its rows of the global draws. So strata span ranks and gradient accumulation, and a test
can replace chance by enumeration or quadrature.

All draws are in double precision. A float32 uniform is a multiple of 2^-24: compared with a mask rate of 1e-9
it would mask far too often, and the weight 1/t would make that visible.
"""

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

Assignment = Literal["permuted", "ordered"]
Strata = Literal["permuted", "ordered", "none"]


@dataclass(frozen=True)
class Draws:
    """Uniform numbers in (0, 1] for `rows` sequences of `length` tokens in blocks."""

    levels: Tensor  # (rows, blocks): the noise level of a block, as a quantile
    spare: Tensor  # (rows, blocks): for other draws of a rule, given the level, such as a count or a seed
    tokens: Tensor  # (rows, length): which tokens of a block are masked first

    def __getitem__(self, rows: slice) -> "Draws":
        """The draws of some rows of the global batch: a rank's share, or a micro-batch."""
        return Draws(levels=self.levels[rows], spare=self.spare[rows], tokens=self.tokens[rows])

    @property
    def block_size(self) -> int:
        """The number of tokens in a block."""
        return self.tokens.shape[1] // self.levels.shape[1]

    def to(self, device: torch.device | str) -> "Draws":
        """The draws on another device."""
        return Draws(
            levels=self.levels.to(device), spare=self.spare.to(device), tokens=self.tokens.to(device)
        )


@dataclass(frozen=True, kw_only=True)
class LevelSampler:
    """Draws one noise level per (sequence, block) in (0, 1] (Suppl. C.4).

    `stratified` divides the unit interval into rows·blocks equal strata, and each block draws inside its own:
    the low-discrepancy sampler of Kingma et al. The paper assigns stratum (k−1)B + b to block b of sequence
    k, which ties the noise level to the place in the batch. At batch size 1 the first block then always has
    the least noise, so estimates of anything that differs between blocks are biased. By default a random
    permutation therefore assigns the strata; `assignment="ordered"` is the paper's way.

    `least` excludes lower levels, as the reference implementation does, and with them a part of every bound:
    levels are then uniform on (least, 1].
    """

    stratified: bool = True
    assignment: Assignment = "permuted"
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.assignment not in ("permuted", "ordered"):
            raise ValueError(f"assignment must be 'permuted' or 'ordered', got {self.assignment!r}")
        if not 0.0 <= self.least < 1.0:
            raise ValueError(f"least must lie in [0, 1), got {self.least}")

    @classmethod
    def spread(cls, strata: Strata) -> Self:
        """The sampler for one of the names in `Strata`."""
        return cls(stratified=False) if strata == "none" else cls(assignment=strata)

    @property
    def is_uniform(self) -> bool:
        """Whether the level of each block, taken alone, is uniform. Otherwise no estimate is unbiased."""
        return self.least == 0.0 and (not self.stratified or self.assignment == "permuted")

    def sample(
        self,
        rows: int,
        blocks: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Levels (rows, blocks). Each, taken alone, is uniform on (0, 1] with permuted strata or none."""
        total = rows * blocks
        levels = 1.0 - torch.rand(total, generator=generator, device=device, dtype=torch.float64)
        if self.stratified:
            if self.assignment == "permuted":
                strata = torch.randperm(total, generator=generator, device=device)
            else:
                strata = torch.arange(total, device=device)
            levels = (strata + levels) / total
        if self.least:
            levels = self.least + (1.0 - self.least) * levels
        return levels.view(rows, blocks)

    def draw(
        self,
        rows: int,
        length: int,
        block_size: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> Draws:
        """All random numbers that a batch of `rows` sequences needs."""
        blocks = blocks_in(length, block_size)

        def uniform(*shape: int) -> Tensor:
            return 1.0 - torch.rand(*shape, generator=generator, device=device, dtype=torch.float64)

        return Draws(
            levels=self.sample(rows, blocks, generator=generator, device=device),
            spare=uniform(rows, blocks),
            tokens=uniform(rows, length),
        )


def blocks_in(length: int, block_size: int) -> int:
    """B = L / L', which must be a whole number."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if length < 1 or length % block_size:
        raise ValueError(
            f"length must be a positive multiple of block_size, got length {length} and "
            f"block_size {block_size}"
        )
    return length // block_size
