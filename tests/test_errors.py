"""The wrong calls in `wrong_calls.md` and in the documentation raise the error that is shown with them."""

import io
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
import rich.console
from flax import nnx
from test_package import PUBLIC

import optax_freeze as fz
import optax_freeze.nnx as fnnx
from optax_freeze import checkpoint
from optax_freeze.__main__ import main

DOCUMENTED = re.compile(
    r"^### ([^\n]*)\n\n(?:[^#]*?\n\n)?```python\n(.*?)\n```\n\n```text\n(\w+: .*?)\n```$", re.DOTALL | re.MULTILINE
)
WRITTEN = re.compile(r"^# ([^\n]*)\n(.*?)(?=\n\n# |\n```$)", re.DOTALL | re.MULTILINE)
CALL = re.compile(r"((?:^(?:>>>|\.\.\.).*\n)+)((?:^(?!>>>).+\n?)+)", re.MULTILINE)


def read(page):
    """The shared values of a page, and its sections."""
    introduction, *sections = re.split(r"^## ", pathlib.Path(page).read_text(), flags=re.MULTILINE)
    [values] = re.findall(r"```python\n(.*?)```", introduction, re.DOTALL)
    return values, sections


def written_calls(section):
    """The calls of a section of `wrong_calls.md`, each with its error; parts not shown are those of the error above."""
    for title, entry in WRITTEN.findall(section):
        parts = {}
        for call, error in CALL.findall(entry):
            what, *others = error.strip().split("\n  ")
            parts |= {"what": what} | {part.partition(":")[0]: part for part in others}
            yield title, re.sub(r"^(>>>|\.\.\.) ?", "", call, flags=re.MULTILINE), "\n  ".join(parts.values())


SHARED, SECTIONS = read("docs/errors.md")
CALLS = [(f"docs: {title}", call, error) for section in SECTIONS for title, call, error in DOCUMENTED.findall(section)]
assert len(CALLS) == sum(section.count("\n### ") for section in SECTIONS)
MORE, SECTIONS = read("tests/wrong_calls.md")
CALLS += [
    (f"{section.splitlines()[0]}: {title}", *each) for section in SECTIONS for title, *each in written_calls(section)
]


@pytest.fixture(scope="module")
def values():
    namespace = {}
    exec(SHARED + MORE, namespace)
    return namespace


@pytest.mark.parametrize(("call", "error"), [each for _, *each in CALLS], ids=[name for name, *_ in CALLS])
def test_a_wrong_call_says_what_is_wrong(call, error, values, tmp_path):
    with warnings.catch_warnings():
        if error.startswith("FreezeWarning"):
            warnings.simplefilter("error", fz.FreezeWarning)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            exec(call, {**values, "directory": tmp_path})
    raised = f"{caught.type.__name__}: {caught.value}"
    assert re.fullmatch(re.escape(error).replace(r"\.\.\.", ".*"), raised)


@pytest.mark.parametrize("name", [name for name in PUBLIC if not isinstance(getattr(fz, name), type)])
def test_every_public_function_refuses_something(name):
    assert any(re.search(rf"\bfz\.{name}\(", call) for _, call, _ in CALLS)


NAMES = ("\x1b[31mred", "a\nb", "\u202eback", "\x9b1m", "line\u2028end", "tab\t", "\x07")


def tree(value=1.0):
    return {name: jnp.full((3, 2), value) for name in NAMES}


def both(frozen):
    """A spec that freezes one leaf alone."""
    return {name: frozen if name == NAMES[0] else False for name in NAMES}


def module():
    model = nnx.Sequential(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    setattr(model, NAMES[0], nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    return model


def migrated(before, after, shape=(3, 2), rows=None):
    params = {name: jnp.ones(shape) for name in NAMES}
    state = fz.freeze(optax.adam(0.1), before).init(tree())
    return fz.migrate(state, fz.freeze(optax.adam(0.1), after), params, rows=rows, report=True)[1]


def shown_by_rich(found):
    console = rich.console.Console(file=io.StringIO(), width=200)
    console.print(found)
    return console.file.getvalue()


def leaky():
    return optax.masked(optax.adamw(0.1), both(False))


def read_rows(params):
    return jnp.sort(params[NAMES[0]], axis=0).sum()


OUTPUTS = {
    "a pattern": lambda: fz.partition(tree(), "red"),
    "another structure": lambda: fz.partition(tree(), dict.fromkeys(NAMES[1:], True)),
    "one path twice": lambda: fz.partition({NAMES[0]: {"x": 1.0}, f"{NAMES[0]}/x": 1.0}, True),
    "a function that fails": lambda: fz.partition(tree(), fz.where(lambda path, leaf: getattr(leaf, path))),
    "labels": lambda: fz.labels_by_path({"red": "slow"}, default="fast")(tree()),
    "combine": lambda: fz.combine(fz.partition(tree(), both(True))[0], {NAMES[0]: jnp.ones(2)}),
    "a switch": lambda: fz.set_frozen(
        fz.freeze_when(optax.sgd(0.1), dict.fromkeys(NAMES, False)).init(tree()), {"no": True}
    ),
    "assert_frozen": lambda: fz.assert_frozen(tree(), tree(2.0), True),
    "assert_frozen, other trees": lambda: fz.assert_frozen(tree(), {NAMES[0]: jnp.ones(2)}, True),
    "audit": lambda: str(fz.audit(tree(), dict.fromkeys(NAMES, True) | {NAMES[1]: False}, leaky())),
    "audit that raises": lambda: fz.audit(tree(), both(True), leaky()).raise_for_leaks(),
    "explain": lambda: str(fz.explain(read_rows, tree(), both(fz.rows([0])))),
    "migrate": lambda: str(migrated(both(True), both(False))),
    "migrate what does not fit": lambda: migrated(False, False, (4, 2), rows={"**": [0]}),
    "summary": lambda: str(fz.summary(tree(), both(fz.rows([0])), optax.adam(0.1))),
    "summary in HTML": lambda: fz.summary(tree(), both(True))._repr_html_(),
    "summary by rich": lambda: shown_by_rich(fz.summary(tree(), both(True))),
    "costs": lambda: str(fz.costs(read_rows, tree(), {NAMES[0]: False}, tx=optax.sgd(0.1))),
    "nnx": lambda: fnnx.freeze(module(), "red"),
}


def output_of(call):
    try:
        return call()
    except Exception as error:
        return str(error)


def assert_clean(text):
    assert isinstance(text, str)
    assert not any(name in text for name in NAMES)
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_name_does_not_command_a_terminal(name):
    text = output_of(OUTPUTS[name])
    assert re.search(r"red|back|a\\nb|\\x07", text)
    assert_clean(text)


def test_nor_does_it_from_a_checkpoint(tmp_path, capsys):
    checkpoint.save(tmp_path / "run", tree(), both(True), step=0, opt_state=optax.adam(0.1).init(tree()))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "base", {NAMES[0]: tree(), "params": 1.0})
    for base in (tree(2.0), {NAMES[0]: jnp.ones(1)}, {name: jnp.ones((4, 2)) for name in NAMES}):
        with pytest.raises(ValueError, match=r"red|\\x07") as caught:
            checkpoint.restore(tmp_path / "run", base)
        assert_clean(str(caught.value))
    with pytest.raises(ValueError, match=r"red|\\x07") as caught:
        checkpoint.restore(tmp_path / "run", tree(), opt_state=optax.adam(0.1).init(both(1.0)))
    assert_clean(str(caught.value))
    for argv in (
        ["run"],
        ["run", "--freeze", "red"],
        ["base", "--params", "red"],
        ["base", "--freeze", "red"],
        ["bas"],
    ):
        main([str(tmp_path / argv[0]), *argv[1:]])
        printed = capsys.readouterr()
        assert printed.out or printed.err
        assert_clean(printed.out + printed.err)


def test_patterns_match_the_real_names():
    trainable, _ = fz.partition(tree(), fz.path(NAMES[0].replace("[", "[[]"), NAMES[1]))
    assert [name for name in NAMES if isinstance(trainable[name], optax.MaskedNode)] == [*NAMES[:2]]
    with pytest.raises(ValueError, match="matches no leaf"):
        fz.partition(tree(), repr(NAMES[1]))
    assert jax.tree.leaves(fz.labels(NAMES[1])(tree())).count("frozen") == 1
