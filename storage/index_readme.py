"""The README of each distribution as a package index shows it, where no other file of the repository is beside it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<label>[^\]]*)\]\((?!https?:|mailto:|#)(?P<path>[^)\s]+)\)")


class IndexReadme(MetadataHookInterface):
    """Makes the relative links of README.md addresses below `[project.urls] Repository`, at the tag of the version.

    `folder` in the hook's configuration is the folder of README.md in the repository. Without an address, which a
    clone before the first release lacks, the text stays unchanged.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Supply `readme`, which the project declares as dynamic."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository := metadata.get("urls", {}).get("Repository"):
            text = absolute_links(text, repository, f"v{metadata['version']}", self.config["folder"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute_links(text: str, repository: str, tag: str, folder: str) -> str:
    """Return a page of `folder` with each relative link as an address of GitHub's form; an image is its raw file."""

    def address(link: re.Match[str]) -> str:
        view = "raw" if link["image"] else "blob"
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        return f"{link['image']}[{link['label']}]({repository.rstrip('/')}/{view}/{tag}/{path})"

    return LINK.sub(address, text)
