"""`bd3lm harness`."""

import json
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from bd3lm.cli.flags import (
    DeviceFlag,
    DTypeFlag,
    LeanFlag,
    Model,
    OptionalFile,
    OptionalFolder,
    OptionalInt,
    TokenizerFlag,
    named,
)


@dataclass(frozen=True)
class Harness:
    """Run tasks of lm-evaluation-harness on a model; needs the extra `harness`.

    Tasks that come with the harness download their data from the hub.
    """

    model: Model
    """A run, model folder or hub id."""
    tasks: Annotated[tuple[str, ...], named("TASK ...")]
    """Names of tasks or groups, or patterns such as "arc_*"."""
    include_path: OptionalFolder = None
    """A folder with task files (YAML) of your own."""
    num_fewshot: OptionalInt = None
    """Examples in each context; by default what the task says."""
    limit: OptionalInt = None
    """Only the first so many examples of each task, to try it out."""
    estimator: Annotated[str, arg(metavar="ESTIMATOR")] = "auto"
    """Of likelihoods: exact (blocks of at most 12), nelbo, counts (the same bound with less noise) or iw:K
    (tighter, from K orders). By default exact up to blocks of 8, else a bound."""
    samples: OptionalInt = None
    """Draws of each text, for an estimate that is drawn; by default 16, for iw:K 1 (of K orders)."""
    lean: LeanFlag = None
    steps: OptionalInt = None
    """Steps of the sampler, for SEDD and D3PM, for SSD-LM those of each block."""
    seed: int = 0
    batch: int = 8
    """Texts side by side."""
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: DTypeFlag = None
    out: OptionalFile = None
    """Write all that the harness reports to this new JSON file."""

    def run(self) -> int:
        from bd3lm.io.extras import require

        require("lm_eval", "harness", "bd3lm harness")

        from bd3lm.commands.harness import run_harness
        from bd3lm.commands.records import check_new_file
        from bd3lm.commands.sources import one_model
        from bd3lm.interop.harness import HarnessLM

        check_new_file(self.out)
        model = HarnessLM(
            one_model(self.model),
            estimator=self.estimator,
            samples=self.samples,
            lean=self.lean,
            steps=self.steps,
            seed=self.seed,
            batch_size=self.batch,
            device=self.device,
            dtype=self.dtype,
            tokenizer=self.tokenizer,
        )
        results = run_harness(
            model,
            self.tasks,
            include_path=self.include_path,
            num_fewshot=self.num_fewshot,
            limit=self.limit,
        )
        if self.out is not None:
            text = json.dumps(results, indent=2, ensure_ascii=False, default=str)
            self.out.write_text(text + "\n", encoding="utf-8")
            print(f"wrote {self.out}")
        return 0
