"""The types of arguments and results, for annotations of your own: ``fz.typing.Spec``.

They are what pyright and mypy check: ``fz.freeze(tx, 1)`` and a set of patterns are errors in an editor already.
"""

from optax_freeze._audit.report import Audit as Audit
from optax_freeze._audit.report import Leak as Leak
from optax_freeze._gradient.explanation import Explanation as Explanation
from optax_freeze._optimizer.conditions import GroupStats as GroupStats
from optax_freeze._precompute.given_features import Features as Features
from optax_freeze._precompute.precompute import Precomputed as Precomputed
from optax_freeze._report.costs import Costs as Costs
from optax_freeze._report.costs import SpecCosts as SpecCosts
from optax_freeze._report.summary import Summary as Summary
from optax_freeze._report.table import Row as Row
from optax_freeze._spec.masks import ElementMask as ElementMask
from optax_freeze._spec.merge_report import MergeReport as MergeReport
from optax_freeze._spec.resolve import Spec as Spec
from optax_freeze._spec.selector_algebra import Selector as Selector
from optax_freeze._spec.tree import PyTree as PyTree
from optax_freeze._state.migrate import Migration as Migration
