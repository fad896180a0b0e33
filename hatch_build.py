"""The README as PyPI shows it: its links lead to the repository, where the builder says which one that is.

    REPOSITORY_URL=https://github.com/OWNER/NAME python -m build

puts the repository's address before every relative link and image, at the tag of this version, and among the
project's addresses. The release workflow sets it. Without it the README is packed as it is.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^]]*)\]\((?P<path>[^)#:\s][^):\s]*)\)")


def with_addresses(readme: str, repository: str, tag: str) -> str:
    """The Markdown with absolute links in place of those that are relative to the repository's root."""

    def absolute(link: re.Match[str]) -> str:
        folder = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({repository}/{folder}/{tag}/{link['path']})"

    return _LINK.sub(absolute, readme)


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("REPOSITORY_URL", "").rstrip("/")
        if repository:
            if not re.fullmatch(r"https://[\w.-]+/[\w./-]+", repository):
                raise ValueError(
                    f"REPOSITORY_URL must be like https://github.com/owner/name, got {repository!r}"
                )
            tag = f"v{metadata['version']}"
            readme = with_addresses(readme, repository, tag)
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{repository}/tree/{tag}/docs",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
