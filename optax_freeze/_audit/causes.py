"""Why freezing leaks in a chain of transformations, and what to do about it: what an audit has to say."""

from typing import NamedTuple


class Cause(NamedTuple):
    """Why something leaks, and what to do about it."""

    name: str
    fix: str


RAW = Cause(
    "the raw gradient is passed on",
    "fz.freeze(tx, frozen): most likely optax.masked was taken for a freeze; where its mask is False, it passes the"
    " gradient on",
)
TRAINS = Cause(
    "it trains",
    "fz.freeze(tx, frozen), around the whole chain: nothing in it freezes this leaf, or its mask is the other way round"
    " (here True means frozen)",
)
DECAY = Cause(
    "weight decay",
    "fz.freeze(optax.chain(..., optax.add_decayed_weights(...)), frozen): decay belongs inside the freeze",
)
PROJECTION = Cause(
    "a projection of the parameters",
    "fz.freeze(optax.chain(tx, optax.keep_params_nonnegative()), frozen): most likely keep_params_nonnegative stands"
    " after the freeze",
)
NOISE = Cause(
    "noise",
    "fz.freeze(optax.chain(tx, optax.add_noise(...)), frozen): most likely add_noise stands after the freeze, or an"
    " optimizer whose moments do not start at zero; neither the gradient nor the parameter changes this update",
)
OWN_VALUE = Cause(
    "its own value moves it",
    "fz.freeze(tx, frozen), around the whole chain: most likely decay before an optimizer that rescales it, both after"
    " the freeze",
)
ROUNDING = Cause(
    "rounding",
    "fz.freeze(optax.contrib.schedule_free(...), frozen): most likely a wrapper with parameters of its own stands"
    " outside the freeze",
)
SIGN = Cause(
    "+0.0 added to -0.0",
    "fz.freeze(tx, frozen), or fz.masked_zero_updates(frozen) last: their zeros are -0.0, which change no number",
)
PRODUCT = Cause(
    "a product with zero: NaN * 0 is NaN",
    "fz.freeze(tx, frozen), or fz.masked_zero_updates(frozen), which select: most likely updates are multiplied by a"
    " mask, or by a learning rate of 0",
)
MOMENTUM = Cause(
    "the state of an optimizer after the freeze",
    "fz.freeze(tx, frozen), or fz.masked_zero_updates(frozen) last: gradients are zeroed only before a stateful"
    " optimizer, whose moments from before the freeze, or from a checkpoint, go on moving it",
)
NORM = Cause(
    "a norm over frozen gradients",
    "fz.freeze(optax.chain(optax.clip_by_global_norm(...), ...), frozen): most likely a clip or a normalization"
    " (clip_by_global_norm, normalize_by_update_norm) stands outside the freeze. Or differentiate only what trains"
    " (fz.value_and_grad), and audit with full_grads=False",
)
STATISTICS = Cause(
    "statistics of the whole leaf",
    "fz.freeze(tx, frozen) by fz.rows or fz.elements(..., compact=True), which gives tx what trains alone: most likely"
    " a trust ratio, factored moments or an orthogonalization, or else a clip outside the freeze",
)
REJECTED = Cause(
    "a frozen NaN rejects the whole step",
    "fz.freeze(optax.apply_if_finite(tx, ...), frozen): most likely a finite check (apply_if_finite, skip_not_finite)"
    " or a line search stands outside the freeze. Or differentiate only what trains (fz.value_and_grad), and audit with"
    " full_grads=False",
)
SPREAD = Cause(
    "a frozen gradient that is not finite spreads",
    "fz.freeze(tx, frozen), around the whole chain: most likely a norm or a finite check stands outside the freeze",
)
OF_PARAMS = Cause(
    "a statistic of frozen parameters",
    "fz.freeze(tx, frozen), around the whole chain: most likely a trust ratio or a distance over all parameters",
)
NOTHING = Cause(
    "nothing trains",
    "fz.freeze(tx, frozen), which takes functions, too: most likely optax.selective_transform was given a function as"
    " freeze_mask (one truthy leaf), labels matched nothing, or a mask is the other way round",
)
DEAF = Cause(
    "its gradient goes nowhere",
    "fz.freeze(tx, frozen) with the spec given here: most likely a mask or a label in the chain freezes more than it",
)
MOMENTS = Cause("state for frozen elements", "fz.freeze(tx, frozen): what is inside never sees a frozen element")
MOMENTS_IN_PART = Cause(
    "state for frozen elements of a leaf",
    "fz.freeze(tx, frozen) by fz.rows or fz.elements(..., compact=True): what is inside sees what trains alone",
)
ACCUMULATED = Cause(
    "accumulated frozen gradients",
    "fz.freeze(optax.MultiSteps(tx, ...), frozen): MultiSteps belongs inside the freeze",
)
FLAT = Cause(
    "one vector for all leaves",
    "fz.freeze(optax.flatten(tx), frozen): optax.flatten belongs inside the freeze",
)
