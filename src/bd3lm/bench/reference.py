"""Speeds of other software on one H200: 12 x 768, vocabulary 50,258, context 1,024.

They were measured before this project began. Training includes AdamW and clipping in the step, batch 32;
sampling writes 512 tokens, nucleus 0.9. Tables show these figures only on the same card and for the same
shape and, for sampling, only if ours is in bfloat16 too: Hugging Face's weights were, and the reference
sampled in its own mixed precision. Neither the scripts that measured them nor their outputs are in this
repository ("The baselines" in docs/performance.md).
"""

from bd3lm.bench.sampling import SamplingCase
from bd3lm.bench.shapes import Shape
from bd3lm.bench.training import TrainingCase

CARD = "H200"
PROVENANCE = (
    "was measured before this project began, on a card of this kind with torch 2.11; neither its script nor "
    "its output is kept (docs/performance.md, The baselines)"
)
# tokens a second, and GiB held, by (method, block size)
_TRAINING = {
    ("bd3lm", 4): (79_500, 66.1, "reference implementation"),
    ("bd3lm", 16): (78_000, 66.1, "reference implementation"),
    ("mdlm", None): (135_700, 48.3, "reference implementation"),
    ("ar", None): (513_000, 21.3, "nanoGPT, compiled, no dropout, no EMA"),
}
# tokens a second, by (method, block size, texts at once)
_SAMPLING = {
    ("bd3lm", 4, 1): (57.7, "reference implementation, one text at a time"),
    ("bd3lm", 16, 1): (68.7, "reference implementation, one text at a time"),
    ("ar", None, 1): (467.0, "Hugging Face generate, static cache, compiled"),
    ("ar", None, 256): (52_400.0, "Hugging Face generate, static cache, compiled"),
}


def training_reference(case: TrainingCase) -> tuple[int, float, str] | None:
    """(tokens/s, GiB, source), if it was measured for exactly this case."""
    if case.batch_size != 32 or not _is_the_shape(case.shape):
        return None
    return _TRAINING.get(_key(case.shape))


def sampling_reference(case: SamplingCase) -> tuple[float, str] | None:
    """(tokens/s, source), if it was measured for exactly this case."""
    if (case.length, case.top_p, case.dtype) != (512, 0.9, "bfloat16") or not _is_the_shape(case.shape):
        return None
    return _SAMPLING.get((*_key(case.shape), case.batch_size))


def _is_the_shape(shape: Shape) -> bool:
    plain = Shape()
    same = ("layers", "hidden", "heads", "context", "vocabulary")
    return all(getattr(shape, name) == getattr(plain, name) for name in same)


def _key(shape: Shape) -> tuple[str, int | None]:
    return shape.method, shape.block_size if shape.method == "bd3lm" else None
