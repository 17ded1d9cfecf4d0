"""Builds the description of the package: the README without what only the repository has, its files and pictures."""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?://)[^)]+\)\n\n?", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]+\)")


class Description(MetadataHookInterface):
    """Links to files of the repository become text, and its pictures are left out."""

    def update(self, metadata: dict) -> None:
        text = pathlib.Path(self.root, "README.md").read_text(encoding="utf-8")
        text = LINK.sub(r"\1", PICTURE.sub("", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
