"""Every public optimizer of the installed Optax, found by introspection, so that new ones are included.

An optimizer is a public function of ``optax`` or ``optax.contrib`` that returns a gradient transformation and takes a
learning rate, or an optimizer as its first argument. Building blocks are excluded: functions named ``scale_by_*``,
those that take neither (a clip, noise, decay), and those that pass a transformation on (``chain``, ``masked``).
Arguments are chosen by parameter name, so that most optimizers need no entry.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib


@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer:
    """A factory function of Optax, or of a learning rate, with its arguments and the extra arguments of its update."""

    factory: Callable[..., optax.GradientTransformation]
    arguments: Mapping[str, Any]
    extra_args: tuple[str, ...] = ("value", "grad", "value_fn", "obj_fn")
    per_example: bool = False  # whether gradients have a leading axis of examples

    def make(self) -> optax.GradientTransformationExtraArgs:
        """The transformation."""
        return optax.with_extra_args_support(_quietly(self.factory)(**self.arguments))

    def extra(self, value: Any, grads: Any, loss: Callable[[Any], jax.Array]) -> dict[str, Any]:
        """The extra arguments of an update; ``loss`` is a function of the parameters."""
        every = {"value": value, "grad": grads, "value_fn": loss, "obj_fn": loss}
        return {name: every[name] for name in self.extra_args}

    def inject(self) -> optax.GradientTransformationExtraArgs:
        """The transformation with every hyperparameter that is a float in its state; 0.999 would be 1 in bfloat16."""
        bound = inspect.signature(self.factory).bind(**self.arguments)
        bound.apply_defaults()
        static = [name for name, value in bound.arguments.items() if not isinstance(value, float)]
        return optax.inject_hyperparams(_quietly(self.factory), static, jnp.float32)(**self.arguments)


def found() -> dict[str, Optimizer]:
    """The optimizers of the installed Optax by name, in the order of their names."""
    functions = {
        prefix + name: function
        for prefix, module in (("", optax), ("contrib.", optax.contrib))
        for name, function in vars(module).items()
        if not name.startswith("_") and callable(function) and not inspect.isclass(function)
    }
    first = {function: name for name, function in reversed(functions.items())}  # optax.multi_transform is a second name
    return {
        name: _optimizer(name, function)
        for name, function in sorted(functions.items())
        if first[function] == name and (name in _FACTORIES or _is_optimizer(name, function))
    }


def _is_optimizer(name: str, function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    first, returned = next(iter(signature.parameters), ""), signature.return_annotation
    takes = first.endswith("optimizer") or any(name.endswith("learning_rate") for name in signature.parameters)
    returns = inspect.isclass(returned) and issubclass(returned, (optax.GradientTransformation, signature.empty))
    return takes and returns and not name.split(".")[-1].startswith("scale_by_")


def _optimizer(name: str, function: Callable[..., Any]) -> Optimizer:
    factory = _FACTORIES.get(name, function)
    arguments = {}
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.name in _ARGUMENTS:
            arguments[parameter.name] = _ARGUMENTS[parameter.name]
        elif parameter.default is parameter.empty and parameter.name.endswith(("optimizer", "inner")):
            arguments[parameter.name] = optax.adam(0.1)
    return Optimizer(factory, arguments | _OWN_ARGUMENTS.get(name, {}), **_UPDATES.get(name, {}))


def _quietly(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Suppresses deprecation warnings that Optax causes itself."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings(action="ignore"):
            return factory(*args, **kwargs)

    return make


class _LookaheadState(NamedTuple):
    slow: Any
    inner_state: Any


def _lookahead(learning_rate: float) -> optax.GradientTransformation:
    """``optax.lookahead`` with the slow parameters in its state, so that it takes one tree of parameters."""
    pair_tx = optax.lookahead(optax.adam(learning_rate), sync_period=2, slow_step_size=0.5)

    def init_fn(params: Any) -> _LookaheadState:
        return _LookaheadState(params, pair_tx.init(optax.LookaheadParams.init_synced(params)))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, _LookaheadState]:
        pair: Any
        pair, inner_state = pair_tx.update(updates, state.inner_state, optax.LookaheadParams(params, state.slow))
        return pair.fast, _LookaheadState(optax.apply_updates(state.slow, pair.slow), inner_state)

    return optax.GradientTransformation(init_fn, update_fn)


_FACTORIES: dict[str, Callable[..., optax.GradientTransformation]] = {
    "contrib.reduce_on_plateau": lambda learning_rate: optax.chain(
        optax.adam(learning_rate), optax.contrib.reduce_on_plateau(patience=1, cooldown=1)
    ),
    "contrib.split_real_and_imaginary": lambda learning_rate: optax.contrib.split_real_and_imaginary(
        optax.adam(learning_rate)
    ),
    "flatten": lambda learning_rate: optax.flatten(optax.adam(learning_rate)),
    "lookahead": _lookahead,
}
"""Functions of a learning rate, for optimizers with other arguments than one tree, or that the rule does not find."""

_ARGUMENTS: dict[str, Any] = {
    "learning_rate": 0.1,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "key": 0,
    "mask": True,
    "freeze_mask": False,
    # Small enough for small parameters, and for a few steps.
    "min_dim_size_to_factor": 2,
    "rank": 2,
    "update_proj_gap": 2,
    "update_interval": 2,
}
"""Arguments by parameter name: required ones, and those that have an effect on small parameters."""

_OWN_ARGUMENTS: dict[str, dict[str, Any]] = {
    "contrib.dpsgd": {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0},
    "contrib.sam": {"adv_optimizer": optax.chain(optax.contrib.normalize(), optax.sgd(0.05))},
}

_UPDATES: dict[str, dict[str, Any]] = {
    "contrib.dpsgd": {"per_example": True},
    "contrib.sam": {"extra_args": ()},
    "lbfgs": {"extra_args": ("value", "grad", "value_fn")},
}
