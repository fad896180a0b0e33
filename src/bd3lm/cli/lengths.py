"""`bd3lm lengths`."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Lengths:
    """How long the documents are that models write, and what ends them, beside the training set's."""

    sources: Positional[tuple[str, ...]]
    """Runs, model folders or hub ids, which write documents; or .jsonl files that `bd3lm sample --out` wrote
    without a prompt."""
    count: int = 500
    """Documents of each model."""
    length: int | None = None
    """Tokens a document may reach; by default 16 contexts. SEDD and uniform noise reach one context."""
    entropy_floor: float = 4.0
    """End a document whose last tokens have less entropy, in nats; 0 ends none."""
    entropy_window: int = 256
    """How many last tokens that is."""
    nucleus: float | None = None
    """Draw from the likeliest tokens that hold this much probability; 1 is the model itself. By default 0.9,
    for SEDD 0.99, for SSD-LM 0.95."""
    seed: int = 0
    batch: int = 32
    """Documents written side by side."""
    data: Path | None = None
    """A folder of token shards to compare with; by default what each run was trained on."""
    tokenizer: str | None = None
    """For models saved without one: a folder or a name on the hub."""
    device: str | None = None
    """cpu, cuda or cuda:1; by default a GPU where there is one."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Precision of the network; by default that of its weights."""
    out: Path | None = None
    """Write the records, all lengths and settings, to this JSON file too."""

    def run(self) -> int:
        from rich.console import Console

        from bd3lm.commands.judgements import SAMPLES_SUFFIX, Samples
        from bd3lm.commands.lengths import Writing, report_lengths
        from bd3lm.commands.subjects import Subject

        if not self.sources:
            raise ValueError("a source must be given: a run, a model, or a .jsonl file of samples")
        if all(source.endswith(SAMPLES_SUFFIX) for source in self.sources):
            self._refuse_writing()
        writing = Writing(
            count=self.count,
            length=self.length,
            entropy_floor=self.entropy_floor,
            entropy_window=self.entropy_window,
            nucleus_p=self.nucleus,
            batch_size=self.batch,
            seed=self.seed,
        )
        sources = [
            Samples.read(Path(source))
            if source.endswith(SAMPLES_SUFFIX)
            else Subject.open(source, device=self.device, dtype=self.dtype, tokenizer=self.tokenizer)
            for source in self.sources
        ]
        records = report_lengths(sources, writing, data=self.data, notes=Console(stderr=True))
        if self.out is not None:
            self.out.write_text(json.dumps(records, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            print(f"wrote {self.out}")
        return 0

    def _refuse_writing(self) -> None:
        """An option that would do nothing is an error."""
        for field in fields(self):
            if field.name not in ("sources", "data", "out") and getattr(self, field.name) != field.default:
                flag = f"--{field.name.replace('_', '-')}"
                raise ValueError(f"{flag} is for models that write, and all sources are files of samples")
