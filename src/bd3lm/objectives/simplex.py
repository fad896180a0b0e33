"""SSD-LM (Han et al., arXiv 2210.17432): Gaussian diffusion of a block on the simplex, with a cross-entropy
loss."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import (
    Draws,
    LevelSampler,
    SquaredCosine,
    add_noise,
    almost_one_hot,
    conditioning_noise,
    derive_seed,
)
from bd3lm.models import Bidirectional, BlockDiffusion, Denoiser, packed, send
from bd3lm.objectives.base import Objective, TokenBatch, TokenLoss, check_scored, token_nats
from bd3lm.objectives.places import Places


@dataclass(frozen=True, kw_only=True)
class SimplexDiffusionLoss(Objective):
    """−log p(x^b | w̃_t^b, x^{<b}) at every token of a block, t uniform on 1..T (SSD-LM, section 3.1).

    A noisy token enters the network as the mean embedding under softmax(w̃_t), a clean one by its id. SSD-LM
    trains one block of each sequence, at a random place and after the text before it. Here one pass trains
    every block of the sequence, each at its own t, as in block diffusion: noisy blocks, then the clean text,
    under the layout `BlockDiffusion`.

    It is a plain cross-entropy, neither a likelihood nor a bound on one.

    Some positions have no noise. A given token keeps its almost one-hot w̃_0 inside a noisy block. Absent
    tokens, and positions missing from an incomplete last block (1,024 tokens are 40 blocks of 25 and one of
    24), hold the embedding of the mask at every t, as in `SimplexWriter`. The present tokens of that block
    may attend to them, as in block diffusion; no other block sees them.
    """

    block_size: int
    mask_id: int
    steps: int = 5000
    """T, the number of steps in the grid of times. A sampler may take another number of steps."""
    simplex_scale: float = 5.0
    """K."""
    schedule: SquaredCosine = field(default_factory=SquaredCosine)
    levels: LevelSampler = field(default_factory=LevelSampler)
    pure_noise: bool = False
    """Always use t = T: how well a block is predicted from the text before it alone."""

    def __post_init__(self) -> None:
        for name in ("block_size", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mask_id < 0:
            raise ValueError(f"mask_id must be a token id, got {self.mask_id}")
        if not 0.0 < self.simplex_scale < math.inf:
            raise ValueError(f"simplex_scale must be positive and finite, got {self.simplex_scale}")

    @property
    def is_bound(self) -> bool:
        return False

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator | None, device: torch.device | str
    ) -> Draws:
        whole = self._whole_blocks(length)
        return self.levels.draw(rows, whole, self.block_size, generator=generator, device=device)

    def loss(self, model: Denoiser, batch: TokenBatch, draws: Draws | None) -> TokenLoss:
        if draws is None:
            raise ValueError("draws must be given: diffusion adds noise at random")
        length = batch.tokens.shape[1]
        if draws.tokens.shape[1] != self._whole_blocks(length) or draws.block_size != self.block_size:
            raise ValueError(
                f"draws must be for {self._whole_blocks(length)} positions in blocks of {self.block_size}, "
                f"got {draws.tokens.shape[1]} in blocks of {draws.block_size}"
            )
        check_scored(batch, self.mask_id)
        scored = Places.of(batch.scored, model.device)
        states = scored.pick(self._states(model, batch, draws)[:, :length])
        nats = token_nats(model.head(states), scored.pick(batch.tokens), self.mask_id)
        counted = send(batch.scored, model.device).to(nats.dtype)
        return TokenLoss(nats=scored.spread(nats), weight=counted)

    def _states(self, model: Denoiser, batch: TokenBatch, draws: Draws) -> Tensor:
        """Hidden states of all noisy blocks, including missing positions of the last one."""
        length = batch.tokens.shape[1]
        whole = self._whole_blocks(length)
        missing = (0, whole - length)
        tokens = F.pad(batch.tokens, missing, value=self.mask_id)
        scored = F.pad(batch.scored, missing, value=False)
        absent = batch.absent if batch.absent is not None else torch.zeros_like(batch.scored)
        absent = F.pad(absent, missing, value=True)
        levels = torch.ones_like(draws.levels) if self.pure_noise else draws.levels
        t = (levels * self.steps).ceil().clamp(1, self.steps)
        alpha_bar = self.schedule.alpha_bar(t / self.steps).repeat_interleave(self.block_size, dim=1)
        noise = send(conditioning_noise(1.0 - alpha_bar), model.device) if model.uses_noise else None
        tokens, absent, kept = (
            send(each, model.device) for each in (tokens, absent, alpha_bar.masked_fill(~scored, 1.0))
        )
        noisy = self._noisy(model, tokens, kept, draws)
        mask = model.embed(tokens.new_full((), self.mask_id))  # a new_tensor would wait for the device
        noisy = torch.where(absent.unsqueeze(-1), mask, noisy)
        documents = batch.documents
        if documents is not None and whole > length:  # missing positions belong to the last text
            documents = torch.cat((documents, documents[:, -1:].expand(-1, whole - length)), dim=1)
        if whole == self.block_size:
            return model(noisy, layout=packed(Bidirectional(whole), documents, model.device), noise=noise)
        inputs = torch.cat((noisy, model.embed(tokens)), dim=1)
        noise = None if noise is None else F.pad(noise, (0, whole))  # the clean text has no noise
        layout = packed(BlockDiffusion(whole, self.block_size), documents, model.device)
        return model(inputs, layout=layout, noise=noise)

    def _noisy(self, model: Denoiser, tokens: Tensor, alpha_bar: Tensor, draws: Draws) -> Tensor:
        """Embeddings of softmax(w̃_t), computed row by row so that no row's noise is kept. The probabilities
        are kept for the gradient of the embedding: one (rows, length, vocabulary) in total.

        Each row's noise has its own generator, with a seed drawn for that row. So a rank or a micro-batch,
        which has only its rows, adds the same noise as the whole batch would.
        """
        size, scale = model.vocab_size, self.simplex_scale
        embedded = []
        for row, bits in enumerate(draws.spare[:, 0].contiguous().view(torch.int64).tolist()):
            seed = derive_seed("simplex", bits)
            generator = torch.Generator(tokens.device).manual_seed(seed)
            normal = torch.randn(tokens.shape[1], size, generator=generator, device=tokens.device)
            w = add_noise(almost_one_hot(tokens[row], size, scale), alpha_bar[row], normal, scale)
            embedded.append(model.embed(w.softmax(-1)))
        return torch.stack(embedded)

    def _whole_blocks(self, length: int) -> int:
        return -(-length // self.block_size) * self.block_size
