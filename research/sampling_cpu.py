"""Tokens per second of the samplers on a CPU, and how a token's cost grows with the length of the text.

    OMP_NUM_THREADS=2 PYTHONPATH=src python research/sampling_cpu.py

Random weights: speed does not depend on them. Prints a table of each part and a JSON line for every row.
"""

import json
import time

import torch

from bd3lm.models import BlockReading, Transformer, TransformerConfig
from bd3lm.sampling import AutoregressiveWriter, BlockWriter, Request, Sharpening, Writer, sample

CONTEXT, VOCABULARY = 256, 1024
MASK = VOCABULARY - 1
REPEATS = 3


def writers(model: Transformer) -> dict[str, Writer]:
    sharpening = Sharpening(top_p=0.9)
    found: dict[str, Writer] = {
        f"block {n}": BlockWriter(
            model, reading=BlockReading(block_size=n, mask_id=MASK), context=CONTEXT, sharpening=sharpening
        )
        for n in (4, 16)
    }
    found["autoregressive"] = AutoregressiveWriter(
        model, mask_id=MASK, context=CONTEXT, sharpening=sharpening
    )
    return found


def seconds(writer: Writer, rows: int, length: int) -> float:
    requests = [Request(torch.tensor([0]), seed, length) for seed in range(rows)]
    begun = time.perf_counter()
    sample(writer, requests, batch_size=rows)
    return time.perf_counter() - begun


def report(name: str, rows: int, length: int, times: list[float]) -> None:
    rates = sorted(rows * (length - 1) / each for each in times)
    median, low, high = rates[len(rates) // 2], rates[0], rates[-1]
    print(f"| {name} | {rows} | {length:,} | {median:,.0f} | {low:,.0f} to {high:,.0f} |")
    print(
        json.dumps(
            {"method": name, "batch": rows, "length": length, "tokens_per_second": median, "runs": rates}
        )
    )


def main() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=VOCABULARY, layers=4, hidden=256, heads=4, context=CONTEXT, dropout=0.0
    )
    model = Transformer(config).eval()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {torch.get_num_threads()} threads")
    print("| method | batch | length | tokens/s, median | runs |\n|---|---|---|---|---|")
    for rows in (1, 32):
        for name, writer in writers(model).items():
            seconds(writer, rows, 32)
            report(name, rows, 256, [seconds(writer, rows, 256) for _ in range(REPEATS)])
    # One text of each length after the other, and again, so that a busy moment does not hit one length alone.
    lengths = (256, 512, 1024, 2048, 4096, 8192)
    times: dict[int, list[float]] = {length: [] for length in lengths}
    writer = writers(model)["block 4"]
    for _ in range(REPEATS):
        for length in lengths:
            times[length].append(seconds(writer, 1, length))
    for length in lengths:
        report("block 4", 1, length, times[length])


if __name__ == "__main__":
    main()
