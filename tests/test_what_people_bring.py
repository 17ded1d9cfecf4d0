"""Each public function with the parameters in each container that people bring, and with each form of a spec.

In any container a call gives the same leaves as with a plain dict, bit for bit, in trees of that container; or the same
error, which has a fix. A new public function needs an entry in ``FUNCTIONS``, or a reason in ``NO_PARAMETERS``.
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import re
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.core
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_package import OUTER, PUBLIC

import optax_freeze as fz
import optax_freeze.nnx as fnnx
from optax_freeze import checkpoint, features, patch

HEAD = jnp.arange(6.0).reshape(3, 2) / 10 - 0.2
BIAS = jnp.array([0.1, -0.3, 0.2])
WEIGHT = jnp.sin(jnp.arange(12.0)).reshape(4, 3)
LEAVES = HEAD, BIAS, WEIGHT
X = jnp.cos(jnp.arange(8.0)).reshape(2, 4)


class Net(NamedTuple):
    bias: Any
    weight: Any


class Model(NamedTuple):
    head: Any
    net: Net


@flax.struct.dataclass
class Struct:
    head: Any
    net: Any
    name: str = flax.struct.field(pytree_node=False, default="model")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    head: Any
    net: Any
    name: str = dataclasses.field(metadata={"static": True}, default="model")


class Layer(eqx.Module):
    bias: Any
    weight: Any
    activation: Callable[..., Any] = jnp.tanh  # a leaf that is not an array


class Module(eqx.Module):
    head: Any
    net: Layer
    name: str = eqx.field(static=True, default="model")


class Linear(nnx.Module):
    def __init__(self, bias, weight):
        self.bias, self.weight = nnx.Param(bias), nnx.Param(weight)


class Network(nnx.Module):
    def __init__(self, head, net):
        self.head, self.net = nnx.Param(head), net


def dict_of(head, bias, weight):
    return {"head": head, "net": {"bias": bias, "weight": weight}}


def network(head, *net):
    return Network(head, Linear(*net))


def boxed(head, bias, weight):
    box = lambda value, *names: nn.Partitioned(value, names)  # noqa: E731
    return dict_of(box(head, None, "x"), nn.LogicallyPartitioned(bias, ("x",)), box(weight, "x", None))


NAMED = "head", "net/bias", "net/weight"
CONTAINERS = {
    "dict": (dict_of, NAMED),
    "FrozenDict": (lambda *leaves: flax.core.freeze(dict_of(*leaves)), NAMED),
    "boxed Linen": (boxed, NAMED),
    "nnx.State": (lambda *leaves: nnx.state(network(*leaves), nnx.Param), NAMED),
    "pure nnx.State": (lambda *leaves: nnx.as_pure(nnx.state(network(*leaves), nnx.Param)), NAMED),
    "NNX module": (network, NAMED),
    "variable of a dict": (lambda head, *net: nnx.state(Network(head, nnx.Param(Net(*net)._asdict()))), NAMED),
    "Equinox module": (lambda head, *net: Module(head, Layer(*net)), NAMED),
    "Haiku": (
        lambda head, bias, weight: {"net/~/head": {"w": head}, "net/~/linear": {"b": bias, "w": weight}},
        ("net/~/head/w", "net/~/linear/b", "net/~/linear/w"),
    ),
    "flax.struct": (lambda head, *net: Struct(head, Net(*net)), NAMED),
    "registered dataclass": (lambda head, *net: Registered(head, [*net]), ("head", "net/0", "net/1")),
    "list": (lambda *leaves: [*leaves], ("0", "1", "2")),
    "NamedTuple": (lambda head, *net: Model(head, Net(*net)), NAMED),
}
MASK = np.arange(12).reshape(4, 3) % 3 == 0
DYNAMIC = fz.rows(jnp.array([0, 2]))
FORMS = {  # what is frozen of the leaf with a number, or at a path
    "leaf": {1: True, 2: True},
    "rows": {1: True, 2: fz.rows([0, 2])},
    "compact": {1: True, 2: fz.elements(MASK, compact=True)},
    "dense": {2: fz.elements(MASK)},
    "dynamic": {1: True, 2: DYNAMIC},
    "an unknown path": {1: True, "nowhere": True},
    "a row out of range": {2: fz.rows([4])},
    "a mask of another shape": {2: fz.elements(MASK.T)},
}


@dataclasses.dataclass
class Case:
    """Parameters in a container, a way to make others, the paths of the leaves, and what is frozen."""

    make: Callable[..., Any]
    paths: tuple[str, ...]
    frozen: dict[Any, Any]
    directory: Any

    def __post_init__(self):
        self.tree, self.other = self.make(*LEAVES), self.make(*[leaf + 1 for leaf in LEAVES])
        named = {self.paths[key] if isinstance(key, int) else key: choice for key, choice in self.frozen.items()}
        self.spec, self.tx = fz.rules(named), fz.freeze(optax.adamw(0.1), fz.rules(named))
        conditions = {path: True if choice is True else (choice, True) for path, choice in named.items()}
        self.groups = fz.freeze_when(optax.adamw(0.1), {self.paths[0]: fz.unfreeze_at(1), **conditions})

    def like(self, *choices):
        """A tree of choices, in the container; what is not an array is frozen."""
        leaves, structure = jax.tree.flatten(self.tree)
        given = iter(choices)
        return structure.unflatten([next(given) if hasattr(leaf, "dtype") else True for leaf in leaves])

    @property
    def gradient(self):
        return fz.grad(loss, self.spec)(self.tree, X)


def arrays(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]


def loss(tree, x):
    """A loss of parameters in any container."""
    head, bias, weight = arrays(tree)
    return jnp.mean((jnp.tanh(x @ weight + bias) @ head - 1) ** 2)


def loss_of_layers(tree, x):
    """A loss of which a frozen bias leaves something to compute once."""
    head, bias, weight = arrays(tree)
    return jnp.mean((jnp.tanh(x[:, :3] + bias) @ weight[:3] @ head - 1) ** 2)


def trained(case, tx, steps=2, jit=lambda step: step):
    step, params, state, value = jit(fz.train_step(loss, tx)), case.tree, tx.init(case.tree), None
    for _ in range(steps):
        params, state, value = step(params, state, X)
    return params, state, value


def updated(case, tx):
    updates, state = tx.update(case.gradient, tx.init(case.tree), case.tree)
    return updates, state, fz.apply_updates(case.tree, updates)


def searched(case):
    tx = fz.freeze(optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(2, store_grad=True)), case.spec)
    state, of_state = tx.init(case.tree), fz.value_and_grad_from_state(loss, case.spec)
    value, grad = of_state(case.tree, X, state=state)
    args = {"value": value, "grad": grad, "value_fn": lambda tree: loss(tree, X)}
    updates, state = tx.update(grad, state, case.tree, **args)
    return of_state(fz.apply_updates(case.tree, updates), X, state=state)


def precomputed(case):
    once = fz.precompute(loss_of_layers, case.spec)
    kept = once.before(case.tree, X)
    return kept, fz.value_and_grad(once.after, case.spec)(case.tree, kept, X)


def saved(case):
    params, state = fz.update_params(case.tx, case.gradient, case.tx.init(case.tree), case.tree)
    checkpoint.save(case.directory, params, case.spec, step=0, opt_state=state)
    return checkpoint.restore(case.directory, case.tree, opt_state=case.tx.init(case.tree))


def of_patch(found):
    """The tensors, in an order that does not depend on their names."""
    return str(sorted((str(x.dtype), x.shape, x.tobytes()) for x in found.tensors.values()))


def patched(case):
    patch.save(case.directory, case.tree, case.spec)
    return of_patch(patch.load(case.directory))


def written(case):
    once = fz.precompute(loss_of_layers, case.spec, example_axis=0)
    features.write(case.directory, once, case.tree, [X, X + 1], progress=False)
    return tuple(features.read(case.directory, once, case.tree))


def printed(case):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fz.print_trainable(case.tree, case.spec)
    return out.getvalue()


def stepped(state, x):
    """A step that trains everything."""
    return jax.tree.map(lambda leaf: leaf - x if hasattr(leaf, "dtype") else leaf, state)


def of_audit(audit):
    return tuple((leak.kind, leak.path) for leak in audit.leaks)


def fingerprinted(case):
    """Paths are part of a fingerprint."""
    by_path = dict(zip(case.paths, LEAVES, strict=True))
    tree = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else None, case.tree)
    return bool((fz.fingerprint(tree, case.spec) == fz.fingerprint(by_path, case.spec)).all())


def migrated(case):
    new = fz.freeze(optax.adamw(0.1), fz.rules({case.paths[1]: True}))
    return fz.migrate(trained(case, case.tx, steps=1)[1], new, case.tree), fz.migrate(
        new.init(case.tree), case.tx, case.tree
    )


def replaced(case):
    mask = fz.rows(jnp.array([1, 3])) if case.frozen.get(2) is DYNAMIC else fz.elements(~MASK)
    return fz.replace_masks(trained(case, case.tx, steps=1)[1], case.tx, case.tree, {case.paths[2]: mask})


FUNCTIONS: dict[str, Callable[[Case], Any]] = {
    "resolve": lambda case: fz.resolve(case.tree, case.spec),
    "elements": lambda case: fz.resolve(case.tree, case.like(False, True, fz.elements(MASK))),
    "rows": lambda case: fz.resolve(case.tree, case.like(False, True, fz.rows([0]))),
    "where": lambda case: fz.resolve(case.tree, fz.where(lambda path, leaf: path == case.paths[1])),
    "all_except": lambda case: fz.resolve(case.tree, fz.all_except(case.paths[1])),
    "path": lambda case: fz.resolve(case.tree, fz.path(case.paths[1])),
    "regex": lambda case: fz.resolve(case.tree, fz.regex(re.escape(case.paths[1]))),
    "labels": lambda case: fz.labels(case.spec)(case.tree),
    "labels_by_path": lambda case: fz.labels_by_path({case.paths[1]: "a"}, default="b")(case.tree),
    "layerwise_decay": lambda case: fz.labels_by_path(fz.layerwise_decay(case.paths[:2], 1, 0.5), default=2)(case.tree),
    "merge_pretrained": lambda case: fz.merge_pretrained(case.tree, case.other)[0],
    "apply_updates": lambda case: fz.apply_updates(case.tree, case.gradient, case.spec),
    "partition": lambda case: fz.partition(case.tree, case.spec),
    "combine": lambda case: fz.combine(*fz.partition(case.tree, case.spec)),
    "stop_gradient": lambda case: eqx.filter_grad(lambda tree: loss(fz.stop_gradient(tree, case.spec), X))(case.tree),
    "grad": lambda case: case.gradient,
    "value_and_grad": lambda case: fz.value_and_grad(loss, case.spec)(case.tree, X),
    "restrict": lambda case: fz.restrict(loss, (parts := fz.partition(case.tree, case.spec))[1])(parts[0], X),
    "value_and_grad_from_state": searched,
    "freeze_loss": lambda case: eqx.filter_grad(fz.freeze_loss(loss, case.spec))(case.tree, X),
    "explain": lambda case: str(fz.explain(loss, case.tree, case.spec, X)),
    "freeze": lambda case: updated(case, case.tx),
    "masked_zero_updates": lambda case: updated(case, fz.masked_zero_updates(case.spec)),
    "update_params": lambda case: fz.update_params(case.tx, case.gradient, case.tx.init(case.tree), case.tree),
    "train_step": lambda case: trained(case, case.tx, jit=eqx.filter_jit),
    "freeze_when": lambda case: trained(case, case.groups),
    "freeze_converged": lambda case: trained(case, fz.freeze_when(optax.sgd(0.1), fz.freeze_converged(case.paths, 1))),
    "each": lambda case: trained(case, fz.freeze_when(optax.sgd(0.1), {fz.each("**"): fz.unfreeze_at(1)})),
    "replace_masks": replaced,
    "spec_of": lambda case: fz.resolve(case.tree, fz.spec_of(case.tx.init(case.tree))),
    "state_shardings": lambda case: len(jax.tree.leaves(fz.state_shardings(case.tx, case.tree))),
    "set_frozen": lambda case: fz.set_frozen(case.groups.init(case.tree), {case.paths[2]: False}),
    "currently_frozen": lambda case: tuple(fz.currently_frozen(case.groups.init(case.tree)).items()),
    "migrate": migrated,
    "cast": lambda case: fz.cast(case.tree, case.spec, jnp.bfloat16),
    "offload": lambda case: fz.offload(case.tree, case.spec, min_bytes=0),
    "summary": lambda case: tuple(
        tuple(row._replace(trainable_rows=""))
        for row in fz.summary(case.tree, case.spec, optax.adam(0.1)).rows
        if row.shape
    ),
    "print_trainable": printed,
    "precompute": precomputed,
    "assert_frozen": lambda case: fz.assert_frozen(case.tree, trained(case, case.tx, steps=1)[0], case.spec),
    "fingerprint": fingerprinted,
    "audit": lambda case: of_audit(fz.audit(case.tree, case.spec, fz.freeze(optax.adamw(0.1), case.paths[1]), steps=1)),
    "audit_step": lambda case: of_audit(
        fz.audit_step(stepped, [case.tree], X[0, 0], params=lambda state: state[0], frozen=case.spec, steps=1)
    ),
    "union": lambda case: trained(case, fz.union(case.tx, fz.freeze(optax.sgd(0.1), fz.all_except(case.paths[1])))),
    "patch.take": lambda case: of_patch(patch.take(case.tree, case.spec)),
    "patch.save": patched,
    "patch.apply": lambda case: patch.apply(case.tree, patch.take(trained(case, case.tx, steps=1)[0], case.spec)),
    "checkpoint.save": saved,
    "features.write": written,
}


def names(tree):
    return [key[0] for key, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: node is not tree)]


def told(result, case):
    """What can be compared of a result: arrays, texts with the number of a leaf for its path, trees of parameters."""
    is_like = lambda node: type(node) is type(case.tree) and names(node) == names(case.tree)  # noqa: E731
    trees, found = sum(map(is_like, jax.tree.leaves(result, is_leaf=is_like))), []
    for key, leaf in jax.tree_util.tree_leaves_with_path(result):
        if jax.tree_util.keystr(key).endswith(".activation"):
            continue
        if isinstance(leaf, str):
            for n, path in enumerate(case.paths):
                leaf = re.sub(rf"(?m)(?<!\S){re.escape(path)}(?= *:|$)", f"leaf {n}", leaf)
            found.append(leaf)
        elif hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
            found.append((str(leaf.dtype), leaf.shape, leaf.tobytes()))
        elif isinstance(leaf, (bool, int, float)):
            found.append(leaf)
    return trees, found


def outcome(function, container, form):
    make, paths = CONTAINERS[container]
    with tempfile.TemporaryDirectory() as directory:
        case = Case(make, paths, FORMS[form], f"{directory}/new")
        try:
            return told(function(case), case)
        except (ValueError, TypeError, AssertionError) as error:
            if "\n  fix: " not in str(error):
                raise
            return str(error).split("\n")[0]


@functools.cache
def of_dict(name, form):
    return outcome(FUNCTIONS[name], "dict", form)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gives_the_same_leaves_in_every_container(name, container):
    for form in FORMS:
        assert (form, outcome(FUNCTIONS[name], container, form)) == (form, of_dict(name, form))


ON_MODULES = {
    "freeze": lambda case: fnnx.freeze(case.tree, case.spec),
    "thaw": lambda case: fnnx.thaw(case.tree, case.spec),
    "trainable": lambda case: nnx.state(case.tree, fnnx.trainable(case.tree, case.spec)),
    "freeze_loss": lambda case: fnnx.freeze_loss(loss, case.spec)(case.tree, X),
    "Frozen": lambda case: fnnx.Frozen(case.tree, case.spec).module,
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ON_MODULES)
def test_a_function_of_nnx_modules_refuses_others(name, container):
    whole = {"leaf"} if name != "freeze_loss" else {"leaf", "rows", "compact", "dense"}
    for form in FORMS:
        refused = isinstance(outcome(ON_MODULES[name], container, form), str)
        assert (form, refused) == (form, container != "NNX module" or form not in whole)


NO_PARAMETERS = {
    **dict.fromkeys(["Part", "FreezeWarning", "checkpoint.Saving", "nnx.FrozenParam"], "a type"),
    **dict.fromkeys(["freeze_at", "unfreeze_at", "alternate", "gradual_unfreeze"], "conditions by the step"),
    "rules": "the spec of every case",
    **dict.fromkeys(["linen.Frozen", "linen.freeze_variables", "linen.frozen_mask"], "of Linen modules"),
    "checkpoint.latest_step": "of a directory",
    **dict.fromkeys(["costs", "nnx.costs"], "each case would compile a step: tests/report/test_costs.py"),
}


def test_every_public_function_is_tried():
    modules = {outer: importlib.import_module(f"optax_freeze.{outer}") for outer in OUTER}
    outer = {
        f"{name}.{key}"
        for name, module in modules.items()
        for key, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not key.startswith("_")
    }
    tried = {*FUNCTIONS, *(f"nnx.{name}" for name in ON_MODULES), "checkpoint.restore", "features.read", "patch.load"}
    assert tried | NO_PARAMETERS.keys() == {*PUBLIC, *outer}
    assert not tried & NO_PARAMETERS.keys()
