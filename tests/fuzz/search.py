"""What the random tests share: how many were tried, which failures are known, and when shrinking has to end."""

import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from hypothesis.database import InMemoryExampleDatabase, choices_to_bytes
from hypothesis.errors import UnsatisfiedAssumption

SHRINK = 60.0
"""The seconds of work after which a failure is as small as it gets."""


SLOW = 100
"""The seconds of a core after which a program takes too long."""


OF_JAX = "# Without the library"
"""The first line of a program that runs in JAX alone, to compare with."""


class FailureError(AssertionError):
    """A failure with the Python that shows it, to be pasted into a table of cases."""

    def __init__(self, text: str, kind: str, rows: frozenset[str]) -> None:
        super().__init__(text)
        self.kind, self.rows = kind, rows


class Attack(NamedTuple):
    """A random test: its share of the time, and how many examples it tries between two others."""

    name: str
    run: Callable[[Any], None]
    share: float
    examples: int


class Choices(InMemoryExampleDatabase):
    """The choices of a failing program, from which hypothesis begins to make it smaller.

    They are under the key of candidates: hypothesis takes what is under the main one to be as small as it gets.
    """

    def __init__(self, choices: Collection[int]) -> None:
        super().__init__()
        self.text = choices_to_bytes(choices)

    def fetch(self, key: bytes) -> Iterator[bytes]:
        if key.endswith(b".secondary"):
            yield self.text


class Search:
    """One search for failures, by one process."""

    def __init__(self) -> None:
        self.tried, self.known = 0, list[FailureError]()
        self.begin()

    def begin(self) -> None:
        """Begins the search for another failure."""
        self.verdicts: dict[str, FailureError | None] = {}
        self.until = float("inf")

    def judge(self, text: str, check: Callable[[], None], rows: Collection[str] = ()) -> None:
        """Raises a `FailureError` if the check fails, unless it is known. The same text gets the same verdict.

        A failure is known if one of the same kind has been found in a program that has only rows of this one.
        """
        if text not in self.verdicts:
            if time.process_time() > self.until:
                return
            self.tried += 1
            self.verdicts[text] = None
            if signal.getsignal(signal.SIGPROF) != signal.SIG_DFL:
                signal.setitimer(signal.ITIMER_PROF, SLOW)
            try:
                check()
            except UnsatisfiedAssumption:
                raise
            except Exception as error:
                kind = getattr(error, "kind", None)
                found = FailureError("", kind or innermost(error), frozenset(rows if kind else ()))
                if not any(each.kind == found.kind and each.rows <= found.rows for each in self.known):
                    comment = "".join(f"# {line}\n" for line in f"{found.kind}\n{error}".splitlines()[:12])
                    found.args = (comment + text,)
                    self.verdicts[text] = found
                    shrink = 0 if isinstance(error, TimeoutError) else SHRINK  # it would wait for each smaller program
                    self.until = min(self.until, time.process_time() + shrink)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        if (found := self.verdicts[text]) is not None:
            raise found


def innermost(error: Exception) -> str:
    """The type of an error, and the innermost line of this package that it comes from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/optax_freeze/" in f.filename]
    place = f" in {frames[-1].name} of {frames[-1].filename.rpartition('/optax_freeze/')[2]}" if frames else ""
    return f"{type(error).__name__}{place}"


SEARCH = Search()
