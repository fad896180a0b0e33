"""`bd3lm report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from bd3lm.cli.flags import (
    DeviceFlag,
    OptionalFolder,
    named,
)


@dataclass(frozen=True)
class ReportCommand:
    """One HTML page, and the same as Markdown, of all that is known of some runs.

    Training curves, perplexities, variances, lengths, samples, and a text being written that can be watched.
    """

    runs: Positional[Annotated[tuple[Path, ...], named("RUN ...")]]
    """Folders of runs, or a folder that holds runs; one of several stages is reported stage by stage."""
    out: OptionalFolder = None
    """Where to write report.html, report.md and plots; by default into the run, or report for several."""
    measure: bool = True
    """Measure what is missing, as far as it takes less than a minute each."""
    samples: int = 3
    """Texts of each model to show."""
    device: DeviceFlag = None

    def run(self) -> int:
        from bd3lm.commands.reports import make_report

        page = make_report(
            self.runs, out=self.out, measure=self.measure, samples=self.samples, device=self.device
        )
        print(f"wrote {page}")
        return 0
