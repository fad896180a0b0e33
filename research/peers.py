"""A network of today beside `transformers`, in one run: the training step of a joint model, and sampling.

    PYTHONPATH=src python research/peers.py --commit COMMIT --out peers.jsonl

On a GPU, alone. The same shape with random weights on both sides, turn about: a step over noisy and clean
text (1,024 positions for a context of 512) with AdamW and bfloat16 autocast, theirs by sdpa under a dense
mask and not compiled; then texts of 512 tokens with a nucleus of 0.9, theirs by `generate`, static cache.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from bd3lm.bench import Shape
from bd3lm.bench.sampling import SamplingCase, sampling_run
from bd3lm.bench.training import TrainingCase, random_tokens, training_step
from bd3lm.diffusion import Counts, LevelSampler
from bd3lm.models import BlockDiffusion

Step = Callable[[], object]
Make = Callable[[], Iterator[Step]]


def their_network(shape: Shape, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """The network of a shape as `transformers` has it."""
    network = shape.network
    config = LlamaConfig(
        vocab_size=network.vocab_size,
        hidden_size=network.hidden,
        intermediate_size=network.mlp_width,
        num_hidden_layers=network.layers,
        num_attention_heads=network.heads,
        num_key_value_heads=network.kv_heads,
        head_dim=network.head_dim,
        max_position_embeddings=max(network.context, 1024),
        rms_norm_eps=network.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": network.rotary_base},
        tie_word_embeddings=network.tied,
        attn_implementation="sdpa",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, dtype)


def their_training(shape: Shape, batch: int, device: torch.device) -> Iterator[Step]:
    """Steps of a joint model: masked tokens by count, and the next tokens of the clean text."""
    model = their_network(shape, device, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    length, mask_id = shape.context, shape.vocabulary - 1
    layout = BlockDiffusion(length, shape.block_size, causal_clean=True, read_clean=True)
    seen = layout.dense(device=device)
    mask = torch.zeros(seen.shape, device=device, dtype=torch.bfloat16).masked_fill(~seen, -torch.inf)
    mask = mask.expand(batch, 1, -1, -1)
    positions = layout.text_positions(device).expand(batch, -1)
    clean = random_tokens(batch, shape).to(device)
    scored = torch.ones_like(clean, dtype=torch.bool)
    rule, generator = Counts(), torch.Generator(device).manual_seed(0)

    def step() -> None:
        draws = LevelSampler().draw(batch, length, shape.block_size, generator=generator, device=device)
        masks = rule(draws, scored)
        masked, weight = masks.masked[:, 0], masks.weight[:, 0]
        tokens = torch.cat((torch.where(masked, mask_id, clean), clean), dim=1)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
        noisy, following = logits.split(length, dim=1)
        nats = F.cross_entropy(noisy.flatten(0, 1).float(), clean.flatten(), reduction="none")
        next_nats = F.cross_entropy(following[:, :-1].flatten(0, 1).float(), clean[:, 1:].flatten())
        loss = (nats * weight.flatten()).sum() / clean.numel() + next_nats
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    yield step


def our_training(shape: Shape, batch: int, device: torch.device, *, steps: int) -> Iterator[Step]:
    case = TrainingCase(shape=shape, batch_size=batch, compile=device.type == "cuda", ema=False)
    with training_step(case, device=device, steps=steps) as step:
        yield step


def their_sampling(shape: Shape, batch: int, length: int, device: torch.device) -> Iterator[Step]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = their_network(shape, device, dtype).eval()
    prompt = torch.zeros(batch, 1, dtype=torch.long, device=device)

    @torch.no_grad()
    def write() -> Tensor:
        found: Tensor = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            top_p=0.9,
            top_k=0,
            min_new_tokens=length - 1,
            max_new_tokens=length - 1,
            cache_implementation="static",
        )
        return found

    yield write


def our_sampling(shape: Shape, batch: int, length: int, device: torch.device) -> Iterator[Step]:
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    with sampling_run(
        SamplingCase(shape=shape, batch_size=batch, length=length, dtype=dtype), device=device
    ) as run:
        yield lambda: run(length)


def seconds(
    step: Step, device: torch.device, *, warmup: int, repeats: int
) -> tuple[list[float], float | None]:
    """Of each call, and the most memory that any held, in GiB."""
    on_gpu = device.type == "cuda"
    for _ in range(warmup):
        step()
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begun)
    return found, torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None


def turn_about(
    sides: dict[str, Make],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    turns: int,
) -> Iterator[dict[str, Any]]:
    """Each side in its turn, made anew, so that neither has the memory of the other."""
    for turn in range(turns):
        for name, make in sides.items():
            for step in make():
                each, peak = seconds(step, device, warmup=warmup, repeats=repeats)
                yield {"side": name, "turn": turn, "seconds": median(each), "each": each, "peak_gib": peak}
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--works", nargs="+", choices=("train", "sample"), default=["train", "sample"])
    parser.add_argument("--size", default="smollm2-135m")
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sampled", type=int, nargs="+", default=[1, 64], help="texts side by side")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    said = {"size": options.size, "vocabulary": options.vocabulary, "context": options.context}
    joint, ar = (Shape(method=method, dropout=0.0, **said) for method in ("joint", "ar"))
    steps, length = 5 + options.steps, options.length
    train: dict[str, Make] = {
        "bd3lm": lambda: our_training(joint, options.batch, device, steps=steps),
        "transformers": lambda: their_training(joint, options.batch, device),
    }
    tokens = options.batch * options.context
    works = [("train", options.batch, tokens, train, {"warmup": 5, "repeats": options.steps})]
    for batch in options.sampled:
        sample: dict[str, Make] = {
            "bd3lm": lambda batch=batch: our_sampling(ar, batch, length, device),
            "transformers": lambda batch=batch: their_sampling(ar, batch, length, device),
        }
        works += [("sample", batch, batch * (length - 1), sample, {"warmup": 2, "repeats": 3})]
    with options.out.open("a", encoding="utf-8") as file:
        for work, batch, tokens, sides, times in (each for each in works if each[0] in options.works):
            for found in turn_about(sides, device, turns=options.turns, **times):
                record = {
                    "work": work,
                    "size": options.size,
                    "batch": batch,
                    "tokens_per_second": tokens / found["seconds"],
                    **found,
                    "commit": options.commit,
                    "torch": torch.__version__,
                    "measured": datetime.now(UTC).isoformat(timespec="seconds"),
                }
                file.write(json.dumps(record) + "\n")
                file.flush()
                peak = "" if record["peak_gib"] is None else f", {record['peak_gib']:.1f} GiB"
                print(f"{work} {batch} {record['side']}: {record['tokens_per_second']:,.0f} tokens/s{peak}")


if __name__ == "__main__":
    main()
