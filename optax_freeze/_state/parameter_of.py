"""Which parameter an array of an optimizer state belongs to.

A state has trees like the parameters in it, each in a *slot*: ``0/mu`` is one in the state of Adam, and ``0/mu/kernel``
belongs to ``kernel``. The end of a place alone does not say so, since a parameter may be named as a field of the state
is: where ``mu/kernel`` is a parameter, too, the tree in the slot ``0/mu`` tells.
"""

import collections
from collections.abc import Callable, Collection, Iterable


def parameter_of(places: Iterable[str], params: Collection[str]) -> Callable[[str], str | None]:
    """A function that gives the path of the parameter to which the array at a place belongs, or None.

    Of the slots in which it can stand it takes the one with the most parameters; one with half as many as another slot
    of the state, or less, is none.

    >>> places = ["0/count", "0/mu/count", "0/mu/mu/kernel", "0/nu/count", "0/nu/mu/kernel"]
    >>> list(map(parameter_of(places, {"count", "mu/kernel"}), places))
    [None, 'count', 'mu/kernel', 'count', 'mu/kernel']
    """

    def readings(place: str) -> list[tuple[str, str]]:
        segments = place.split("/")
        cuts = (("/".join(segments[:n]), "/".join(segments[n:])) for n in range(len(segments) + 1))
        return [(slot, path) for slot, path in cuts if path in params]

    held = collections.Counter(slot for place in set(places) for slot, _ in readings(place))
    most = max(held.values(), default=0)

    def of(place: str) -> str | None:
        found = [(held[slot], path) for slot, path in readings(place) if 2 * held[slot] > most]
        return max(found, key=lambda reading: reading[0])[1] if found else None

    return of
