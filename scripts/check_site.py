"""Whether the site that was built holds together by itself.

    python scripts/check_site.py build/site

Links inside it must lead to a page and a place that are there. What a page loads (scripts, styles, fonts,
pictures) must be part of the site, so that it works without a network. Links to elsewhere are only read.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links, the loaded files and the places of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag in ("a", "area") and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and {"stylesheet", "icon", "preload"} & set(given.get("rel", "").split()):
            self.loaded.append(given["href"])
        elif tag == "link":
            self.links.append(given.get("href", ""))
        if "src" in given:
            self.loaded.append(given["src"])
        if tag == "object":
            self.loaded.append(given.get("data", ""))


def broken(site: Path) -> list[str]:
    """What is wrong, a line each."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: {link} {fault}" for link in page.links if (fault := _fault(path, link, pages))]
        for link in page.loaded:
            if urlsplit(link).scheme != "data" and (urlsplit(link).netloc or _fault(path, link, pages)):
                found.append(f"{name}: loads {link}, which is not on the site")
    for style in site.rglob("*.css"):
        for link in re.findall(r"url\(\s*[\"']?([^\"')]+)", style.read_text(encoding="utf-8")):
            parts = urlsplit(link)
            if parts.scheme != "data" and (parts.netloc or not (style.parent / parts.path).exists()):
                found.append(f"{style.relative_to(site)}: loads {link}, which is not on the site")
    if not pages:
        found.append(f"{site}: there are no pages")
    return found


def _fault(page: Path, link: str, pages: dict[Path, Page]) -> str | None:
    """What is wrong with a link of a page, if anything."""
    try:
        parts = urlsplit(link)
    except ValueError as error:
        return f"is no address: {error}"
    if parts.scheme in ("http", "https"):
        well = re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?|localhost(:\d+)?|127\.0\.0\.1(:\d+)?", parts.netloc)
        return None if well and not re.search(r"\s", link) else "is no address"
    if parts.scheme == "mailto":
        return None
    if parts.scheme or parts.netloc:
        return "has a scheme that no page here needs"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return "leads to no file"
    fragment = unquote(parts.fragment)
    if fragment and target in pages and fragment not in pages[target].places:
        return "leads to a page without that place"
    return None


def main() -> None:
    site = Path(sys.argv[1])
    faults = broken(site)
    for line in faults:
        print(line, file=sys.stderr)
    if faults:
        sys.exit(1)
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    print(
        f"{site}/index.html: {len(list(site.rglob('*.html')))} pages, {size / 2**20:.1f} MiB, no broken link"
    )


if __name__ == "__main__":
    main()
