"""Costs of specs: the compiler's figures, operations of all loops and devices, what fits, and what is refused."""

import importlib.util
import io
import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from benchmarks.measure import on, tpu_sharding
from conftest import bits, counting_flops
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
import optax_freeze.nnx as fnnx
from optax_freeze._jax_internals import without_unused
from optax_freeze._program.flops import flops

ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
SGD = optax.sgd(0.1)
LAYERS, WIDTH = 4, 512
SPECS = {
    "head": "layers",
    "last layer": {"layers": fz.rows(slice(0, 3)), "head": True},
    "columns": {"layers": True, "head": fz.rows(slice(0, 6), axis=1)},
    "everything": False,
}
on_tpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, which compiles, is missing")


def shapes(layers=LAYERS, width=WIDTH):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    return {"layers": shape(layers, width, width), "head": shape(width, 8)}


def arrays(like):
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), like)


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


BATCH = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)


def row(*args, frozen="layers", tx=ADAMW, **options):
    [found] = fz.costs(*args[:2], {"it": frozen}, *args[2:], tx=tx, **options).rows
    return found


class TestFigures:
    def test_are_those_of_the_compiled_step_in_the_given_order(self):
        found = fz.costs(loss, shapes(), SPECS, BATCH, tx=ADAMW)
        assert [row.name for row in found.rows] == [*SPECS]
        for row, frozen in zip(found.rows, SPECS.values(), strict=True):
            tx, summary = fz.freeze(ADAMW, frozen), fz.summary(shapes(), frozen, ADAMW)
            state = jax.eval_shape(tx.init, shapes())
            step = jax.jit(fz.train_step(loss, tx), donate_argnums=(0, 1))
            memory = step.lower(shapes(), state, BATCH).compile().memory_analysis()
            used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
            assert row[1:4] == (summary.trainable_elements, summary.trainable_bytes, summary.state_bytes)
            assert row.memory_bytes == used - memory.alias_size_in_bytes
            assert (row.host_bytes, row.fits) == (0, None)

    def test_of_arrays_are_those_of_shapes_and_nothing_is_changed(self):
        params, x = arrays(shapes(2, 8)), jnp.ones((3, 8))
        before = bits((params, x))
        found = row(loss, params, x)
        assert bits((params, x)) == before  # none was donated
        assert found == row(loss, shapes(2, 8), jax.ShapeDtypeStruct(x.shape, x.dtype))
        assert found == row(loss, jax.tree.map(np.asarray, params), np.asarray(x))

    def test_with_auxiliary_outputs_extra_arguments_and_objects_among_the_parameters(self):
        model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))  # activations are leaves
        both = lambda model, x: (jnp.sum(jax.vmap(model)(x) ** 2), {"x": x + 1.0})  # noqa: E731
        search = optax.lbfgs()
        found = row(
            both,
            model,
            jnp.ones((3, 4)),
            frozen=fz.all_except("layers/1"),
            tx=search,
            has_aux=True,
            extra_args=["value", "grad", "value_fn"],
        )
        assert found.trainable_elements == 18
        assert found.state_bytes == fz.summary(model, fz.all_except("layers/1"), search).state_bytes


class TestOperations:
    @pytest.mark.parametrize("frozen", SPECS.values(), ids=SPECS)
    def test_are_those_that_run(self, frozen):
        params, x = arrays(shapes(4, 8)), jnp.ones((3, 8))
        tx = fz.freeze(ADAMW, frozen)
        step, state = fz.train_step(loss, tx), tx.init(params)
        program = jax.make_jaxpr(step)(params, state, x)
        program, _ = without_unused(program, [True] * len(program.out_avals))
        assert row(loss, params, x, frozen=frozen).flops == counting_flops(program)(params, state, x)

    def test_count_each_iteration_and_no_dead_code(self):
        def with_dead_code(params, x):
            _ = params["layers"][0] @ params["layers"][1]
            return loss(params, x)

        of = [row(loss, shapes(layers), BATCH, frozen=False, tx=SGD).flops for layers in (2, 3, 4)]
        assert of[2] - of[1] == of[1] - of[0] > 3 * 2 * 16 * WIDTH**2
        assert row(with_dead_code, shapes(), BATCH, frozen=False, tx=SGD).flops == of[2]

    def test_of_dynamic_rows_count_as_many_steps_as_there_can_be(self):
        specs = {"first": slice(0, 1), "dynamic": jnp.array([1]), "all": slice(0, LAYERS)}
        specs = {name: {"layers": ~fz.rows(index), "head": True} for name, index in specs.items()}
        last, dynamic, everything = fz.costs(loss, shapes(), specs, BATCH, tx=SGD).rows
        assert last.flops < dynamic.flops <= 1.02 * everything.flops

    def test_count_each_cell_of_a_grid(self):
        def of(cells):
            def kernel(x, out):
                out[...] = x[...] @ x[...]

            square = pl.pallas_call(kernel, grid=(cells,), out_shape=x, interpret=True)
            return flops(jax.make_jaxpr(square)(x).eqns)

        x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        assert of(4) == 4 * of(1) >= 4 * 2 * 8**3

    def test_count_all_devices(self):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        placed, batch = on(NamedSharding(mesh, P()), shapes(2, 64)), jax.ShapeDtypeStruct((16, 64), jnp.float32)
        sharded = on(NamedSharding(mesh, P("data")), batch)

        def mapped(params, x):
            each = jax.shard_map(
                lambda params, x: jax.lax.pmean(loss(params, x), "data"),
                mesh=mesh,
                in_specs=(P(), P("data")),
                out_specs=P(),
            )
            return each(params, x)

        alone = row(loss, shapes(2, 64), batch).flops
        assert row(loss, placed, sharded).flops == alone
        assert row(mapped, placed, sharded).flops == pytest.approx(alone, rel=0.1)


class TestShardings:
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_of_parameters_and_state_are_kept(self, kind):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        params = shapes() | {"unused": np.zeros(3)}  # it has none
        params["layers"] = on(NamedSharding(mesh, P(None, None, "data")), params["layers"])
        params["head"] = on(NamedSharding(mesh, P("data")), params["head"])
        x = on(NamedSharding(mesh, P()), BATCH)
        gathered = lambda params, x: loss(jax.sharding.reshard(params, P()), x)  # noqa: E731
        fun = loss if kind == AxisType.Auto else gathered
        with jax.set_mesh(mesh):
            found = row(fun, params, x, frozen=fz.path("head", "unused"))
        stack = 4 * LAYERS * WIDTH**2
        assert found.state_bytes > 2 * stack
        assert 3 * stack / 8 < found.memory_bytes < found.state_bytes + 4 * stack

    def test_of_a_batch_alone_are_those_of_all(self):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        params = jax.tree.map(np.asarray, arrays(shapes(2, 64)))
        x = jax.device_put(jnp.ones((16, 64)), NamedSharding(mesh, P("data")))
        assert row(loss, params, x).memory_bytes > 4 * 2 * 64**2


class TestWhatFits:
    def test_is_what_the_memory_holds(self):
        used = row(loss, shapes(), BATCH).memory_bytes
        assert [row(loss, shapes(), BATCH, memory=each).fits for each in (used, used - 1)] == [True, False]
        assert row(loss, shapes(), BATCH, memory=2.5 * used).fits

    def test_by_default_that_of_the_device_if_it_is_known(self, monkeypatch):
        monkeypatch.setattr("optax_freeze._report.compiled_step._limit", lambda device: 2**20)
        found = fz.costs(loss, shapes(), SPECS, BATCH, tx=ADAMW)
        assert (found.memory, {row.fits for row in found.rows}) == (2**20, {False})

    @pytest.mark.parametrize(
        ("message", "needed"),
        [
            ("the total memory required for HLO temporaries (23.50G) exceeds available HBM", 23.5 * 2**30),
            ("Out of memory while trying to allocate 1 bytes", None),
        ],
    )
    def test_is_not_what_the_compiler_refuses(self, message, needed, monkeypatch):
        def refuse(*_):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")

        monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
        found = fz.costs(loss, shapes(), {"it": "layers"}, BATCH, tx=ADAMW, memory=2**60)
        [row] = found.rows
        assert (row.memory_bytes, row.fits) == (needed, False)
        assert ("over" if needed is None else "23.50 GiB") in str(found)

    @pytest.mark.parametrize("message", ["INTERNAL: no", "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"])
    def test_another_error_of_the_compiler_is_passed_on_with_the_name_of_the_spec(self, message, monkeypatch):
        def refuse(*_):
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            row(loss, shapes(), BATCH)
        assert caught.value.__notes__ == ["with the spec 'it'"]

    def test_an_error_has_the_name_of_the_spec(self):
        for frozen in ("encoder", True):
            with pytest.raises(ValueError, match=r"encoder|nothing to differentiate") as caught:
                fz.costs(loss, shapes(), {"first": "head", "\x1b[31m": frozen}, BATCH, tx=ADAMW)
            assert caught.value.__notes__[-1] == r"with the spec '\x1b[31m'"

    def test_arrays_in_host_memory_count_as_memory_of_the_host(self):
        away = fz.offload(arrays(shapes()), "layers")
        assert row(loss, away, BATCH) == row(loss, shapes(), BATCH, offload=True)
        assert row(loss, away, BATCH).host_bytes == away["layers"].nbytes


@on_tpu
class TestWithoutATPU:
    def test_frozen_stacks_in_host_memory_are_a_column_of_their_own(self):
        params, x = on(tpu_sharding(), (shapes(), BATCH))
        last = SPECS["last layer"]
        here, away = (fz.costs(loss, params, {"last": last}, x, tx=ADAMW, offload=each) for each in (False, True))
        stack = 4 * LAYERS * WIDTH**2
        assert [each.rows[0].host_bytes for each in (here, away)] == [0, stack]
        assert away.rows[0].memory_bytes < here.rows[0].memory_bytes - stack / 3
        assert away.rows[0].state_bytes == here.rows[0].state_bytes
        assert "host memory" in str(away)
        assert "host memory" not in str(here)
        assert row(loss, fz.offload(params, last), x, frozen=last) == away.rows[0]._replace(name="it")

    def test_the_figure_of_a_step_that_does_not_fit_has_arguments_and_temporaries(self):
        """Three times that of a third of the parameters: 21 GiB, of which 6 are arguments."""
        matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        dense = lambda params, w: jnp.sum(jnp.tanh(jnp.tanh(params["a"] @ w) @ w) ** 2)  # noqa: E731
        third, whole = (
            row(dense, *on(tpu_sharding(), ({"a": matrix.update(shape=(rows, 1024))}, matrix)), frozen=False, tx=SGD)
            for rows in (2**19, 3 * 2**19)
        )
        assert (third.fits, whole.fits) == (None, False)
        assert whole.memory_bytes == pytest.approx(3 * third.memory_bytes, rel=0.01)

    def test_the_script_of_the_page(self, capsys):
        page = pathlib.Path("docs/does_it_fit.md").read_text(encoding="utf-8")
        [script] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
        exec(script, {})
        assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[2:5]] == ["yes"] * 3


class TestNNX:
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.body, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.dropout, self.head = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 2, rngs=rngs)

        def __call__(self, x):
            return self.head(self.dropout(nnx.relu(self.norm(self.body(x)))))

    @staticmethod
    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    def test_only_parameters_are_trainable_and_the_model_is_unchanged(self):
        model, specs = self.Model(nnx.Rngs(0)), {"head": fz.all_except("head"), "all": False}
        before = bits(nnx.state(model))
        found = fnnx.costs(self.loss, model, specs, jnp.ones((4, 8)), tx=ADAMW)
        assert bits(nnx.state(model)) == before
        assert [row.trainable_elements for row in found.rows] == [34, 8 * 16 + 16 + 32 + 34]
        abstract = nnx.eval_shape(lambda: self.Model(nnx.Rngs(0)))
        assert fnnx.costs(self.loss, abstract, specs, np.ones((4, 8), np.float32), tx=ADAMW).rows == found.rows

    def test_rows(self):
        frozen = {"kernel": fz.rows(slice(0, 6)), "bias": True}
        model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        [found] = fnnx.costs(self.loss, model, {"rows": frozen}, jnp.ones((4, 8)), tx=ADAMW).rows
        assert (found.trainable_elements, found.state_bytes) == (8, 2 * 8 * 4 + 4)

    def test_auxiliary_outputs_and_frozen_variables(self):
        model = fnnx.freeze(self.Model(nnx.Rngs(0)), "body")
        both = lambda model, x: (self.loss(model, x), x)  # noqa: E731
        [found] = fnnx.costs(both, model, {"all": False}, jnp.ones((4, 8)), tx=ADAMW, has_aux=True).rows
        assert found.trainable_elements == 32 + 34


class TestTable:
    def test_as_text_html_and_by_rich(self):
        found = fz.costs(loss, shapes(), SPECS | {"[red]<b>": "head"}, BATCH, tx=ADAMW, memory=2**23)
        text, html = str(found), found._repr_html_()
        assert text.splitlines()[0].split() == "spec trainable bytes optimizer state memory FLOP fits".split()  # noqa: SIM905
        assert "memory of one device; a device has 8.00 MiB" in text
        console = rich.console.Console(file=io.StringIO(), width=200)
        console.print(found)
        shown = console.file.getvalue()
        for each in (text, shown):
            assert "[red]<b>" in each
        assert "[red]&lt;b&gt;" in html
        assert {"yes", "no"} == {line.split()[-1] for line in text.splitlines()[2:7]}

    def test_a_bar_is_shown_in_a_terminal_alone_and_is_gone_at_the_end(self, capsys, monkeypatch):
        row(loss, shapes(2, 8), np.ones((2, 8), np.float32))
        assert capsys.readouterr() == ("", "")
        monkeypatch.setenv("FORCE_COLOR", "1")
        with pytest.raises(ValueError, match="matches no leaf"):
            row(loss, shapes(2, 8), np.ones((2, 8), np.float32), frozen="no")
        out, err = capsys.readouterr()
        assert out == ""
        assert "0/1" in err
        assert err.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is back, and the line erased
