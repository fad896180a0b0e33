"""research/results.md and its digest, docs/results.md, with their plots, and the README's plot: all from the
results. Prose is written by hand, and no figure is.

    python -m research.evidence.document                     # rewrites the regions and the plots
    python -m research.evidence.document --check             # fails where a region is stale
    python -m research.evidence.document --page results.html # the long version as one page by itself

A region lies between `<!-- NAME -->` and `<!-- end -->`. In the long version a figure in the prose must
stand in a region of the same section too; the digest has figures in its regions only.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bd3lm.reports.document import Document, Listing, Part, Plot, Prose, Section
from bd3lm.reports.markdown import render_markdown
from bd3lm.reports.page import render_page
from research.evidence import account, decoding, digest, findings, plots, tables
from research.evidence.figures import Evidence, is_decoding
from research.evidence.measures import ZERO_SHOT, Documents, Measure, Texts
from research.evidence.runs import DECODED, PRESET, Run
from research.evidence.samples import RESULTS

_ROOT = Path(__file__).parents[2]
DOCUMENT, IMAGES = _ROOT / "research" / "results.md", "images"
DIGEST, DIGEST_IMAGES = _ROOT / "docs" / "results.md", "images/results"
README, SUMMARY_IMAGES = _ROOT / "README.md", "docs/images/readme"
_REGION = re.compile(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
_FIGURE = re.compile(r"\d+(?:\.\d+)? ?%|\d+\.\d+")  # what looks measured
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_SPECIAL = re.compile(rf"{_REGION.pattern}|{_FENCE.pattern}", re.DOTALL | re.MULTILINE)
Region = Callable[[Evidence], Iterator[Part | None]]


def _past(size: int) -> Region:
    def region(evidence: Evidence) -> Iterator[Part | None]:
        yield tables.past_table(evidence, size)
        yield plots.past_plot(evidence, size)
        yield Listing(list(findings.past_findings(evidence, size)))

    return region


def _orders(evidence: Evidence) -> Iterator[Part | None]:
    for size in (4, 16):
        yield tables.order_table(evidence, size)
        yield plots.order_plot(evidence, size)
        yield Listing(list(findings.order_findings(evidence, size)) or ["Not measured yet."])


def _decoding(evidence: Evidence) -> Iterator[Part | None]:
    yield decoding.decoding_table(evidence)
    for name in (f"{PRESET}-4", f"{DECODED}-4", f"{DECODED}-16"):
        yield plots.decoding_plot(evidence, name)
    yield Listing(list(decoding.decoding_findings(evidence)))


def _preset_orders(evidence: Evidence) -> Iterator[Part | None]:
    yield plots.preset_order_plot(evidence) or Prose("Not measured yet.")


def _region(
    table: Callable[[Evidence], Part],
    plot: Callable[[Evidence], Plot | None] | None = None,
    found: Callable[[Evidence], Iterator[str]] | None = None,
) -> Region:
    """A table, its plot where there is something to plot, and what it says."""

    def region(evidence: Evidence) -> Iterator[Part | None]:
        yield table(evidence)
        yield plot and plot(evidence)
        yield found and Listing(list(found(evidence)))

    return region


def _once_measured(what: str, wanted: Callable[[Run, Measure], bool], region: Region) -> Region:
    """A region, or one line instead while nothing in it is known."""

    def short(evidence: Evidence) -> Iterator[Part | None]:
        asked = [(run, each) for run in evidence.runs for each in run.measures if wanted(run, each)]
        if any(evidence.results.failed(run) or evidence.result(run, each) for run, each in asked):
            yield from region(evidence)
        else:
            yield Prose(f"Not measured yet: {what}, {len({run.key for run, _ in asked})} runs.")

    return short


def _of_table(name: str, end: str = "") -> Callable[[Run, Measure], bool]:
    return lambda run, _: run.table == name and run.name.endswith(end)


# Of the README, which has figures of its own in the prose.
SUMMARY: Mapping[str, Region] = {
    "preset-orders": _preset_orders,
}
REGIONS: Mapping[str, Region] = {
    "verdicts": _region(findings.verdict_table),
    "quality": _region(tables.summary_table),
    "setting": _region(account.setting),
    "progress": _region(account.progress_table),
    "alternatives": _region(tables.alternatives_table, None, findings.alternatives_findings),
    "main": _once_measured(
        "test perplexities",
        lambda run, _: run.name in tables.MAIN,
        _region(tables.main_table, plots.block_size_plot, findings.main_findings),
    ),
    "long": _once_measured(
        "longer trainings", _of_table("long"), _region(tables.long_table, None, findings.long_findings)
    ),
    "part": _once_measured(
        "what takes many passes",
        lambda run, each: getattr(each, "part", False) and run.name != "ar",
        _region(tables.part_table),
    ),
    "zero-shot": _once_measured(
        "zero-shot perplexities",
        lambda _, each: getattr(each, "data", None) in ZERO_SHOT,
        _region(tables.zero_shot_table, None, findings.zero_shot_findings),
    ),
    "case": _once_measured(
        "blocks of one token",
        _of_table("case"),
        _region(tables.case_table, plots.case_plot, findings.case_findings),
    ),
    "ranges": _once_measured(
        "mask ranges", _of_table("ranges"), _region(tables.range_table, None, findings.range_findings)
    ),
    "schedules": _once_measured(
        "noise schedules",
        _of_table("schedules"),
        _region(tables.schedule_table, None, findings.schedule_findings),
    ),
    "variants": _region(tables.variant_table),
    "past-4": _once_measured("variants at blocks of 4", _of_table("past", "-4"), _past(4)),
    "past-16": _once_measured("variants at blocks of 16", _of_table("past", "-16"), _past(16)),
    "orders": _once_measured("orders that lean", lambda _, each: bool(getattr(each, "lean", 0.0)), _orders),
    "tied": _once_measured(
        "blocks from a tied AR model",
        lambda run, _: run.name.startswith(f"{PRESET}-"),
        _region(tables.tied_table, None, findings.tied_findings),
    ),
    "texts": _once_measured(
        "texts as in the paper",
        lambda _, each: isinstance(each, Texts) and not is_decoding(each),
        _region(tables.text_table, None, findings.text_findings),
    ),
    "decoding": _once_measured(
        "rules of decoding",
        lambda _, each: isinstance(each, Texts) and is_decoding(each),
        _decoding,
    ),
    "lengths": _once_measured(
        "documents",
        lambda _, each: isinstance(each, Documents),
        _region(tables.length_table, plots.length_plot, findings.length_findings),
    ),
    "failures": _region(account.failure_table),
    "earlier": _region(account.earlier_table),
    "cost": _region(account.cost_table),
}


def build(evidence: Evidence, regions: Mapping[str, Region] = REGIONS) -> dict[str, list[Part]]:
    """The parts of every region."""
    return {name: [part for part in region(evidence) if part] for name, region in regions.items()}


def rewrite(text: str, parts: Mapping[str, Sequence[Part]], images: str = IMAGES) -> str:
    """The document with its regions as they should be; its plots are in `images`, seen from where it lies."""
    found = _REGION.findall(text)
    if sorted(found) != sorted(parts):
        wrong = sorted(set(found) ^ set(parts)) or [name for name in found if found.count(name) > 1]
        raise ValueError(f"the document must hold every region once, which is not so of {', '.join(wrong)}")
    return _REGION.sub(
        lambda at: f"<!-- {at[1]} -->\n\n{_markdown(parts[at[1]], images)}\n\n<!-- end -->", text
    )


def check_prose(text: str, *, by_hand: bool = True) -> None:
    """Refuse a figure in the prose that no region of its section has, or any without `by_hand`."""
    for section in text.split("\n## "):
        regions = _REGION.finditer(section) if by_hand else ()
        known = {figure for at in regions for figure in _FIGURE.findall(at[0])}
        prose = _FENCE.sub("", _REGION.sub("", section))
        if wrong := [figure for figure in _FIGURE.findall(prose) if figure not in known]:
            where = "in a region of the same section too" if by_hand else "in a region"
            raise ValueError(f"figures in the prose must stand {where}, got {', '.join(wrong)}")


def _markdown(parts: Sequence[Part], images: str) -> str:
    """What a report would have for these parts alone."""
    whole = render_markdown(Document("", "", [Section("", parts)], ""), images)
    return whole.partition("## \n\n")[2].rpartition("\n\n---")[0].replace(digest.UNBROKEN, "\u00a0")


def to_page(text: str, parts: Mapping[str, Sequence[Part]]) -> str:
    """The document as one page: its prose, and the regions' parts in their places."""
    head, *rest = text.split("\n## ")
    title, _, lead = head.removeprefix("# ").partition("\n")
    sections = []
    for each in rest:
        name, _, body = each.partition("\n")
        sections.append(Section(name, list(_page_parts(body, parts))))
    return render_page(
        Document(title, _flat(lead), sections, "Made by `python -m research.evidence.document`.")
    )


def _page_parts(body: str, parts: Mapping[str, Sequence[Part]]) -> Iterator[Part]:
    place = 0
    for at in _SPECIAL.finditer(body):
        yield from _prose(body[place : at.start()])
        place = at.end()
        yield from (
            parts[at[1]] if at[1] else [Listing([f"`{line}`" for line in at[0].splitlines()[1:-1] if line])]
        )
    yield from _prose(body[place:])


def _prose(text: str) -> Iterator[Part]:
    for paragraph in filter(None, map(_flat, text.split("\n\n"))):
        items = re.split(r"(?:^| )- ", paragraph)
        yield Prose(paragraph) if len(items) == 1 else Listing(items[1:])


def _flat(text: str) -> str:
    """A paragraph on one line, of links only the words."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join(text.split()))


def write(
    document: Path, parts: Mapping[str, Sequence[Part]], page: Path | None = None, images: str = IMAGES
) -> list[Path]:
    """Rewrite the document, its plots, and the page where one is asked for."""
    text = rewrite(document.read_text("utf-8"), parts, images)
    folder = document.parent / images
    files = {folder / f"{plot.name}.svg": plot.svg for plot in _plots(parts)}
    folder.mkdir(parents=True, exist_ok=True)
    for unused in {*folder.glob("*.svg")} - {*files}:
        unused.unlink()
    files[document] = text
    if page is not None:
        files[page] = to_page(text, parts)
    for file, content in files.items():
        file.write_text(content, "utf-8")
    return list(files)


def _plots(parts: Mapping[str, Sequence[Part]]) -> list[Plot]:
    return [part for each in parts.values() for part in each if isinstance(part, Plot)]


def stale(document: Path, parts: Mapping[str, Sequence[Part]], images: str = IMAGES) -> list[str]:
    """The regions that are not what the results give, and the plots that are not there."""
    text = document.read_text("utf-8")
    now = {at[1]: at[0] for at in _REGION.finditer(rewrite(text, parts, images))}
    wrong = [at[1] for at in _REGION.finditer(text) if at[0] != now[at[1]]]
    folder = document.parent / images
    return wrong + [plot.name for plot in _plots(parts) if not (folder / f"{plot.name}.svg").is_file()]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m research.evidence.document", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder with the results")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="the Markdown file with the regions")
    parser.add_argument("--digest", type=Path, help="the one with the digest; else this repository's own")
    parser.add_argument("--readme", type=Path, help="the one with the summary; else this repository's own")
    parser.add_argument("--page", type=Path, help="an HTML file to write too")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is stale")
    options = parser.parse_args(words)
    if options.check and options.page:
        parser.error("--check writes nothing, so it goes without --page")
    is_ours = options.document == DOCUMENT
    short, readme = options.digest or (is_ours and DIGEST), options.readme or (is_ours and README)
    try:
        evidence = Evidence.read(options.results)
        check_prose(options.document.read_text("utf-8"))
        pages = [(options.document, build(evidence), options.page, IMAGES)]
        if short:
            check_prose(short.read_text("utf-8"), by_hand=False)
            pages.append((short, build(evidence, digest.REGIONS), None, DIGEST_IMAGES))
        if readme:
            pages.append((readme, build(evidence, SUMMARY), None, SUMMARY_IMAGES))
        for document, parts, page, images in pages:
            if not options.check:
                print("\n".join(f"wrote {file}" for file in write(document, parts, page, images)))
            elif wrong := stale(document, parts, images):
                raise ValueError(f"{document.name} must be made anew, stale: {', '.join(wrong)}")
    except ValueError as error:
        raise SystemExit(f"evidence: {error}") from None


if __name__ == "__main__":
    main()
