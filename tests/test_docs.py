"""The documentation: links, files and names exist. (Examples are doctests; Sphinx checks that all pages are listed.)"""

import doctest
import pathlib
import re

import pytest

import optax_freeze as fz
import optax_freeze.checkpoint
import optax_freeze.nnx

PAGES = [pathlib.Path("README.md"), *sorted(pathlib.Path("docs").rglob("*.md"))]
CODE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
EMPTY = re.compile(r"(?<!!)\[\]\([^()\s]+\)")
ROLE = re.compile(r"\{py:\w+\}`[^`]+`")
LINK = re.compile(r"\]\(([^()\s]+)\)")
MENTION = re.compile(r"`((?:docs|examples|tests)/[\w/]+\.\w+)`")
NAME = re.compile(r"`(fz|fnnx|checkpoint)\.(?!py`)(\w+)(?:\(.*?\))?`")
CELL = re.compile(r"^```\{code-cell\} python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 100  # characters of code, beside the contents of a page in a window of 1280 pixels
NOTEBOOKS = {"docs/lisa.md": "lisa", "docs/precompute.md": "train_on_features"}
OTHER_FRAMEWORKS = "tests/gallery/test_other_frameworks.py"
RUN_BY = {  # the pages with code that is not a doctest, and what runs it
    "README.md": "tests/test_readme.py",
    "docs/checks.md": "tests/test_main.py",
    "docs/does_it_fit.md": "tests/report/test_costs.py",
    "docs/equinox_haiku_keras.md": OTHER_FRAMEWORKS,
    "docs/errors.md": "tests/test_errors.py",
    "docs/from_pytorch.md": OTHER_FRAMEWORKS,
    "docs/offload.md": "tests/gallery/test_quantized.py",
    "docs/recipes.md": "tests/test_recipes.py",
    "docs/trainers.md": "tests/gallery/trainers.py",
}
ROOMS = {"fz": fz, "fnnx": fz.nnx, "checkpoint": fz.checkpoint}


def anchors(page):
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_at_most_30_pages_of_which_two_are_notebooks():
    assert len(PAGES) - 1 <= 30  # without the README
    assert sum(len(page.read_text().split()) for page in PAGES) <= 36_000
    assert {str(page) for page in PAGES if "{code-cell}" in page.read_text()} == {*NOTEBOOKS}
    assert sum("executed by the tests" in page.read_text() for page in PAGES) == 1  # that the examples are, once


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_a_notebook_shows_and_runs_its_example(page):
    text, example = pathlib.Path(page).read_text(), NOTEBOOKS[page]
    script, cells = pathlib.Path(f"examples/{example}.py").read_text(), "".join(CELL.findall(text))
    assert text.startswith("---\nfile_format: mystnb\n")
    assert f"```{{literalinclude}} ../examples/{example}.py\n" in text
    [name] = re.findall(rf"^import {example}(?: as (\w+))?$", cells, re.MULTILINE)
    used = set(re.findall(rf"\b{name or example}\.(\w+)", cells))
    assert {"compare", "report"} <= used
    assert all(re.search(rf"^(def )?{function}\b", script, re.MULTILINE) for function in used)


@pytest.mark.parametrize("chosen", ["Flax Linen", "Flax NNX"])  # pytest runs the page with its last tab
def test_each_tab_of_the_page_of_fine_tuning_goes_with_the_rest(chosen):
    tabs = re.compile(r"^:::\{tab-item\} (.*?)\n(.*?)^:::$", re.MULTILINE | re.DOTALL)
    page = pathlib.Path("docs/fine_tuning.md").read_text()
    text = tabs.sub(lambda tab: tab[2] if tab[1] == chosen else "", page)
    assert len(tabs.findall(page)) == 3
    examples = doctest.DocTestParser().get_doctest(text, {}, chosen, "docs/fine_tuning.md", 0)
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_line_of_code_is_wider_than_the_page(page):
    blocks = re.findall(r"^```(python|sh|\{code-cell\} python)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for _, block in blocks for line in block.splitlines()]
    lines += re.findall(r"^(?:>>>|\.\.\.) .*$", page.read_text(), re.MULTILINE)
    assert [line for line in lines if len(line) > WIDTH] == []


def test_all_code_is_run():
    code = re.compile(r"^```(python\n(?!>>>)|console)", re.MULTILINE)
    assert {str(page) for page in PAGES if code.search(page.read_text())} == {*RUN_BY}
    named = {page: pathlib.Path(test).read_text() for page, test in RUN_BY.items()}
    assert [page for page, test in named.items() if pathlib.Path(page).name not in test] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_file_and_name_of_ours_in_the_text_exists(page):
    text = CODE.sub("", page.read_text())
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    assert [path for path in MENTION.findall(text) if not pathlib.Path(path).exists()] == []
    assert [(room, name) for room, name in NAME.findall(text) if not hasattr(ROOMS[room], name)] == []
    assert EMPTY.findall(text) + ROLE.findall(text) == []  # only Sphinx fills these in
