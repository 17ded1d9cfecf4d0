"""Label functions for ``optax.multi_transform``, and learning rates by depth."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from optax_freeze._errors import described, is_array, refuse_no_mapping, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selector_algebra import Selector, as_selector, first_match, is_selector
from optax_freeze._spec.selectors import distinct
from optax_freeze._spec.tree import PyTree


def labels(frozen: Spec) -> Callable[[PyTree], PyTree]:
    """Returns a label function for ``optax.multi_transform`` (``optax.partition``).

    Optax calls it in every ``update``. Prefer :func:`optax_freeze.freeze`, which resolves the spec once, unless you
    need other labels.

    Args:
      frozen: the spec of the frozen parameters, in any form.

    Returns:
      A function of ``params`` that returns a tree of the same structure with ``"frozen"`` at frozen leaves and at
      ``optax.MaskedNode()``, and ``"trainable"`` at all other leaves, including partially frozen ones.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": np.float32(1), "head": np.float32(1)}
      >>> fz.labels("encoder")(params)
      {'encoder': 'frozen', 'head': 'trainable'}
    """
    return lambda params: make_plan(params, frozen).labels()


def labels_by_path(labels: Mapping[Any, Hashable], *, default: Hashable | None = None) -> Callable[[PyTree], PyTree]:
    """Returns a label function for ``optax.multi_transform`` with your own labels.

    Args:
      labels: a mapping from patterns or selectors to labels; the first that matches a leaf gives its label.
      default: the label of leaves that no pattern matches; if None, such a leaf is an error.

    Returns:
      A function of ``params`` that returns a tree of the same structure with a label at each leaf. It raises
      ``ValueError`` if a pattern matches nothing, if earlier patterns match all its leaves, or if a leaf has no label.
      Frozen leaves need none inside :func:`optax_freeze.freeze`, nor any ``optax.MaskedNode()``.

    Raises:
      TypeError: if ``labels`` is not a mapping, a key is neither a pattern nor a selector, or a label is None, a
        container, a selector or an array.

    Example:
      >>> import optax_freeze as fz
      >>> label_fn = fz.labels_by_path({"**/bias": "no decay", "encoder": "decay"}, default="slow")
      >>> label_fn({"embed": 0.0, "encoder": {"kernel": 0.0, "bias": 0.0}})
      {'embed': 'slow', 'encoder': {'bias': 'no decay', 'kernel': 'decay'}}
    """
    fix = 'for "trainable" and "frozen" alone, use fz.labels(frozen)'
    if not is_selector(labels):
        fix = "optax.partition({label: optimizer}, fz.labels_by_path({pattern: label}))"
    refuse_no_mapping("fz.labels_by_path", labels, "{pattern or selector: label}", at="its first argument", fix=fix)
    selectors = [as_selector(key, "fz.labels_by_path") for key in labels]
    words = list(labels.values())
    for i, word in enumerate([*words, *([] if default is None else [default])]):
        if is_array(word) or not jax.tree_util.all_leaves([word]):
            fix = "use its text in both mappings: {repr(pattern): tx} and fz.labels_by_path({pattern: repr(pattern)})"
            raise type_error(
                "fz.labels_by_path: not a label",
                at="its first argument" if i < len(words) else "default",
                got=described(word),
                expected="a string, or another value that is neither a container nor an array",
                fix=fix if isinstance(word, Selector) else "give a key of the transformations of optax.multi_transform",
            )

    def label_fn(params: PyTree) -> PyTree:
        leaves = _tree.leaves(params)
        first = first_match(selectors, leaves) if leaves else []
        values, treedef = _tree.flatten(params)
        hole = [value if _tree.is_masked_node(value) else default for value in values]
        found = [hole[i] if n is None else words[n] for i, n in enumerate(first)]
        if None in found:
            at = leaves[found.index(None)].path
            got, fix = f"none of the patterns {list(labels)}", "give a default: fz.labels_by_path({...}, default=label)"
            raise value_error("a leaf has no label", at=at, got=got, expected="a label for each leaf", fix=fix)
        return jax.tree.unflatten(treedef, found)

    return label_fn


def layerwise_decay(patterns: Sequence[Any], base: Any, factor: float) -> dict[Any, Any]:
    """Computes learning rates that decrease from the output to the input layers, as in ULMFiT.

    Args:
      patterns: patterns or selectors, from the output to the input layers.
      base: the learning rate of the first pattern, a number or a schedule.
      factor: the ratio of one learning rate to the one before; ULMFiT uses 1 / 2.6.

    Returns:
      ``{pattern: learning rate}``: ``base * factor**i`` for pattern ``i``; schedules if ``base`` is a schedule.

    Raises:
      TypeError, ValueError: if ``patterns`` is not a list of patterns, one is named twice, ``base`` is neither a number
        nor a schedule, or ``factor`` is not a positive number.

    Example:
      >>> import optax, optax_freeze as fz
      >>> layers = ["head", "encoder/layer_1", "encoder/layer_0"]
      >>> rates = fz.layerwise_decay(layers, base=1e-2, factor=0.5)
      >>> rates
      {'head': 0.01, 'encoder/layer_1': 0.005, 'encoder/layer_0': 0.0025}
      >>> transforms = {pattern: optax.adam(rate) for pattern, rate in rates.items()}
      >>> labels = fz.labels_by_path({pattern: pattern for pattern in rates})
      >>> tx = optax.multi_transform(transforms, labels)
    """
    is_number = isinstance(factor, (int, float, np.floating))
    if isinstance(factor, bool) or not is_number or not 0 < factor < float("inf"):
        raise (value_error if is_number else type_error)(
            "`factor` must be a positive number",
            at="factor",
            got=described(factor),
            expected="a positive number, less than 1 for slower input layers",
            fix="factor=1 / 2.6, as in ULMFiT",
        )
    if not _is_rate(base):
        got, expected = described(base), "a number, or a schedule: a function of the count"
        raise type_error("`base` must be a learning rate", at="base", got=got, expected=expected, fix="base=1e-2")

    def scaled(by: float) -> Any:
        return (lambda count: base(count) * by) if callable(base) else base * by

    return {pattern: scaled(factor**i) for i, pattern in enumerate(distinct("fz.layerwise_decay", patterns))}


def _is_rate(base: Any) -> bool:
    """Whether ``base`` is a learning rate: a number, an array without axes, or a schedule."""
    if is_array(base):
        return base.shape == ()
    return callable(base) or (isinstance(base, (int, float)) and not isinstance(base, bool))
