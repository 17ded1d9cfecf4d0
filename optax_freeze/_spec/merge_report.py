"""What :func:`optax_freeze.merge_pretrained` did with each leaf, to be printed or logged."""

import dataclasses
from typing import Any, NamedTuple

from optax_freeze._errors import counted, printable

TOLD = 8  # at most so many paths are listed


class Grown(NamedTuple):
    """A leaf of which the leading ``rows`` of ``size`` along ``axis`` are pretrained."""

    path: str
    axis: int
    rows: int
    size: int

    def __str__(self) -> str:
        return f"{self.path} (rows 0:{self.rows} of {self.size} along axis {self.axis})"


@dataclasses.dataclass(frozen=True, repr=False)
class MergeReport:
    """What merging did with each leaf; ``print`` shows it, and :meth:`as_dict` is for a log.

    Attributes:
      loaded: the paths of the leaves that are pretrained as a whole.
      grown: the leaves whose leading rows are pretrained: ``path``, ``axis``, ``rows`` and ``size``.
      new: the paths of the leaves of ``params`` that keep their own values.
      ignored: the paths of the leaves of ``pretrained`` that are left out.
    """

    loaded: tuple[str, ...]
    grown: tuple[Grown, ...]
    new: tuple[str, ...]
    ignored: tuple[str, ...]

    def as_dict(self) -> dict[str, list[Any]]:
        """The lists of the report, of strings and dicts, which JSON can store."""
        fields = {field.name: list(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return fields | {"grown": [leaf._asdict() for leaf in self.grown]}

    def __str__(self) -> str:
        lines = [f"loaded: {counted(len(self.loaded), 'leaf', 'leaves')}"]
        for name in ("grown", "new", "ignored"):
            found = getattr(self, name)
            what = f"{counted(len(found), 'leaf', 'leaves')}: {', '.join(told(list(map(str, found))))}"
            lines.append(f"{name}: {what if found else 'nothing'}")
        return "\n".join(lines)

    __repr__ = __str__


def told(texts: list[str]) -> list[str]:
    """At most a few texts."""
    more = [f"and {len(texts) - TOLD} more"] if len(texts) > TOLD else []
    return [*map(printable, texts[:TOLD]), *more]
