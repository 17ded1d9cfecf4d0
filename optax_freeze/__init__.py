"""Declare once which parameters are frozen: gradients, the optimizer, reports and checkpoints all respect it."""

from optax_freeze._version import __version__ as __version__

# What is frozen: leaves, and elements of a leaf.
from optax_freeze._spec.tree import Part as Part
from optax_freeze._spec.element_masks import elements as elements
from optax_freeze._spec.element_masks import rows as rows
from optax_freeze._spec.selectors import all_except as all_except
from optax_freeze._spec.selectors import path as path
from optax_freeze._spec.selectors import regex as regex
from optax_freeze._spec.selectors import rules as rules
from optax_freeze._spec.selectors import where as where
from optax_freeze._spec.resolve import FreezeWarning as FreezeWarning
from optax_freeze._spec.resolve import resolve as resolve
from optax_freeze._spec.labels import labels as labels
from optax_freeze._spec.labels import labels_by_path as labels_by_path
from optax_freeze._spec.labels import layerwise_decay as layerwise_decay
from optax_freeze._spec.merge_pretrained import merge_pretrained as merge_pretrained
from optax_freeze._spec.partition import combine as combine
from optax_freeze._spec.partition import partition as partition
from optax_freeze._spec.partition import stop_gradient as stop_gradient

# The loss as a function of the trainable parameters.
from optax_freeze._gradient.grad import grad as grad
from optax_freeze._gradient.grad import restrict as restrict
from optax_freeze._gradient.grad import value_and_grad as value_and_grad
from optax_freeze._gradient.grad import value_and_grad_from_state as value_and_grad_from_state
from optax_freeze._gradient.freeze_loss import freeze_loss as freeze_loss
from optax_freeze._gradient.explain import explain as explain

# Gradient transformations around any Optax optimizer.
from optax_freeze._optimizer.freeze import freeze as freeze
from optax_freeze._optimizer.freeze import masked_zero_updates as masked_zero_updates
from optax_freeze._optimizer.convergence import freeze_converged as freeze_converged
from optax_freeze._optimizer.apply_updates import apply_updates as apply_updates
from optax_freeze._optimizer.update_params import update_params as update_params
from optax_freeze._optimizer.step_conditions import alternate as alternate
from optax_freeze._optimizer.step_conditions import freeze_at as freeze_at
from optax_freeze._optimizer.step_conditions import gradual_unfreeze as gradual_unfreeze
from optax_freeze._optimizer.step_conditions import unfreeze_at as unfreeze_at
from optax_freeze._optimizer.parse_groups import each as each
from optax_freeze._optimizer.freeze_when import freeze_when as freeze_when
from optax_freeze._optimizer.union import union as union

# Reading and changing optimizer states.
from optax_freeze._state.replace_masks import replace_masks as replace_masks
from optax_freeze._state.spec_of import spec_of as spec_of
from optax_freeze._state.state_shardings import state_shardings as state_shardings
from optax_freeze._state.set_frozen import currently_frozen as currently_frozen
from optax_freeze._state.set_frozen import set_frozen as set_frozen
from optax_freeze._state.migrate import migrate as migrate

# A whole training step.
from optax_freeze._train.train_step import train_step as train_step

# Frozen parameters in host memory, or in fewer bits.
from optax_freeze._memory.cast import cast as cast
from optax_freeze._memory.offload import offload as offload

# Reports: what is frozen, how much it saves, and what fits.
from optax_freeze._report.summary import summary as summary
from optax_freeze._report.costs import costs as costs
from optax_freeze._report.summary import print_trainable as print_trainable

# Computing frozen layers once per batch.
from optax_freeze._precompute.precompute import precompute as precompute

# Bitwise checks of frozen parameters.
from optax_freeze._verify.assert_frozen import assert_frozen as assert_frozen
from optax_freeze._verify.fingerprint import fingerprint as fingerprint

# Finding leaks in an optimizer, or in a whole training step.
from optax_freeze._audit.audit import audit as audit
from optax_freeze._audit.audit_step import audit_step as audit_step

# The types of arguments and results.
from optax_freeze import typing as typing

# What another name means.
from optax_freeze._errors import missing_name as __getattr__  # noqa: F401
