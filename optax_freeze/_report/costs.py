"""Compares specs before a run: the memory and operations of a training step with each, and what fits: :func:`costs`."""

import contextlib
import dataclasses
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from optax_freeze._errors import described, is_int, printable, refuse_no_mapping, type_error, value_error
from optax_freeze._gradient.grad import refuse_no_function
from optax_freeze._memory.offload import offload as move_to_host
from optax_freeze._optimizer.call_init import eval_init
from optax_freeze._optimizer.freeze import freeze
from optax_freeze._optimizer.transformation import as_transformation
from optax_freeze._report import table as _table
from optax_freeze._report.compiled_step import Figures, figures, limit, placed
from optax_freeze._report.state_bytes import nbytes, refuse_freezing
from optax_freeze._report.summary import summary
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.module_parameters import is_module
from optax_freeze._spec.resolve import Spec
from optax_freeze._spec.tree import PyTree
from optax_freeze._state.own_states import OWN
from optax_freeze._state.state_shardings import state_shardings
from optax_freeze._train.train_step import train_step

_CALL = "fz.costs(loss, params, {name: spec}, *batch, tx=tx)"


class SpecCosts(NamedTuple):
    """What training with one spec costs.

    Attributes:
      name: the name of the spec.
      trainable_elements, trainable_bytes: the trainable parameters, as :func:`optax_freeze.summary` counts them.
      state_bytes: the optimizer state.
      memory_bytes: the memory of one device for the whole step: arguments, results and temporaries, without results
        that are written over arguments. Where the compiler refuses the step, the arguments and temporaries that it
        names; None if it gives no figure.
      host_bytes: the host memory for one device.
      flops: the floating-point operations of all devices in one step, with all iterations of loops. A ``cond`` counts
        as its most expensive branch. A ``while_loop`` counts as one iteration, unless it counts up to a number that
        the program limits, as the loops of dynamic rows do; then as the most iterations.
      fits: whether ``memory_bytes`` are at most the memory of the device; None if either is not known, False if the
        compiler refuses the step.
    """

    name: str
    trainable_elements: int
    trainable_bytes: int
    state_bytes: int
    memory_bytes: int | None
    host_bytes: int
    flops: int
    fits: bool | None


@dataclasses.dataclass(frozen=True, repr=False)
class Costs(_table.Report):
    """The result of :func:`optax_freeze.costs`, which can be printed, or shown in a notebook or by rich.

    Attributes:
      rows: one :class:`SpecCosts` for each spec, in the given order.
      memory: the memory of one device in bytes; None if it is not known.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> params = {"encoder": jnp.ones((3, 2)), "head": jnp.ones(2)}
      >>> loss = lambda params, x: jnp.sum(x @ params["encoder"] @ params["head"])
      >>> specs = {"head": "encoder", "all": False}
      >>> found = fz.costs(loss, params, specs, jnp.ones((4, 3)), tx=optax.sgd(0.1))
      >>> [(row.name, row.trainable_elements, row.fits) for row in found.rows]
      [('head', 2, None), ('all', 8, None)]
    """

    rows: tuple[SpecCosts, ...]
    memory: int | None = None

    def _table(self) -> _table.Table:
        header = {"spec": "left", **dict.fromkeys(("trainable", "bytes", "optimizer state", "memory"), "right")}
        with_host = any(row.host_bytes for row in self.rows)
        header |= {"host memory": "right"} if with_host else {}
        cells = []
        for row in self.rows:
            sizes = [row.trainable_bytes, row.state_bytes, row.memory_bytes, *[row.host_bytes] * with_host]
            none = "over" if row.fits is False else "unknown"
            shown = (none if each is None else _table.size(each, 2) for each in sizes)
            fits = {True: "yes", False: "no", None: "unknown"}[row.fits]
            cells.append((printable(row.name), f"{row.trainable_elements:,}", *shown, _table.count(row.flops), fits))
        limited = f"a device has {_table.size(self.memory or 0, 2)}"
        unlimited = "how much a device has is not known: pass memory="
        totals = [f"memory of one device; {unlimited if self.memory is None else limited}", "FLOP of all devices"]
        return _table.Table(cells, totals, {**header, "FLOP": "right", "fits": "left"}, dim="no")


def costs(
    loss: Callable[..., Any],
    params: PyTree,
    specs: Mapping[str, Spec],
    *batch: Any,
    tx: optax.GradientTransformation | optax.MultiSteps,
    memory: float | None = None,
    offload: bool = False,
    has_aux: bool = False,
    extra_args: Sequence[str] = (),
) -> Costs:
    """Compares specs before a run: trainable parameters, memory, operations, and whether each fits the device.

    For each spec, the jitted :func:`optax_freeze.train_step`, which donates parameters and state, is compiled for the
    devices of the parameters. Nothing is allocated, and nothing runs. A large model takes minutes; a progress bar
    shows how far it is. Devices may be those of a topology,
    ``jax.experimental.topologies.get_topology_desc("v5e:2x2", "tpu")``, without a TPU.

    Args:
      loss: the function to differentiate, called as ``loss(params, *batch)``. It returns a scalar, or with ``has_aux``
        a pair of a scalar and anything.
      params: any pytree of arrays or of ``jax.ShapeDtypeStruct``, with any shardings. Arrays without one are
        replicated over the devices of the others.
      specs: from a name to the spec of the frozen parameters, in any form.
      *batch: the other arguments of ``loss``, arrays or shapes.
      tx: the optimizer that you would use without freezing, not wrapped in :func:`optax_freeze.freeze`.
      memory: the memory of one device in bytes; by default what JAX can use of it, if that is known.
      offload: whether frozen stacks are in host memory, as :func:`optax_freeze.offload` puts them there. Compilers for
        CPUs and GPUs count copies of them as memory of the device.
      has_aux: whether ``loss`` returns a pair.
      extra_args: as in :func:`optax_freeze.train_step`.

    Returns:
      A :class:`optax_freeze.typing.Costs` with a row for each spec. ``print`` shows it as plain text, a rich console
      and a notebook as a table.

    Raises:
      ValueError: if a spec does not fit the parameters or freezes everything, ``tx`` already freezes parameters,
        ``params`` is a whole training state, there is no spec, ``memory`` is not positive, or parameters have different
        meshes. A note of an error has the name of the spec.
      TypeError: if an argument is of another type, such as an NNX module as ``params``; for one, use
        :func:`optax_freeze.nnx.costs`. Errors of ``loss`` and ``tx`` are passed on.

    Example:
      >>> import jax, jax.numpy as jnp, optax_freeze as fz
      >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")
      >>> params = {"layers": shape(8, 256, 256), "head": shape(256)}
      >>> def loss(params, x):
      ...     x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
      ...     return jnp.mean(x @ params["head"])
      >>> specs = {"the head": "layers", "everything": False}
      >>> found = fz.costs(loss, params, specs, shape(32, 256), tx=optax.adam(1e-3), memory=5 * 2**20)
      >>> [(row.name, row.state_bytes, row.fits) for row in found.rows]
      [('the head', 2052, True), ('everything', 4196356, False)]
    """
    refuse_no_function(loss, params, _CALL)
    _refuse_no_parameters(params)
    fix = 'fz.costs(loss, params, {"head": fz.all_except("head"), "all": False}, *batch, tx=tx)'
    refuse_no_mapping("fz.costs", specs, "from a name to a spec", at="specs", fix=fix)
    for name in specs or [None]:
        if not isinstance(name, str):
            got = described(name) if specs else "no spec"
            raise value_error("a spec without a name", at="specs", got=got, expected="from a name to a spec", fix=fix)
    memory = _checked(memory)
    as_transformation(tx, _CALL)
    shapes, batch = placed(params, batch)
    inner: Any = eval_init(freeze(tx, False, tied="ignore").init, shapes)  # without leaves that cannot train
    refuse_freezing(inner.inner_state, at="tx", fix="unwrap it: tx=inner for tx=fz.freeze(inner, frozen)")
    memory = limit(shapes) if memory is None else memory
    rows = []
    with progress_bar(len(specs)) as show:
        for name, spec in specs.items():
            show(name)
            try:
                counted, frozen_tx = summary(params, spec), freeze(tx, spec)
                state = eval_init(frozen_tx.init, shapes)
                of_spec = move_to_host(shapes, spec) if offload else shapes
                of_state = jax.tree.map(lambda x, s: x.update(sharding=s), state, state_shardings(frozen_tx, of_spec))
                step = train_step(loss, frozen_tx, has_aux, extra_args=extra_args)
                found = figures(step, of_spec, of_state, batch)
            except Exception as error:
                error.add_note(f"with the spec {name!r}")
                raise
            sizes = counted.trainable_elements, counted.trainable_bytes, nbytes(state)
            fits = _fits(found, memory)
            rows.append(SpecCosts(name, *sizes, found.memory_bytes, found.host_bytes, found.flops, fits))
    return Costs(tuple(rows), memory)


def _fits(found: Figures, memory: int | None) -> bool | None:
    if found.is_refused:
        return False
    return None if found.memory_bytes is None or memory is None else found.memory_bytes <= memory


def _checked(memory: Any) -> int | None:
    if memory is None:
        return None
    fix = "memory=15.75 * 2**30 for 15.75 GiB"
    if not (is_int(memory) or isinstance(memory, float)):
        got, expected = described(memory), "a number of bytes"
        raise type_error("`memory` must be a number of bytes", at="memory", got=got, expected=expected, fix=fix)
    if not 0 < memory < math.inf:
        raise value_error("`memory` must be positive", at="memory", got=memory, expected="a number of bytes", fix=fix)
    return int(memory)


def _refuse_no_parameters(params: PyTree) -> None:
    """Raises for a tree with an NNX module or with an optimizer state, whose arrays would count as parameters."""
    nodes = jax.tree.leaves(params, is_leaf=lambda node: is_module(node) or _is_state(node))
    if found := [node for node in nodes if is_module(node)]:
        raise type_error(
            "an NNX module instead of parameters",
            at="params",
            got=f"a {type(found[0]).__name__}, whose statistics would count as trainable",
            expected="a pytree of parameters",
            fix="optax_freeze.nnx.costs(loss, model, specs, *batch, tx=tx)",
        )
    if any(map(_is_state, nodes)):
        raise value_error(
            "a whole training state as the parameters",
            at="params",
            got="a state of an optimizer in the parameters",
            expected="the parameters alone",
            fix="fz.costs(loss, state.params, specs, *batch, tx=tx)",
        )


def _is_state(node: Any) -> bool:
    """Whether a node is a training state of Flax, or a state of an optimizer: of Optax or of this library."""
    of_flax = getattr(sys.modules.get("flax.training.train_state"), "TrainState", ())
    of_optax = isinstance(node, tuple) and hasattr(node, "_fields") and type(node).__module__.startswith("optax.")
    return isinstance(node, (*OWN, *([of_flax] if of_flax else []))) or (of_optax and not _tree.is_leaf(node))


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to be called before each of ``total`` pieces of work, with its name."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    has_widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None  # without, rich warns
    shown = console.is_terminal or has_widgets
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns, console=console, transient=True, disable=not shown, redirect_stdout=False, redirect_stderr=False
    )
    with bar:
        task, begun = bar.add_task("", total=total), itertools.count()
        yield lambda name: bar.update(task, description=printable(name), completed=next(begun))
