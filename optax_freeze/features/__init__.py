"""Features on disk, example by example: computed once, and read in any order by every epoch of every run.

:func:`write` computes the features of each batch with ``before`` of :func:`optax_freeze.precompute` and stores them in
files of NumPy. A record next to them identifies the program and the frozen parameters and lists the complete batches,
so that a killed run continues where it stopped.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from optax_freeze._errors import counted, described, is_array, type_error, value_error, whole_number
from optax_freeze._precompute.given_features import Features
from optax_freeze._precompute.precompute import Precomputed
from optax_freeze._spec.tree import PyTree
from optax_freeze._verify.one_writer import only_writer, sync
from optax_freeze._verify.saved_base import absolute
from optax_freeze.features import _record
from optax_freeze.features._arrays import Writer, by_example, held, on_host
from optax_freeze.features._batches import computation
from optax_freeze.features._sequence import FeatureSequence as FeatureSequence

_SECONDS = 1.0
"""How often what was written is forced to the disk."""

_CALLS = "features.write(directory, once, params, batches), features.read(directory)"


def write(
    directory: str | os.PathLike[str],
    once: Precomputed,
    params: PyTree,
    batches: Iterable[Any],
    *others: Any,
    progress: bool = True,
    variants: int = 1,
    **kwargs: Any,
) -> None:
    """Computes the features of every batch and stores them by example.

    If the process stops, call it again with the same arguments. Stored batches are checked and not computed again. A
    loss of power may cost those of the last second.

    Args:
      directory: a separate directory on a local disk, created if necessary. With several processes, each writes the
        features of its own batches into its own directory.
      once: from :func:`optax_freeze.precompute`, with ``example_axis``.
      params: the full parameters. Of trainable ones only the shapes are read.
      batches: the batches, in the same order each time. A batch is the recurring argument, or a tuple of the
        recurring arguments in the order of the function. Batches may differ in size.
      *others: the other arguments of the function, in order, as for the first batch. Only their shapes are read, so
        they may be ``jax.ShapeDtypeStruct``; for a batch of another size, axes with one entry per example change.
      progress: whether to show a progress bar, on stderr.
      variants: if more than 1, how many variants of each example to store, such as crops of an image, or one image with
        several random keys. Each item of ``batches`` is then a list of as many batches: the same examples in the same
        order, in each variant. Reading draws one of them for each example.
      **kwargs: more of the other arguments.

    Raises:
      ValueError: if ``once`` has no ``example_axis``; if the directory contains other files, or features of a different
        base, spec, program, list of batches or number of variants, which are not changed; if examples differ in shape;
        if a batch has no examples, or a size that the other arguments cannot fit; if the variants of a batch are not
        as many as ``variants`` or differ in size; if an array spans processes; if another process or thread is writing
        to the directory; and as ``before`` does.
      TypeError: if ``once`` is not from ``fz.precompute``, ``batches`` is not an iterable of batches, or ``variants``
        is not an int.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax_freeze as fz
      >>> from optax_freeze import features
      >>> loss = lambda params, x: jnp.mean(jnp.tanh(x @ params["encoder"]) @ params["head"])
      >>> params = {"encoder": jnp.ones((4, 8)), "head": jnp.ones((8, 1))}
      >>> once = fz.precompute(loss, "encoder", example_axis=0)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     batches = [jnp.ones((3, 4)), jnp.ones((2, 4))]
      ...     features.write(directory, once, params, batches, progress=False)
      ...     features.read(directory)[[4, 0, 2]][0].shape
      (3, 8)
    """
    where = absolute(directory, _CALLS, local=True)
    _refuse_other_once(once)
    variants = whole_number("variants", variants, least=1, fix="give the number of batches in each item of `batches`")
    if is_array(batches) or isinstance(batches, (str, Mapping)) or not isinstance(batches, Iterable):
        what, expected = "`batches` is not an iterable of batches", "a list of batches, or an iterator"
        fix = "features.write(directory, once, params, [batch])"
        raise type_error(what, at="batches", got=described(batches), expected=expected, fix=fix)
    with only_writer(where):
        leaves = _record.base_of(params, once)
        record = _record.read_record(where, or_none=True, held=held)
        if record:
            _record.refuse_other_variants(record, variants)
            _record.refuse_other_params(record, leaves)
        features_of = computation(once, params, others, kwargs, variants)
        done, count, writing = len(record.batches) if record else 0, 0, None
        with _progress_bar(batches, progress) as show:
            for count, batch in enumerate(batches, 1):
                digest, shapes, compute = features_of(batch, count)
                record = record or _record.begin(where, shapes, leaves, variants)
                _record.refuse_other_features(record, shapes, count)
                if count <= done or record.complete:
                    _record.refuse_other_batch(record, digest, count)
                    show()
                else:
                    writing = writing or _Writing(where, record, show)
                    writing.add(digest, compute)
            if record is None or count < max(done, 1):
                raise value_error(
                    "there are fewer batches than are stored" if done else "there are no batches",
                    at="batches",
                    got=counted(count, "batch", "batches"),
                    expected=f"at least the {done} that are stored" if done else "at least one",
                    fix="give the same batches each time: a list, or a new iterator",
                )
            if not record.complete:
                writing = writing or _Writing(where, record, show)
                writing.finish()


@contextlib.contextmanager
def _progress_bar(batches: Iterable[Any], progress: bool) -> Iterator[Callable[..., None]]:
    """Yields a function to be called after each batch, with the number of its examples if these were computed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = "features", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[rate]}")
    with Progress(*shown, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("", total=getattr(batches, "__len__", lambda: None)(), rate="")

        def show(examples: int = 0) -> None:
            bar.advance(task)
            if examples:
                speed = bar.tasks[task].speed or 0
                bar.update(task, rate=f"{speed:.3g} batches/s, {speed * examples:.3g} examples/s")

        yield show


class _Writing:
    """Writes the features of a batch while those of the next one are computed."""

    def __init__(self, where: str, record: _record.Record, show: Callable[..., None]) -> None:
        self._where, self._record, self._show = where, record, show
        self._writer = Writer(where, record)
        self._waiting: Any = None
        self._synced = time.monotonic()

    def add(self, digest: str, compute: Callable[[], list[Features]]) -> None:
        before, self._waiting = self._waiting, (digest, compute())
        if before:
            self._store(*before)

    def finish(self) -> None:
        """After the last batch."""
        if self._waiting:
            self._store(*self._waiting)
        self._writer.finish()
        _record.complete(self._where, self._record)

    def _store(self, digest: str, features: list[Features]) -> None:
        on_hosts = [[on_host(array, "the features") for array in each] for each in features]
        arrays = [*map(by_example, zip(*on_hosts, strict=True))]
        self._writer.append(arrays)
        _record.add_batch(self._where, self._record, digest, len(arrays[0]))
        if time.monotonic() > self._synced + _SECONDS:
            self._writer.sync()
            sync(os.path.join(self._where, _record.FILE))
            self._synced = time.monotonic()
        self._show(len(features[0][0]))


def read(
    directory: str | os.PathLike[str], once: Precomputed | None = None, params: PyTree = None, *, seed: int = 0
) -> FeatureSequence:
    """Opens the features that :func:`write` stored.

    Args:
      directory: as in :func:`write`.
      once: from :func:`optax_freeze.precompute`; necessary with ``params``.
      params: the full parameters. If the frozen ones differ from those that computed the features, an error is raised.
        If None, they are not compared.
      seed: decides, with :meth:`FeatureSequence.epoch`, which variant of each example is read.

    Returns:
      A :class:`FeatureSequence`.

    Raises:
      FileNotFoundError: if there are no features.
      ValueError: if they are not complete, or damaged, or were written by a newer release; or if their base or spec
        differs, in which case the error lists the leaves; or if ``seed`` is negative.
      TypeError: if ``once`` is not from ``fz.precompute``, or ``seed`` is not an int.

    Example:
      >>> from optax_freeze import features
      >>> features.read("a/new/directory")
      Traceback (most recent call last):
          ...
      FileNotFoundError: there are no features
      ...
    """
    where = absolute(directory, _CALLS, local=True)
    if params is not None and once is None:
        fix = "features.read(directory, once, params)"
        expected = "the result of fz.precompute, which has the spec"
        raise value_error("`params` was given without `once`", at="once", got="None", expected=expected, fix=fix)
    if once is not None:
        _refuse_other_once(once)
    seed = whole_number("seed", seed, fix="seed=0")
    record = _record.read_record(where)
    if not record.complete:
        got = f"{counted(len(record.batches), 'batch', 'batches')}, {record.examples} examples"
        expected = "all batches: features.write was stopped"
        fix = "call features.write again; it continues where it stopped"
        raise value_error("the features are not complete", at=where, got=got, expected=expected, fix=fix)
    if once is not None and params is not None:
        _record.refuse_other_params(record, _record.base_of(params, once))
    found = FeatureSequence(where, record, seed)
    found._opened()
    return found


def _refuse_other_once(once: Any) -> None:
    fix = "once = fz.precompute(loss, frozen, example_axis=0)"
    if not isinstance(once, Precomputed):
        what, expected = "`once` was not made by fz.precompute", "the result of fz.precompute"
        raise type_error(what, at="once", got=described(once), expected=expected, fix=fix)
    if once.example_axis is None:
        raise value_error(
            "features of whole batches cannot be stored example by example",
            at="once",
            got=f"{once!r} with example_axis=None",
            expected="the batch axis of the recurring arguments",
            fix=fix,
        )
