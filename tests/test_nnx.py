"""Freezing in NNX: variable types changed in place, a wrapper that holds batch statistics, and a filter."""

import concurrent.futures
import subprocess
import sys
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_equal_up_to_rounding, bits
from flax import linen as nn
from flax import nnx

import optax_freeze as fz
from optax_freeze import nnx as fnnx


class Block(nnx.Module):
    """A linear layer, a batch norm and dropout; the norm takes its mode from the caller, if told so."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.width = 4

    def __call__(self, x, train=None):
        average = None if train is None else not train
        return self.dropout(jnp.tanh(self.norm(self.linear(x), use_running_average=average)))

    def features(self, x):
        """Before the dropout."""
        return self.norm(self.linear(x))

    def itself(self):
        return self

    @property
    def doubled(self):
        return 2 * self.width


@pytest.fixture
def rngs():
    return nnx.Rngs(0)


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (6, 4)) + 3.0


@pytest.fixture
def chain(rngs):
    """Three linear layers."""
    return nnx.Sequential(*(nnx.Linear(4, 4, rngs=rngs) for _ in range(3)))


def kinds(module):
    """The type of each variable, by path."""
    found = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(module))}
    classes = {path: v.type if type(v).__name__ == "HijaxVariable" else type(v) for path, v in found.items()}
    return {path: cls.__name__ for path, cls in classes.items()}


def trains(module):
    return {path for path, kind in kinds(module).items() if kind == "Param"}


def frozen_in(module):
    return {path for path, kind in kinds(module).items() if kind == "FrozenParam"}


def grad_paths(grads):
    return {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(grads)}


def values(module, kind=...):
    return bits(nnx.to_pure_dict(nnx.state(module, kind)))


def loss(module, x):
    return jnp.sum(module(x) ** 2)


@nnx.jit
def step(model, optimizer, x):
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


def of_vectors(params):
    return jax.tree.map(lambda leaf: leaf.ndim == 1, params)


class MyParam(nnx.Param):
    """A parameter with a type of its own."""


def test_thaw_gives_back_the_type_and_the_metadata(rngs):
    def types(module):
        return {path: (type(v), dict(v.get_metadata())) for path, v in nnx.to_flat_state(nnx.state(module))}

    module = nnx.LoRA(4, 2, 4, base_module=nnx.Linear(4, 4, rngs=rngs), rngs=rngs)
    module.mine = MyParam(jnp.ones(2), note="kept")
    before = types(module)
    for spec, others in (("base_module", 3), (["base_module/kernel", "mine"], 2), (True, 0)):  # freezing again adds
        fnnx.freeze(module, spec)
        assert list(kinds(module).values()).count("FrozenParam") == len(before) - others
    assert module.mine.note == "kept"
    for spec in ("lora_a", ["lora_a", "mine"]):  # thawing again takes away
        assert frozen_in(fnnx.thaw(nnx.clone(module), spec)).isdisjoint(spec)
    module = nnx.merge(*nnx.split(nnx.clone(module)))
    nnx.jit(lambda module: module(jnp.ones(4)))(module)
    assert types(fnnx.thaw(module)) == before


@pytest.mark.filterwarnings("ignore:Variable hooks")
@pytest.mark.parametrize("way", ["methods", "hooks"])
def test_a_parameter_with_its_own_access_keeps_it_when_frozen(rngs, x, way):
    class Doubled(nnx.Param):
        """Reads as twice what it holds."""

        def get_value(self, **kwargs):
            return 2 * super().get_value(**kwargs)

        def set_value(self, value, **kwargs):
            super().set_value(value / 2, **kwargs)

    linear = nnx.Linear(4, 4, rngs=rngs)
    if way == "hooks":
        linear.kernel = nnx.Param(linear.kernel[...], on_get_value=lambda variable, value: 2 * value)
    elif hasattr(nnx.Variable, "get_value"):
        linear.kernel = Doubled(linear.kernel[...])
    else:
        pytest.skip("this Flax has no such methods to override")
    kind, output = type(linear.kernel), bits(linear(x))
    assert bits(fnnx.freeze(linear, True)(x)) == output
    if way == "methods":
        kernel = linear.kernel[...]
        linear.kernel[...] = kernel + 1
        assert bits(linear.kernel[...]) == bits(kernel + 1)
        linear.kernel[...] = kernel
    assert bits(linear(x)) == output
    assert type(fnnx.thaw(linear).kernel) is kind
    assert bits(linear(x)) == output


HEAD_KERNEL = fz.where(lambda path, leaf: path == "head/kernel")


class Tied(nnx.Module):
    """One kernel as embedding and as head."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(4, 4, rngs=rngs)
        self.head.kernel = self.embed.kernel

    def __call__(self, x):
        return self.head(self.embed(x))


@pytest.mark.parametrize("spec", ["embed/kernel", "head/kernel", fz.all_except("**/bias"), HEAD_KERNEL], ids=str)
def test_a_shared_variable_is_frozen_by_each_of_its_paths(rngs, spec):
    model = Tied(rngs)
    fnnx.freeze(model, spec)
    assert trains(model) == {"head/bias"}
    assert nnx.to_pure_dict(nnx.grad(loss)(model, jnp.ones((1, 4)))).keys() == {"head"}
    fnnx.thaw(model, "head/kernel")
    assert isinstance(model.embed.kernel, nnx.Param)
    assert model.head.kernel is model.embed.kernel


def test_a_shared_variable_trains_by_each_of_its_paths(rngs):
    for name in ("embed", "head"):
        assert isinstance(fnnx.freeze(Tied(rngs), fz.all_except(name)).embed.kernel, nnx.Param)
    wrt = fnnx.trainable(Tied(rngs), fz.all_except("head/kernel"))
    paths = [("embed", "kernel"), ("head", "kernel"), ("head", "bias")]
    assert [wrt(path, nnx.Param(jnp.ones(1))) for path in paths] == [True, True, False]
    with pytest.raises(ValueError, match="nearest paths: head/kernel"):
        fnnx.freeze(Tied(rngs), "head/kernal")


def test_a_shared_module_is_frozen_by_each_of_its_paths_and_wherever_it_stands(rngs):
    shared = nnx.Linear(4, 4, rngs=rngs)
    model = nnx.Sequential(shared, nnx.Linear(4, 4, rngs=rngs), shared)
    for path in ("layers/0", "layers/2"):
        assert trains(fnnx.freeze(model, path)) == {"layers/1/kernel", "layers/1/bias"}
        assert model.layers[0] is model.layers[2]
        fnnx.thaw(model)
    model = nnx.Sequential(shared, fnnx.Frozen(shared))
    assert trains(model) == set()
    assert model.layers[1].module is shared


def test_parameters_in_containers_in_modules_that_are_no_pytrees_and_in_cycles(rngs):
    class Loose(nnx.Module):
        def __init__(self):
            self.pair = nnx.data((nnx.Param(jnp.ones(1)), {"deep": nnx.Param(jnp.ones(2))}))
            self.list = nnx.List([nnx.Param(jnp.ones(3)), nnx.Linear(1, 1, rngs=rngs)])
            self.tree = nnx.Param({"a": jnp.ones(1), "b": jnp.ones(2)})

    class Child(nnx.Module, pytree=False):
        def __init__(self, parent):
            self.parent = parent
            self.loose = [nnx.Param(jnp.ones(1))]

    class Parent(nnx.Module, pytree=False):
        def __init__(self):
            self.children = [Child(self), Child(self)]

    for model, frozen, left in (
        (Loose(), ["pair/1", "list/0", "tree"], {"pair/0", "list/1/kernel", "list/1/bias"}),
        (Parent(), "children/0", {"children/1/loose/0"}),
    ):
        assert trains(fnnx.freeze(model, frozen)) == left
        assert set(kinds(fnnx.thaw(model)).values()) == {"Param"}
    with pytest.raises(ValueError, match=r"(?s)cannot be frozen in part.*at: tree/b"):
        fnnx.freeze(Loose(), "tree/a")


@pytest.fixture
def hijax_pair(rngs):
    """Two layers whose variables are values of JAX's high-level types."""
    if "hijax" not in nnx.Variable(1).get_metadata():
        pytest.skip("this Flax has no such variables")
    with nnx.var_defaults(hijax=True):
        lora = nnx.LoRA(4, 2, 4, b_initializer=nnx.initializers.ones, rngs=rngs)
        return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), lora)


def test_freeze_and_thaw_hijax_variables(hijax_pair, x):
    model, before, output = hijax_pair, kinds(hijax_pair), hijax_pair(x)
    assert fnnx.freeze(model, "layers/1") is model
    assert trains(model) == {"layers/0/kernel", "layers/0/bias"}
    assert not isinstance(model.layers[1].lora_a, nnx.Param)
    assert bits(model(x)) == bits(output)
    np.testing.assert_allclose(jax.jit(lambda: model(x))(), output, rtol=1e-5, atol=1e-6)
    model.layers[1].lora_b[...] = jnp.zeros((2, 4))
    assert bits(model(x)) != bits(output)
    assert kinds(fnnx.thaw(model)) == before
    assert bits(model.layers[1].lora_b[...]) == bits(jnp.zeros((2, 4)))


@pytest.mark.parametrize("wrapped", [False, True])
def test_train_beside_frozen_hijax_variables(hijax_pair, x, wrapped):
    model = nnx.Sequential(fnnx.Frozen(hijax_pair.layers[0]), hijax_pair.layers[1]) if wrapped else hijax_pair
    if not wrapped:
        fnnx.freeze(model, "layers/0")
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    before, losses = values(model, fnnx.FrozenParam), []
    for _ in range(3):
        try:
            value, grads = nnx.value_and_grad(loss)(model, x + 1)
        except NotImplementedError:
            pytest.skip("this Flax does not differentiate such variables")
        assert {path[-1] for path in grad_paths(grads)} <= {"a", "b"}
        optimizer.update(model, grads)
        losses.append(value)
    assert len(set(map(float, losses))) == 3
    assert values(model, fnnx.FrozenParam) == before != {}


def test_rows_of_hijax_variables(hijax_pair, x):
    graph, state = nnx.split(hijax_pair)
    params = nnx.to_pure_dict(state)

    def of_dict(params):
        full = jax.tree.map(lambda variable: variable, state)
        nnx.replace_by_pure_dict(full, params)
        return loss(nnx.merge(graph, full), x + 1)

    spec = fz.rules({"layers/0/kernel": fz.rows([0, 2])}, default=True)
    try:
        dense = jax.grad(of_dict)(params)["layers"][0]["kernel"]
    except NotImplementedError:
        pytest.skip("this Flax does not differentiate such variables")
    assert bits(fz.grad(of_dict, spec)(params)["layers"][0]["kernel"].values) == bits(dense[1::2])


@pytest.mark.parametrize("spec", ["kernel", ["kernel", "**"], {"kernel": True, "table": False}])
def test_integers_are_frozen_whatever_the_spec_says_and_thaw_by_true_alone(rngs, spec, x):
    linear = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
    linear.table = MyParam(jnp.arange(3), note="kept")
    fnnx.thaw(fnnx.freeze(linear, spec), spec)
    assert kinds(linear) == {"kernel": "Param", "table": "FrozenParam"}
    assert trains(nnx.grad(lambda linear: linear(x).sum())(linear)) == {"kernel"}
    table = fnnx.thaw(linear, True).table
    assert (type(table), table.get_metadata()["note"]) == (MyParam, "kept")
    assert bits(table[...]) == bits(jnp.arange(3))


def test_shapes_alone_are_enough_and_freezing_inside_jit_reaches_the_caller(chain):
    model = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    assert trains(fnnx.freeze(model, "kernel")) == {"bias"}
    nnx.jit(lambda model: fnnx.freeze(model, "layers/0") and None)(chain)
    assert "layers/0/kernel" not in trains(chain)


IN_PART = {
    "rows": lambda tx: fz.freeze(tx, fz.rules({"layers/0/kernel": fz.rows([0, 2]), "layers/0/bias": True})),
    "groups": lambda tx: fz.freeze_when(
        tx,
        {"layers/0/kernel": (fz.rows(slice(0, 3)), fz.unfreeze_at(2)), "layers/2": fz.alternate(1)},
        optax.clip_by_global_norm(1.0),
    ),
}


@pytest.mark.parametrize("frozen", IN_PART)
def test_an_nnx_optimizer_keeps_its_structure(chain, x, frozen):
    """With leaves frozen in part: one compilation, and a scan over the model and the optimizer."""
    optimizer = nnx.Optimizer(chain, IN_PART[frozen](optax.MultiSteps(optax.adam(0.1), 2)), wrt=nnx.Param)
    graphdef = nnx.graphdef((chain, optimizer))
    before = jax.tree.map(jnp.copy, nnx.state((chain, optimizer)))
    traces = []

    def train(models, x):
        traces.append(1)
        model, optimizer = models
        optimizer.update(model, nnx.grad(loss)(model, x))
        return models

    jitted = nnx.jit(train)
    for _ in range(4):
        jitted((chain, optimizer), x)
    assert nnx.graphdef((chain, optimizer)) == graphdef
    assert len(traces) == 1
    scanned = nnx.merge(graphdef, before)
    nnx.scan(train, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(scanned, jnp.stack([x] * 4))
    chex.assert_trees_all_close(nnx.state(scanned), nnx.state((chain, optimizer)), rtol=1e-4, atol=1e-5)


def test_trainable_is_a_filter(chain, x):
    wrt = fnnx.trainable(chain, "layers/[01]")
    assert set(kinds(chain).values()) == {"Param"}
    _, some, rest = nnx.split(chain, wrt, ...)
    assert grad_paths(some) == {"layers/2/kernel", "layers/2/bias"}
    assert len(jax.tree.leaves(rest)) == 4
    before = values(some), values(rest)
    optimizer = nnx.Optimizer(chain, optax.adamw(0.1), wrt=wrt)
    optimizer.update(chain, nnx.state(nnx.grad(loss)(chain, x), wrt))
    _, some, rest = nnx.split(chain, wrt, ...)
    assert values(rest) == before[1]
    assert values(some) != before[0]
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(optimizer, nnx.optimizer.OptState))) == 2 * 20 + 2

    fnnx.freeze(chain, "layers/0")
    one, other = fnnx.trainable(chain, "layers/1"), fnnx.trainable(chain, fz.regex("layers/1/.*"))
    assert len({one, other, fnnx.trainable(chain, "layers/2")}) == 2
    fnnx.freeze(chain, "layers/2/bias")
    assert grad_paths(nnx.state(chain, one)) == {"layers/2/kernel"}
    assert "2 paths" in repr(one)


def test_a_chain_with_a_frozen_layer(rngs, x):
    """The list of Flux's own tests: m0 = chain(l1, l2, l3) and m1 = chain(l1, Frozen(l2), l3)."""
    l1, l2, l3 = (nnx.Linear(4, 4, rngs=rngs) for _ in range(3))
    m0, m1 = nnx.Sequential(l1, l2, l3), nnx.Sequential(l1, fnnx.Frozen(nnx.clone(l2)), l3)
    assert bits(m0(x)) == bits(m1(x))
    (g0, of_input), (g1, got_of_input) = nnx.grad(loss, argnums=(0, 1))(m0, x), nnx.grad(loss, argnums=(0, 1))(m1, x)
    assert grad_paths(g1) == {f"layers/{i}/{name}" for i in (0, 2) for name in ("kernel", "bias")}
    for i in (0, 2):
        assert bits(g0["layers"][i]) == bits(g1["layers"][i])
    assert bits(of_input) == bits(got_of_input)


def test_the_wrapper_is_used_like_the_module(rngs, chain, x):
    block = Block(rngs)
    block.eval()
    features = block.features(x)
    frozen = fnnx.Frozen(block, fz.all_except("linear/bias", "norm"))
    assert trains(frozen) == {f"module/{path}" for path in ("linear/bias", "norm/scale", "norm/bias")}
    assert frozen.module is frozen.itself() is block
    assert bits(frozen.features(x)) == bits(features)
    assert frozen.features.__doc__ == "Before the dropout."
    assert (frozen.width, frozen.doubled) == (4, 8)
    assert frozen.linear.kernel is block.linear.kernel
    frozen.width = 5
    assert block.width == 5
    assert not hasattr(frozen, "nothing")
    with pytest.raises(AttributeError, match="nothing"):
        frozen.nothing()
    stack, y = fnnx.Frozen(chain), x
    for layer in stack.layers:
        y = layer(y)
    assert bits(y) == bits(chain(x))
    assert bits(stack.layers[0](x)) == bits(chain.layers[0](x))
    assert len(stack.layers) == 3
    assert [type(layer) for layer in stack.layers[1:]] == [fnnx.Frozen, fnnx.Frozen]
    assert stack


def test_frozen_inside_frozen(rngs, x):
    inner = fnnx.Frozen(Block(rngs), stats="live")
    outer = fnnx.Frozen(nnx.Sequential(inner, nnx.Linear(4, 4, rngs=rngs)))
    outer.train()
    before = values(outer, nnx.BatchStat)
    outer(x)
    outer.layers[0](x)  # the wrapper outside holds the statistics
    assert values(outer, nnx.BatchStat) == before
    inner(x)
    assert values(outer, nnx.BatchStat) != before
    assert fnnx.Frozen(inner).module is inner
    assert trains(outer) == set()


USES = {
    "argument": lambda model, x: model(x, train=True),
    "method": lambda model, x: model.features(x),
    "submodule": lambda model, x: model.norm(x, use_running_average=False),
    "jit": nnx.jit(lambda model, x: model(x)),
    "remat": nnx.grad(nnx.remat(lambda model, x: loss(model, x)), argnums=1),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_batch_statistics_do_not_move_and_the_stored_ones_are_used(rngs, x, use):
    block = Block(rngs)
    model = fnnx.Frozen(block)
    model.train()
    before, graphdef = values(model, nnx.BatchStat), nnx.graphdef(model)
    use(model, x)
    with pytest.raises(TypeError):
        use(model, jnp.ones((2, 7)))
    assert values(model, nnx.BatchStat) == before
    assert type(block.norm) is nnx.BatchNorm
    assert block.norm.use_running_average is False
    assert nnx.graphdef(model) == graphdef
    use(block, x)
    assert values(model, nnx.BatchStat) != before


def test_frozen_statistics_make_the_output_and_live_ones_are_the_callers(rngs, x):
    block = Block(rngs)
    block.dropout.deterministic = True
    stored, before = bits(block(x, train=False)), values(block, nnx.BatchStat)
    block.norm.use_running_average = False
    for kwargs in ({}, {"train": True}):
        assert bits(fnnx.Frozen(block)(x, **kwargs)) == stored
    live = fnnx.Frozen(block, stats="live")
    assert bits(live(x, train=False)) == stored
    assert values(block, nnx.BatchStat) == before
    assert bits(live(x)) != stored
    assert values(block, nnx.BatchStat) != before


@pytest.mark.parametrize("stats", ["frozen", "live"])
def test_a_norm_that_knows_the_attribute_alone(rngs, x, stats):
    class Norm(nnx.BatchNorm):
        """Has no such argument."""

        def __call__(self, x):
            return super().__call__(x)

    class Trains(nnx.Sequential):
        """Sets the mode in its call."""

        def __call__(self, x):
            self.train()
            return super().__call__(x)

    norm = Norm(4, rngs=rngs)
    inner = fnnx.Frozen(norm, stats=stats)
    frozen = fnnx.Frozen(Trains(inner))
    before = values(frozen, nnx.BatchStat)
    frozen(x)
    assert values(frozen, nnx.BatchStat) == before
    assert bits(frozen(x)) == bits(nnx.BatchNorm.__call__(norm, x, use_running_average=True))
    assert vars(norm)["use_running_average"] is False
    assert type(norm) is Norm
    assert "use_running_average" not in vars(inner)


@pytest.mark.parametrize("pytree", [True, False])
def test_a_norm_of_your_own(x, pytree):
    class Norm(nnx.Module, pytree=pytree):
        """Written with a mode that is an argument of the call alone, or an attribute of the class."""

        use_running_average = False

        def __init__(self):
            self.mean, self.calls = nnx.BatchStat(jnp.zeros(4)), nnx.BatchStat(jnp.ones(()))
            self.seen = []

        def __call__(self, x, use_running_average=False):
            if not (use_running_average or self.use_running_average):
                self.mean[...] = x.mean(0)
            self.calls[...] += 1  # in either mode: the output has it, and it is lost
            self.seen = ["one"]
            return nnx.jit(lambda self, x: x - self.mean[...] * self.calls[...])(self, x) * self.calls[...]

    norm = Norm()
    frozen = fnnx.Frozen(norm)
    assert bits(frozen(x)) == bits(frozen(x, False)) == bits(frozen(x, use_running_average=False)) == bits(2 * x)
    assert type(norm) is Norm
    assert norm.calls[...] == 1
    assert bits(norm(x)) == bits((x - x.mean(0) * 2) * 2)


def test_calls_of_two_threads_leave_the_class_of_a_norm(rngs, x):
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def meet(x):
        if first_is_in.is_set():
            second_is_in.set()
            assert first_is_out.wait(20)
        else:
            first_is_in.set()
            assert second_is_in.wait(20)
        return x

    norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
    model = fnnx.Frozen(nnx.Sequential(norm, meet))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(model, x)
        assert first_is_in.wait(20)
        second = pool.submit(model, x)
        outputs = [first.result()]
        first_is_out.set()
        outputs.append(second.result())
    assert type(norm) is nnx.BatchNorm
    assert bits(outputs) == bits([norm(x)] * 2)


@pytest.mark.parametrize("outside", [True, False], ids=["stack in Frozen", "Frozen in stack"])
def test_stacked_layers(rngs, x, outside):
    """Layers made by vmap and applied by scan, wrapped as a whole or one by one."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return Block(rngs) if outside else fnnx.Frozen(Block(rngs))

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = make(rngs)

        def __call__(self, x):
            apply = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return apply(self.layers, x)

    stack = fnnx.Frozen(Stack()) if outside else Stack()
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), stack)
    model.train()
    before = values(stack, (nnx.BatchStat, fnnx.FrozenParam))
    assert len(before) == 6
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    first, last = step(model, optimizer, x), step(model, optimizer, x)
    assert first != last
    assert values(stack, (nnx.BatchStat, fnnx.FrozenParam)) == before
    assert trains(model) == {"layers/0/kernel", "layers/0/bias"}
    assert [count.tolist() for count in jax.tree.leaves(nnx.state(stack, nnx.RngCount))] == [[2, 2, 2]]


@pytest.mark.skipif(not hasattr(nnx, "view"), reason="this Flax has no nnx.view")
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: m.norm], ids=["of a block", "of a norm"])
def test_views_reach_the_module_inside(rngs, x, wrap):
    frozen = fnnx.Frozen(nnx.Sequential(wrap(Block(rngs))))
    view = nnx.view(frozen, use_running_average=True)
    assert bits(view(x)) != bits(x)
    assert "use_running_average" in nnx.view_info(fnnx.Frozen(wrap(Block(rngs))))


class Adapted(nnx.Module):
    """Layers in a list, a shared one, a LoRA and a batch norm."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.lora = nnx.LoRA(4, 2, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.tied = self.layers[0]

    def __call__(self, x):
        return self.lora(self.norm(self.layers[1](self.layers[0](x))))


LAYERS = {f"layers/{i}/{name}" for i in range(2) for name in ("kernel", "bias")}
LORA = {"lora/lora_a", "lora/lora_b"}
NORM, KERNELS = {"norm/scale", "norm/bias"}, {"layers/0/kernel", "layers/1/kernel"}
BIASES = {"layers/0/bias", "layers/1/bias", "norm/bias"}
FILTERS = {
    "type": (lambda: nnx.LoRAParam, LORA),
    "OfType": (lambda: nnx.OfType(nnx.LoRAParam), LORA),
    "PathContains an index": (lambda: nnx.PathContains(1), {"layers/1/kernel", "layers/1/bias"}),
    "All": (lambda: nnx.All(nnx.Param, nnx.PathContains("bias")), BIASES),
    "Any": (lambda: nnx.Any(nnx.LoRAParam, nnx.PathContains("norm")), LORA | NORM),
    "Not": (lambda: nnx.Not(nnx.LoRAParam), LAYERS | NORM),
    "a function in All": (lambda: nnx.All(nnx.Param, lambda path, value: value.ndim == 2), KERNELS | LORA),
    "filter | pattern": (lambda: nnx.OfType(nnx.LoRAParam) | fz.path("norm"), LORA | NORM),
    "~selector | type": (lambda: ~(fz.path("norm") | nnx.LoRAParam), LAYERS),
    "pattern & filter": (lambda: fz.path("norm") & nnx.PathContains("bias"), {"norm/bias"}),
    "rules": (lambda: fz.rules({nnx.LoRAParam: False, "norm/bias": False}, default=True), LAYERS | {"norm/scale"}),
    "a tree": (
        lambda: {"layers": {0: False, 1: False}, "lora": True, "norm": {"bias": False, "scale": True}},
        LORA | {"norm/scale"},
    ),
    "a function": (lambda: of_vectors, NORM | BIASES),
    "a state": (lambda: of_vectors(nnx.state(Adapted(nnx.Rngs(0)), nnx.Param)), NORM | BIASES),
}
if "exact" in nnx.PathContains.__dataclass_fields__:  # not in the oldest Flax
    FILTERS["PathContains in part"] = (lambda: nnx.PathContains("lora_", exact=False), LORA)


def value_of(variable):
    return variable.get_value() if hasattr(nnx.Variable, "get_value") else variable.raw_value


def hits(answers):
    """The paths at which a state of variables holds True."""
    return {"/".join(map(str, path)) for path, hit in nnx.to_flat_state(answers) if value_of(hit) is True}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_is_a_spec_wherever_there_are_variables(rngs, name):
    make, frozen = FILTERS[name]
    model = Adapted(rngs)
    params, before = nnx.state(model, nnx.Param), values(model)
    assert hits(fz.resolve(params, make())) == frozen
    assert grad_paths(nnx.state(model, fnnx.trainable(model, make()))) == (LAYERS | LORA | NORM) - frozen
    for function in (fnnx.freeze, fnnx.Frozen):
        function(model, make())
        assert frozen_in(model) == frozen
        assert fnnx.thaw(model, make()) is model
        assert frozen_in(model) == set()
        assert values(model) == before


def test_a_filter_sees_a_module_as_a_pytree_and_each_path_of_a_shared_variable(rngs):
    answers = fz.resolve(Adapted(rngs), nnx.Any(nnx.BatchStat, nnx.PathContains("tied")))
    assert value_of(answers.norm.mean) is value_of(answers.tied.kernel) is True
    assert value_of(answers.norm.scale) is value_of(answers.lora.lora_a) is False
    assert frozen_in(fnnx.freeze(Adapted(rngs), nnx.PathContains("tied"))) == {"layers/0/kernel", "layers/0/bias"}


def test_a_filter_names_a_group_and_a_label(rngs):
    params = nnx.state(Adapted(rngs), nnx.Param)
    labels = fz.labels_by_path({nnx.LoRAParam: "adapter"}, default="base")(params)
    assert hits(jax.tree.map(lambda word: word == "adapter", labels)) == LORA
    tx = fz.freeze_when(optax.sgd(0.1), {nnx.PathContains("norm"): fz.freeze_at(1)})
    updates, _ = tx.update(params, tx.init(params), params)
    assert len(jax.tree.leaves(updates)) == len(LAYERS | LORA | NORM)
    spec = fz.freeze(optax.sgd(0.1), nnx.LoRAParam).init(params).plan
    assert not any(hasattr(leaf, "variable") for leaf in spec.leaves)


@pytest.mark.parametrize("spec", [nnx.BatchStat, nnx.PathContains("heads")], ids=repr)
def test_a_spec_that_freezes_nothing_is_warned_about(chain, spec):
    for function in (fnnx.freeze, fnnx.Frozen, fnnx.trainable):
        with pytest.warns(fz.FreezeWarning, match="freezes nothing"):
            function(chain, spec)
    fnnx.thaw(chain, spec)
    fnnx.freeze(chain, False)
    fnnx.freeze(chain, "layers")


@pytest.mark.parametrize("spec", [nnx.PathContains("norm"), nnx.Not(nnx.OfType(nnx.Param)) | fz.path("norm")])
def test_a_filter_of_a_tree_without_variables_is_refused(rngs, spec):
    params = nnx.to_pure_dict(nnx.state(Adapted(rngs), nnx.Param))
    for use in (fz.freeze(optax.sgd(0.1), spec).init, fz.labels(spec), lambda params: fz.resolve(params, spec)):
        with pytest.raises(ValueError, match=r"(?s)an NNX filter needs NNX variables.*fz\.path.*fz\.where"):
            use(params)
    with pytest.raises(ValueError, match=r"(?s)where a bool is expected.*cannot contain labels or patterns"):
        fz.resolve({"norm": jnp.ones(2)}, {"norm": nnx.OfType(nnx.Param)})
    with pytest.raises(TypeError, match="looks at values"):
        fz.resolve(nnx.state(Adapted(rngs)), nnx.All(nnx.Param, lambda path, value: bool((value[...] > 0).all())))


class Bridged(nnx.Module):
    """A Linen backbone, called once, and a head of NNX."""

    def __init__(self, rngs):
        linen = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=True)])
        self.backbone = nnx.bridge.ToNNX(linen, rngs=rngs)
        self.backbone.lazy_init(jnp.ones((1, 4)))
        self.head = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.backbone(x))


@pytest.mark.parametrize("function", [fnnx.freeze, fnnx.Frozen])
def test_parameters_of_a_linen_module_are_refused_and_still_train(rngs, x, function):
    model = Bridged(rngs)
    before, output = kinds(model), bits(model(x))
    for module, frozen in ((model, True), (model, nnx.PathContains("layers_0")), (model.backbone, True)):
        with pytest.raises(ValueError, match="parameter of a Linen module cannot become a FrozenParam"):
            function(module, frozen)
    assert kinds(model) == before
    assert bits(model(x)) == output
    function(model, "head")
    assert frozen_in(model) == {"head/kernel", "head/bias"}


def test_wrong_arguments_change_nothing(chain):
    for function in (fnnx.freeze, fnnx.thaw, fnnx.Frozen, fnnx.trainable):
        with pytest.raises(ValueError, match=r"(?s)matches no leaf.*nearest paths: layers/2/kernel"):
            function(chain, ["layers/0", "layers/2/kernle"])
    with pytest.raises(ValueError, match=r"(?s)at: stats.*'frozen' or 'live'"):
        fnnx.Frozen(chain, stats="Frozen")
    with pytest.raises(ValueError, match="no parameter is trainable"):
        fnnx.trainable(chain, "layers")
    assert set(kinds(chain).values()) == {"Param"}


def test_importing_it_teaches_flax_to_store_a_part():
    code = """
import optax_freeze.nnx, optax_freeze as fz, flax.serialization
assert flax.serialization.to_state_dict(fz.Part(1.0)) == {"values": 1.0}
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class _ScannedBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.norm(jnp.tanh(self.linear(x))))


class _Scanned(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(6, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=5)(nnx.vmap(_ScannedBlock, in_axes=0, out_axes=0))(rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, tokens):
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            self.embed(tokens), self.blocks
        )
        self.calls[...] += 1
        self.last = nnx.Variable(x.mean())  # a variable that the call creates
        return self.head(x)


class TestFreezeLoss:
    FROZEN = fz.rules({"embed/embedding": fz.rows(slice(0, 4)), "blocks/**": fz.rows(slice(0, 3)), "head/bias": True})

    @staticmethod
    def loss(model, tokens, labels, rngs):
        logits = model(tokens) + 0.1 * jax.random.normal(rngs.noise(), (4, 3))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def train(self, loss, steps):
        model, rngs = _Scanned(nnx.Rngs(0)), nnx.Rngs(noise=3)
        optimizer = nnx.Optimizer(model, fz.freeze(optax.adamw(1e-2), self.FROZEN), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, rngs):
            gradient = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Param))
            value, grads = gradient(model, jnp.array([0, 5, 3, 1]), jnp.array([0, 1, 2, 0]), rngs=rngs)
            optimizer.update(model, grads)
            return value, grads

        values, grads = zip(*[step(model, optimizer, rngs) for _ in range(steps)], strict=True)
        params, others = nnx.split_state(nnx.state(model), nnx.Param, ...)
        return [nnx.to_pure_dict(state) for state in (nnx.state(rngs), others, params)], values, grads[0]

    def test_a_scanned_model_trains_as_without_it(self):
        """Random streams, batch statistics and a variable that the call creates by bits, parameters up to rounding."""
        (*plain, params), values, dense = self.train(self.loss, 1)
        (*ours, our_params), our_values, grads = self.train(fnnx.freeze_loss(self.loss, self.FROZEN), 1)
        assert bits((ours, our_values)) == bits((plain, values))
        assert "last" in ours[1]
        assert_equal_up_to_rounding(our_params, params)
        kernel = np.asarray(grads["blocks"]["linear"]["kernel"][...])
        assert not kernel[:3].any()
        assert_equal_up_to_rounding(kernel[3:], np.asarray(dense["blocks"]["linear"]["kernel"][...])[3:])
        *after_two, _ = self.train(self.loss, 2)
        *ours_after_two, _ = self.train(fnnx.freeze_loss(self.loss, self.FROZEN), 2)
        assert_equal_up_to_rounding(ours_after_two, after_two, roundings=64)

    def test_modules_in_and_out(self):
        model = nnx.Embed(4, 1, rngs=nnx.Rngs(0))

        def fun(model, head, text):
            model.embedding[...] *= 2
            model.new = nnx.Variable(jnp.ones(2))
            return model.embedding[...].sum() + head.bias[...].sum(), model, {text: head}

        before, head = model.embedding[...], nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        _, same, aux = fnnx.freeze_loss(fun, {"embedding": fz.rows([0])})(model, head, "text")
        assert same is model
        assert aux["text"] is head
        assert bits(model.embedding[...]) == bits(before * 2)
        assert model.new[...].tolist() == [1, 1]


def norm_and_dropout(model, x):
    """Changes the batch statistics and the counter of the dropout."""
    model.train()
    model(x)
    assert int(model.dropout.rngs.count[...])
    return model


class TestOnlyParametersOfAModule:
    @pytest.mark.parametrize("frozen", [True, ["norm", "linear"], nnx.Param])
    def test_what_a_call_counts_is_not_compared(self, rngs, x, frozen):
        model = fnnx.freeze(Block(rngs), "linear")
        before, digest = nnx.clone(model), fz.fingerprint(model, frozen)
        norm_and_dropout(model, x)
        assert bits(fz.fingerprint(model, frozen)) == bits(digest)
        fz.assert_frozen(before, model, frozen)
        fz.assert_frozen({"a": before}, {"a": model}, True)

    @pytest.mark.parametrize("cls", [nnx.Linear, nnx.LoRA])
    def test_a_bit_of_a_parameter_is(self, rngs, cls):
        model = fnnx.freeze(nnx.Sequential(cls(2, 4, 4, rngs=rngs) if cls is nnx.LoRA else cls(2, 4, rngs=rngs)), True)
        for variable in [*nnx.to_flat_state(nnx.state(model)), *nnx.to_flat_state(nnx.state(fnnx.thaw(model)))]:
            before, digest = nnx.clone(model), fz.fingerprint(model, "layers/0")
            name = variable[0][-1]
            changed = getattr(model.layers[0], name)
            changed[...] = changed[...].at[0].set(-changed[...][0] - 0.0)
            assert bits(fz.fingerprint(model, "layers/0")) != bits(digest)
            with pytest.raises(AssertionError, match=f"layers/0/{name}"):
                fz.assert_frozen(before, model, "layers/0")

    def test_a_state_is_compared_whole(self, rngs, x):
        model = Block(rngs)
        for types in (nnx.BatchStat, nnx.RngCount, nnx.Variable):
            before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
            digest = fz.fingerprint(nnx.state(model, types), True)
            norm_and_dropout(model, x)
            assert bits(fz.fingerprint(nnx.state(model, types), True)) != bits(digest)
            with pytest.raises(AssertionError, match="norm/mean"):
                fz.assert_frozen(before, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))), True)

    def test_a_module_has_the_digest_of_the_state_of_its_parameters(self, rngs):
        model = fnnx.freeze(Block(rngs), "linear")
        state = nnx.state(model, (nnx.Param, fnnx.FrozenParam))
        assert bits(fz.fingerprint(model, "linear")) == bits(fz.fingerprint(state, "linear"))
        resolved = fz.resolve(model, "linear")
        assert bits(fz.fingerprint(model, resolved)) == bits(fz.fingerprint(model, "linear"))

    @pytest.mark.parametrize("name", ["a", "b"])
    def test_a_shared_variable_has_each_of_its_paths(self, rngs, name):
        model = nnx.Sequential(nnx.Linear(2, 2, rngs=rngs))
        model.a = model.b = nnx.Linear(2, 2, rngs=rngs)
        digest = fz.fingerprint(model, name)
        model.a.bias[...] += 1
        assert bits(fz.fingerprint(model, name)) != bits(digest)

    def test_a_module_that_is_not_a_pytree(self, rngs):
        class Plain(nnx.Module, pytree=False):
            def __init__(self):
                self.layer = nnx.Linear(2, 2, rngs=rngs)

        model = Plain()
        digest = fz.fingerprint(model, "layer")
        model.layer.bias[...] += 1
        assert bits(fz.fingerprint(model, "layer")) != bits(digest)

    @pytest.mark.parametrize("frozen", ["dropout", ["linear", "norm/mean"], fz.rules({"dropout/**": True})])
    def test_a_spec_of_other_variables_is_refused(self, rngs, frozen):
        model = Block(rngs)
        calls = [fz.fingerprint, lambda model, frozen: fz.assert_frozen(model, nnx.clone(model), frozen)]
        for call in calls:
            with pytest.raises(ValueError, match=r"not parameters\n  at: frozen\n(.|\n)*nnx.state\(model"):
                call(model, frozen)
            with pytest.raises(ValueError, match="matches no leaf"):
                call(model, "nowhere")
        with pytest.raises(ValueError, match="an NNX module without parameters"):
            fz.fingerprint(model.dropout, True)
