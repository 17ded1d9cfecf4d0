"""The types in the signatures of this library, for annotations of your own: ``fz.typing.Spec``.

They are what pyright and mypy check: ``fz.freeze(tx, 1)`` and a set of patterns are errors in an editor already.
"""

from optax_freeze._spec.masks import ElementMask as ElementMask
from optax_freeze._spec.resolve import Spec as Spec
from optax_freeze._spec.selector_algebra import Selector as Selector
from optax_freeze._spec.tree import PyTree as PyTree
