"""The report: rows, totals, the optimizer's state, and how they are shown."""

import html
import io
import math
import re
import sys
import typing
from typing import ClassVar

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
import rich.console

import optax_freeze as fz
from optax_freeze._report import table as _table
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.folded_paths import fold


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def shown(summary):
    """The cells of the lines of the printed table, and the lines below it."""
    table, _, totals = str(summary).partition("\n\n")
    return [re.split(r"  +", line) for line in table.splitlines()[2:]], totals.splitlines()


def paths(summary):
    return [cells[0] for cells in shown(summary)[0]]


MASK = np.arange(12).reshape(3, 4) % 3 == 0
SPECS = {
    "nothing": False,
    "everything": True,
    "a_pattern": "encoder/layer_0",
    "rows": fz.rules({"**/kernel": fz.rows([0, 1])}),
    "stepped_columns": fz.rules({"**/kernel": fz.rows(slice(0, None, 2), axis=1), "head": True}),
    "dense": fz.rules({"encoder/layer_0/kernel": MASK}),
    "compact": fz.rules({"encoder/layer_0/kernel": fz.elements(MASK, compact=True)}, default=True),
    "dynamic": fz.rules({"**/kernel": ~fz.rows(jnp.array([2, 0]))}),
}
OPTIMIZERS = {
    "a_pattern": optax.adafactor(1e-3, min_dim_size_to_factor=2),
    "rows": optax.lbfgs(),
    "dense": optax.MultiSteps(optax.adam(1e-3), 4),
    "compact": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "stepped_columns": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.adam(1e-3)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_trains_is_what_an_update_moves(params, spec):
    tx = optax.adamw(1e-3)
    summary = fz.summary(params, spec, tx)
    moved = fz.apply_updates(params, jax.tree.map(lambda leaf: jnp.full(leaf.shape, 9.0), params), spec)
    names = jax.tree_util.tree_leaves_with_path(params)
    for row, (path, leaf), new in zip(summary.rows, names, jax.tree.leaves(moved), strict=True):
        assert (row.path, row.shape, row.dtype) == (_tree.keystr(path), leaf.shape, leaf.dtype)
        assert (row.elements, row.bytes) == (leaf.size, leaf.nbytes)
        assert row.frozen_elements == int((leaf == new).sum())
        assert row.frozen_bytes == row.frozen_elements * leaf.dtype.itemsize
    assert summary.elements == summary.frozen_elements + summary.trainable_elements
    assert summary.bytes == nbytes(params) == summary.frozen_bytes + summary.trainable_bytes
    without = fz.summary(params, spec)
    assert (without.rows, without.state_bytes, without.full_state_bytes) == (summary.rows, None, None)
    assert fz.summary(jax.eval_shape(lambda: params), spec, tx) == summary
    traced = []
    jax.eval_shape(lambda params: traced.append(fz.summary(params, spec, tx)), params)
    assert traced == [summary]


def test_awkward_leaves_have_rows(awkward):
    more = {"fn": jax.nn.relu, "masked": optax.MaskedNode(), "int4": jnp.ones(3, jnp.int4)}
    summary = fz.summary(awkward | more, "frozen")
    rows = {row.path: row for row in summary.rows}
    assert (rows["frozen/key"].elements, rows["frozen/key"].frozen_elements, rows["frozen/key"].bytes) == (1, 1, 8)
    assert rows["frozen/empty"].shape == (0, 3)
    assert rows["int4"].frozen_elements == 3
    for path in ("fn", "masked"):
        assert rows[path][1:] == (None, None, 0, 0, 0, 0, 1, 0, "")
    assert summary.trainable_elements == 2
    assert "frozen/none" not in rows


def test_parts_count_what_is_there(params):
    spec = fz.rules({"encoder/layer_0/kernel": fz.rows([0, 1]), "encoder/layer_1": True})
    trainable, rest = fz.partition(params, spec)
    row = next(row for row in fz.summary(trainable, spec).rows if row.path == "encoder/layer_0/kernel")
    assert (row.shape, row.elements, row.frozen_elements) == ((1, 4), 4, 0)
    assert fz.summary(trainable, spec).bytes == nbytes(trainable)
    assert fz.summary(trainable, True).frozen_bytes == nbytes(trainable)
    compact = fz.rules({"encoder/layer_0/kernel": fz.elements(MASK, compact=True)}, default=True)
    trainable, rest = fz.partition(params, compact)
    assert fz.summary(trainable, compact).elements == (~MASK).sum()
    assert fz.summary(rest, compact).elements == fz.summary(params, compact).elements


def test_a_dense_mask_is_counted_where_it_has_values():
    kernel, mask, counts = {"kernel": jnp.ones((4, 2))}, jnp.eye(4, 2, dtype=bool), []

    def step(kernel, mask):
        counts.append(fz.summary(kernel, {"kernel": mask}, optax.adam(1e-3)).frozen_elements)

    jax.jit(lambda kernel: step(kernel, mask))(kernel)
    assert counts == [2]
    for use in (lambda: jax.jit(step)(kernel, mask), lambda: step(kernel, shape(4, 2, dtype=bool))):
        with pytest.raises(ValueError, match=r"(?s)cannot be counted.*at: kernel.*outside of jit"):
            use()


def test_tied_leaves():
    tied = dict.fromkeys("ab", jnp.ones((2, 2)))
    assert fz.summary(tied, "a", optax.adam(0.1), tied="ignore").frozen_elements == 4


def test_a_tree_without_leaves_has_no_rows():
    summary = fz.summary({}, True, optax.adam(1e-3))
    assert summary.rows == ()
    assert summary.state_bytes == summary.full_state_bytes == 4
    assert "trainable 0 of 0 elements" in str(summary)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_bytes_are_those_of_the_states(params, name):
    tx, spec = OPTIMIZERS[name], SPECS[name]
    summary = fz.summary(params, spec, tx)
    assert summary.full_state_bytes == nbytes(tx.init(params))
    assert summary.state_bytes == nbytes(fz.freeze(tx, spec).init(params))


@pytest.mark.parametrize("spec", [False, True], ids=str)
def test_no_state_is_held_for_what_cannot_train(spec):
    params = {"w": jnp.ones(3), "key": jax.random.key(0), "fn": jax.nn.relu, "int": np.int32(3), "none": None}
    params |= {"int8": jnp.ones((64, 64), jnp.int8), "bool": jnp.ones(5, bool), "float8": shape(8, dtype="float8_e5m2")}
    summary = fz.summary(params, spec, optax.adam(1e-3))
    assert summary.full_state_bytes == 4 + 2 * (12 + 8)
    assert summary.state_bytes == 4 + 2 * (12 + 8) * (spec is not True)


def test_narrow_numbers_share_bytes():
    params = {name: shape(3, 5, dtype=name) for name in ("float4_e2m1fn", "int4", "complex64", "bool")}
    rows = fz.summary(params, {"float4_e2m1fn": fz.rows([0]), "int4": True, "complex64": False, "bool": True}).rows
    found = {row.path: (row.bytes, row.frozen_bytes) for row in rows}
    assert found == {"float4_e2m1fn": (8, 3), "int4": (8, 8), "complex64": (120, 0), "bool": (15, 15)}


def test_an_optimizer_that_freezes_already_is_refused(params):
    """A bare ``fz.freeze`` is in ``wrong_calls.md``."""
    inner = optax.adam(1e-3)
    chain = optax.chain(fz.freeze_when(inner, {"encoder": fz.unfreeze_at(3)}))
    for tx in (optax.MultiSteps(fz.freeze(inner, "encoder"), 2), chain):
        with pytest.raises(ValueError, match="already freezes parameters"):
            fz.summary(params, "encoder", tx)


LAYERS = ["encoder/layer_0", "encoder/layer_1", "head/bias", "head/kernel"]


@pytest.mark.parametrize(("depth", "paths"), [(0, [""]), (1, ["encoder", "head"]), (2, LAYERS)])
def test_depth_sums_up_what_is_below(params, depth, paths):
    spec, tx = fz.rules({"encoder/layer_0": True, "head/kernel": fz.rows([0])}), optax.adam(1e-3)
    whole, summary = fz.summary(params, spec, tx), fz.summary(params, spec, tx, depth=depth)
    assert [row.path for row in summary.rows] == paths
    for total in ("elements", "frozen_elements", "bytes", "frozen_bytes", "state_bytes", "full_state_bytes"):
        assert getattr(summary, total) == getattr(whole, total)
    assert sum(summary.row_state_bytes) == sum(whole.row_state_bytes) > 0
    assert summary.rows[0][1:3] == (None, jnp.float32)
    assert sum(row.leaves for row in summary.rows) == 6
    if depth == 2:
        assert summary.rows[2:] == whole.rows[4:]


def test_leaves_of_other_dtypes_in_one_row():
    [row] = fz.summary({"a": {"b": jnp.ones(2), "c": jnp.ones(2, jnp.bfloat16)}}, True, depth=1).rows
    assert row == ("a", None, None, 4, 4, 12, 12, 2, 0, "")


def block(names=("attention", "mlp"), size=4):
    return {name: {"kernel": shape(size, size)} for name in names}


def test_a_model_of_seventy_billion_parameters_reads_on_one_screen():
    d, kv, ff, vocabulary = 8192, 1024, 28672, 128256
    sizes = {"q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d), "gate": (d, ff), "up": (d, ff), "down": (ff, d)}
    norms = {"attention_norm": shape(d), "mlp_norm": shape(d)}
    layer = {name: {"kernel": shape(*size, dtype=jnp.bfloat16)} for name, size in sizes.items()} | norms
    params = {"embed": shape(vocabulary, d), "head": shape(d, vocabulary), "norm": shape(d)}
    params |= {f"layer_{i}": layer for i in range(80)}
    summary = fz.summary(params, fz.all_except("layer_78", "layer_79", "norm"), optax.adamw(1e-3))
    assert len(summary.rows) == 80 * 9 + 3
    assert [len(str(summary).splitlines()), max(map(len, str(summary).splitlines())) < 120] == [2 + 3 + 2 * 9 + 5, True]
    cells, totals = shown(summary)
    assert ["layer_0 … layer_77/down/kernel", "78 × (28672, 8192)", "bfloat16"] in [line[:3] for line in cells]
    assert sum(int(line[3].replace(",", "")) for line in cells) == summary.elements == 70_553_706_496
    assert totals[2:] == ["all 70,553,706,496 elements, 135.3 GiB", "optimizer state 6.4 GiB instead of 270.7 GiB"]


@pytest.mark.parametrize(
    ("names", "label"),
    [
        ([f"layer_{i}" for i in range(32)], "layer_0 … layer_31"),
        ([f"block{i:02d}" for i in range(12)], "block00 … block11"),
        ([f"{i}" for i in range(3)], "0 … 2"),
        (["0", "2", "4"], "0, 2, 4"),
        (["a1", "a2", "a3", "a7", "a8"], "a1 … a3, a7 … a8"),
        ([f"a{i}" for i in range(0, 40, 2)], "a0, a2, a4, …, a38"),
        ([f"model.{i}.kernel" for i in range(8)], "model.{0 … 7}.kernel"),
        ([f"v2_block_{i}" for i in range(8)], "v2_block_0 … v2_block_7"),
        (["only_1"], "only_1"),
        ([f"a{10**30 + i}" for i in range(1)], f"a{10**30}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_that_differ_in_one_number_are_one(names, label):
    [cells] = shown(fz.summary({name: {"kernel": shape(3)} for name in names}, True))[0]
    assert cells[0] == f"{label}/kernel"
    assert cells[1] == (f"{len(names)} × (3,)" if len(names) > 1 else "(3,)")


def test_layers_fold_only_if_they_hold_the_same():
    layers = {f"layer_{i}": block() for i in range(6)}
    assert paths(fz.summary(layers, "layer_[0-3]", depth=1)) == ["layer_0 … layer_3", "layer_4 … layer_5"]
    other = layers | {"layer_2": block(size=5)}
    assert paths(fz.summary(other, True, depth=None))[2:] == ["layer_2/attention/kernel", "layer_2/mlp/kernel"]
    renamed = layers | {"layer_2": block(("attention", "moe"))}
    assert "layer_2/moe/kernel" in paths(fz.summary(renamed, True))
    partly = fz.rules({"layer_[01]/mlp": fz.rows([0]), "layer_2/mlp": fz.rows([1, 2])})
    names = ["layer_0 … layer_1", "layer_2", "layer_3 … layer_5"]
    assert paths(fz.summary(layers, partly))[1::2] == [f"{name}/mlp/kernel" for name in names]


def test_experts_fold_within_layers():
    layers = {f"{i}": {"experts": {f"{j}": block() for j in range(8)}, "norm": shape(4)} for i in range(12)}
    cells, _ = shown(fz.summary({"layers": layers}, "**/experts/[0-3]"))
    experts = [f"experts/{some}/{name}/kernel" for some in ("0 … 3", "4 … 7") for name in ("attention", "mlp")]
    expected = [[f"layers/0 … 11/{path}", "48 × (4, 4)"] for path in experts]
    assert [line[:2] for line in cells] == [*expected, ["layers/0 … 11/norm", "12 × (4,)"]]


trees = st.recursive(
    st.sampled_from([(), (2,), (2, 3)]),
    lambda children: st.dictionaries(st.sampled_from(["a", "b1", "b2", "b3", "3_c4", "3_c5", "4_c4", ""]), children),
    max_leaves=24,
)


@hypothesis.settings(derandomize=True, deadline=None, max_examples=60)
@hypothesis.given(trees, st.data())
def test_the_lines_of_any_tree_add_up_to_its_rows(tree, data):
    params = jax.tree.map(lambda sizes: shape(*sizes), tree, is_leaf=lambda node: isinstance(node, tuple))
    leaves = jax.tree.leaves(params)
    bools = data.draw(st.lists(st.booleans(), min_size=len(leaves), max_size=len(leaves)))
    frozen = jax.tree.unflatten(jax.tree.structure(params), bools)
    try:
        summary = fz.summary(params, frozen)
    except ValueError:  # the empty key: two leaves with one path
        hypothesis.reject()
    lines = fold((row.path, row) for row in summary.rows)
    assert sum(line.times for line in lines) == len(leaves)
    for name in ("elements", "frozen_elements", "bytes", "frozen_bytes"):
        assert sum(line.times * getattr(line.content, name) for line in lines) == getattr(summary, name)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    assert summary.frozen_elements == np.dot(sizes, bools)


def test_text_is_plain_and_knows_no_terminal(params, monkeypatch):
    expected = str(fz.summary(params, "encoder"))
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(fz.summary(params, "encoder")) == repr(fz.summary(params, "encoder")) == expected
    assert "\x1b" not in expected
    long = "/".join(["segment"] * 60)
    assert paths(fz.summary({long: shape(3)}, True)) == [long]


def rendered(summary, width):
    file = io.StringIO()
    rich.console.Console(file=file, width=width).print(summary)
    return file.getvalue()


def test_paths_in_a_terminal_and_a_notebook():
    names = {"[red]a[/red]": shape(3), "[/]": shape(2), "<script>b</script>&": shape(2)}
    output, written = rendered(fz.summary(names, True), 100), fz.summary(names, True)._repr_html_()
    assert all(name in output for name in names)
    assert "<script>" not in written
    assert all(html.escape(name) in written for name in names)
    assert written.count("<tr>") == 4
    path = "a_rather_long_name/" * 5 + "kernel"
    narrow = rendered(fz.summary({path: shape(3)}, True), 60)
    assert path in "".join(line.split("  ")[0].strip() for line in narrow.splitlines())


def test_shares_are_nothing_or_everything_only_if_exactly_so():
    shares = [_table.share(part, 10**9) for part in (0, 1, 10**7, 10**9 - 1, 10**9)]
    assert shares == ["0 %", "< 0.01 %", "1 %", "> 99.99 %", "100 %"]
    sizes = [_table.size(count) for count in (0, 1023, 1024, 3 * 2**29, 2**80)]
    assert sizes == ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "1,048,576.0 EiB"]


def test_rows_say_which_they_are():
    columns, turning = ~fz.rows(slice(10), axis=1), ~fz.rows(jnp.array([3]))
    params = {"bias": shape(9), "layers": [shape(8, 40), shape(8, 40)], "table": shape(9, 1)}
    spec = {"bias": fz.rows([0, 7]), "layers": columns, "table": turning}
    assert [(line[0], line[-1]) for line in shown(fz.summary(params, spec))[0]] == [
        ("bias", "7 train (77.78 %): rows 1:7, 8:9 of axis 0"),
        ("layers/0 … 1", "160 train (25 %): rows 0:10 of axis 1"),
        ("table", "1 train (11.11 %): 1 row of axis 0"),
    ]


def test_leaves_say_what_they_are():
    params = {"masked": optax.MaskedNode(), "empty": shape(0, 3), "part": shape(100, 10), "whole": shape(2)}
    cells, totals = shown(fz.summary(params, fz.rules({"part": fz.rows(slice(0, 99))})))
    said = [
        ("(0, 3)", "0 B"),
        ("no array", "0 B"),
        ("(100, 10)", "10 train (1 %): rows 99:100 of axis 0"),
        ("(2,)", "trains"),
    ]
    assert [(line[1], line[-1]) for line in cells] == said
    assert totals == [
        "trainable 12 of 1,002 elements (1.198 %), 48 B of 3.9 KiB",
        "frozen 990 of 1,002 elements (98.8 %), 3.9 KiB of 3.9 KiB",
        "all 1,002 elements, 3.9 KiB",
    ]


def test_text_and_html_need_neither_rich_nor_matplotlib(params, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in ("rich", "matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    summary = fz.summary(params, "encoder")
    assert str(summary)
    assert summary._repr_html_()
    with pytest.raises(ImportError, match="pip install matplotlib"):
        summary.plot()


@pytest.fixture
def ax():
    plt.switch_backend("agg")
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def drawn(ax):
    """The bytes of the parts of each bar by its name, and the names of the parts in the legend."""
    names = [label.get_text() for label in ax.get_yticklabels()]
    lengths = [[patch.get_width() * UNITS[ax.get_xlabel()] for patch in bars] for bars in ax.containers]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    return dict(zip(names, zip(*lengths, strict=True), strict=True)), legend


@pytest.mark.parametrize("name", ["rows", "compact"])
def test_bars_are_the_bytes_of_modules(params, ax, name):
    summary = fz.summary(params, SPECS[name], optax.adamw(1e-3))
    assert summary.plot(ax) is ax
    bars, legend = drawn(ax)
    assert math.isclose(sum(bar[2] for bar in bars.values()), sum(summary.row_state_bytes))
    assert list(bars) == ["encoder", "head"]
    for module, bar in bars.items():
        rows = [row for row in summary.rows if row.path.startswith(module)]
        expected = (sum(r.bytes - r.frozen_bytes for r in rows), sum(r.frozen_bytes for r in rows))
        assert np.allclose(bar[:2], expected)
    masks = 0 if name == "rows" else MASK.nbytes
    assert summary.state_bytes == sum(summary.row_state_bytes) + 4 + masks
    assert [text.split(":")[0] for text in legend] == ["trainable", "frozen", "optimizer state"]
    assert legend[2] == f"optimizer state: {_table.size(summary.state_bytes)}"
    starts = [[patch.get_x() for patch in bars_of_part] for bars_of_part in ax.containers]
    assert starts[0] == [0, 0]
    assert np.allclose(starts[1], [patch.get_width() for patch in ax.containers[0]])
    ax.figure.canvas.draw()


def test_a_depth_of_a_picture_names_smaller_modules(params, ax):
    bars, legend = drawn(fz.summary(params, "encoder").plot(ax, depth=2))
    assert list(bars) == LAYERS
    assert bars["head/kernel"] == (32, 0)
    assert legend == ["trainable: 40 B", "frozen: 144 B"]
    for use in (fz.summary(params, "encoder").plot, lambda depth: fz.summary(params, "encoder", depth=depth)):
        with pytest.raises(ValueError, match="`depth` must be a non-negative int"):
            use(depth=-1)


def test_small_modules_share_a_bar(ax):
    params = {f"block_{i}": shape(1000 * (i + 1)) for i in range(40)}
    bars, _ = drawn(fz.summary(params, "block_1*").plot(ax))
    assert list(bars) == [*(f"block_{i}" for i in range(28, 40)), "28 smaller"]
    assert math.isclose(sum(map(sum, bars.values())), fz.summary(params, True).bytes)
    assert ax.get_xlabel() == "MiB"


def test_a_picture_without_axes_makes_its_own(params):
    plt.switch_backend("agg")
    ax = fz.summary({"a$b$": shape(3), "x\ny": shape(3)}, "a*").plot()
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a\\$b\\$", "'x\\ny'"]
    plt.close(ax.figure)
    with pytest.raises(ValueError, match="nothing to draw"):
        fz.summary({"masked": optax.MaskedNode()}, True).plot()


@pytest.mark.parametrize(("spec", "extent"), [("**", "everything"), (False, "nothing")])
def test_a_spec_that_freezes_nothing_or_everything_is_said(spec, extent):
    always = "; leaves that are not floating-point or complex arrays are always frozen"
    params = {"a": jnp.ones(2), "steps": jnp.int32(0)}
    for summary in (fz.summary(params, spec), fz.summary(params, spec, optax.adam(1.0), depth=0)):
        assert summary.extent == extent
        assert str(summary).splitlines()[-1] == f"the spec freezes {extent}" + always * (extent == "nothing")
        for text in (summary._repr_html_(), rendered(summary, 100)):
            assert f"the spec freezes {extent}" in text


def test_a_spec_that_freezes_some_is_not():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    assert str(fz.summary(params, False)).splitlines()[-1] == "the spec freezes nothing"
    for tree, spec in ((params, "a"), (fz.partition(params, "a")[0], "a"), (params, fz.rules({"**": fz.rows(0)}))):
        assert fz.summary(tree, spec).extent is None
        assert "the spec freezes" not in str(fz.summary(tree, spec))


class TestOnHost:
    spec: ClassVar = {"layers": fz.rows([0, 1, 2]), "embed": True, "head": False}
    model: ClassVar = {"layers": jnp.ones((4, 6, 2)), "embed": jnp.ones((3, 2, 2)), "head": jnp.ones(3)}

    @pytest.mark.parametrize("shapes", [False, True])
    def test_rows_and_totals_say_what_lies_there(self, shapes):
        params = jax.eval_shape(lambda: self.model) if shapes else self.model
        before = fz.summary(params, self.spec, optax.adam(0.1))
        assert (before.host_bytes, before.device_bytes) == (0, before.bytes)
        assert "host" not in str(before)
        after = fz.summary(fz.offload(params, self.spec, min_bytes=0), self.spec, optax.adam(0.1))
        assert {row.path: row.host_bytes for row in after.rows} == {"embed": 48, "head": 0, "layers": 192}
        assert (after.host_bytes, after.device_bytes) == (240, 12)
        assert after.row_state_bytes == before.row_state_bytes
        for text in (str(after), rendered(after, 120), html.unescape(after._repr_html_())):
            assert "frozen, on the host" in text
            assert "12 train (25 %): rows 3:4 of axis 0, on the host" in text
            assert "in the device's memory 12 B, in the host's 240 B" in text

    def test_a_sum_and_bars_say_how_much(self, ax):
        params = fz.offload(self.model, self.spec, min_bytes=0)
        summary = fz.summary(params, self.spec, depth=0)
        assert [(row.host_bytes, row.leaves) for row in summary.rows] == [(240, 3)]
        assert "240 B on the host" in str(summary)
        assert fz.summary(fz.partition(params, self.spec)[1], True).host_bytes == 240
        _, legend = drawn(summary.plot(ax))
        assert legend == ["trainable: 12 B", "frozen: 0 B", "in the host's memory: 240 B"]


class TestManyLeaves:
    params: typing.ClassVar = {f"layer_{i}": {"kernel": shape(4, 4), "bias": shape(4)} for i in range(20)}

    def traced_leaves(self, make):
        """The number of leaves that `init` is traced for in each call, and the summary."""
        found = []

        def init(params):
            found.append(len(jax.tree.leaves(params)))
            return make().init(params)

        tx = optax.GradientTransformation(init, make().update)
        return found, fz.summary(self.params, "layer_0/**", tx)

    def exact(self, make):
        return nbytes(jax.eval_shape(fz.freeze(make(), "layer_0/**").init, self.params))

    def test_with_freezing_one_leaf_of_each_kind_is_traced(self):
        found, summary = self.traced_leaves(lambda: optax.adam(0.1))
        assert found == [40, 2]
        assert summary.state_bytes == self.exact(lambda: optax.adam(0.1))
        assert sum(summary.row_state_bytes) == summary.state_bytes - 4

    def test_a_state_that_is_not_by_leaf_is_traced_in_full(self):
        found, summary = self.traced_leaves(lambda: optax.flatten(optax.adam(0.1)))
        assert found == [40, 2, 38]
        assert summary.state_bytes == self.exact(lambda: optax.flatten(optax.adam(0.1)))

    def test_an_optimizer_may_ask_for_the_structure_of_its_parameters(self):
        def init(params):
            return optax.adam(0.1).init(params), jnp.ones(params["layer_3"]["kernel"].shape)

        tx = optax.GradientTransformation(init, optax.adam(0.1).update)
        summary = fz.summary(self.params, "layer_0/kernel", tx)
        assert summary.state_bytes == nbytes(jax.eval_shape(fz.freeze(tx, "layer_0/kernel").init, self.params))

    def test_a_leaf_with_the_name_of_a_count(self):
        params = {**self.params, "count": shape(5)}
        summary = fz.summary(params, "layer_0/**", optax.adam(0.1))
        assert dict(zip((row.path for row in summary.rows), summary.row_state_bytes, strict=True))["count"] == 2 * 4 * 5


@pytest.mark.parametrize("rows", [fz.rows([2**31 + 1, 2**32]), ~fz.rows(slice(2**31, None, 2**20))])
def test_rows_beyond_32_bits_need_numbers_of_64(rows):
    table = shape(3 * 2**31, 2)
    assert fz.summary(table, ~fz.rows([2**32]), optax.adam(0.1)).trainable_elements == 2  # one run is a slice
    with pytest.raises(ValueError, match=r"6442450944 rows(.|\n)*jax_enable_x64"):
        fz.summary(table, rows, optax.adam(0.1))
    with jax.enable_x64(True):
        fz.summary(table, rows, optax.adam(0.1))
