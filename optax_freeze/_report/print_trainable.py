"""How many parameters train, as the one line that Hugging Face PEFT prints."""

from optax_freeze._report.summary import summary
from optax_freeze._spec.resolve import Spec, Tied
from optax_freeze._spec.tree import PyTree


def print_trainable(params: PyTree, frozen: Spec, *, tied: Tied = "error") -> None:
    """Prints how many parameters train, in the format of PEFT's ``print_trainable_parameters``.

    The numbers count elements, as in :func:`optax_freeze.summary`. Integers count as frozen, since they cannot train.

    Args:
      params: any pytree of arrays or of ``jax.ShapeDtypeStruct``.
      frozen: the spec of the frozen parameters, in any form.
      tied: as in :func:`optax_freeze.partition`.

    Returns:
      None. For the numbers themselves use :func:`optax_freeze.summary`.

    Raises:
      TypeError, ValueError: as :func:`optax_freeze.summary` does.

    Example:
      >>> import numpy as np, optax_freeze as fz
      >>> params = {"base": np.ones(4444, np.float32), "adapter": np.ones(1234, np.float32)}
      >>> fz.print_trainable(params, "base")
      trainable params: 1,234 || all params: 5,678 || trainable%: 21.7330
    """
    counted = summary(params, frozen, tied=tied)
    trains, elements = counted.trainable_elements, counted.elements
    percent = 100 * trains / elements if elements else 0.0
    print(f"trainable params: {trains:,} || all params: {elements:,} || trainable%: {percent:.4f}")
