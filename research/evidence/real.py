"""Real text to hold the models' texts against: some of the held-out text, to be judged, and document lengths.

    python -m research.evidence.real evidence.tar.xz FOLDER

Writes FOLDER/real-x1.jsonl and real-x2.jsonl for `bd3lm judge`, texts of one and two contexts as training
wraps them, spread over the test split, and `real.json`, beside the results, with the size of the training
text and the lengths of its documents.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bd3lm.data import Tokenizer, TokenShards, WrappedTokens
from bd3lm.evaluation import LengthStatistics
from bd3lm.evaluation.lengths import evenly_spaced
from bd3lm.sampling import token_entropy
from research.evidence.measures import TRAINED_ON, Texts
from research.evidence.prepare import unpack
from research.evidence.runs import COMMON
from research.evidence.samples import RESULTS, write_texts

REAL = "real.json"
_KEPT = 1000  # lengths: enough for a histogram


def real_name(contexts: int) -> str:
    return f"real-x{contexts}"


def real_samples(shards: TokenShards, length: int, count: int) -> list[dict[str, Any]]:
    """Sequences of the test split, evenly spaced, as `bd3lm sample --out` would record them."""
    rows = WrappedTokens(shards, "test", length)
    every = len(rows) // count
    if not every:
        raise ValueError(f"the test split must hold {count} sequences of {length} tokens, got {len(rows)}")
    texts = [rows[place : place + 1][0].tolist() for place in range(0, every * count, every)]
    return [_record(tokens, shards.tokenizer) for tokens in texts]


def _record(tokens: Sequence[int], tokenizer: Tokenizer) -> dict[str, Any]:
    pieces = (list(piece) for ends, piece in groupby(tokens, tokenizer.eos_id.__eq__) if not ends)
    return {
        "documents": [tokenizer.decode(piece) for piece in pieces],
        "length": len(tokens),
        "given": 0,
        "evaluations": 0,
        "redraws": 0,
        "redrawn_passes": 0,
        "stopped_by": "length",
        "entropy": round(token_entropy(torch.tensor(tokens)).item(), 6),
        "dtype": "none",
        "settings": {"length": len(tokens)},
    }


def real_facts(shards: TokenShards) -> dict[str, Any]:
    lengths = shards.lengths("train")
    return {
        "data": shards.fingerprint[:16],
        "vocabulary": shards.tokenizer.vocab_size,
        "tokens": shards.split("train").tokens,
        **asdict(LengthStatistics.of(lengths)),
        "lengths": evenly_spaced(lengths, _KEPT),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out texts for `bd3lm judge`, and document lengths.")
    parser.add_argument("data", type=Path, help="what prepare.py wrote")
    parser.add_argument("folder", type=Path, help="the folder for the texts")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"the folder for {REAL}")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        unpack(options.data, Path(scratch))
        shards = TokenShards(Path(scratch) / TRAINED_ON)
        for contexts in (1, 2):
            samples = real_samples(shards, contexts * COMMON["data"]["context"], Texts().count)
            print(f"wrote {write_texts(options.folder / f'{real_name(contexts)}.jsonl', samples)}")
        (options.results / REAL).write_text(json.dumps(real_facts(shards)) + "\n", "utf-8")
    print(f"wrote {options.results / REAL}")


if __name__ == "__main__":
    main()
