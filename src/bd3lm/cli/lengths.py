"""`bd3lm lengths`."""

from dataclasses import dataclass

from bd3lm.cli.flags import (
    DeviceFlag,
    LeanFlag,
    ModelsOrFiles,
    NucleusFlag,
    NucleusRuleFlag,
    OptionalFile,
    OptionalFolder,
    OptionalInt,
    SamplingDTypeFlag,
    TokenizerFlag,
    check_sources,
)


@dataclass(frozen=True)
class Lengths:
    """How long the documents are that models write, and what ends them, beside the training set's."""

    sources: ModelsOrFiles
    """Runs, model folders or hub ids, which write documents; or .jsonl files that `bd3lm sample --out` wrote
    without a prompt."""
    count: int = 500
    """Documents of each model."""
    length: OptionalInt = None
    """Tokens a document may reach; by default 16 contexts. SEDD and uniform noise reach one context."""
    entropy_floor: float = 4.0
    """End a document whose last tokens have less entropy, in nats; 0 ends none."""
    entropy_window: int = 256
    """How many last tokens that is."""
    nucleus: NucleusFlag = None
    nucleus_rule: NucleusRuleFlag = "inclusive"
    lean: LeanFlag = None
    seed: int = 0
    batch: int = 32
    """Documents written side by side."""
    data: OptionalFolder = None
    """A folder of token shards to compare with; by default what each run was trained on."""
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: SamplingDTypeFlag = None
    out: OptionalFile = None
    """Write the records, all lengths and settings, to this new JSON file too."""

    def run(self) -> int:
        from rich.console import Console

        from bd3lm.commands.lengths import Writing, report_lengths
        from bd3lm.commands.records import check_new_file, write_records
        from bd3lm.commands.sample_files import open_source
        from bd3lm.commands.samples import sampling_dtype
        from bd3lm.commands.subjects import Subject, check_lean_is_for

        check_sources(self, for_files=("data", "out"))
        check_new_file(self.out)
        writing = Writing(
            count=self.count,
            length=self.length,
            entropy_floor=self.entropy_floor,
            entropy_window=self.entropy_window,
            nucleus_p=self.nucleus,
            nucleus_rule=self.nucleus_rule,
            batch_size=self.batch,
            seed=self.seed,
        )
        options = {
            "device": self.device,
            "dtype": sampling_dtype(self.dtype, self.device),
            "tokenizer": self.tokenizer,
            "lean": self.lean,
        }
        sources = [open_source(source, **options) for source in self.sources]
        check_lean_is_for([each for each in sources if isinstance(each, Subject)], self.lean)
        write_records(self.out, report_lengths(sources, writing, data=self.data, notes=Console(stderr=True)))
        return 0
