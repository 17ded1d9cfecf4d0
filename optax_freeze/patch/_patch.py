"""What was trained, with the record of its base: :class:`Patch`."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from optax_freeze._errors import counted, printable
from optax_freeze._report.table import size
from optax_freeze._spec.masks import Choice
from optax_freeze._spec.selection import TRAINABLE, RowSelection
from optax_freeze._spec.selector_algebra import Choices, ResolvedSpec, Selector
from optax_freeze._verify.saved_base import LeafRecord
from optax_freeze.patch._layout import VALUES, TrainedLeaf


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Patch:
    """The trained values of a model, and the record of the base that they belong to. It can be printed, and pickled.

    Attributes:
      tensors: the arrays by their names in a file, in NumPy. ``name`` is a leaf that trains as a whole, ``name.values``
        and ``name.rows`` are trained rows and their numbers, ``name.values`` and ``name.indices`` trained elements and
        their numbers in the flattened leaf.
      metadata: the metadata that were given to :func:`save`.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> from optax_freeze import patch
      >>> found = patch.take({"encoder": jnp.ones(1000), "head": jnp.ones(2)}, "encoder")
      >>> print(found)
      1 of 2 leaves, 8 B
      head: float32[2]
      >>> found.nbytes, list(found.tensors)
      (8, ['head'])
    """

    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]
    _leaves: tuple[LeafRecord, ...]
    _names: Mapping[str, str]  # of the leaves that train, by their paths

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors, without the record."""
        return sum(array.nbytes for array in self.tensors.values())

    @property
    def frozen(self) -> Selector:
        """The spec of what was frozen, for parameters with the same leaves; dynamic rows are static in it."""
        choices = self._choices
        return ResolvedSpec(tuple(choices), Choices(choices.values()), "patch")

    @property
    def _choices(self) -> dict[str, Choice]:
        """What the spec says about each leaf of the base, by its path."""
        frozen: dict[str, Choice] = {leaf.path: True for leaf in self._leaves}
        return frozen | {each.leaf.path: each.choice(each.shape) for each in self._own}

    @property
    def _own(self) -> list[TrainedLeaf]:
        names = self._names
        return [TrainedLeaf(leaf, names[leaf.path], self.tensors) for leaf in self._leaves if leaf.path in names]

    def __repr__(self) -> str:
        lines = [f"{len(self._own)} of {counted(len(self._leaves), 'leaf', 'leaves')}, {size(self.nbytes)}"]
        for leaf, name, _ in self._own:
            struct, selection = leaf.struct, leaf.selection
            assert struct is not None
            told = f"{leaf.path or '(the root)'}: {struct.dtype}{list(struct.shape)}"
            if isinstance(selection, RowSelection):
                told += f", {counted(selection.count, 'row', 'rows')} along axis {selection.axis}"
            elif selection is not TRAINABLE:
                told += f", {counted(len(self.tensors[name + VALUES]), 'element', 'elements')}"
            lines.append(told + f", as {name}" * (name != leaf.path.replace("/", ".")))
        return "\n".join(map(printable, lines))
