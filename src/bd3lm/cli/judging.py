"""`bd3lm judge`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

_OF_DRAWING = (
    "count",
    "length",
    "nucleus",
    "steps",
    "entropy_floor",
    "redraws",
    "batch",
    "seed",
    "tokenizer",
)


@dataclass(frozen=True)
class Judge:
    """Generative perplexity: how likely samples are to another language model; by default as in the paper."""

    sources: Positional[tuple[str, ...]]
    """Runs, model folders or hub ids, from which samples are drawn; or .jsonl files that `bd3lm sample --out`
    wrote, which are judged as they are."""
    judge: str = "gpt2-large"
    """A causal language model: a local folder, a GGUF file, or a name on the hub, which is downloaded."""
    count: int = 300
    """Samples of each model and length."""
    length: tuple[int, ...] = (1024, 2048)
    """Tokens of a sample, whatever ends come in it; several lengths are judged one by one."""
    nucleus: float | None = None
    """Draw from the likeliest tokens that hold this much probability; 1 is the model itself. By default 0.9,
    for SEDD 0.99, for SSD-LM 0.95."""
    steps: int | None = None
    """Ancestral steps a block (5,000 in the paper) instead of first-hitting ones; for SEDD and D3PM their
    steps, for SSD-LM those of each block."""
    entropy_floor: float = 4.0
    """Draw a sample again whose last 256 tokens have less entropy, in nats; 0 draws none again."""
    redraws: int = 20
    """How often, before it is cut short and counted."""
    batch: int = 32
    """Samples drawn side by side."""
    seed: int = 0
    tokenizer: str | None = None
    """For models saved without one: a folder or a name on the hub."""
    window: int = 1024
    """Tokens that the judge reads at a time."""
    stride: int = 512
    """By how much the window moves on over longer texts."""
    judge_batch: int = 8
    """Windows judged side by side."""
    mauve: Path | None = None
    """Also compute MAUVE against the human text in this file (.jsonl, .txt or .parquet)."""
    out: Path | None = None
    """Write the figures as JSON to this new file; for a run they are also kept in RUN/measured."""
    device: str | None = None
    """cpu, cuda or cuda:1; by default a GPU where there is one."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Precision of the models; by default that of their weights."""
    judge_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision of the judge."""

    def run(self) -> int:
        import torch
        from rich.console import Console

        from bd3lm.commands.judgements import SAMPLES_SUFFIX, Drawing, Judging, run_judge
        from bd3lm.commands.subjects import Subject
        from bd3lm.evaluation import HuggingFaceJudge
        from bd3lm.training import pick_device

        if not self.sources:
            raise ValueError("a source must be given: a run, a model, or a .jsonl file of samples")
        if all(source.endswith(SAMPLES_SUFFIX) for source in self.sources):
            self._refuse_drawing()
        device = pick_device(self.device)
        run_judge(
            self.sources,
            Drawing(
                count=self.count,
                lengths=self.length,
                nucleus_p=self.nucleus,
                steps=self.steps,
                entropy_floor=self.entropy_floor,
                redraws=self.redraws,
                batch_size=self.batch,
                seed=self.seed,
            ),
            Judging(
                window=self.window, stride=self.stride, batch_size=self.judge_batch, reference=self.mauve
            ),
            open_subject=lambda source: Subject.open(
                source, device=str(device), dtype=self.dtype, tokenizer=self.tokenizer
            ),
            load_judge=lambda: HuggingFaceJudge.load(
                self.judge, device=device, dtype=getattr(torch, self.judge_dtype)
            ),
            out=self.out,
            notes=Console(stderr=True),
        )
        return 0

    def _refuse_drawing(self) -> None:
        """An option that would do nothing is an error."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in (*_OF_DRAWING, "dtype"):
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for drawing samples, and all sources are files of samples"
                )
