"""How a network reads a text in blocks: one value for whatever trains, samples or measures it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BlockReading:
    """What a network is shown of a block, and of the text before it."""

    block_size: int
    mask_id: int
    causal_clean: bool = False
    """Whether clean tokens attend causally rather than block-causally."""
    previous_token: bool = False
    """Whether a masked token is shown together with the token before it, be that of its block or of the text
    before: much as a position of an autoregressive network begins."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if self.mask_id < 0:
            raise ValueError(f"mask_id must be a token id, at least 0, got {self.mask_id}")
