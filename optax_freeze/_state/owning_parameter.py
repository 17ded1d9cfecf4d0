"""Finds the parameter that an array of an optimizer state belongs to, by the trees of parameters in the state.

The structure alone does not say it. ``optax.tree_map_params`` needs the optimizer, which is not known of an old state
or of a user's training step; and it fails where ``init`` looks at the parameters (SM3, L-BFGS, Muon, ``optax.masked``,
``optax.flatten``). A plan in a state says which parameters there are, and not where an optimizer keeps theirs.
"""

import collections
import functools
from collections.abc import Callable, Collection, Iterable


def parameter_of(addresses: Iterable[str], params: Collection[str], largest: int = 0) -> Callable[..., str | None]:
    """Returns a function from the address of an array to the path of its parameter, or to None.

    The end of an address may be ambiguous: a parameter may have the name of a field of the state. Of the trees that may
    contain the array, the one with the most parameters decides. Trees with at most half as many parameters as the
    largest tree are ignored, unless the array is known to be that of a parameter (``is_part``). ``largest`` is the
    number of parameters in a tree without addresses here.

    >>> addresses = ["0/count", "0/mu/count", "0/mu/mu/kernel", "0/nu/count", "0/nu/mu/kernel"]
    >>> list(map(parameter_of(addresses, {"count", "mu/kernel"}), addresses))
    [None, 'count', 'mu/kernel', 'count', 'mu/kernel']
    """

    @functools.cache
    def readings(address: str) -> list[tuple[str, str]]:
        found, end = [(address, "")] if "" in params else [], len(address)
        while end >= 0:
            end = address.rfind("/", 0, end)
            if address[end + 1 :] in params:
                found.append((address[: max(end, 0)], address[end + 1 :]))
        return found[::-1]

    sizes = collections.Counter(tree for address in set(addresses) for tree, _ in readings(address))
    largest = max([largest, *sizes.values()])

    def owner(address: str, is_part: bool = False) -> str | None:
        found = [(sizes[tree], path) for tree, path in readings(address) if is_part or 2 * sizes[tree] > largest]
        return max(found, key=lambda reading: reading[0])[1] if found else None

    return owner
