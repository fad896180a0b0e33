import pytest

from bd3lm.models import BlockReading


def test_a_reading_needs_blocks_of_tokens_and_a_mask_that_is_one():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        BlockReading(block_size=0, mask_id=0)
    with pytest.raises(ValueError, match="mask_id must be a token id, at least 0, got -1"):
        BlockReading(block_size=1, mask_id=-1)
