"""One writer of a directory at a time, of all threads and processes of a machine."""

import contextlib
import os
from collections.abc import Iterator

import filelock

from optax_freeze._errors import value_error

LOCK = ".lock"
"""The name of the lock. It is in the directory itself, so it is the same file for every path that leads there."""


@contextlib.contextmanager
def only_writer(where: str) -> Iterator[None]:
    """Creates a directory and holds its lock, which the system releases if the process ends.

    Directories that were created and are still empty are removed again.
    """
    created, parent = [], where
    while not os.path.lexists(parent):
        created.append(parent)
        parent = os.path.dirname(parent)
    os.makedirs(where, exist_ok=True)
    file = os.path.join(where, LOCK)
    lock = filelock.FileLock(file, blocking=False, thread_local=False)
    try:
        with contextlib.suppress(NotImplementedError):  # a file system without locks
            lock.acquire()
    except filelock.Timeout:
        raise another_writer(where) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # on Windows, where `release` removes the file
            os.unlink(file)
        lock.release()
        with contextlib.suppress(OSError):
            for each in created:
                os.rmdir(each)


def sync(path: str) -> None:
    """Forces a file to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def another_writer(where: str) -> ValueError:
    expected, fix = "one writer", "wait until it is done, or use a separate directory for each process"
    what, got = "another process or thread is writing to this directory", f"the lock {os.path.join(where, LOCK)}"
    return value_error(what, at=where, got=got, expected=expected, fix=fix)
