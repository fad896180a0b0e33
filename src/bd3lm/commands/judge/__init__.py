"""`bd3lm judge`: generative perplexity of samples, drawn from a model or read from a file."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    DeviceFlag,
    DType,
    LawFlag,
    LeanFlag,
    MaxDocumentFlag,
    ModelsOrFiles,
    OptionalFile,
    RecordsFlag,
    SamplingDTypeFlag,
    SeedFlag,
    StepsFlag,
    TokenizerFlag,
    TopPFlag,
    TopPRuleFlag,
    check_sources,
    named,
)

_FOR_FILES = (
    "field",
    "max_document",
    "judge",
    "window",
    "stride",
    "judge_batch_size",
    "mauve",
    "out",
    "device",
    "judge_dtype",
)


@dataclass(frozen=True)
class Judge(Command):
    """Measure generative perplexity: how likely another language model finds samples.

    Defaults follow the paper.
    """

    kind = "judge"

    sources: Annotated[
        ModelsOrFiles,
        arg(
            help="Runs, model folders, GGUF files or hub ids to draw samples from; or files to judge as they "
            "are: of `bd3lm sample --out`, other .jsonl with texts in --field, or .txt with blank lines "
            "between texts. Of a text with a prompt, only what follows the prompt is scored, given the "
            "prompt."
        ),
    ] = ()
    field: Annotated[
        str | None,
        named(
            "NAME",
            help="Field of a .jsonl file that holds a text or a list of texts. Default: text.",
        ),
    ] = None
    max_document: MaxDocumentFlag = None
    judge: Annotated[str, arg(metavar="MODEL")] = "gpt2-large"
    """The judge, a causal language model: a local folder, a GGUF file, or a hub id to download."""
    count: int = 300
    """Samples per model and length."""
    length: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (1024, 2048)
    """Tokens per sample, not stopping at end tokens. Each length is judged separately."""
    top_p: TopPFlag = None
    top_p_rule: TopPRuleFlag = "inclusive"
    steps: StepsFlag = None
    law: LawFlag = None
    lean: LeanFlag = None
    entropy_floor: float = 4.0
    """Draw a sample again if its last 256 tokens have less entropy than this, in nats. 0: never."""
    redraws: int = 20
    """How often to draw a sample again before it is cut short and counted."""
    batch_size: int = 32
    """Samples drawn in parallel."""
    seed: SeedFlag = 0
    tokenizer: TokenizerFlag = None
    window: int = 1024
    """Tokens that the judge reads at once."""
    stride: int = 512
    """Tokens by which the window moves in longer texts."""
    judge_batch_size: int = 8
    """Windows per batch of the judge."""
    mauve: OptionalFile = None
    """Also compute MAUVE against the human texts in this .jsonl, .txt or .parquet file."""
    out: RecordsFlag = None
    device: DeviceFlag = None
    dtype: SamplingDTypeFlag = None
    judge_dtype: DType = "float32"
    """Precision of the judge."""

    def run(self) -> int:
        from bd3lm.commands.shared.models import SUFFIX
        from bd3lm.commands.shared.records import check_new_file, write_records

        check_new_file(self.out)
        if self.field is not None and not any(source.endswith(SUFFIX) for source in self.sources):
            raise ValueError(
                f"--field is for texts in {SUFFIX} files, and no source is one, got {self.field!r}"
            )
        check_sources(self, for_files=_FOR_FILES)
        self._check()

        import torch  # the checks above do not need it

        from bd3lm.commands.judge.judging import check_flags, open_judge, run_judge
        from bd3lm.commands.shared.sample_files import open_sources
        from bd3lm.io.console import Console
        from bd3lm.models.devices import pick_device

        check_flags(self)
        records = run_judge(
            open_sources(self, field=self.field or "text"),
            self,
            load_judge=lambda: open_judge(
                self.judge, device=pick_device(self.device), dtype=getattr(torch, self.judge_dtype)
            ),
            notes=Console(stderr=True),
        )
        write_records(self.out, records)
        return 0

    def _check(self) -> None:
        """Refuse what is wrong before torch is loaded."""
        from bd3lm.limits import check_counts

        check_counts(count=self.count, judge_batch_size=self.judge_batch_size, batch_size=self.batch_size)
        if not self.length or len(set(self.length)) < len(self.length):
            raise ValueError(f"--length must be one or more different lengths, got {self.length}")
        if not self.entropy_floor and self.redraws != Judge.redraws:
            raise ValueError(f"--redraws needs an entropy floor above 0, got {self.redraws} without one")
        if self.mauve is not None and not self.mauve.is_file():
            raise ValueError(f"--mauve must be a file of human texts, and {self.mauve} is not a file")
