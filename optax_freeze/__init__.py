"""Declare once which parameters are frozen: gradients, the optimizer, reports and checkpoints all respect it."""

# What is frozen: leaves, and elements of a leaf.
from optax_freeze._tree import Part as Part
from optax_freeze._masks import elements as elements
from optax_freeze._masks import rows as rows
from optax_freeze._select import only as only
from optax_freeze._select import path as path
from optax_freeze._select import regex as regex
from optax_freeze._select import rules as rules
from optax_freeze._select import where as where
from optax_freeze._resolve import FreezeWarning as FreezeWarning
from optax_freeze._resolve import resolve as resolve
from optax_freeze._labels import labels as labels
from optax_freeze._labels import labels_by_path as labels_by_path
from optax_freeze._labels import layerwise_decay as layerwise_decay

# The parameters in two parts.
from optax_freeze._partition import apply_updates as apply_updates
from optax_freeze._partition import combine as combine
from optax_freeze._partition import partition as partition
from optax_freeze._partition import stop_gradient as stop_gradient

# The loss as a function of what trains.
from optax_freeze._restrict import grad as grad
from optax_freeze._restrict import restrict as restrict
from optax_freeze._restrict import value_and_grad as value_and_grad
from optax_freeze._restrict import value_and_grad_from_state as value_and_grad_from_state

from optax_freeze._explain import Explanation as Explanation
from optax_freeze._explain import explain as explain

# Any optimizer, on what trains.
from optax_freeze._transform import freeze as freeze
from optax_freeze._transform import masked_zero_updates as masked_zero_updates

# What its state knows.
from optax_freeze._state import replace_masks as replace_masks
from optax_freeze._shardings import state_shardings as state_shardings
from optax_freeze._state import spec_of as spec_of

# Freezing that changes while training.
from optax_freeze._conditions import alternate as alternate
from optax_freeze._conditions import freeze_at as freeze_at
from optax_freeze._conditions import gradual_unfreeze as gradual_unfreeze
from optax_freeze._conditions import unfreeze_at as unfreeze_at
from optax_freeze._schedule import freeze_when as freeze_when
from optax_freeze._switches import currently_frozen as currently_frozen
from optax_freeze._switches import set_frozen as set_frozen

# An optimizer state from one spec to another.
from optax_freeze._migrate import migrate as migrate

# What is frozen, and what that saves.
from optax_freeze._report import Summary as Summary
from optax_freeze._report import summary as summary

# Whether it holds.
from optax_freeze._verify import assert_frozen as assert_frozen
from optax_freeze._verify import fingerprint as fingerprint
from optax_freeze._audit import Audit as Audit
from optax_freeze._audit import audit as audit
