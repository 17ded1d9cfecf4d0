"""Frozen modules of Flax Linen equal the unwrapped modules, except in the gradient of their parameters."""

from collections.abc import Callable

import chex
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import bits
from flax import nnx
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, unflatten_dict

import optax_freeze as fz
from optax_freeze import checkpoint
from optax_freeze._program.dependence import depends_on
from optax_freeze.linen import Frozen, freeze_variables, frozen_mask

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 4))
X16 = jax.random.normal(jax.random.key(2), (16, 16))
IDS = jnp.array([1, 5])
SCALES = "_overwrite_with_gradient"


def bare(module, *args, **kwargs):
    """Stands for ``Frozen`` in the same model without freezing."""
    return module


def constants(module, *args, **kwargs):
    return Frozen(module, *args, collection="constants", **kwargs)


class Compact(nn.Module):
    """A model whose compact call is the function ``run``."""

    run: Callable

    @nn.compact
    def __call__(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def scanned(run, **axes):
    """A scan over three layers, each of which calls ``run`` as ``Compact`` does."""
    stack = nn.scan(Compact, variable_axes={"params": 0, **axes}, split_rngs={"params": True}, length=3)
    return stack(lambda module, x, _: (run(module, x), None))


def vmapped(module):
    return nn.vmap(module, in_axes=0, variable_axes={"params": None}, split_rngs={"params": False})


class Block(nn.Module):
    """A residual layer that keeps the shape."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(x.shape[-1], name="dense")(nn.tanh(x))


class Holder(nn.Module):
    """Modules given from outside, one within another's field."""

    first: nn.Module
    second: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(self.second(self.first(x)))


class Layer(nn.Module):
    """One frozen and one trainable module, made in setup."""

    wrap: Callable

    def setup(self):
        self.fixed = self.wrap(Block())
        self.free = nn.Dense(4)

    def __call__(self, x):
        return self.free(self.fixed(x))


class Adapter(nn.Module):
    """Adds to a module, in the module's own scope."""

    base: nn.Module

    def setup(self):
        nn.share_scope(self, self.base)

    @nn.compact
    def __call__(self, x):
        x = x @ self.param("rotation", nn.initializers.orthogonal(), (x.shape[-1], x.shape[-1]))
        y = self.base(x)
        return y + x @ self.param("low_rank", nn.initializers.normal(), (x.shape[-1], y.shape[-1]))


def in_setup(wrap):
    class Model(nn.Module):
        def setup(self):
            self.body = wrap(Block())
            self.named = wrap(nn.Dense(4, name="own_name"))
            self.layers = [wrap(Block()), Block()]
            self.head = nn.Dense(3)

        def __call__(self, x):
            x = self.named(self.body(x))
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    return Model()


def in_compact(wrap):
    def run(module, x):
        x = wrap(Block())(nn.Dense(4)(x))
        x = wrap(nn.Dense(5, name="own_name"))(x)
        return nn.Dense(3)(wrap(nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(4)]))(x))

    return Compact(run)


def in_scan(wrap):
    def layer(module, x):
        return nn.Dense(4, name="free")(wrap(Block(name="fixed"))(x))

    return Compact(lambda module, x: nn.Dense(3)(scanned(layer)(x, None)[0]))


def of_scan(wrap):
    stack = lambda: wrap(scanned(lambda module, x: Block()(x)))  # noqa: E731
    return Compact(lambda module, x: nn.Dense(3)(stack()(x, None)[0]))


def in_lift(lift):
    return lambda wrap: Compact(lambda module, x: nn.Dense(3)(lift(Layer)(wrap, name="layer")(x)))


def of_lift(lift):
    return lambda wrap: nn.Sequential([nn.Dense(4), wrap(lift(Block)()), nn.Dense(3)])


def lifted_method(wrap):
    """A lifted method of a module that was given its modules from outside."""

    class Model(nn.Module):
        body: nn.Module

        def setup(self):
            self.head = nn.Dense(3)

        @nn.remat
        def features(self, x):
            return self.body(x)

        def __call__(self, x):
            return self.head(self.features(x))

    return Model(wrap(Holder(Block(), Block())))


def two_wrappers(wrap):
    class Model(nn.Module):
        def setup(self):
            shared = nn.Dense(4)
            self.a, self.b, self.head = wrap(shared, "kernel"), wrap(shared, "bias"), nn.Dense(3)

        def __call__(self, x):
            return self.head(self.b(nn.tanh(self.a(x))))

    return Model()


def given_to_a_method(wrap):
    """A module that is given modules with the call, which are not its own: one of them is frozen itself."""

    def read(module, x, first, second):
        return nn.Dense(4, name="mine")(second(first(x)))

    def run(module, x):
        first, second = wrap(Block(name="first")), nn.Sequential([nn.Dense(4, name="second")])
        return wrap(Compact(read))(x, first, second=second)

    return Compact(run)


MODELS = {
    "alone": lambda wrap: wrap(Block()),
    "sequential": lambda wrap: nn.Sequential([nn.Dense(4), wrap(nn.Dense(4)), nn.relu, nn.Dense(3)]),
    "setup": in_setup,
    "compact": in_compact,
    "fields of a field": lambda wrap: Holder(Block(), wrap(Holder(Block(), Holder(Block(), nn.Dense(4))))),
    "applied twice": lambda wrap: nn.Sequential([(body := wrap(Block())), body, nn.Dense(3)]),
    "frozen in frozen": lambda wrap: nn.Sequential([wrap(nn.Sequential([wrap(Block()), nn.Dense(4)])), nn.Dense(3)]),
    "frozen of frozen": lambda wrap: nn.Sequential([wrap(wrap(Block())), nn.Dense(3)]),
    "two wrappers": two_wrappers,
    "in scan": in_scan,
    "of scan": of_scan,
    "in remat": in_lift(nn.remat),
    "of remat": of_lift(nn.remat),
    "in jit": in_lift(nn.jit),
    "of jit": of_lift(nn.jit),
    "in vmap": in_lift(vmapped),
    "of vmap": of_lift(vmapped),
    "remat of the wrapper": lambda wrap: nn.Sequential([nn.remat(wrap)(Block()) if wrap is Frozen else Block()]),
    "lifted method": lifted_method,
    "given to a method": given_to_a_method,
    "adapter": lambda wrap: nn.Sequential([nn.Dense(4), Adapter(wrap(nn.Dense(3)))]),
    "adapter in a lift": lambda wrap: nn.Sequential([nn.remat(Adapter)(wrap(Holder(Block(), nn.Dense(4))))]),
    "adapter, compact": lambda wrap: Compact(lambda module, x: Adapter(wrap(nn.Dense(3)))(x)),
    "of adapters": lambda wrap: wrap(nn.Sequential([Adapter(nn.Dense(4)), wrap(Adapter(nn.Dense(3)))])),
}
COLLECTED = {"alone", "sequential", "setup", "compact", "fields of a field", "applied twice", "lifted method"}
COLLECTED |= {"given to a method", "adapter", "adapter, compact"}  # which are also tested with a collection


def flat(tree):
    return flatten_dict(tree, sep="/")


def frozen_paths(mask):
    return {path for path, frozen in flat(mask).items() if frozen is True}


def frozen_modules(*args, **kwargs):
    """The first segments of the paths that ``frozen_mask`` names."""
    return {path.split("/")[0] for path in frozen_paths(frozen_mask(*args, **kwargs))}


def merged(variables):
    """The two collections as one tree."""
    trees = [flatten_dict(variables.get(name, {})) for name in ("params", "constants")]
    assert not set(trees[0]) & set(trees[1])
    return unflatten_dict(trees[0] | trees[1])


def loss(model, params, x=X):
    return jnp.sum(jnp.sin(model.apply({"params": params}, x)))


gradients = jax.grad(loss, argnums=1)


def any_grad(grads):
    return any(jnp.any(grad) for grad in jax.tree.leaves(grads))


def run_with_gradients(model, variables, x=X, **options):
    """The bits of the output, the gradients of the parameters by path, and the bits of the gradient of the inputs."""

    def value(params, x):
        output = model.apply({**variables, "params": params}, x, **options)
        return jnp.sum(jnp.sin(output)), output

    (_, output), (params, x) = jax.value_and_grad(value, (0, 1), has_aux=True)(variables.get("params", {}), x)
    return bits(output), flat(params), bits(x)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_bare_module_but_for_the_gradient_of_its_parameters(name):
    build = MODELS[name]
    wrapped, plain = build(Frozen), build(bare)
    output, variables = plain.init_with_output(KEY, X)
    assert bits(wrapped.init_with_output(KEY, X)) == bits((output, variables))
    output, grads, of_inputs = run_with_gradients(plain, variables)
    got_output, got_grads, got_of_inputs = run_with_gradients(wrapped, variables)
    assert (got_output, got_of_inputs) == (output, of_inputs)

    mask = frozen_mask(wrapped, X)
    assert jax.tree.structure(mask) == jax.tree.structure(variables["params"])
    if name == "two wrappers":  # each freezes what the other does not
        assert frozen_paths(mask) == set()
        return
    assert frozen_paths(mask)
    expected = {path: jnp.zeros_like(grad) if path in frozen_paths(mask) else grad for path, grad in grads.items()}
    assert bits(got_grads) == bits(expected)

    if name in COLLECTED:
        moved = build(constants)
        collected = moved.init(KEY, X)
        assert bits(merged(collected)) == bits(variables["params"])
        assert set(flat(collected["constants"])) == frozen_paths(mask)
        got_output, got_grads, got_of_inputs = run_with_gradients(moved, collected)
        assert (got_output, got_of_inputs) == (output, of_inputs)
        assert bits(got_grads) == bits({path: grads[path] for path in flat(collected.get("params", {}))})
        assert not any(jax.tree.leaves(frozen_mask(moved, X)))


class Table(nn.Module):
    """Tied input and output embeddings, with a method of each kind."""

    size: int = 7

    def setup(self):
        self.table = self.param("table", nn.initializers.normal(), (self.size, 4))
        self.mix = nn.Dense(4)
        self.layers = [nn.Dense(4), nn.Dense(4)]
        self.stages = {"last": nn.Sequential([nn.Dense(4), nn.tanh])}

    def __call__(self, ids):
        return self.decode(self.mix(self.table[ids]))

    def decode(self, x, scale=1.0):
        for layer in [*self.layers, self.stages["last"]]:
            x = layer(x)
        return scale * x @ self.table.T

    @property
    def transposed(self):
        return self.table.T

    @staticmethod
    def double(x):
        return 2 * x

    @nn.nowrap
    def scaled(self, x):
        return self.mix(self.size * x)


READS = {
    "a method": lambda m, x: m.decode(x, scale=2.0),
    "a method of the class": lambda m, x: Table.decode(m, x),
    "a method without a wrapper": lambda m, x: m.scaled(x),
    "a parameter made in setup": lambda m, x: x @ m.table.T,
    "a property": lambda m, x: x @ m.transposed,
    "a submodule": lambda m, x: m.mix(x),
    "a parameter of a submodule": lambda m, x: x @ m.mix.variables["params"]["kernel"],
    "a submodule in a list": lambda m, x: m.layers[1](m.layers[0](x)),
    "a submodule of a submodule": lambda m, x: m.stages["last"].layers[0](x),
    "the variables": lambda m, x: x @ m.variables["params"]["table"].T,
    "a variable": lambda m, x: x @ m.get_variable("params", "table").T,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whatever_is_read_through_the_wrapper_is_frozen(read):
    variables = Table().init(KEY, IDS)
    output, grads, of_inputs = run_with_gradients(Table(), variables, method=read)
    assert any_grad(grads)
    for frozen in (Frozen(Table()), Frozen(Frozen(Table()))):
        got_output, got_grads, got_of_inputs = run_with_gradients(frozen, variables, method=read)
        assert (got_output, got_of_inputs) == (output, of_inputs)
        assert not any_grad(got_grads)


def test_a_submodule_given_to_a_jitted_module_is_read_anew_each_time():
    jitted = nn.jit(nn.Sequential)

    class Model(nn.Module):
        def setup(self):
            self.table = Frozen(Table())
            self.reader = jitted([self.table.mix])

        def __call__(self, ids):
            return self.reader(self.table(ids)[:, :4])

    variables = Model().init(KEY, IDS)
    for scale in (1.0, 2.0):
        scaled = jax.tree.map(lambda leaf, scale=scale: scale * leaf, variables)
        frozen, table = Table().bind({"params": scaled["params"]["table"]}), Model().apply(scaled, IDS)
        assert bits(table) == bits(frozen.mix(frozen(IDS)[:, :4]))


class Named(nn.Module):
    """Uses its own name."""

    @nn.compact
    def __call__(self, x):
        return x + self.param(f"of_{self.name}", nn.initializers.normal(), x.shape)


class NamedInSetup(nn.Module):
    wrap: Callable

    def setup(self):
        self.first = self.wrap(Named())
        self.layers = [self.wrap(self.wrap(Named())), self.wrap(self.wrap(Named(name="own")))]

    def __call__(self, x):
        assert self.first.name == "first"
        return self.layers[1](self.layers[0](self.first(x)))


def named_in_compact(wrap):
    def run(module, x):
        layer = wrap(wrap(Named()))
        assert layer.name == "Named_0"
        return nn.Sequential([wrap(Named(name="own")), wrap(Named())])(layer(x))

    return Compact(run)


def test_the_name_is_that_of_the_bare_module():
    for build in (NamedInSetup, named_in_compact, lambda wrap: nn.Sequential([wrap(Named())])):
        assert bits(build(Frozen).init(KEY, X)) == bits(build(bare).init(KEY, X))
    with flax.config.temp_flip_flag("preserve_adopted_names", True):
        kept, expected = (nn.Sequential([wrap(nn.Dense(3, name="kept"))]).init(KEY, X) for wrap in (Frozen, bare))
    assert bits(kept) == bits(expected)
    options = {"console_kwargs": {"width": 200, "force_terminal": False}}
    assert in_setup(Frozen).tabulate(KEY, X, **options) == in_setup(bare).tabulate(KEY, X, **options)


def test_plain_attributes_and_variables_of_setup():
    class Counter(nn.Module):
        def setup(self):
            self.count = self.variable("cache", "count", lambda: jnp.ones(()))

        def __call__(self):
            return self.count.value

    assert Frozen(Counter()).bind(Counter().init(KEY)).count.value == 1
    frozen = Frozen(Table(9))
    bound = frozen.bind(Table(9).init(KEY, IDS))
    for module in (frozen, bound):
        assert (module.size, module.double(2)) == (9, 4)
        with pytest.raises(AttributeError, match="nothing_like_it"):
            _ = module.nothing_like_it
    assert len(bound.layers) == 2


@pytest.mark.parametrize("method", ["attend", nn.Embed.attend, Frozen(nn.Embed(7, 4)).attend, nn.Dense.__call__])
def test_a_method_can_be_named_to_apply(method):
    is_call = method is nn.Dense.__call__
    module = nn.Dense(3) if is_call else nn.Embed(7, 4)
    variables = module.init(KEY, X if is_call else IDS)
    output, grads, _ = run_with_gradients(Frozen(module), variables, method=method)
    assert output == bits(module.apply(variables, X, method=None if is_call else nn.Embed.attend))
    assert not any_grad(grads)


def test_parameters_made_by_several_methods_and_bind_and_unbind():
    def run(module, ids):
        table = Frozen(Table(name="table"), "mix")
        return table.decode(table.scaled(jnp.ones((2, 4))))

    variables = Compact(run).init(KEY, IDS)
    assert set(variables["params"]["table"]) == {"table", "mix", "layers_0", "layers_1", "stages_last"}
    assert frozen_paths(frozen_mask(Compact(run), IDS)) == {"table/mix/kernel", "table/mix/bias"}
    model = in_setup(Frozen)
    variables = model.init(KEY, X)
    bound = model.bind(variables)
    assert bits(bound(X)) == bits(model.apply(variables, X))
    module, part = bound.body.unbind()
    assert isinstance(module, Frozen)
    assert bits(part) == bits({"params": variables["params"]["body"]})
    assert bits(module.apply(part, X)) == bits(bound.body(X)) == bits(Block().apply(part, X))


class Noted(nn.Module):
    """Sows, drops out and draws."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(4)(x)
        self.sow("intermediates", "note", x)
        x = nn.Dropout(0.5)(x, deterministic=not train)
        return x + jax.random.normal(self.make_rng("noise"), x.shape)


def test_sown_values_and_random_streams_are_those_of_the_bare_module():
    rngs = {"params": KEY, "dropout": jax.random.key(2), "noise": jax.random.key(3)}
    results = []
    for wrap in (Frozen, bare):

        def run(module, x, wrap=wrap):
            before = jax.random.normal(module.make_rng("noise"), x.shape)
            noted = wrap(Noted())
            x = noted(noted(x + before, train=True), train=True)
            return x + jax.random.normal(module.make_rng("noise"), x.shape)

        variables = Compact(run).init(rngs, X)
        options = {"rngs": rngs, "mutable": ["intermediates"], "capture_intermediates": True}
        results.append(bits((variables, Compact(run).apply(variables, X, **options))))
    assert results[0] == results[1]


class Normed(nn.Module):
    """Batch statistics by Linen's own module, and by one that writes whatever the mode is."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        count = self.variable("batch_stats", "count", lambda: jnp.zeros((), jnp.int32))
        count.value += 1
        return x + count.value


def test_frozen_statistics_stand_still_and_live_ones_are_the_callers():
    variables = Normed().init(KEY, X)
    assert bits(Frozen(Normed()).init(KEY, X)) == bits(variables)

    def run(module, train):
        return module.apply(variables, X, train=train, mutable=["batch_stats"])

    for train in (True, False):
        live, frozen = run(Frozen(Normed(), stats="live"), train), run(Frozen(Normed()), train)
        expected, stored = run(Normed(), train), run(Normed(), False)
        assert bits(live) == bits(expected)
        assert bits(live[1]["batch_stats"]) != bits(variables["batch_stats"])
        assert bits(frozen) == bits((stored[0], {"batch_stats": variables["batch_stats"]}))
    with freeze_variables(True):
        assert bits(run(Normed(), False)) == bits(live)
    assert bits(Frozen(Normed()).apply(variables, X, mutable=True)[1]) == bits(variables)


@pytest.mark.parametrize("field", [None, False, True])
def test_the_mode_of_a_frozen_batch_norm_is_the_stored_one(field):
    variables = nn.BatchNorm(use_running_average=True).init(KEY, X)
    expected = bits(nn.BatchNorm(use_running_average=True).apply(variables, X))
    frozen = Frozen(nn.BatchNorm(use_running_average=field))
    for call in ({"use_running_average": False}, {"use_running_average": True}, {}):
        assert bits(frozen.apply(variables, X, **call)) == expected
        assert bits(frozen.apply(variables, X, *call.values())) == expected


def test_statistics_of_other_names():
    def run(module, x):
        for col in ("mine", "cache"):
            module.variable(col, "count", lambda: jnp.zeros(())).value += 1
        return nn.Dense(4)(x)

    frozen = Frozen(Compact(run), stats_collections=("mine",))
    variables = frozen.init(KEY, X)
    _, moved = frozen.apply(variables, X, mutable=["mine", "cache"])
    changes = {col: float(moved[col]["count"] - variables[col]["count"]) for col in moved}
    assert changes == {"mine": 0, "cache": 1}


@pytest.mark.parametrize("stats", ["frozen", "live"])
def test_scales_of_float8_matmuls(stats):
    def dense():
        return nn.Dense(16, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)

    model = nn.Sequential([Frozen(dense(), stats=stats), dense()])
    variables, loss = model.init(KEY, jnp.ones((16, 16))), lambda variables: jnp.mean(model.apply(variables, X16) ** 2)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))
    trained = state.apply_gradients(grads=jax.grad(loss)(variables)).params
    moved = {name: bits(trained[SCALES][name]) != bits(scales) for name, scales in variables[SCALES].items()}
    assert moved == {"layers_0": stats == "live", "layers_1": True}
    assert bits(trained["params"]["layers_0"]) == bits(variables["params"]["layers_0"])


def test_a_jitted_module_with_statistics_is_not_run_by_the_program_of_another_mode():
    jitted = nn.jit(Normed)

    def model(stats):
        layer = jitted(name="normed", parent=None)
        return nn.Sequential([Frozen(layer, stats=stats) if stats else layer])

    variables = model(None).init(KEY, X)
    for stats in (None, "live", "frozen", "live", None, "frozen"):
        output, moved = model(stats).apply(variables, X, mutable=["batch_stats"])
        inner = {collection: tree["layers_0"] for collection, tree in variables.items()}
        expected, _ = Normed().apply(inner, X, stats != "frozen", mutable=True)
        chex.assert_trees_all_close(output, expected, rtol=1e-5)  # jitted and not
        assert (bits(moved["batch_stats"]) == bits(variables["batch_stats"])) is (stats == "frozen")


def test_statistics_beside_a_frozen_module_and_of_one_given_to_its_method_move():
    def norm(name):
        return nn.BatchNorm(use_running_average=False, name=name)

    def run(module, x):
        x = Frozen(Compact(lambda module, x, given: given(norm("mine")(x)), name="reader"))(x, norm("given"))
        return norm("beside")(x)

    variables = Compact(run).init(KEY, X)
    moved = Compact(run).apply(variables, X, mutable=["batch_stats"])[1]["batch_stats"]
    stays = {name for name, before in variables["batch_stats"].items() if bits(moved[name]) == bits(before)}
    assert stays == {"reader"}


def test_a_method_of_an_unbound_module_needs_nothing_frozen():
    class Helper(nn.Module):
        def double(self, x):
            return 2 * x

    model = Compact(lambda module, x: Helper(parent=None).double(x))
    assert bits(Frozen(model).apply({}, X)) == bits(2 * X)
    with freeze_variables("kernel"):
        nn.Dense(3).init(KEY, Helper().double(X))


def test_a_module_used_bare_and_frozen_has_the_gradient_of_the_bare_use():
    class Model(nn.Module):
        def setup(self):
            self.layer = nn.Dense(4)
            self.frozen = Frozen(self.layer)

        def __call__(self, x, times):
            x = self.frozen(x)
            for _ in range(times):
                x = self.layer(jax.lax.stop_gradient(x))
            return self.frozen(x) if times else x

    variables = Model().init(KEY, X, 1)
    assert set(variables["params"]) == {"layer"}
    grads = jax.grad(lambda v: Model().apply(v, X, 1).sum())(variables)["params"]["layer"]
    apply = lambda params, x: nn.Dense(4).apply({"params": params}, x)  # noqa: E731

    def by_hand(params):
        constant = jax.lax.stop_gradient(params)
        return apply(constant, apply(params, jax.lax.stop_gradient(apply(constant, X)))).sum()

    assert bits(grads) == bits(jax.grad(by_hand)(variables["params"]["layer"]))
    assert not any(jax.tree.leaves(frozen_mask(Model(), X, 1)))
    assert all(jax.tree.leaves(frozen_mask(Model(), X, 0)))


def halves(params):
    return {"layers_0": True, "layers_2": False}


@pytest.mark.parametrize("spec", [["layers_0/kernel", "layers_0/bias"], fz.all_except("layers_2"), halves({}), halves])
def test_a_spec_is_relative_to_the_module(spec):
    body = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(4)])
    model = nn.Sequential([Frozen(body, spec), nn.Dense(3)])
    assert frozen_paths(frozen_mask(model, X)) == {"layers_0/layers_0/kernel", "layers_0/layers_0/bias"}
    elsewhere = Compact(lambda module, x: Frozen(nn.Sequential([nn.Dense(4), nn.Dense(4)]), "../Dense_0")(x))
    assert frozen_modules(elsewhere, X) == {"Dense_0"}


@pytest.mark.parametrize("mask", [fz.rows(slice(0, 3)), fz.elements(jnp.eye(4, dtype=bool))], ids=["rows", "elements"])
def test_element_masks(mask):
    layer = Frozen(nn.Dense(4, use_bias=False), {"kernel": mask})
    model = nn.Sequential([layer, nn.tanh, layer])
    params = model.init(KEY, X)["params"]
    got = frozen_mask(model, X)
    assert repr(got) == repr({"layers_0": {"kernel": mask}})
    expected = jax.grad(lambda p: loss(model, fz.stop_gradient(p, got)))(params)
    assert bits(gradients(model, params)) == bits(expected)
    assert any_grad(expected)


def test_element_masks_that_differ_between_uses_or_from_the_stack_are_refused():
    def run(module, x):
        layer = nn.Dense(4, use_bias=False)
        return Frozen(layer, {"kernel": fz.rows(0)})(Frozen(layer, {"kernel": fz.rows(1)})(x))

    stack = scanned(lambda module, x: Frozen(nn.Dense(4, use_bias=False), {"kernel": fz.rows(0)})(x))
    for model, args in ((Compact(run), (X,)), (stack, (X, None))):
        with pytest.raises(ValueError, match=r"one element mask does not fit all uses[\s\S]*at: .*kernel"):
            frozen_mask(model, *args)


def test_a_lift_must_carry_the_collection():
    def layer(module, x):
        return nn.Dense(4, name="free")(constants(Block(name="fixed"))(x))

    variables = scanned(layer, constants=0).init(KEY, X, None)
    assert variables["constants"]["fixed"]["dense"]["kernel"].shape == (3, 4, 4)
    assert set(variables["params"]) == {"free"}
    with pytest.raises(ValueError, match=r"would come out empty[\s\S]*variable_axes"):
        scanned(layer).init(KEY, X, None)
    with pytest.raises(ValueError, match=r"not in the collection 'constants'[\s\S]*variable_axes"):
        scanned(layer).apply(variables, X, None)
    with pytest.raises(ValueError, match="would come out empty"):
        constants(Block()).init(KEY, X, mutable=["params"])


def test_variables_in_the_wrong_collection_are_refused():
    for spec in (True, "kernel"):
        model = constants(nn.Dense(3), spec)
        variables = model.init(KEY, X)
        with pytest.raises(ValueError, match="not in the collection 'constants'"):
            model.apply({"params": merged(variables)}, X)
        with pytest.raises(ValueError, match=r"not in the collection 'constants'|no leaf"):
            model.apply({"params": variables.get("params", {})}, X)
    with pytest.raises(ValueError, match=r"not in the collection 'params'[\s\S]*at: bias"):
        model.apply({"constants": merged(variables)}, X)


def uses_constants(module, x):
    module.variable("constants", "one", lambda: jnp.ones(()))
    return nn.Dense(3)(x)


UNUSABLE = {
    "the module itself uses the collection": constants(Compact(uses_constants)),
    "the collection would be empty": constants(nn.Dense(3), False),
    "part of a parameter cannot be moved": constants(nn.Dense(3), {"kernel": fz.rows(0), "bias": True}),
    r"a parameter is not in the collection[\s\S]*freeze a module alike": two_wrappers(constants),
}


@pytest.mark.parametrize("says", UNUSABLE)
def test_a_collection_that_cannot_hold_what_is_frozen_is_refused(says):
    with pytest.raises(ValueError, match=says):
        UNUSABLE[says].init(KEY, X)


def test_a_new_parameter_joins_its_collection():
    def model(*names):
        return constants(Compact(lambda module, x: [nn.Dense(4, name=name)(x) for name in names]))

    variables = model("first").init(KEY, X)
    _, grown = model("first", "second").apply(variables, X, mutable=True, rngs={"params": KEY})
    assert set(grown["constants"]) == {"first", "second"}
    assert bits(grown["constants"]["first"]) == bits(variables["constants"]["first"])


@jax.tree_util.register_pytree_node_class
class Box(flax.core.meta.AxisMetadata):
    """A box of a user, whose content has a number as its key."""

    def __init__(self, content):
        self.content = content

    def tree_flatten(self):
        return (self.content,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    def unbox(self):
        return self.content

    def replace_boxed(self, val):
        return Box(val)

    def add_axis(self, index, params):
        return self

    remove_axis = add_axis


def boxed_model():
    """A model with boxes and a layer called "value", and its parameters with and without boxes."""
    boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "x"))
    logically = nn.with_logical_partitioning(nn.initializers.zeros, ("x",))
    layers = lambda m, x: nn.Dense(3, name="value")(nn.Dense(4, True, kernel_init=boxed, bias_init=logically)(x))  # noqa: E731
    params = Compact(layers).init(KEY, X)["params"]
    return Compact(layers), params, nn.meta.unbox(params)


PATHS = ["Dense_0/bias", "Dense_0/kernel", "value/bias", "value/kernel"]


def test_a_box_adds_nothing_to_a_path():
    _, params, _ = boxed_model()
    for spec in ("**/kernel", {"Dense_0": {"kernel": True, "bias": False}, "value": {"kernel": True, "bias": False}}):
        resolved = fz.resolve(params, spec)
        assert jax.tree.structure(resolved) == jax.tree.structure(params)
        assert jax.tree.leaves(resolved) == [False, True, False, True]
    assert [row.path for row in fz.summary(params, True).rows] == PATHS
    nested = {"value": Box({"value": jnp.ones(2), "w": Box(Box(jnp.ones(2)))}), "hole": Box(optax.MaskedNode())}
    assert fz.resolve(nested, "value/w")["value"].content["w"].content.content is True
    assert [row.path for row in fz.summary(nested, "hole").rows if row.shape] == ["value/value", "value/w"]
    assert fz.resolve(Box(jnp.ones(2)), fz.where(lambda path, leaf: path == "")).content is True
    assert jax.tree.leaves(fz.resolve(nnx.state(nnx.Linear(1, 1, rngs=nnx.Rngs(0))), "kernel")) == [False, True]


@pytest.mark.parametrize("kernel", [fz.rows([0]), jnp.eye(4) > 0])
def test_checks_and_files_of_boxed_and_unboxed_parameters_fit_each_other(kernel, tmp_path):
    model, *both = boxed_model()
    frozen = fz.rules({"Dense_0/kernel": kernel, "value/bias": True})
    tx = fz.freeze(optax.adam(0.1), frozen)
    trained, states, _ = fz.train_step(lambda p: loss(model, p), tx)(both[0], tx.init(both[0]))
    for before, after in ((both[0], trained), (both[1], trained), (trained, both[1])):
        fz.assert_frozen(before, after, frozen)
    with pytest.raises(AssertionError, match="at: Dense_0/bias"):
        fz.assert_frozen(both[1], trained, "Dense_0/bias")
    assert (fz.fingerprint(both[1], frozen) == fz.fingerprint(trained, frozen)).all()
    for n, (tree, other) in enumerate([both, both[::-1]]):
        value, state, likewise = (
            jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(of))
            for like, of in ((tree, trained), (tx.init(tree), states), (other, trained))
        )
        checkpoint.save(tmp_path / str(n), value, frozen, step=0, opt_state=state)
        restored = checkpoint.restore(tmp_path / str(n), other, opt_state=tx.init(other))
        chex.assert_trees_all_equal_structs(restored, (other, tx.init(other)))
        assert [x.tobytes() for x in jax.tree.leaves(restored)] == [
            x.tobytes() for x in jax.tree.leaves((value, state))
        ]
        merged, _, report = fz.merge_pretrained(tree, likewise)
        assert list(report.loaded) == PATHS
        assert bits(merged) == bits(value)


def test_a_file_of_orbax_has_the_contents_of_boxes_as_dicts():
    _, params, unboxed = boxed_model()
    read = {"Dense_0": {name: {"value": x} for name, x in unboxed["Dense_0"].items()}, "value": unboxed["value"]}
    assert list(fz.merge_pretrained(params, read)[2].loaded) == PATHS
    with pytest.raises(ValueError, match="at: Dense_0/bias/value: only in"):
        fz.merge_pretrained(unboxed, read)


def test_audit_step_finds_parameters_below_a_box():
    def step(state, x):
        a, b = state["box"].content["layer"].values()
        return {"box": Box({"layer": {"a": a - x, "b": b}})}

    state = {"box": Box({"layer": {"a": jnp.ones(2), "b": jnp.ones(2)}})}
    for params, above in (("box", "layer/"), ("box/layer", "")):
        leaks = fz.audit_step(step, state, jnp.ones(2), params=params, frozen=f"{above}a").leaks
        assert [leak.path for leak in leaks] == [f"{above}a"]


def test_boxed_parameters_keep_their_boxes():
    kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    dense = nn.Dense(4, kernel_init=kernel_init)
    frozen, variables = Frozen(dense, "kernel"), dense.init(KEY, X)
    assert bits(frozen.init(KEY, X)) == bits(variables)
    grads = jax.grad(lambda v: frozen.apply(v, X).sum())(variables)["params"]
    assert not jnp.any(grads["kernel"].value)
    assert jnp.all(grads["bias"])
    mask = frozen_mask(frozen, X)
    assert mask == {"kernel": True, "bias": False}
    assert isinstance(constants(dense, "kernel").init(KEY, X)["constants"]["kernel"], nn.Partitioned)
    in_box = Compact(lambda module, x: x @ module.param("kernel", kernel_init, (4, 4), unbox=False).value)
    boxed = {"params": {"kernel": variables["params"]["kernel"]}}
    assert bits(Frozen(in_box).apply(boxed, X)) == bits(X @ boxed["params"]["kernel"].value)
    assert len(jax.tree.leaves(fz.partition(variables["params"], mask)[0])) == 1


DENSE, NO_PARAMETERS = nn.Dense(3), nn.Dropout(0.5, deterministic=True)
WRONG = {
    "one collection of stats": (lambda: Frozen(DENSE, stats_collections="batch_stats"), "given by their names"),
    "params as stats": (lambda: Frozen(DENSE, stats_collections=("params",)), "cannot be used"),
    "stats as collection": (lambda: Frozen(DENSE, collection="batch_stats"), "cannot be used"),
    "no string": (lambda: Frozen(DENSE, collection=True), "cannot be used"),
    "a context's collection": (lambda: freeze_variables(True, "params").__enter__(), "cannot be used"),
    "a pattern, no parameters": (lambda: Frozen(NO_PARAMETERS, "kernel").init(KEY, X), "kernel"),
    "unbound": (lambda: Frozen(DENSE)(X), "before it belongs to a model"),
}


@pytest.mark.parametrize(("wrong", "says"), WRONG.values(), ids=WRONG)
def test_wrong_inputs(wrong, says):
    """Those in ``wrong_calls.md`` are not repeated here."""
    with pytest.raises(ValueError, match=says):
        wrong()


@pytest.mark.parametrize("build", [in_setup, in_scan, lifted_method], ids=lambda build: build.__name__)
def test_a_context_moves_what_it_names_to_a_collection(build):
    model = build(bare)
    output, expected = model.init_with_output(KEY, X)
    patterns = ["**/bias"]
    with freeze_variables(patterns, collection="constants"):
        got, variables = model.init_with_output(KEY, X)
        assert bits(got) == bits(output)
        chex.assert_trees_all_close(model.apply(variables, X), output, rtol=1e-5)
    assert bits(merged(variables)) == bits(expected["params"])
    assert all(path[-1] == "bias" for path in flatten_dict(variables["constants"]))
    assert not any(path[-1] == "bias" for path in flatten_dict(variables["params"]))


def test_contexts_nest_and_stand_inside_a_module():
    def run(module, x):
        with freeze_variables(True):
            x = nn.Dense(4)(nn.Dense(4)(x))
        return nn.Dense(3)(x)

    model = Compact(run)
    params = model.init(KEY, X)["params"]

    assert {name for name, grad in gradients(model, params).items() if any_grad(grad)} == {"Dense_2"}
    with freeze_variables("Dense_2/bias"), freeze_variables("Dense_2/kernel"):
        assert not any_grad(gradients(model, params))


def test_a_context_ends_with_an_exception():
    params = nn.Dense(3).init(KEY, X)
    with pytest.raises(KeyError), freeze_variables(True):
        raise KeyError
    with pytest.raises(ValueError, match="kernal"), freeze_variables("kernal"):
        nn.Dense(3).apply(params, X)
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(jax.grad(lambda p: nn.Dense(3).apply(p, X).sum())(params)))


def test_a_context_refuses_programs_that_are_compiled_and_setup_that_makes_what_moves():
    jitted = nn.jit(Block)
    variables = jitted().init(KEY, X)
    step = jax.jit(Block().apply)
    step(variables, X)
    with pytest.raises(ValueError, match=r"itself transformed by nn\.jit"), freeze_variables(True):
        jitted().apply(variables, X)
    jitted().apply(variables, X)
    for call in (step, jitted().apply):
        with pytest.raises(ValueError, match="no module was applied"), freeze_variables(True):
            call(variables, X)
    inside = nn.Sequential([jitted()])
    with freeze_variables(True):
        assert not any_grad(gradients(inside, {"layers_0": variables["params"]}))
    match = r"made in `setup`[\s\S]*Frozen\(module, collection"
    with pytest.raises(ValueError, match=match), freeze_variables(True, collection="constants"):
        Table().init(KEY, IDS)
    with freeze_variables("kernel"):  # which must match in each application
        nn.Dense(3).init(KEY, X)
        with pytest.raises(ValueError, match=r"kernel[\s\S]*scale"):
            nn.BatchNorm(use_running_average=True).init(KEY, X)


@pytest.mark.parametrize("rngs", [{}, {"rngs": KEY}, {"rngs": {"params": KEY, "dropout": KEY, "noise": KEY}}])
def test_a_mask_takes_the_arguments_of_a_call(rngs):
    def run(module, x, mode, *, train):
        assert mode == "features"
        return nn.Dense(3)(Frozen(Normed())(Frozen(Noted())(x, train=train), train))

    assert frozen_modules(Compact(run), X, "features", train=True, **rngs) == {"Noted_0", "Normed_0"}


def test_a_mask_is_not_read_off_a_program_that_nn_jit_kept():
    jitted = nn.jit(Layer)(Frozen)
    for model in (jitted, nn.Sequential([jitted])):
        variables = model.init(KEY, X)
        gradients(model, variables["params"])
        for _ in range(2):
            assert {path.split("/")[-2] for path in frozen_paths(frozen_mask(model, X))} == {"dense"}


def test_a_mask_of_a_model_without_a_derivative_when_bare():
    def run(module, x):
        layer = Frozen(nn.Dense(4))
        if not module.is_initializing():
            x = nn.while_loop(lambda m, x: x.sum() > 9, lambda m, x: layer(x), module, x)
        return nn.Dense(3)(layer(x))

    assert frozen_modules(Compact(run), X) == {"Dense_0"}


def test_a_mask_of_a_parameter_that_is_a_tree_itself():
    def run(module, x):
        first, (second, third) = module.param("tree", lambda _: (x[0], [x[0], x[1]]))
        return x * first + second - third

    assert frozen_mask(Frozen(Compact(run)), X) == {"tree": (True, [True, True])}
    assert frozen_mask(Frozen(Compact(run), "tree/1"), X) == {"tree": (False, [True, True])}


def test_an_unused_parameter_is_frozen_with_the_module_that_holds_it():
    def model(wrap):
        def run(module, ids):
            table, own_stop = wrap(Table(name="table")), nn.Dense(4, name="own_stop")
            used = table(ids) if module.is_initializing() else table.scaled(jnp.ones((2, 4)))
            return used.sum() + jax.lax.stop_gradient(own_stop(jnp.ones((2, 4)))).sum()

        return Compact(run)

    mask = frozen_mask(model(Frozen), IDS)
    assert all(jax.tree.leaves(mask.pop("table")))
    assert frozen_paths(mask) == set()
    assert frozen_modules(model(bare), IDS) == set()
    of_method = frozen_mask(Frozen(Table()), X, method="decode")
    assert {path.split("/")[0] for path in frozen_paths(of_method)} == {"table", "layers_0", "layers_1", "stages_last"}


def test_a_mask_sees_through_control_flow_and_custom_derivatives():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (double(x), None), lambda _, g: (2 * g,))

    def run(module, x):
        frozen, free = Frozen(nn.Dense(4, name="frozen")), nn.Dense(4, name="free")
        if module.is_initializing():
            return free(frozen(x))
        x = jax.nn.gelu(double(free(frozen(x))))
        x = nn.cond(x.sum() > 0, lambda m, x: frozen(x), lambda m, x: free(x), module, x)
        return jax.lax.fori_loop(0, 3, lambda _, x: jax.nn.softmax(x), x)

    assert frozen_paths(frozen_mask(Compact(run), X)) == {"frozen/kernel", "frozen/bias"}


@pytest.mark.parametrize("rngs", [None, jax.random.key(1), {"dropout": jax.random.key(1)}], ids=["none", "key", "dict"])
def test_the_mask_needs_no_random_stream_for_parameters(rngs):
    model = nn.Sequential([Frozen(nn.Dense(4)), nn.Dropout(0.5, deterministic=False), nn.Dense(1)])
    assert frozen_paths(frozen_mask(model, X, rngs=rngs)) == {"layers_0/kernel", "layers_0/bias"}


new_ref = getattr(jax, "new_ref", None) or getattr(jax, "array_ref", None)


@pytest.mark.skipif(new_ref is None, reason="this JAX has no mutable references")
@pytest.mark.parametrize("in_a_loop", [False, True])
def test_what_is_written_to_a_reference_is_not_lost(in_a_loop):
    def fun(x, y):
        ref = new_ref(jnp.zeros_like(x))

        def body(carry, _):
            before = ref[...]
            ref[...] = x
            return carry + 1, before

        if in_a_loop:
            return jax.lax.scan(body, y, None, length=2)[::-1]
        jax.jit(lambda ref, x: ref.__setitem__(..., x))(ref, x)
        return jax.jit(lambda ref: ref[...])(ref), jax.jit(lambda y: y * 2)(y)

    jaxpr = jax.make_jaxpr(fun)(jnp.ones(2), jnp.ones(2))
    assert depends_on(jaxpr, [True, False]) == [True, False]
    assert depends_on(jaxpr, [False, True])[1]
