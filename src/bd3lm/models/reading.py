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


@dataclass(frozen=True, kw_only=True)
class DraftReading:
    """How a network reads masks behind a text, which draft what follows it; its causal law verifies them.

    Places are counted from the first token after the text, which the causal law gives without a draft.
    """

    mask_id: int
    masks: int
    """In a group."""
    shifted: bool
    """Whether a mask predicts the token after its place, and not the one at it. A group that is not shifted
    begins with a mask for place 1, so it drafts a token less than it has masks."""
    adds: bool = False
    """Whether the low-rank additions of the network apply to the masks."""
    previous_token: bool = False
    """Whether a mask is shown as the mask plus the token before it."""

    def __post_init__(self) -> None:
        least = self.masks_for(1)
        if self.masks < least:
            raise ValueError(f"masks must be at least {least}, so that a token is drafted, got {self.masks}")

    @property
    def places(self) -> range:
        """Those that are drafted."""
        return range(2, self.masks + 1 + self.shifted)

    def masks_for(self, drafts: int) -> int:
        """How many masks a group needs to draft so many tokens."""
        return drafts if self.shifted or not drafts else drafts + 1
