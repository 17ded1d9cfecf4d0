"""Checkpoints contain only the trainable parameters, and are restored only onto the base of their run."""

import contextlib
import functools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from conftest import bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from save_until_killed import FROZEN, TX, at_step

import optax_freeze as fz
from optax_freeze import checkpoint
from optax_freeze.__main__ import main
from optax_freeze._verify.one_writer import only_writer

HERE = pathlib.Path(__file__).parent
DENSE = np.arange(64).reshape(8, 8) % 3 == 0
SPECS = {
    "rows": fz.rules({"encoder": True, "embed": fz.rows(slice(0, 6))}),
    "several runs": fz.rules({"embed": fz.rows([0, 1, 4, 7])}, default=False),
    "a stride": fz.rules({"encoder": True, "embed": fz.rows(slice(0, 8, 3))}),
    "columns": fz.rules({"embed": ~fz.rows([1, 2], axis=1)}),
    "dense": {"encoder": True, "embed": False, "head": {"a/b": False, "w": DENSE}, "odd": True},
    "compact": {
        "encoder": True,
        "embed": False,
        "head": {"a/b": False, "w": fz.elements(DENSE, compact=True)},
        "odd": True,
    },
}


@pytest.fixture
def base():
    return {
        "encoder": jnp.array([-0.0, jnp.nan, 1.0]),
        "embed": jnp.arange(32.0).reshape(8, 4),
        "head": {"a/b": jnp.ones(2, jnp.bfloat16), "w": jnp.ones((8, 8))},
        "odd": {"integer": jnp.array([1, 2]), "key": jax.random.key(0), "function": jnp.tanh, "none": None},
    }


def trained(base, frozen, steps=2, state=None):
    """What a few steps make of the parameters and the optimizer's state."""
    tx, params = fz.freeze(optax.adamw(0.1), frozen), base
    state = state or tx.init(base)
    for _ in range(steps):
        grads = jax.tree.map(
            lambda x: jnp.ones_like(x) if getattr(x, "dtype", None) in (jnp.float32, jnp.bfloat16) else x, params
        )
        updates, state = tx.update(grads, state, params)
        params = fz.apply_updates(params, updates, frozen)
    return tx, params, state


@pytest.mark.parametrize("name", SPECS)
def test_what_was_saved_comes_back(base, name, tmp_path):
    frozen = SPECS[name]
    tx, params, state = trained(base, frozen)
    checkpoint.save(tmp_path, params, frozen, step=2, opt_state=state)
    for spec, template in ((frozen, tx.init(base)), (None, jax.eval_shape(lambda: tx.init(base)))):
        restored = checkpoint.restore(tmp_path, base, opt_state=template, frozen=spec)
        assert bits(restored) == bits((params, state))
        assert jax.tree.structure(restored[1]) == jax.tree.structure(state)
    assert checkpoint.restore(tmp_path, base)[1] is None
    if name == "rows":
        assert bits(trained(restored[0], frozen, 2, restored[1])[1:]) == bits(trained(base, frozen, 4)[1:])


def test_the_base_is_never_written(tmp_path):
    sizes = {}
    for n in (10, 1_000_000):
        noise = np.random.default_rng(0).standard_normal(n).astype(np.float32)
        params = {"base": jnp.asarray(noise), "adapter": jnp.asarray(noise[:10]), "embed": jnp.asarray(noise[:, None])}
        checkpoint.save(tmp_path / str(n), params, fz.rules({"base": True, "embed": fz.rows(slice(0, -2))}), step=0)
        sizes[n] = sum(path.stat().st_size for path in (tmp_path / str(n)).rglob("*") if path.is_file())
    assert abs(sizes[1_000_000] - sizes[10]) < 1_000 < sizes[10] < 100_000


def test_random_keys_hyperparameters_and_several_arrays_of_a_part_in_the_state(base, tmp_path):
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.inject_hyperparams(optax.sgd)(0.1))
    for step, inner in enumerate((noisy, optax.sm3(0.1))):  # which has an array for each axis of a leaf
        state = fz.freeze(inner, SPECS["several runs"]).init(base)
        checkpoint.save(tmp_path, base, SPECS["several runs"], step=step, opt_state=state)
        assert bits(checkpoint.restore(tmp_path, base, opt_state=state)[1]) == bits(state)


@pytest.mark.parametrize("place", [jnp.asarray, lambda x: jax.device_put(x, jax.devices()[0])])
def test_arrays_that_jax_would_convert(place, tmp_path):
    """They are compared as they were written, and given back as JAX arrays."""
    noise = np.random.default_rng(0).standard_normal(100)
    base = {
        "frozen": place(jnp.ones(2)),
        "float64": noise,
        "number": 0.5,
        "float8": jnp.asarray(noise, jnp.float8_e4m3fn),
    }
    state = {"int4": jnp.arange(7).astype(jnp.int4), "count": 3, "int64": np.int64(7), "float64": noise, "flag": True}
    checkpoint.save(tmp_path, base, "frozen", step=0, opt_state=state)
    restored = checkpoint.restore(tmp_path, {**base, "float64": noise * 0, "number": 1.5}, opt_state=state)
    assert bits(restored) == bits(jax.tree.map(jnp.asarray, (base, state)))


NO_ROWS = np.zeros((0, 3), bool)
EMPTY = {
    "beside others": ({"a": jnp.zeros((0, 3)), "b": jnp.ones(2), "c": jnp.zeros((2, 0), jnp.bfloat16)}, "b"),
    "frozen": ({"a": jnp.zeros((0, 3)), "b": jnp.ones(2)}, "a"),
    "rows": ({"a": jnp.ones((4, 0)), "b": jnp.ones(2)}, {"a": fz.rows([0, 1]), "b": True}),
    "masks": (
        {"a": jnp.zeros((0, 3)), "b": jnp.ones(2)},
        {"a": fz.elements(NO_ROWS, compact=True), "b": np.array([True, False])},
    ),
    "all": ({"a": jnp.zeros((0, 3)), "b": jnp.zeros(0)}, False),
}


@pytest.mark.parametrize(("name", "with_state"), [*((name, True) for name in EMPTY), ("masks", False)])
def test_arrays_of_no_size(name, with_state, tmp_path, capsys):
    base, frozen = EMPTY[name]
    tx = fz.freeze(optax.chain(optax.trace(0.9), optax.scale_by_adam()), frozen)
    state = tx.init(base)
    opt_state = jax.tree.map(lambda x: x + jnp.ones_like(x), state) if with_state else None
    trainable, rest = fz.partition(base, frozen)
    params = fz.combine(jax.tree.map(lambda x: x * 2, trainable), rest)
    checkpoint.save(tmp_path, params, frozen, step=0, opt_state=opt_state)
    for template in (state, jax.eval_shape(lambda: state)) if with_state else (None,):
        restored = checkpoint.restore(tmp_path, base, opt_state=template, frozen=frozen)
        assert bits(restored) == bits((params, opt_state))
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{fz.summary(base, frozen)}\n"


def test_onto_another_mesh(tmp_path):
    def placed(mesh, spec):
        params = {"embed": jnp.arange(512.0).reshape(64, 8), "encoder": jnp.ones((8, 8)), "empty": jnp.zeros((0, 8))}
        return jax.device_put(params, NamedSharding(mesh, spec))

    frozen = fz.rules({"encoder": True, "embed": fz.rows(slice(0, 56))})
    tx = fz.freeze(optax.adam(0.1), frozen)
    params = placed(jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2), P("x", "y"))
    checkpoint.save(tmp_path, params, frozen, step=0, opt_state=tx.init(params))
    base = placed(jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,)), P(None, "z"))
    layout, shapes = fz.state_shardings(tx, base), jax.eval_shape(tx.init, base)
    template = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, layout)
    restored, state = checkpoint.restore(tmp_path, base, opt_state=template)
    assert bits((restored, state)) == bits((params, tx.init(params)))
    assert jax.tree.map(lambda leaf: leaf.sharding, (restored, state)) == (
        jax.tree.map(lambda leaf: leaf.sharding, base),
        layout,
    )


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("of_shapes", [False, True])
def test_a_step_compiles_once_for_what_is_restored(tmp_path, committed, of_shapes):
    params = {
        "encoder": jnp.ones((2, 2)),
        "embed": jnp.ones((4, 2)),
        "empty": jnp.zeros((0, 2)),
        "key": jax.random.key(0),
    }
    params = jax.device_put(params, jax.devices()[1]) if committed else params
    tx = fz.freeze(optax.adam(0.1), fz.rules({"encoder": True, "embed": fz.rows(0)}))
    step = jax.jit(fz.train_step(lambda p: jnp.sum(p["embed"] @ p["encoder"]) + p["empty"].sum(), tx))
    params, state, _ = step(params, tx.init(params))
    checkpoint.save(tmp_path, params, fz.spec_of(state), step=0, opt_state=state)
    template = jax.eval_shape(tx.init, params) if of_shapes else state
    moved, state = checkpoint.restore(tmp_path, params, opt_state=template)
    step.clear_cache()
    for _ in range(2):
        moved, state, _ = step(moved, state)
    assert step._cache_size() == 1
    assert {leaf.committed for leaf in jax.tree.leaves((moved, state))} == {committed}


class TestSteps:
    def test_the_latest_is_restored(self, base, tmp_path):
        assert checkpoint.latest_step(tmp_path) is None
        assert checkpoint.latest_step(tmp_path / "nowhere") is None
        for step in (3, 10):
            checkpoint.save(tmp_path, {**base, "embed": base["embed"] + step}, "encoder", step=step)
            assert checkpoint.latest_step(tmp_path) == step
        for step in (None, 3):
            params, _ = checkpoint.restore(tmp_path, base, step=step)
            assert bits(params["embed"]) == bits(base["embed"] + (step or 10))

    def test_a_file_where_the_directory_should_be(self, base, tmp_path):
        (tmp_path / "file").write_text("")
        for call in (functools.partial(checkpoint.save, frozen="encoder", step=0), checkpoint.restore):
            with pytest.raises(ValueError, match=r"not a directory(.|\n)*got: a file"):
                call(tmp_path / "file", base)
        with pytest.raises(ValueError, match="not a directory"):
            checkpoint.latest_step(tmp_path / "file")

    def test_in_the_background(self, base, tmp_path):
        for n in range(3):
            params = {**base, "embed": base["embed"] + n}
            saving = checkpoint.save(tmp_path, params, "encoder", step=n, wait=False)
        assert repr(saving) == f"Saving({str(tmp_path)!r}, under way)"
        saving.wait()
        saving.wait()
        assert repr(saving) == f"Saving({str(tmp_path)!r}, done)"
        assert bits(checkpoint.restore(tmp_path, base, step=2)[0]) == bits(params)

    @pytest.mark.parametrize("wait", [True, False])
    def test_of_two_threads_with_one_step_one_saves(self, base, wait, tmp_path):
        (tmp_path / "link").symlink_to(tmp_path / "new")

        def save(n, directory):
            params = {**base, "embed": base["embed"] + n}
            checkpoint.save(tmp_path / directory, params, "encoder", step=3, wait=wait).wait()
            return n

        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(save, *each) for each in enumerate(["new", "link"])]
        [lost] = [call.exception() for call in calls if call.exception()]
        assert re.match("a checkpoint of this step already exists", str(lost))
        [won] = [call.result() for call in calls if not call.exception()]
        assert bits(checkpoint.restore(tmp_path / "new", base)[0]["embed"]) == bits(base["embed"] + won)
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["3"]

    def test_another_process_that_saves(self, base, tmp_path):
        (tmp_path / "link").symlink_to(tmp_path / "here")
        with only_writer(str(tmp_path / "here")):
            with pytest.raises(ValueError, match="another process or thread is writing to this directory"):
                checkpoint.save(tmp_path / "link", base, "encoder", step=0)
            assert checkpoint.latest_step(tmp_path / "here") is None
        checkpoint.save(tmp_path / "link", base, "encoder", step=0)

    def test_what_is_saved_in_the_background_may_be_donated(self, tmp_path):
        params = {"encoder": jnp.ones(2), "head": jnp.zeros(100_000)}
        saving = checkpoint.save(tmp_path, params, "encoder", step=0, wait=False)
        jax.jit(lambda x: x + 1, donate_argnums=0)(params["head"])
        saving.wait()
        restored, _ = checkpoint.restore(tmp_path, {"encoder": jnp.ones(2), "head": jnp.ones(100_000)})
        assert not restored["head"].any()

    def test_a_step_is_a_new_number(self, base, tmp_path):
        checkpoint.save(tmp_path, base, "encoder", step=3)
        for step, text in ((3, "already exists"), (2, "a later")):
            with pytest.raises(ValueError, match=text):
                checkpoint.save(tmp_path, base, "encoder", step=step)
        for step, error in ((-1, ValueError), ("4", TypeError), (4.0, TypeError), (True, TypeError)):
            with pytest.raises(error, match="at least 0"):
                checkpoint.save(tmp_path, base, "encoder", step=step)
            with pytest.raises(error, match="at least 0"):
                checkpoint.restore(tmp_path, base, step=step)
        assert bits(checkpoint.restore(tmp_path, base, step=np.int64(3))[0]) == bits(base)


STATES = {
    "leaf": True,
    "none": False,
    "rows 0:2": fz.rows([0, 1]),
    "rows 2:4": fz.rows([2, 3]),
    "one row": fz.rows([0]),
    "columns": fz.rows([0], axis=1),
    "dense": np.eye(4, 2, dtype=bool),
    "other dense": ~np.eye(4, 2, dtype=bool),
    "compact": fz.elements(np.eye(4, 2, dtype=bool), compact=True),
    "other compact": fz.elements(np.eye(4, 2, -1, dtype=bool), compact=True),
    "dynamic": fz.rows(jnp.array([0, 1])),
    "other dynamic": fz.rows(jnp.array([2, 3])),
}


def of_spec(part):
    return fz.freeze(optax.adam(0.1), {"w": part, "head": False})


def of_group(part):
    groups = {True: {"w": True}, False: {"head": True}}.get(part) if isinstance(part, bool) else {"w": (part, True)}
    return fz.freeze_when(optax.adam(0.1), groups)


class TestWrongInput:
    @pytest.fixture
    def saved(self, base, tmp_path):
        _, params, state = trained(base, SPECS["rows"])
        checkpoint.save(tmp_path, params, SPECS["rows"], step=2, opt_state=state)
        return tmp_path

    def test_no_such_step_or_directory(self, base, saved):
        with pytest.raises(FileNotFoundError, match="no such directory"):
            checkpoint.restore(saved / "nowhere", base)
        with pytest.raises(FileNotFoundError, match=r"(?s)steps 2.*a checkpoint of step 5"):
            checkpoint.restore(saved, base, step=5)

    def test_another_base_model_or_spec(self, base, saved):
        embed = base["embed"]
        for other, says in (
            ({"encoder": base["encoder"].at[0].set(0.0)}, "the base differs.*at: encoder\n.*1 of 5 frozen leaves"),
            ({"embed": embed.at[5, 3].add(1e-6)}, "the base differs.*at: embed\n.*1 of 5 frozen leaves"),
            ({"embed": embed[:4]}, r"at: embed\n  got: float32 of shape \[4, 4\]\n.*\[8, 4\]"),
            ({"more": jnp.ones(1)}, r"different tree structure\n  at: more"),
        ):
            with pytest.raises(ValueError, match=f"(?s){says}"):
                checkpoint.restore(saved, {**base, **other})
        for frozen in (SPECS["several runs"], SPECS["dense"], False):
            with pytest.raises(ValueError, match=r"(?s)the spec differs.*fz\.migrate"):
                checkpoint.restore(saved, base, frozen=frozen)
        checkpoint.restore(saved, {**base, "embed": embed.at[6].add(1.0)})  # a row that trains

    def test_another_mask(self, base, tmp_path):
        checkpoint.save(tmp_path, base, SPECS["dense"], step=0)
        mask = {**SPECS["dense"], "head": {"a/b": False, "w": ~DENSE}}
        with pytest.raises(ValueError, match=r"(?s)the spec differs.*at: head/w"):
            checkpoint.restore(tmp_path, base, frozen=mask)

    def test_the_state_of_another_spec_or_optimizer(self, base, saved):
        for tx in (optax.adamw(0.1), fz.freeze(optax.sgd(0.1), SPECS["rows"])):
            state = tx.init({"encoder": base["encoder"], "embed": base["embed"]})
            with pytest.raises(ValueError, match=r"(?s)opt_state.*fz\.migrate"):
                checkpoint.restore(saved, base, opt_state=state)
        rows = fz.rules({"encoder": True, "embed": fz.rows([0, 1, 2, 3, 4, 7])})
        with pytest.raises(ValueError, match=r"(?s)opt_state: .*a different spec.*at: embed.*rows.*fz\.migrate"):
            checkpoint.restore(saved, base, opt_state=fz.freeze(optax.adamw(0.1), rows).init(base))

    @pytest.mark.parametrize("saved", STATES)
    @pytest.mark.parametrize("make", [of_spec, of_group])
    def test_a_state_is_restored_into_its_own_spec(self, make, saved, tmp_path):
        """By Orbax and by Flax: another spec is refused, and other masks and dynamic rows come back with the state."""
        params = {"w": jnp.ones((4, 2)), "head": jnp.ones(2)}
        state = make(STATES[saved]).init(params)
        checkpoint.save(tmp_path, params, False, step=0, opt_state=state)
        for name, part in STATES.items():
            template = make(part).init(params)
            by_orbax = functools.partial(checkpoint.restore, tmp_path, params, opt_state=template)
            by_flax = functools.partial(flax.serialization.from_bytes, template, flax.serialization.to_bytes(state))
            if template.plan != state.plan:
                for restored in (by_orbax, by_flax):
                    with pytest.raises(ValueError, match=r"(?s)at: .*\bw\b.*fz\.migrate"):
                        restored()
                continue
            assert bits(by_flax()) == bits(state)
            differs = pytest.warns(fz.FreezeWarning, match="masks or rows in the checkpoint differ(.|\n)*at: w\n")
            with contextlib.nullcontext() if name == saved else differs:
                assert bits(by_orbax()[1]) == bits(state)
            assert bits(by_orbax(opt_state=jax.eval_shape(lambda template=template: template))[1]) == bits(state)
            assert bits(by_orbax(frozen=False)[1]) == bits(state)

    def test_a_base_that_lora_was_merged_into(self, tmp_path):
        params = {"base": jnp.ones((2, 2)), "lora": jnp.ones(2)}
        merged = {**params, "base": params["base"] + 1}
        checkpoint.save(tmp_path, merged, "base", step=0)
        with pytest.raises(ValueError, match=r"the base differs(.|\n)*LoRA was merged(.|\n)*params, False, step"):
            checkpoint.restore(tmp_path, params)
        checkpoint.save(tmp_path, merged, False, step=1)
        assert bits(checkpoint.restore(tmp_path, params)[0]) == bits(merged)

    def test_a_state_of_another_wrapper(self, tmp_path):
        params = {"w": jnp.ones(2), "head": jnp.ones(2)}
        checkpoint.save(tmp_path, params, "w", step=0, opt_state=fz.masked_zero_updates("w").init(params))
        with pytest.raises(ValueError, match=r"(?s)opt_state.*got: 0 specs\n.*1 spec"):
            checkpoint.restore(tmp_path, params, opt_state=optax.identity().init(params))
        schedules = [
            fz.freeze_when(optax.adam(0.1), {"w": at}).init(params) for at in (fz.unfreeze_at(2), lambda step: step < 2)
        ]
        for template, stored in (schedules, schedules[::-1]):
            with pytest.raises(ValueError, match=r"different spec(.|\n)*at: w\n"):
                flax.serialization.from_bytes(template, flax.serialization.to_bytes(stored))
        with pytest.raises(ValueError, match="got: no spec"):
            flax.serialization.from_state_dict(schedules[0].plan, {})

    def test_under_jit(self, tmp_path):
        with pytest.raises(TypeError, match="traced"):
            jax.jit(lambda params: checkpoint.save(tmp_path, params, "a", step=0) and 0)({"a": 1.0, "b": 1.0})

    def test_a_record_of_a_newer_release(self, base, saved, capsys):
        file = saved / "2" / "spec" / "metadata"
        record = json.loads(file.read_text())
        number = record["format"] + 1
        file.write_text(json.dumps({**record, "format": number}))
        newer = rf"by a newer optax_freeze\n  at: {saved / '2'}\n  got: format {number}(.|\n)*fix: install the newest"
        with pytest.raises(ValueError, match=newer):
            checkpoint.restore(saved, base)
        assert main([str(saved)]) == 2
        assert re.search(newer, capsys.readouterr().err)

    @pytest.mark.parametrize("lost", ["spec", "trainable", "opt_state"])
    def test_half_of_a_checkpoint(self, base, saved, lost):
        tx = fz.freeze(optax.adamw(0.1), SPECS["rows"])
        shutil.rmtree(saved / "2" / lost)
        with pytest.raises(ValueError, match=rf"(?s)cannot be read\n  at: {saved / '2'}.*at {lost}"):
            checkpoint.restore(saved, base, opt_state=tx.init(base))

    @pytest.mark.parametrize("item", ["trainable", "opt_state"])
    def test_a_flipped_bit_is_not_restored(self, item, tmp_path):
        """Orbax has no checksums of the arrays."""
        noise = jnp.asarray(np.random.default_rng(0).standard_normal((2000, 2)), jnp.float32)
        params, state = {"encoder": jnp.ones(2), "embed": noise}, {"momentum": noise[:1500]}
        frozen = fz.rules({"encoder": True, "embed": fz.rows(slice(500))})
        checkpoint.save(tmp_path, params, frozen, step=0, opt_state=state)
        file = max((path for path in (tmp_path / "0" / item).rglob("*") if path.is_file()), key=os.path.getsize)
        content = file.read_bytes()
        path = {"trainable": "embed", "opt_state": "momentum"}[item]
        for at in range(len(content) // 4, 3 * len(content) // 4, 2000):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(ValueError, match=rf"the checkpoint is damaged\n  at: .*/0: {path}\n  got: 1 of 1 "):
                checkpoint.restore(tmp_path, params, opt_state=state)
        file.write_bytes(content)
        assert bits(checkpoint.restore(tmp_path, params, opt_state=state)) == bits((params, state))

    def test_a_checkpoint_of_something_else(self, base, tmp_path):
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(0, args=ocp.args.StandardSave({"a": jnp.ones(2)}))
        with pytest.raises(ValueError, match="cannot be read"):
            checkpoint.restore(tmp_path, base)


PARTS = [
    {"axis": 0, "rows": [[1, 2, 1], [3, 4, 1]], "train": True},
    {"compact": True, "count": 1},
    {"compact": False, "count": None},
]
TREE = {
    "compact": jnp.ones(3),
    "dense": jnp.ones((2, 2)),
    "key": jax.random.key(0),
    "live": jnp.arange(4.0),
    "name": jnp.tanh,
    "rows": jnp.arange(8.0).reshape(4, 2),
}
IN_PART = {
    "compact": fz.elements(np.array([True, False, True]), compact=True),
    "dense": np.eye(2, dtype=bool),
    "key": True,
    "live": False,
    "name": True,
    "rows": fz.rows([0, 2]),
}
TREE_TX = fz.freeze(optax.adam(0.1), IN_PART)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A checkpoint with every kind of field, and the text of its record."""
    directory = tmp_path_factory.mktemp("recorded")
    checkpoint.save(directory, TREE, IN_PART, step=1, opt_state=TREE_TX.init(TREE))
    file = directory / "1" / "spec" / "metadata"
    return directory, file, file.read_text()


ROWS = [
    *(None, [], {}, 3, [1, 2, 1], ["abc"], [[1, 2]], [[1, 2, 0]], [[1, 2, 1.0]], [[0, 1, math.nan]], [[0, 4, 1]]),
    *([[0, 2, 1], [2, 3, 1]], [[0, 3, 2]], [[2, 1, 1]], [[-1, 1, 1]], [[1, 5, 1]], [[3, 4, 1], [1, 2, 1]]),
    [[0, 2, 1], [1, 3, 1]],
]
PART = "true, false, or the frozen part"
FIELDS = {
    "format": ([0, -5, math.nan, math.inf, 1.0, True, "1", None, [1]], "a number, 1 or more"),
    "leaves": ([None, {}, "leaves", 3], "a list of leaves"),
    "leaves[0]": ([None, [], "leaf", 3], "a JSON object"),
    "leaves[0].path": ([None, 3, ["compact"]], "a string"),
    "leaves[0].shape": ([3, "3", [3.0], [-3], [True], [None], {}, math.nan], "a list of sizes"),
    "leaves[0].dtype": ([None, 3, "float33", "", "i4,i4", "O", "("], "the name of a dtype"),
    "leaves[4].dtype": (["float32"], "null, like the shape"),
    "leaves[0].weak": ([None, 1, "true"], "true or false"),
    "leaves[2].frozen": ([{"axis": 0, "rows": [[0, 1, 1]], "train": True}, 0], "true or false"),
    "leaves[4].frozen": ([{"compact": False, "count": None}], "true or false"),
    "leaves[0].frozen": (
        [
            *(None, 1, "true", [True], {"compact": True}),
            *({"compact": compact, "count": 1} for compact in (None, 1, "true")),
            *({"compact": True, "count": count} for count in (None, 0, -1, 4, 1.0, math.nan, "1")),
            *({"compact": False, "count": count} for count in (1, 0, "null")),
        ],
        PART,
    ),
    "leaves[5].frozen": (
        [
            *({"axis": axis, "rows": [[0, 1, 1]], "train": True} for axis in (None, -1, 2, 0.0, "0", False)),
            *({"axis": 0, "rows": [[0, 1, 1]], "train": trains} for trains in (None, 1, "true")),
            *({"axis": 0, "rows": rows, "train": True} for rows in ROWS),
            *({"axis": 0, "count": count, "dynamic": True} for count in (None, 0, 5, 1.0, True)),
        ],
        PART,
    ),
    "leaves[0].fingerprint": ([None, [], "0" * 31, "0" * 33, "g" * 32, 0], "32 hexadecimal digits"),
    "written": ([None, []], "a JSON object"),
    "written.trainable.3.dtype": ([None, "float33"], "the name of a dtype"),
    "written.masks.0.fingerprint": ([None, "0" * 31], "32 hexadecimal digits"),
    "opt_state": ([3, {}, "state", True], "a list of arrays"),
    "opt_state[0]": ([None, [], 3], "a JSON object"),
    "opt_state[0].path": ([None, 3], "a string"),
    "opt_state[0].shape": ([None, 3, [-1], [math.nan]], "a list of sizes"),
    "opt_state[0].dtype": ([None, "bool33"], "the name of a dtype"),
    "plans": ([None, {}], "a list of digests"),
    "plans[0]": ([None, 3, "0", "0g"], "pairs of hexadecimal digits"),
    "opt_state[0].part": ([True, -1, 1.0, "rows", []], "rows, a number of elements, or null"),
}


class TestDamagedRecords:
    """Each is a ``ValueError`` with the field at fault, and one message on the command line."""

    @pytest.fixture
    def refused(self, recorded, capsys):
        """A function that says with which message a record is refused, by both that read it."""
        directory, file, text = recorded

        def refused(damaged):
            file.write_text(damaged)
            with pytest.raises(ValueError, match="damaged") as caught:
                checkpoint.restore(directory, TREE, opt_state=TREE_TX.init(TREE))
            capsys.readouterr()
            assert main([str(directory)]) == 2
            assert capsys.readouterr() == ("", f"error: {caught.value}\n")
            return str(caught.value)

        yield refused
        file.write_text(text)

    @pytest.mark.parametrize("field", FIELDS)
    def test_a_field_that_is_wrong(self, recorded, refused, field):
        wrong, expected = FIELDS[field]
        for value in wrong:
            told = refused(json.dumps(put(json.loads(recorded[2]), field, value)))
            assert f"/1/spec: {field}\n" in told
            assert re.search(rf"\n  expected: {re.escape(expected)}", told)

    def test_a_field_that_is_missing_or_a_path_that_is_there_twice(self, recorded, refused):
        fields = ["format", "leaves", "opt_state", "plans"]
        fields += [f"leaves[5].{name}" for name in ("path", "shape", "dtype", "weak", "frozen", "fingerprint")]
        fields += [f"opt_state[3].{name}" for name in ("path", "shape", "dtype", "weak", "part")]
        fields += ["written", "written.opt_state.12.dtype", "written.masks.0.fingerprint"]
        for field in fields:
            told = refused(json.dumps(put(json.loads(recorded[2]), field)))
            assert f"/1/spec: {field}\n  got: nothing\n" in told
        recorded[1].write_text(json.dumps(put(json.loads(recorded[2]), "written.trainable.3")))
        with pytest.raises(ValueError, match=r"damaged\n.*/1/spec: written.trainable.3\n  got: nothing"):
            checkpoint.restore(recorded[0], TREE)
        told = refused(json.dumps(put(json.loads(recorded[2]), "leaves[0].path", "rows")))
        assert re.search(r"spec: leaves\n(.|\n)*a different path", told)

    def test_what_is_no_record(self, recorded, refused):
        for top in ([], None, 3, "record", math.nan, True):
            assert "/1/spec: the whole file\n" in refused(json.dumps(top))
        for text in ("", "record", "{'format': 1}", "\x00", "[" * 100_000, recorded[2][: len(recorded[2]) // 2]):
            assert "at spec: " in refused(text)

    @given(st.data())
    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    def test_any_change_is_refused_or_of_no_effect(self, recorded, data):
        directory, file, text = recorded
        record = json.loads(text)
        node, key = data.draw(st.sampled_from(list(nodes(record))))
        junk = st.none() | st.booleans() | st.integers(-3, 5) | st.integers() | st.floats() | st.text(max_size=8)
        junk |= st.lists(st.integers(-1, 5), max_size=4) | st.just({}) | st.sampled_from(PARTS)
        change = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if change == "replace":
            node[key] = data.draw(junk)
        elif change == "remove":
            del node[key]
        elif isinstance(node, dict):
            node[data.draw(st.text(max_size=3))] = data.draw(junk)
        else:
            node.insert(key, data.draw(junk))
        file.write_text(json.dumps(record))
        state = TREE_TX.init(TREE)
        base = {**TREE, "live": -TREE["live"]}
        try:
            restored = checkpoint.restore(directory, base, opt_state=state)
        except ValueError as error:
            assert str(error).count("\n") == 4  # noqa: PT017
        else:
            assert bits(restored) == bits((TREE, state))
        finally:
            file.write_text(text)


def put(record, field, *value):
    """A record with another value at a field like ``leaves[0].shape``, or without the field."""
    *steps, last = [json.loads(index) if index else name for name, index in re.findall(r"(\w+)|\[(\d+)", field)]
    node = record
    for step in steps:
        node = node[step]
    if value:
        node[last] = value[0]
    else:
        del node[last]
    return record


def nodes(tree):
    """Every place in a tree of lists and dicts, as a container and a key in it."""
    for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(child, dict | list):
            yield from nodes(child)


def run(script, *arguments, **options):
    """A script in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), **options}
    command = [sys.executable, HERE / script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_process_killed_while_saving_leaves_the_last_complete_checkpoint(tmp_path):
    moments = random.Random(0)
    directories = [tmp_path / f"{i}" for i in range(4)]
    children = [run("save_until_killed.py", directory) for directory in directories]
    for directory, child in zip(directories, children, strict=True):
        for _ in range(moments.randint(1, 4)):
            said = int(child.stdout.readline())
        time.sleep(moments.uniform(0.0, 0.3))
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        latest = checkpoint.latest_step(directory)
        assert latest >= said - 1  # every other one is waited for
        params, state = at_step(latest)
        base, _ = at_step(-1)
        restored = checkpoint.restore(directory, base, opt_state=TX.init(base), frozen=FROZEN)
        assert bits(restored) == bits((params, state))
        checkpoint.save(directory, params, FROZEN, step=latest + 1)


def test_two_processes(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{listener.getsockname()[1]}"
    options = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    options["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    processes = [run("two_processes.py", coordinator, "2", str(process), tmp_path, **options) for process in range(2)]
    try:
        told = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], told
    digests = [line for out, _ in told for line in out.splitlines() if line.startswith("fingerprint")]
    assert "saved: 3\n" in told[0][0]  # by the recipe
    assert len(digests) == 4
    assert len(set(digests)) == 1
    for out, _ in told:
        assert "refused: processes differ in the spec\n  at: process 1\n  got: the fingerprint " in out
        assert "moved: 1 of 2 frozen leaves changed\n  at: embed: 48 of 512 elements, by up to 1\n" in out
        assert "latest: 3" in out


def test_a_directory_with_wildcards_is_refused(tmp_path):
    for name in ("lr=[1e-3]", "run*", "run?"):
        with pytest.raises(ValueError, match="Orbax cannot save into this directory"):
            checkpoint.save(tmp_path / name, {"a": np.ones(2), "b": np.ones(2)}, "a", step=0)
        assert not (tmp_path / name).exists()
