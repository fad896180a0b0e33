"""A method in a package of its own: two tokens a pass, drawn as if the one did not know the other.

What a pass reveals is all of a block of two, so the law it writes is known exactly: the product of both.
"""

from dataclasses import dataclass

import torch

from bd3lm.diffusion import Draws, Masks
from bd3lm.evaluation import Estimator, Sampled
from bd3lm.methods import Frame, Method, Settings, Training
from bd3lm.models import BlockReading, Denoiser
from bd3lm.objectives import BlockDenoiser, Objective, TokenBatch, TokenLoss
from bd3lm.sampling import BlockWriter, FirstHitting, Writer


@dataclass(frozen=True, kw_only=True)
class TwinLoss(Objective):
    """−log p of both tokens of each block, given all before it."""

    reading: BlockReading
    is_bound = True
    is_random = False

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator | None, device: torch.device | str
    ) -> None:
        return None

    def loss(self, model: Denoiser, batch: TokenBatch, draws: Draws | None) -> TokenLoss:
        masked = batch.scored.unsqueeze(1)
        masks = Masks(masked=masked, weight=masked.float(), mask_rate=None)
        total, nats = BlockDenoiser(model, batch, self.reading).weighted_nats(masks)
        return TokenLoss(nats=nats.squeeze(1), weight=batch.scored.to(nats), total=total)


@dataclass(frozen=True, kw_only=True)
class Twins(Method):
    kind = "twins"
    title = "twins"

    def objective(self, training: Training, frame: Frame) -> TwinLoss:
        return TwinLoss(reading=BlockReading(block_size=2, mask_id=frame.mask_id))

    def writer(self, network: Denoiser, settings: Settings, frame: Frame) -> Writer:
        settings.refuse("unmasking", "steps", "stride", "projection", why="twins write two tokens a pass")
        return BlockWriter(
            network,
            reading=BlockReading(block_size=2, mask_id=frame.mask_id),
            context=frame.context,
            unmasking=FirstHitting(tokens_per_pass=2),
            sharpening=settings.sharpening(),
        )

    def estimator(self, name: str, frame: Frame) -> Estimator:
        return Sampled("exact", self.objective(Training(), frame))

    def scoring_unit(self, context: int) -> int:
        return 2
