"""One test for each model of the gallery.

Of ``make gallery`` all of them, which leave their figures for its page in the folder that ``GALLERY`` names; otherwise
the few whose packages the other tests need, too.
"""

import json
import os
import pathlib
import re

import pytest

from gallery import cases, gallery

FOLDER = os.environ.get("GALLERY", "")


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("case", cases.CASES if FOLDER else cases.SMALL, ids=lambda case: case.name)
def test_a_model(case):
    if case.missing:
        pytest.skip(f"not installed: {case.missing}")
    model = case.make()
    checked, figures = gallery.check(model), gallery.measure(model)
    if FOLDER:
        row = {"checked": checked._asdict(), "merged": figures.merged}
        row |= {"whole": figures.to_whole._asdict(), "hand": figures.to_hand._asdict()}
        pathlib.Path(FOLDER, f"{case.name}.json").write_text(json.dumps(row), encoding="utf-8")
    assert not [*gallery.problems(case, checked, figures)]


@pytest.mark.skipif(bool(FOLDER), reason="the page is written after these tests")
def test_the_pages_have_every_model():
    page = pathlib.Path("tests/gallery/models.md").read_text()
    assert [case.name for case in cases.CASES if f"| {case.name} ({case.kind}) |" not in page] == []
    models = pathlib.Path("docs/compatibility.md").read_text().partition("## Models")[2].partition("\n## ")[0]
    assert f"\n\nAny pytree of parameters works. {len(cases.CASES)} models" in models
    assert [
        case.name for case in cases.CASES if not re.search(rf"[|,] {re.escape(case.name)}( \(|,| \|)", models)
    ] == []
