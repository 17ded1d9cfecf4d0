"""Why an optimizer or a step leaks, and what to do about it."""

from typing import NamedTuple

from optax_freeze._audit.report import Kind


class Cause(NamedTuple):
    """The name of a cause, and its fix."""

    name: str
    fix: str


EXPECTED: dict[Kind, str] = {
    "moved": "the same bits after each step, whatever the gradient, the batch, the parameters and the state",
    "changed": "bit for bit the same update, whatever the gradients of frozen elements are",
    "gradient": "no gradient of frozen parameters, or one that nothing reads, which compilers remove",
    "state": "no state for frozen elements",
    "untrained": "an update, or state, that depends on its gradient",
}

_NO_GRADIENT = "fz.value_and_grad(loss, frozen), which computes no gradient of frozen parameters"
_NOT_WRITTEN = "leave frozen leaves out where the step writes to parameters: fz.apply_updates(params, updates, frozen)"

TRAINS = Cause(
    "it trains",
    "fz.freeze(tx, frozen), around the whole chain: nothing freezes this leaf, a mask is inverted (here True means"
    " frozen), a label or a pattern matches something else, a stop_gradient is at another place, or optax.masked was"
    " taken for a freeze: it passes the gradient on where its mask is False",
)
OTHER_SPEC = Cause(
    "the state of fz.freeze has another spec",
    "one spec everywhere; convert a state of an earlier run: fz.migrate(opt_state, fz.freeze(tx, frozen), params)",
)
SET = Cause(
    "a value from the batch, set outside of the optimizer",
    f"{_NOT_WRITTEN}; most likely a router's bias, or statistics among the parameters",
)
BATCH = Cause("a value that depends on the batch", f"fz.freeze(tx, frozen), around the whole chain; or {_NOT_WRITTEN}")
DECAY = Cause(
    "weight decay",
    "fz.freeze(optax.chain(..., optax.add_decayed_weights(...)), frozen): decay belongs inside the freeze; a"
    " stop_gradient, or a gradient of zero, does not stop it",
)
AFTER = Cause(
    "a transformation after the freeze",
    "fz.freeze(optax.chain(tx, ...), frozen): most likely noise (add_noise), a projection (keep_params_nonnegative), an"
    " optimizer after weight decay, or a wrapper with its own copy of the parameters (schedule_free)",
)
OTHER_PART = Cause(
    "another part of the step",
    "fz.freeze(tx, frozen), around the whole chain; most likely noise, a projection, a conversion of the dtype or a"
    " copy of the parameters",
)
ROUNDING = Cause(
    "values are computed again, and rounded",
    f"{_NOT_WRITTEN}; most likely a projection, a conversion of the dtype, or an average with themselves",
)
AVERAGE = Cause(
    "an average that rounds",
    "average only the trainable part: fz.partition(params, frozen)[0]; or average + (1 - decay) * (params - average),"
    " which keeps a value that it equals",
)
COPY = Cause(
    "a copy of frozen values that moves",
    "fz.freeze(tx, frozen), around the whole chain that updates the copy: most likely float32 master weights",
)
LATER = Cause(
    "a later step",
    f"{_NOT_WRITTEN}; most likely a schedule, or code that runs every so many steps, such as a merge or a reset",
)
STATISTICS = Cause(
    "statistics of a frozen module",
    "run the module with use_running_average=True, or in optax_freeze.linen.Frozen or optax_freeze.nnx.Frozen",
)
PRODUCT = Cause(
    "a product with zero: NaN * 0 is NaN",
    "fz.freeze(tx, frozen), or fz.masked_zero_updates(frozen), which select: most likely updates are multiplied by a"
    " mask, or by a learning rate of 0",
)
STATE_AFTER = Cause(
    "the state of an optimizer after the freeze",
    "fz.freeze(tx, frozen), or fz.masked_zero_updates(frozen) last: most likely gradients are zeroed only before a"
    " stateful optimizer, whose moments from earlier training, or from a checkpoint, still move frozen parameters",
)
NORM = Cause(
    "a norm over frozen gradients",
    "fz.freeze(optax.chain(optax.clip_by_global_norm(...), ...), frozen): most likely a clip or a normalization is"
    f" outside the freeze. Or use {_NO_GRADIENT} (audit an optimizer for it with full_grads=False)",
)
FINITE_CHECK = Cause(
    "a finite check over frozen gradients",
    "fz.freeze(optax.apply_if_finite(tx, ...), frozen): most likely a check (apply_if_finite, skip_not_finite), a loss"
    f" scale or a line search is outside the freeze. Or use {_NO_GRADIENT} (audit an optimizer for it with"
    " full_grads=False)",
)
COUPLED = Cause(
    "a sum or a preconditioner over frozen gradients",
    "compute it of the gradients of trainable parameters alone: those of fz.value_and_grad(loss, frozen), or of"
    " fz.restrict and fz.partition; most likely a preconditioner of all parameters, or a sum of their gradients",
)
STATISTIC = Cause(
    "a statistic over frozen elements",
    "fz.freeze(tx, frozen), around the whole chain, by fz.rows or fz.elements(..., compact=True) for a part of a leaf:"
    " most likely a trust ratio, factored moments, or a distance over all parameters",
)
IGNORED = Cause(
    "its gradient is ignored",
    "fz.freeze(tx, frozen) with the spec given here: most likely a mask is inverted, labels match nothing or freeze"
    " more, a stop_gradient stops more than is frozen, or optax.selective_transform was given a function as"
    " freeze_mask, which freezes everything",
)
STATE = Cause(
    "state for frozen elements",
    "fz.freeze(tx, frozen), with MultiSteps and optax.flatten inside, by fz.rows or fz.elements(..., compact=True) for"
    " a part of a leaf: tx then never sees a frozen element. A stop_gradient in the loss does not affect the state",
)


def reading(reader: str) -> Cause:
    fix = f"{_NO_GRADIENT}; or fz.freeze(tx, frozen), around the whole chain"
    return Cause(f"a gradient that is read by {reader}", fix)
