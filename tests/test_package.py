"""The house: what importing it loads, which names it has, and that each room keeps to its place."""

import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest
import user_code

import optax_freeze as fz

PACKAGE = pathlib.Path(fz.__file__).parent
ROOMS = [
    *("_tree", "_masks", "_mesh", "_parts", "_glob", "_selector", "_select", "_prefix", "_resolve", "_labels"),
    *("_partition", "_jaxpr", "_split", "_read", "_rules", "_control", "_evaluate", "_restrict", "_explain"),
    *("_inner", "_transform", "_slots", "_state", "_shardings"),
    *("_conditions", "_groups", "_schedule", "_switches", "_places", "_migrate"),
    *("_table", "_treemap", "_report"),
    *("_bits", "_verify", "_facts", "_probe", "_causes", "_leaks", "_audit"),
    *("_depends", "_lift", "_record"),  # below the map: of the rooms that bring Flax or Orbax
]
OUTER = ["linen", "nnx", "checkpoint"]  # you import these yourself: they bring Flax or Orbax with them
MAIN = "__main__"
PUBLIC = [name for name, value in vars(fz).items() if not (name.startswith("_") or inspect.ismodule(value))]


def test_importing_it_loads_neither_flax_nor_orbax_nor_what_draws():
    heavy = {"flax", "orbax", "orbax.checkpoint", "rich", "matplotlib", "jax.extend"}
    code = f"import sys, optax_freeze; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_map_is_re_exports_and_nothing_else():
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    assert isinstance(body[0], ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in body[1:])


def test_every_file_is_a_known_room():
    assert sorted(path.stem for path in PACKAGE.glob("*.py")) == sorted(["__init__", *ROOMS, *OUTER, MAIN])


@pytest.mark.parametrize("room", [*ROOMS, *OUTER, MAIN])
def test_a_room_imports_only_rooms_above_it(room):
    text = (PACKAGE / f"{room}.py").read_text()
    imported = re.findall(r"^ *from optax_freeze\.(\w+) import", text, re.MULTILINE)
    for names in re.findall(r"^ *from optax_freeze import (.+)", text, re.MULTILINE):
        imported += names.split(", ")
    assert set(imported) <= set(ROOMS[: ROOMS.index(room)] if room in ROOMS else ROOMS)


def test_the_architecture_has_a_paragraph_on_each_room_and_a_reason_for_each_long_one():
    page = pathlib.Path("docs/architecture.md").read_text()
    assert re.findall(r"^\*\*`(\w+)\.py`\*\* ", page, re.MULTILINE) == [*ROOMS, *OUTER, MAIN]
    reasons = page.partition("## What a file keeps to")[2].partition("\n\nEach room")[0]
    long = {path.name for path in PACKAGE.glob("*.py") if len(path.read_text().splitlines()) > 300}
    assert set(re.findall(r"`(\w+\.py)`", reasons)) == long


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    function = getattr(fz, name)
    room = function.__module__.rpartition("._")[2]
    page = pathlib.Path("docs/api", f"{room}.md").read_text()
    assert re.search(rf"optax_freeze\.{name}$", page, re.MULTILINE)
    doc = inspect.getdoc(function)
    assert doc is not None
    sections = ("Attributes:",) if inspect.isclass(function) else ("Args:", "Returns:")
    for section in () if name == "FreezeWarning" else sections:
        assert section in doc
    assert "Example:\n  >>> " in doc
    parameters = () if name == "FreezeWarning" else inspect.signature(function).parameters
    assert all(re.search(rf"^  \*{{0,2}}{parameter}: ", doc, re.MULTILINE) for parameter in parameters)


@pytest.mark.parametrize("room", OUTER)
def test_every_public_name_of_an_outer_room_is_documented(room):
    module = importlib.import_module(f"optax_freeze.{room}")
    here = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    public = {name: inspect.getdoc(value) for name, value in here.items() if not name.startswith("_")}
    assert public
    page = pathlib.Path("docs/api", f"{room}.md").read_text()
    for name, doc in public.items():
        assert re.search(rf"optax_freeze\.{room}\.{name}$", page, re.MULTILINE)
        assert re.search(r"Example:\n  >>> ", doc)


@pytest.mark.skipif(not pathlib.Path("optax_freeze").exists(), reason="tests of an installed wheel: no source to build")
def test_the_wheel_and_the_sdist_are_complete(tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info" not in name}
    assert held == {f"optax_freeze/{path.name}" for path in PACKAGE.iterdir() if path.is_file()}
    assert "optax_freeze/py.typed" in held
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    for path in ("LICENSE", "tests/conftest.py", "examples/finetune_digits.py", "docs/index.md"):
        assert any(name.endswith(f"/{path}") for name in names)


def test_the_code_of_a_user_runs(capsys):
    user_code.main()
    assert "Params" in capsys.readouterr().out
