"""`bd3lm report`: one page about some runs; measures first what is missing and quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import DeviceFlag, OptionalFolder, named
from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from bd3lm.io.console import Console


@dataclass(frozen=True)
class Report(Command):
    """Write a report about some runs, as one HTML page and as Markdown.

    The page has training curves, perplexities, variances, lengths, samples, and an animation of a text being
    written.
    """

    kind = "report"

    runs: Positional[Annotated[tuple[Path, ...], named("RUN ...")]] = ()
    """Run folders, or a folder of runs. A run with several stages is reported stage by stage."""
    out: OptionalFolder = None
    """Folder for report.html, report.md and plots. Default: the run, or report if there are several."""
    measure: bool = True
    """First measure what is missing, if that takes less than a minute."""
    samples: int = 3
    """Texts to show per model."""
    device: DeviceFlag = None

    def run(self) -> int:
        say(f"wrote {make_report(self)}")
        return 0


def make_report(flags: Report, *, console: "Console | None" = None) -> Path:
    """Write report.html, and the same as Markdown; return the path of the page.

    A run of several stages is reported stage by stage, and a folder of runs stands for all of them. With
    --measure, missing measurements that are quick are made first and stored in the folder of each run.
    """
    from rich.text import Text

    from bd3lm.interop import check_folder
    from bd3lm.io.console import Console
    from bd3lm.limits import check_counts, check_device

    console = console or Console(stderr=True)
    if not flags.runs:
        raise ValueError("runs must name at least one run, got none")
    check_counts(samples=flags.samples)
    for folder in flags.runs:
        check_folder("runs", folder)
    if flags.device is not None:
        check_device(flags.device, "--device")
    out = flags.out or (flags.runs[0] if len(flags.runs) == 1 else Path("report"))
    _check_out(out)

    from bd3lm.commands.report.measuring import measure_missing  # this import loads torch
    from bd3lm.commands.report.runs import check_different, content, open_run, runs_in, stages_of
    from bd3lm.commands.shared.subjects import tell_what_is_not_kept
    from bd3lm.reports import write_report

    stages = [stage for folder in flags.runs for run in runs_in(folder) for stage in stages_of(run)]
    check_different([stage.folder for stage in stages])
    unfinished = [str(stage.folder) for stage in stages if not stage.is_trained]
    if len(unfinished) == len(stages):
        raise ValueError(f"runs must hold a trained model, and these have none yet: {', '.join(unfinished)}")
    for name in unfinished:
        console.print(Text(f"{name}: training has not finished, so it is left out"), soft_wrap=True)
    opened = [open_run(stage, flags.device) for stage in stages if stage.is_trained]
    content(opened, {}, unfinished)  # raises errors in the runs before anything is measured
    unmeasured: dict[tuple[str, str], str] = {}
    if flags.measure:
        tell_what_is_not_kept(each.subject for each in opened)
        for each in opened:
            for kind, why in measure_missing(each.subject, flags.samples, console).items():
                unmeasured[each.subject.name, kind] = why
    return write_report(content(opened, unmeasured, unfinished), out)


def _check_out(out: Path) -> None:
    """Refuse a path that cannot be a folder, or looks like a file, before anything is measured."""
    from bd3lm.commands.shared.records import why_not_writable

    if not out.is_dir() and (out.exists() or out.suffix[1:].isalpha()):  # a folder may be called v1.2
        raise ValueError(f"--out must be the folder for report.html and report.md, got a file name, {out}")
    if not out.parent.is_dir():
        raise ValueError(f"--out must be in an existing folder, and {out.parent} is not one")
    if (why := why_not_writable(out)) is not None:
        raise ValueError(f"--out must be a writable folder, and {out} is not: {why}")
