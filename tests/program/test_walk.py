"""Schedules: which tasks run, under which conditions, what is stored meanwhile, and how a function is flattened."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optax_freeze._jax_internals import is_backward
from optax_freeze._program.regions import (
    EVERYTHING,
    DynamicRows,
    Numbers,
    Rows,
    Values,
    covering,
    is_scattered,
    is_whole,
)
from optax_freeze._program.tasks import ALWAYS, Context, new_guards, one_region
from optax_freeze._program.trace import flatten
from optax_freeze._program.walk import schedule

W = jnp.sin(jnp.arange(24.0)).reshape(6, 4)
RAN = []


def noted(name, value):
    """The value, when it is computed; it is no side effect, so it may be left out."""
    return jax.pure_callback(lambda value: (RAN.append(name), value)[1], jax.typeof(value), value)


def program_of(fun, *operands):
    return flatten(jax.make_jaxpr(fun)(*operands))


def asked(program, *regions_and_guards):
    return [(v, region, guard) for v, (region, guard) in zip(program.outputs, regions_and_guards, strict=True)]


def names(tasks):
    return [task.eqn.primitive.name for task in tasks]


def _steps(w):
    """One row of the result for each step."""
    return lax.scan(lambda carry, row: (carry + row.sum(), row * carry), jnp.float32(1), w)[1]


def _loop(w):
    """All rows in each step."""
    return lax.scan(lambda w, _: (jnp.sin(w) * 2, None), w, length=3)[0]


FUNCTIONS_OF_ROWS = [
    lambda w: jnp.zeros((6, 4)).at[jnp.array([5, 3, 3, 2])].add(jnp.tanh(w[:4])),
    lambda w: jnp.concatenate([jnp.sin(w[:2]), jnp.pad(w[4:], ((1, 1), (0, 0)))]) + w.reshape(2, 3, 4).reshape(6, 4),
    _loop,
    _steps,
    lambda w: lax.cond(w[0, 0] > 1, lambda w: w + 1, lambda w: jnp.cos(w @ w.T) @ w, w),
]


class TestGuards:
    def run(self, fun, operands, guards, holds, regions=None):
        """The results if these conditions hold, and the number of conditions in the program."""
        program = program_of(fun, *operands)
        regions = regions or [EVERYTHING] * len(guards)
        found = schedule(program, asked(program, *zip(regions, guards, strict=True)))

        def run(operands, holds):
            return found.run(Values(dict(enumerate(operands))), Context(holds))

        RAN.clear()
        jitted = jax.jit(run)
        outs = jax.block_until_ready(jitted(operands, holds))
        conditions = sum(eqn.primitive.name == "cond" for eqn in jax.make_jaxpr(run)(operands, holds).eqns)
        return outs, conditions, sorted(RAN)

    @pytest.mark.parametrize("holds", [*itertools.product([False, True], repeat=2)])
    def test_a_task_runs_if_a_condition_holds_that_needs_it(self, holds):
        def fun(w):
            both = noted("both", w * 2)
            one, other = noted("one", jnp.sin(both)), noted("other", both + 1)
            return one, jnp.cos(one), other, noted("always", w + 3)

        a, b = new_guards(2)
        guards = [a, a, b, ALWAYS]
        outs, conditions, ran = self.run(fun, [W], guards, dict(zip([a, b], map(jnp.array, holds), strict=True)))
        needed = {"one": holds[0], "other": holds[1], "both": any(holds), "always": True}
        assert ran == sorted(name for name, is_needed in needed.items() if is_needed)
        assert conditions == 3  # of a, b, and both
        for out, expected, guard in zip(outs, fun(W), guards, strict=True):
            skipped = {a: not holds[0], b: not holds[1]}.get(guard, False)
            np.testing.assert_allclose(out, expected * (not skipped), rtol=1e-6)

    @pytest.mark.parametrize("holds", [(True, False), (False, True), (True, True)])
    @pytest.mark.parametrize("region", ["known", "dynamic", "inner"])
    def test_regions_of_a_loop_under_conditions(self, region, holds):
        def fun(x):
            def body(c, x):
                c = jnp.tanh(c + x)
                return c, (noted("first", c * x), noted("second", c + 1))

            return lax.scan(body, x[0], x)[1]

        a, b = new_guards(2)
        regions, counts = {
            "known": ([Rows(0, [1, 2]), Rows(0, [2, 3])], (2, 2)),
            "dynamic": ([DynamicRows(0, jnp.array([1, 4])), DynamicRows(0, jnp.array([2]))], (2, 1)),
            "inner": ([DynamicRows(0, jnp.array([1, 4])), Rows(1, [0, 3])], (2, 6)),
        }[region]
        conditions = {a: jnp.array(holds[0]), b: jnp.array(holds[1])}
        outs, _, ran = self.run(fun, [W], [a, b], conditions, regions)
        assert ran == ["first"] * counts[0] * holds[0] + ["second"] * counts[1] * holds[1]
        for out, expected, each, is_wanted in zip(outs, fun(W), regions, holds, strict=True):
            if is_wanted:
                np.testing.assert_allclose(out, each.take(expected), rtol=1e-6)


class Counted(Values):
    """Values that count how many there are at most."""

    most = 0

    def write(self, number, region, array):
        super().write(number, region, array)
        self.most = max(self.most, len(self._stored))


def test_values_are_dropped_after_their_last_use():
    def fun(w):
        first = w + 1
        x = first
        for _ in range(9):
            x = jnp.sin(x) * 2
        return x, w

    program = program_of(fun, W)
    values = Counted({0: W})
    schedule(program, asked(program, (EVERYTHING, ALWAYS), (EVERYTHING, ALWAYS))).run(values)
    assert values.most == 3
    assert set(values._stored) == set(program.outputs)


class TestRegionsOfAValue:
    def tasks(self, fun, *regions):
        program = program_of(fun, W)
        found = schedule(program, asked(program, *((region, ALWAYS) for region in regions)))
        outs = found.run(Values({0: W}))
        for out, region, expected in zip(outs, regions, fun(W), strict=True):
            np.testing.assert_allclose(out, region.take(expected), rtol=1e-6)
        return found, names(found.tasks), [task.extent for task in found.tasks if task.extent]

    def test_a_cheap_operation_is_repeated(self):
        found, tasks, log = self.tasks(lambda w: (jnp.sin(w),) * 2, Rows(0, [0, 1]), Rows(0, [4]))
        assert (tasks, log) == (["sin", "sin"], ["rows"] * 2)
        assert list(found.given[0]) == [Rows(0, [0, 1]), Rows(0, [4])]

    def test_regions_that_overlap_are_repeated_a_few_times_and_layers_that_do_not_each(self):
        layers = [Rows(0, [i]) for i in range(6)]
        _, tasks, _ = self.tasks(lambda w: (jnp.sin(w),) * 6, *layers)
        assert tasks == ["sin"] * 6
        _, tasks, _ = self.tasks(lambda w: (jnp.sin(w),) * 6, *layers[:5], Rows(0, [0, 1]))
        assert tasks == ["sin"]

    def test_of_everything_and_rows_everything_is_computed_once(self):
        _, tasks, log = self.tasks(lambda w: (w @ w.T,) * 2, Rows(0, [0, 1]), EVERYTHING)
        assert (tasks, log) == (["transpose", "dot_general"], [])

    def test_another_operation_computes_all_of_them_once(self):
        found, tasks, _ = self.tasks(lambda w: (w @ w.T,) * 2, Rows(0, [0, 1]), Rows(0, [1, 3]))
        assert tasks == ["transpose", "dot_general"]
        assert Rows(0, [0, 1, 3]) in found.given[0]

    def test_regions_of_two_axes(self):
        _, tasks, _ = self.tasks(lambda w: (w @ w.T,) * 2, Rows(0, [0, 1]), Rows(1, [1]))
        assert tasks.count("dot_general") == 2
        _, tasks, _ = self.tasks(lambda w: (w @ w.T,) * 2, Rows(0, [0, 1, 2]), Rows(1, [1, 2, 3]))
        assert tasks.count("dot_general") == 1  # half and half are everything

    def test_without_a_rule_everything_is_computed_and_cut(self):
        _, tasks, log = self.tasks(lambda w: (lax.cumsum(w * 2, 1), w), Rows(1, [1, 3]), Rows(0, [2]))
        assert (tasks, log) == (["mul", "cumsum"], ["rows"])
        _, tasks, log = self.tasks(lambda w: (noted("all", w), w), Rows(0, [1, 3]), EVERYTHING)
        assert log == ["everything"]
        _, tasks, log = self.tasks(lambda w: lax.sort((w, w * 2), num_keys=1), Rows(0, [1]), Rows(0, [2]))
        assert log == ["everything"]  # of two results, the rows must be the same

    def test_what_is_not_wanted_is_not_computed(self):
        program = program_of(lambda w: (jnp.sin(w), jnp.cos(w), lax.sort((w, w), num_keys=2)), W)
        found = schedule(program, [(program.outputs[1], Rows(0, [2]), ALWAYS)])
        assert names(found.tasks) == ["cos"]
        assert found.given == {0: {Rows(0, [2]): ALWAYS}}


class TestRegions:
    def test_rows(self):
        rows = Rows(1, [1, 2, 5])
        assert rows.runs == [(1, 3), (5, 6)]
        assert (rows.step, Rows(0, [1, 3, 5]).step, Rows(0, [4]).step) == (None, 2, 1)
        assert rows.shape((3, 8, 2)) == (3, 3, 2)
        assert (rows.share((3, 6)), EVERYTHING.share((3, 6))) == (0.5, 1.0)
        assert rows == Rows(1, np.array([1, 2, 5])) != Rows(0, [1, 2, 5])
        assert rows.inside() == Rows(0, [1, 2, 5])
        assert Rows(0, [2, 5]).within(Rows(0, [1, 2, 5])) == Rows(0, [1, 2])
        assert Rows(0, [2, 6]).within(Rows(0, [1, 2, 5])) is None
        assert Rows(0, [2, 3]).within(Rows(0, [1, 2, 5])) is None
        assert Rows(1, [2]).within(Rows(0, [1, 2, 5])) is None

    @pytest.mark.parametrize("numbers", [[0, 1], [2, 3], [1, 3, 5], [0, 2, 5], [i * i for i in range(20)]])
    def test_take_indices_and_find(self, numbers):
        numbers = np.array(numbers)
        table = jnp.arange(1000.0).reshape(500, 2)
        for region in (Rows(0, numbers), DynamicRows(0, jnp.asarray(numbers - 7)).shifted(7)):
            np.testing.assert_array_equal(region.take(table), table[numbers])
            np.testing.assert_array_equal(region.indices, numbers)
            asked = np.array([-1, *numbers, 499, 500])
            found, distinct = region.find(asked, 500)
            found = np.where((found >= 0) & (found < len(numbers)), found, -1)
            np.testing.assert_array_equal(found, [-1, *range(len(numbers)), -1, -1])
            assert not distinct or len(set(np.asarray(region.find(np.arange(500), 500)[0]).tolist())) == 500

    def test_dynamic_rows_out_of_range_are_those_that_exist(self):
        numbers = jnp.array([0, 1, 3, 5], jnp.int32)
        region = DynamicRows(0, numbers).shifted(-1).clamped(4)
        np.testing.assert_array_equal(region.take(W[:4]), W[jnp.array([0, 0, 2, 3])])
        np.testing.assert_array_equal(region.unclamped, [-1, 0, 2, 4])
        assert region == DynamicRows(0, numbers).shifted(-1).clamped(4) != region.shifted(1)
        assert region != DynamicRows(0, numbers + 0).shifted(-1).clamped(4)  # their numbers may be different

    def test_what_is_written_to_one_of_equal_rows_is_in_all(self):
        region = DynamicRows(0, jnp.array([0, 1, 3, 5], jnp.int32)).shifted(-1).clamped(4)
        place, _ = region.find(jnp.array([0]), 4)
        written = region.take(W[:4]).at[place].set(7.0)
        np.testing.assert_array_equal(region.joined(written, 4), region.take(W[:4].at[0].set(7.0)))

    @pytest.mark.parametrize("fun", FUNCTIONS_OF_ROWS, ids=["lookups", "pieces", "loop", "steps", "branch"])
    def test_a_plan_has_the_name_of_numbers_that_are_known_when_it_is_evaluated(self, fun):
        program = program_of(fun, W)
        name = Numbers("the trainable rows", 2)
        region = DynamicRows(0, name).clamped(6)
        assert region == DynamicRows(0, Numbers("the trainable rows", 2)).clamped(6)
        assert region != DynamicRows(0, Numbers("others", 2)).clamped(6)
        found = schedule(program, asked(program, (region, ALWAYS)))
        for numbers in ([0, 3], [2, 5]):
            context = Context(numbers={name: jnp.array(numbers, jnp.int32)})
            [rows] = found.run(Values({0: W}), context)
            np.testing.assert_allclose(rows, fun(W)[np.array(numbers)], rtol=1e-6)

    def test_covering(self):
        shape, other = (6, 4), DynamicRows(0, jnp.array([0]))
        assert covering([Rows(0, [1]), Rows(0, [3, 4])], shape) == [Rows(0, [1, 3, 4])]
        assert covering([Rows(0, [1]), other, other], shape) == [Rows(0, [1]), other]
        assert covering([Rows(0, [0, 1, 2]), Rows(0, [3, 4, 5])], shape) == [EVERYTHING]
        assert covering([Rows(0, [0, 1, 2]), Rows(1, [2, 3])], shape) == [EVERYTHING]
        assert covering([], shape) == []
        scattered = np.array([i for i in range(40) if i % 4])
        assert is_scattered(Rows(0, scattered), (40, 2))
        for rows, size in ((scattered, 80), (np.arange(0, 40, 2), 40), (scattered[:12], 16)):
            assert not is_scattered(Rows(0, rows), (size, 2))
        assert one_region([], shape) is None
        assert one_region([Rows(0, [1]), other], shape) is EVERYTHING
        assert one_region([Rows(0, [1])], shape) == Rows(0, [1])
        assert is_whole(Rows(1, range(4)), shape)
        assert not is_whole(DynamicRows(1, jnp.arange(4)), shape)

    def test_values(self):
        values = Values({0: W})
        values.write(1, Rows(0, [1, 2, 4, 5]), W[np.array([1, 2, 4, 5])])
        np.testing.assert_array_equal(values.read(1, Rows(0, [2, 4])), W[np.array([2, 4])])
        array, begins = values.read_run(1, Rows(0, [4, 5]))
        np.testing.assert_array_equal(array[4 - begins], W[4])
        assert values.read_run(0, Rows(0, [4, 5])) == (W, 0)
        with pytest.raises(KeyError):
            values.read(1, Rows(0, [3]))
        with pytest.raises(KeyError):
            values.read_run(1, Rows(1, [1]))
        some = values.only([1])
        some.write(1, EVERYTHING, W)
        assert not some.has(0)
        with pytest.raises(KeyError):
            values.read(1, Rows(0, [3]))


class TestFlatten:
    def test_calls_are_entered(self):
        @jax.jit
        def inner(x):
            with jax.named_scope("scope"):
                return jnp.sin(x) + W

        program = program_of(jax.jit(lambda w: jax.named_call(inner, name="called")(w)), W)
        assert [eqn.name for eqn in program.eqns] == ["sin", "add"]
        assert [*program.consts.values()] == [W] or program.consts == {}
        assert "called" in str(program.eqns[0].source.name_stack)
        assert "scope" in str(program.eqns[0].source.name_stack)
        assert "test_walk.py" in program.eqns[0].line

    def test_a_scope_named_as_a_backward_pass_is_none(self):
        named = jax.named_call(jnp.sin, name="transpose(jvp(k))")
        assert not any(map(is_backward, program_of(named, W).eqns))
        assert any(map(is_backward, program_of(jax.grad(lambda w: jnp.sum(jnp.sin(w) + w)), W).eqns))

    def test_calls_of_donated_or_sharded_arrays_are_not_entered(self):
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        for options in ({"donate_argnums": 0}, {"in_shardings": sharding}, {"out_shardings": sharding}):
            program = program_of(jax.jit(lambda w: w + 1, **options), W)
            assert [eqn.primitive.name for eqn in program.eqns] in (["jit"], ["pjit"])

    @pytest.mark.parametrize(("prevent_cse", "barriers"), [(True, 1), (False, 0)])
    def test_remat(self, prevent_cse, barriers):
        fun = jax.checkpoint(lambda w: jnp.sum(jnp.sin(jnp.sin(w))), prevent_cse=prevent_cse)
        program = program_of(jax.grad(fun), W)
        assert [eqn.name for eqn in program.eqns].count("optimization_barrier") == barriers
        remat = {"checkpoint", "remat", "remat2", "RematTraced"}
        assert remat.isdisjoint(eqn.name for eqn in program.eqns)
        found = schedule(program, [(program.outputs[0], Rows(0, [2]), ALWAYS)])
        [out] = found.run(Values({0: W}))
        np.testing.assert_allclose(out, jax.grad(fun)(W)[2:3], rtol=1e-6)
        assert list(found.given[0]) == [Rows(0, [2])]
        left = flatten(jax.make_jaxpr(jax.grad(fun))(W), enter_remat=False)
        assert not remat.isdisjoint(eqn.name for eqn in left.eqns)

    def test_constants_and_inputs_that_are_results(self):
        big = jnp.arange(6.0)
        program = program_of(lambda w, x: (x, 2.5, w + big[:, None], w), W, big)
        outs = schedule(program, asked(program, *[(EVERYTHING, ALWAYS)] * 2, *[(Rows(0, [1]), ALWAYS)] * 2)).run(
            Values({0: W, 1: big})
        )
        for out, expected in zip(outs, (big, 2.5, W[1:2] + 1, W[1:2]), strict=True):
            np.testing.assert_array_equal(out, expected)

    def test_operations_keep_their_source_and_context(self):
        def fun(w):
            with jax.named_scope("here"), jax.default_matmul_precision("highest"):
                return jnp.sin(w @ w.T)

        program = program_of(fun, W)
        found = schedule(program, [(program.outputs[0], Rows(0, [1]), ALWAYS)])
        jaxpr = jax.make_jaxpr(lambda w: found.run(Values({0: w})))(W)
        scopes = {eqn.primitive.name: str(eqn.source_info.name_stack) for eqn in jaxpr.eqns}
        assert scopes["sin"] == scopes["dot_general"] == "here"
        [dot] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
        assert dot.params["precision"] == (lax.Precision.HIGHEST,) * 2
