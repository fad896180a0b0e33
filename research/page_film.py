"""The moving picture of the server's page, and a still of it: one text written without drafts and with three.

    python research/page_film.py --film docs/images/page.webp --still docs/images/page.png

Starts `bd3lm serve` on this machine and presses the page's own buttons in chromium. Time in the page is held,
so that every moment of the text has its frame however long a screenshot takes.
"""

import argparse
import io
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from PIL import Image

from tests.serving import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTH, HEIGHT = 1000, 1200
STEP = 50  # milliseconds of the page between two frames: half a moment of ten a second
FIRST, LAST = 800, 4000  # milliseconds that the first and the last frame are seen
MARGIN = 12  # pixels around what is filmed
PANES = "[data-pane=a] .play, [data-pane=b] .play"


@dataclass
class Frames:
    """Pictures, and how long each is seen; one that is as the one before only lengthens it."""

    pictures: list[Image.Image] = field(default_factory=list)
    milliseconds: list[int] = field(default_factory=list)

    def add(self, picture: Image.Image, milliseconds: int) -> None:
        if self.pictures and picture.tobytes() == self.pictures[-1].tobytes():
            self.milliseconds[-1] += milliseconds
            return
        self.pictures.append(picture)
        self.milliseconds.append(milliseconds)

    def save(self, path: Path) -> None:
        first, *others = self.pictures
        first.save(
            path,
            save_all=True,
            append_images=others,
            duration=self.milliseconds,
            loop=0,
            lossless=True,
            method=6,
            minimize_size=True,
        )


def is_playing(page: "Page") -> bool:
    return "Pause" in page.locator(PANES).all_text_contents()


def around(page: "Page", *parts: str) -> tuple[int, int]:
    """From where on and up to where some parts of the page are seen."""
    boxes = [box for part in parts if (box := page.locator(part).bounding_box()) is not None]
    top, bottom = min(box["y"] for box in boxes), max(box["y"] + box["height"] for box in boxes)
    return round(top) - MARGIN, round(bottom) + MARGIN


def seen(page: "Page") -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot(animations="disabled", caret="hide"))).convert("RGB")


def record(page: "Page", frames: Frames, still: int) -> Image.Image:
    """Fill `frames`; says how the whole page looks after so many milliseconds of play."""
    page.click("#show-why")
    page.wait_for_selector("#verdict:has-text('passes')")
    for pane in "ab":
        page.click(f"[data-pane={pane}] .play:has-text('Pause')")  # before time is held, which ends no timers
    page.clock.install(time=0)
    page.clock.pause_at(60_000)
    page.click("#play-both")
    page.mouse.move(0, 0)
    page.evaluate("scrollTo(0, 0)")
    (top, bottom), (_, end) = around(page, "#comparison", ".legend"), around(page, ".foot")
    at, found, picture = 0, None, seen(page)
    while is_playing(page):
        frames.add(picture.crop((0, top, WIDTH, bottom)), STEP if at else FIRST)
        if at == still:
            found = picture.crop((0, 0, WIDTH, end))
        page.clock.run_for(STEP)
        at += STEP
        picture = seen(page)
    frames.add(picture.crop((0, top, WIDTH, bottom)), LAST)
    if found is None:
        raise SystemExit(f"the text is played in {at} milliseconds, before the still at {still}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="box")
    parser.add_argument("--prompt", default="The river")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=72)
    parser.add_argument("--still-at", type=int, default=2500, help="milliseconds of play")
    parser.add_argument("--film", type=Path, required=True)
    parser.add_argument("--still", type=Path, required=True)
    arguments = parser.parse_args()
    program = shutil.which("chromium")
    if program is None:
        sys.exit("chromium must be installed; make test-browser does it")
    from playwright.sync_api import sync_playwright

    frames = Frames()
    with serving(arguments.model) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        size = {"width": WIDTH, "height": HEIGHT}
        page = browser.new_page(viewport=size, color_scheme="light")  # type: ignore[arg-type]
        page.goto(server.url)
        page.wait_for_selector("#show-why")
        for name in ("prompt", "seed", "tokens"):
            page.fill(f"#{name.replace('tokens', 'max_tokens')}", str(getattr(arguments, name)))
        still = record(page, frames, arguments.still_at)
        browser.close()
    frames.save(arguments.film)
    still.save(arguments.still, optimize=True)
    size_kb = arguments.film.stat().st_size / 1000
    print(f"{len(frames.pictures)} frames, {sum(frames.milliseconds) / 1000:.1f} s, {size_kb:.0f} kB")


if __name__ == "__main__":
    main()
