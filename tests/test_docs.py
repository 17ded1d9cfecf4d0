"""The documentation: every link leads somewhere. (Its examples are doctests, and sphinx wants pages in a toctree.)"""

import pathlib
import re

import pytest

PAGES = [pathlib.Path("README.md"), *sorted(pathlib.Path("docs").rglob("*.md"))]
CODE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
MENTION = re.compile(r"`((?:docs|examples|tests)/[\w/]+\.\w+)`")


def anchors(page):
    """What the headings of a page are called in a link."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_and_every_file_that_a_page_names_exists(page):
    text = CODE.sub("", page.read_text())
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"
    for path in MENTION.findall(text):
        assert pathlib.Path(path).exists(), f"{page}: {path}"
