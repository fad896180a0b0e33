"""Does the fast training step learn what the plain one does, on the same text from the same weights?

Fast: compiled, FlexAttention. Plain: eager, a dense attention mask. Same data order, masks, dropout and first
weights. Prints the losses of both, and their means over the last quarter, beside those of a second plain run
whose first weights are the next numbers of their precision: what rounding alone makes of 200 steps.

    PYTHONPATH=src python research/training_parity.py DATA_FOLDER [--steps 200] [--out results.jsonl]
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bd3lm.data import BatchStream, TokenShards, WrappedTokens
from bd3lm.diffusion import Counts
from bd3lm.models import BlockReading, Transformer, TransformerConfig
from bd3lm.objectives import BlockDiffusionLoss
from bd3lm.training import CheckpointStore, Engine, OptimizerSettings, Trainer, TrainSettings, pick_device


def losses(
    shards: TokenShards, *, fast: bool, steps: int, batch: int, lr: float, nudged: bool = False
) -> list[float]:
    """The training loss of every step; `nudged` from weights that differ in their last bit."""
    torch.manual_seed(0)
    tokenizer = shards.tokenizer
    network = Transformer(TransformerConfig(vocab_size=tokenizer.vocab_size, dropout=0.1))
    if nudged:
        for weights in network.parameters():
            weights.data = torch.nextafter(weights.data, torch.tensor(torch.inf))
    network.attention_backend = "auto" if fast else "dense"
    data = BatchStream(WrappedTokens(shards, "train", 1024), rows=batch, seed=0)
    seen: list[float] = []

    class Watch:
        def on_start(self, trainer: Trainer) -> None: ...
        def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
            seen.append(metrics["train_nats"])

        def on_end(self, trainer: Trainer) -> None: ...

    with TemporaryDirectory() as folder:
        trainer = Trainer(
            network=network,
            objective=BlockDiffusionLoss(
                reading=BlockReading(block_size=4, mask_id=tokenizer.mask_id), masking=Counts()
            ),
            data=data,
            settings=TrainSettings(
                steps=steps,
                global_batch=batch,
                compile=fast,
                log_every=1,
                checkpoint_every=10**9,
            ),
            optimizer=OptimizerSettings(warmup_steps=50, lr=lr),
            engine=Engine(device=pick_device(None)),
            store=CheckpointStore(Path(folder)),
            callbacks=[Watch()],
        )
        trainer.store.save = lambda *a, **k: None  # the weights are of no interest
        trainer.run()
    if len(seen) < steps:
        raise SystemExit(f"stopped after {len(seen)} of {steps} steps: nothing to compare")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4, help="the paper's, unless given")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shards = TokenShards(options.data)
    asked = {"steps": options.steps, "batch": options.batch, "lr": options.lr}
    runs = {
        "fast": losses(shards, fast=True, **asked),
        "plain": losses(shards, fast=False, **asked),
        "plain, nudged": losses(shards, fast=False, nudged=True, **asked),
    }
    last = options.steps // 4
    means = {name: sum(values[-last:]) / last for name, values in runs.items()}
    device = pick_device(None)
    record = {
        "benchmark": "training parity",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        **asked,
        "mean_last_quarter": means,
    }
    for step in range(0, options.steps, max(1, options.steps // 10)):
        print(step, *(f"{name} {values[step]:.4f}" for name, values in runs.items()))
    print(json.dumps(record))
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(record | {"losses": runs}) + "\n")


if __name__ == "__main__":
    main()
