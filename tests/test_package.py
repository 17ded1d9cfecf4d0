"""The package as a whole: what importing it loads, its public names, and which file imports which."""

import ast
import graphlib
import importlib
import importlib.metadata
import inspect
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import mutants
import pytest
import user_code
import yaml

import optax_freeze as fz

PACKAGE = pathlib.Path(fz.__file__).parent
PAGE = pathlib.Path("docs/development.md").read_text()
FOLDERS = re.findall(r"^\| `(_\w+)` \|", PAGE, re.MULTILINE)  # each imports only those above it
API = pathlib.Path("docs/api.md").read_text()
KNOW_JAX = {"_jax_internals", "_jax_tracing"}  # what differs between its versions
OUTER = ["linen", "nnx", "checkpoint", "features", "patch"]  # you import these yourself: most bring Flax or Orbax
MAP = (PACKAGE / "__init__.py").read_text()
PUBLIC = [name for name, value in vars(fz).items() if not (name.startswith("_") or inspect.ismodule(value))]


@pytest.mark.parametrize("module", ["optax_freeze", "optax_freeze.patch"])
def test_importing_it_loads_neither_flax_nor_orbax_nor_what_draws(module):
    heavy = {"flax", "orbax", "orbax.checkpoint", "rich", "matplotlib", "safetensors", "jax.extend"}
    heavy.add("scipy.sparse.csgraph")
    code = f"import sys, {module}; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_imported_is_declared():
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {name.split(".")[0] for name in names} - {"optax_freeze"}
    of_other_systems = {"curses", "fcntl", "grp", "msvcrt", "posix", "pwd", "resource", "syslog", "termios", "winreg"}
    assert not imported & of_other_systems
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][name] for name in ("plot", "safetensors"))
    declared = [re.match(r"[\w-]+", line)[0] for line in sum(extras, project["dependencies"])]
    assert {"orbax-checkpoint" if name == "orbax" else name for name in imported - sys.stdlib_module_names} == {
        *declared
    } - {"jaxlib"}  # which JAX imports


def module_of(path):
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_by(module, with_types=True):
    """The modules of this package that a module imports, at its top or inside of functions, or for types alone."""
    tree = ast.parse(MODULES[module].read_text())
    tree.body = [node for node in tree.body if with_types or ast.unparse(node).split("\n")[0] != "if TYPE_CHECKING:"]
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not any(node.level for node in nodes)
    names = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    own = {name.removeprefix("optax_freeze.") for name in names if name.startswith("optax_freeze.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in own}


def test_the_architecture_lists_the_folders_that_exist():
    assert sorted(FOLDERS) == sorted(path.name for path in PACKAGE.glob("_*/") if path.name != "__pycache__")
    others = {path.stem for path in PACKAGE.glob("*.py")}
    assert others == {"__init__", "__main__", "_errors", *KNOW_JAX, "_version", "nnx", "typing"}
    docstring, *exports = ast.parse(MAP).body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in exports)
    public = [name for name in FOLDERS if name != "_program"]
    assert public == list(dict.fromkeys(re.findall(r"^from optax_freeze\.(\w+)\.", MAP, re.MULTILINE)))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_a_docstring_and_imports_only_its_folder_and_those_above(module):
    text = MODULES[module].read_text()
    assert ast.get_docstring(ast.parse(text))
    whole = re.findall(r"^ *(?:import optax_freeze|from optax_freeze import).*", text, re.MULTILINE)
    allowed = {"__main__": ["import optax_freeze as fz"], "__init__": ["from optax_freeze import typing as typing"]}
    assert whole == allowed.get(module, [])
    folder = module.partition(".")[0]
    if folder in FOLDERS:
        imported = {name.partition(".")[0] for name in imported_by(module)}
        assert imported <= {"_errors", *KNOW_JAX, *FOLDERS[: FOLDERS.index(folder) + 1]}


@pytest.mark.parametrize("module", sorted(set(MODULES) - KNOW_JAX))
def test_two_modules_know_the_inside_of_jax(module):
    tree = ast.parse(MODULES[module].read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    inside = ("jax.extend", "jax.interpreters", "jax.custom_derivatives", "jax._src")
    known = {name for name in names if name.startswith(inside)}
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)]
    params = {node.slice.value for node in read if ast.unparse(node.value).split(".")[-1] == "params"}
    if module != "_gradient.custom_derivative":  # which defines a primitive
        assert not known
        assert not params or module in ("_program.operations", "_program.host_lookups", "_program.flops")


def test_no_module_imports_itself_through_others():
    graphlib.TopologicalSorter({module: imported_by(module) for module in MODULES}).prepare()  # raises CycleError


def test_freeze_needs_little_and_no_folder_stands_high():
    reached, left = set(), ["_optimizer.freeze"]
    while left:
        reached.add(module := left.pop())
        left += imported_by(module, with_types=False) - reached
    assert {name.partition(".")[0] for name in reached} == {"_errors", "_jax_tracing", "_spec", "_optimizer"}
    assert sum(len(MODULES[name].read_text().splitlines()) for name in reached) <= 4850
    below = {module.partition(".")[0]: set() for module in MODULES}
    for module in MODULES:
        folder = module.partition(".")[0]
        below[folder] |= {name.partition(".")[0] for name in imported_by(module)} - {folder}
    level = {}
    for folder in graphlib.TopologicalSorter(below).static_order():
        level[folder] = 1 + max((level[other] for other in below[folder]), default=0)
    assert max(level.values()) <= 9


def test_the_architecture_has_a_reason_for_each_long_file():
    reasons = re.search(r"^A file of more than 300 lines .*?\n\n", PAGE, re.MULTILINE | re.DOTALL)[0]
    long = (path for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 300)
    assert set(re.findall(r"`([\w/]+\.py)`", reasons)) == {str(path.relative_to(PACKAGE)) for path in long}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    function = getattr(fz, name)
    row = not inspect.isclass(function) or name == "Part"
    assert (f"`fz.{name}` | " if row else f".. autoclass:: optax_freeze.{name}\n") in API
    doc = inspect.getdoc(function)
    assert doc is not None
    assert "Example:\n  >>> " in doc
    if name != "FreezeWarning":
        assert all(
            section in doc for section in (["Attributes:"] if inspect.isclass(function) else ["Args:", "Returns:"])
        )
        parameters = inspect.signature(function).parameters
        assert all(re.search(rf"^  \*{{0,2}}{parameter}: ", doc, re.MULTILINE) for parameter in parameters)


def test_every_type_is_documented_and_nothing_private():
    types = {name for name in vars(fz.typing) if not name.startswith("_")}
    of_arguments = {"ElementMask", "Spec", "Selector", "PyTree"}
    assert set(re.findall(r"^\.\. py:data:: (\w+)$", API, re.MULTILINE)) == of_arguments
    assert set(re.findall(r"^\.\. autoclass:: optax_freeze\.typing\.(\w+)$", API, re.MULTILINE)) == types - of_arguments
    assert all("Attributes:\n  " in inspect.getdoc(getattr(fz.typing, name)) for name in types - of_arguments)
    assert not re.search(r"\._|:: _", API)


@pytest.mark.parametrize("outer", OUTER)
def test_every_public_name_of_an_outer_module_is_documented(outer):
    module = importlib.import_module(f"optax_freeze.{outer}")
    here = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    public = {name: inspect.getdoc(value) for name, value in here.items() if not name.startswith("_")}
    assert public
    for name, doc in public.items():
        listed = rf"^(`f?{outer}\.{name}` \| |\.\. autoclass:: optax_freeze\.{outer}\.{name}$)"
        assert re.search(listed, API, re.MULTILINE)
        assert re.search(r"Example:\n  >>> ", doc)


@pytest.mark.skipif(not pathlib.Path("optax_freeze").exists(), reason="tests of an installed wheel: no source to build")
def test_the_wheel_and_the_sdist_are_complete(tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info" not in name}
        [metadata] = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")]
    assert held == {f"optax_freeze/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")} | {
        "optax_freeze/py.typed"
    }
    assert "\n## Limits\n" in metadata
    assert not re.search(
        r"\]\((?!https?://)|!\[", metadata
    )  # links to files, and pictures, which an index does not have
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"LICENSE", "tests/conftest.py", "examples/finetune_digits.py", "docs/index.md"} <= names


def test_the_code_of_a_user_runs_and_the_version_is_that_of_the_package(capsys):
    user_code.main()
    assert "Params" in capsys.readouterr().out
    assert fz.__version__ == importlib.metadata.version("optax-freeze")


@pytest.mark.skipif(not pathlib.Path(".github").exists(), reason="tests of an installed wheel: no workflows")
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.file)
def test_a_mutant_replaces_text_that_stands_once(mutant):
    assert pathlib.Path("optax_freeze", mutant.file).read_text().count(mutant.old) == 1


def test_workflows_and_hooks_call_commands_that_exist():
    makefile = pathlib.Path("Makefile").read_text()
    workflow = yaml.safe_load(pathlib.Path(".github/workflows/test.yml").read_text())
    wheel = workflow["jobs"]["wheel"]["strategy"]["matrix"]["include"]
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    *others, with_tests = commands
    assert others == ["make test PYTHON=python", "make ${{ matrix.target }} PYTHON=python"]
    command, tests = with_tests.rstrip('"').split(' TESTS="')
    assert command == "make test-newest PYTHON=python"
    assert all(pathlib.Path(path).exists() for path in tests.split())
    assert workflow["jobs"]["hijax"]["env"] == {"JAX_REMAT3": 1, "JAX_CUSTOM_VJP3": 1}
    assert {entry["target"] for entry in wheel} == {"test-oldest", "test-newest"}
    entries = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    [flags] = [entry["flags"] for entry in entries if "flags" in entry]
    assert f"XLA_FLAGS={flags} make test" in PAGE
    assert "\ntest: " in makefile
    assert "\ntest-oldest test-newest: " in makefile
    assert all(yaml.safe_load(path.read_text()) for path in pathlib.Path(".github/ISSUE_TEMPLATE").glob("*.yml"))
    [repository] = yaml.safe_load(pathlib.Path(".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]:
        assert hook["entry"].removesuffix(" --fix").replace(".venv/bin", "$(BIN)") in makefile


@pytest.mark.skipif(not pathlib.Path(".github").exists(), reason="tests of an installed wheel: no metadata of GitHub")
def test_read_the_docs_and_the_citation_refer_to_what_exists():
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    hosted = yaml.safe_load(pathlib.Path(".readthedocs.yaml").read_text())
    assert pathlib.Path(hosted["sphinx"]["configuration"]).exists()
    assert set(hosted["python"]["install"][0]["extra_requirements"]) <= set(project["optional-dependencies"])
    citation = yaml.safe_load(pathlib.Path(".github/CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["license"], citation["version"]) == (project["license"], fz.__version__)
