"""How a network reads a text in blocks: one value for training, sampling and measuring."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BlockReading:
    """How a network reads a block and the text before it."""

    block_size: int
    mask_id: int
    causal_clean: bool = False
    """Clean tokens attend causally instead of block-causally."""
    previous_token: bool = False
    """Show each masked token together with the token before it, from its own block or from the text before.
    An autoregressive network predicts a token at a position much like this one."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if self.mask_id < 0:
            raise ValueError(f"mask_id must be a token id, at least 0, got {self.mask_id}")


@dataclass(frozen=True, kw_only=True)
class DraftReading:
    """How a network reads masks after a text in order to draft the next tokens. Its causal predictions verify
    the drafts.

    Places are counted from the first token after the text, which the causal prediction gives without a draft.
    """

    mask_id: int
    masks: int
    """Masks in a group."""
    shifted: bool
    """A mask predicts the token after its place instead of the token at its place. A group that is not
    shifted begins with a mask for place 1, so it drafts one token less than it has masks."""
    adds: bool = False
    """Apply the network's low-rank additions at the masks."""
    previous_token: bool = False
    """Embed a mask as the mask plus the token before it."""

    def __post_init__(self) -> None:
        least = self.masks_for(1)
        if self.masks < least:
            raise ValueError(f"masks must be at least {least}, to draft at least one token, got {self.masks}")

    @property
    def places(self) -> range:
        """The places that are drafted."""
        return range(2, self.masks + 1 + self.shifted)

    def masks_for(self, drafts: int) -> int:
        """How many masks a group needs to draft this many tokens."""
        return drafts if self.shifted or not drafts else drafts + 1
