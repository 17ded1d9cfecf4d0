"""Examples of stored features in any order, and which variant of each is read."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from optax_freeze._errors import described, is_int, type_error, whole_number
from optax_freeze._precompute.given_features import Features
from optax_freeze.features._arrays import Reader, as_feature
from optax_freeze.features._record import Record


class FeatureSequence(Sequence[Features]):
    """Features on disk, of one example or of several; from :func:`optax_freeze.features.read`.

    ``features[3]`` is one example, without a batch axis: NumPy arrays, and JAX arrays for random keys. A slice
    or an array of numbers gives these examples along the first axis, in this order. It can be a random-access source
    for data loaders, can be pickled, and can be read from any thread or process.

    Of features written with several ``variants``, one variant of each example is read. :meth:`epoch` draws them anew;
    for the same seed and epoch they are the same in every process, and do not depend on the order of reading.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax_freeze as fz
      >>> from optax_freeze import features
      >>> loss = lambda params, x: jnp.mean(jnp.tanh(x @ params["encoder"]) @ params["head"])
      >>> params = {"encoder": jnp.ones((4, 2)), "head": jnp.ones((2, 1))}
      >>> once = fz.precompute(loss, "encoder", example_axis=0)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     batches = [jnp.zeros((3, 4)), jnp.ones((2, 4))]
      ...     features.write(directory, once, params, batches, progress=False)
      ...     stored = features.read(directory)
      ...     len(stored), stored[0], stored[1:4][0].shape
      (5, Features((array([0., 0.], dtype=float32),)), (3, 2))
    """

    def __init__(self, directory: str, record: Record, seed: int = 0, epoch: int = 0) -> None:
        self._directory, self._record, self._seed, self._epoch = directory, record, seed, epoch
        self._leaves = tuple((leaf.path, leaf.struct) for leaf in record.leaves)
        self._reader: Reader | None = None
        self._draws: np.ndarray | None = None  # of all examples

    def __repr__(self) -> str:
        shapes = ", ".join(f"{struct.dtype}{list(struct.shape)}" for struct in self._record.features)
        of = f", {self.variants} variants each: epoch {self._epoch} of seed {self._seed}" if self.variants > 1 else ""
        return f"FeatureSequence({self._directory!r}, {len(self)} examples of {shapes}{of})"

    def __reduce__(self) -> Any:
        record = dataclasses.replace(self._record, batches=[])
        return FeatureSequence, (self._directory, record, self._seed, self._epoch)

    def __len__(self) -> int:
        return self._record.examples

    @property
    def variants(self) -> int:
        """The number of stored variants of each example."""
        return self._record.variants

    def epoch(self, number: int) -> "FeatureSequence":
        """The same examples, with variants drawn for this epoch; ``features`` itself is epoch 0."""
        number = whole_number("number", number, fix="features.epoch(0)")
        found = FeatureSequence(self._directory, self._record, self._seed, number)
        found._reader = self._reader
        return found

    def drawn(self, index: Any) -> Any:
        """The number of the variant of each example that ``features[index]`` reads: an int or an array."""
        return self._drawn(self._chosen(index))

    def __getitem__(self, index: Any) -> Features:  # type: ignore[override]
        """The features of one example for an int; of several for a slice or ints."""
        chosen = self._chosen(index)
        if self.variants > 1:
            numbers = np.r_[chosen] if isinstance(chosen, slice) else chosen
            chosen = numbers * self.variants + self._drawn(chosen)
        read = self._opened().read(chosen)
        arrays = [as_feature(array, of) for array, of in zip(read, self._record.features, strict=True)]
        return Features(arrays, self._record.cut, self._leaves)

    def _chosen(self, index: Any) -> Any:
        """The numbers of examples: an int, a slice of step 1, or an array."""
        if isinstance(index, slice):
            chosen = range(len(self))[index]
            return slice(chosen.start, max(chosen.start, chosen.stop)) if chosen.step == 1 else np.array(chosen, int)
        chosen = np.asarray(index)
        if not np.issubdtype(chosen.dtype, np.integer):  # of ints that have no common dtype, a float array
            chosen = np.array(index, object)
        if chosen.ndim > 1 or (chosen.dtype == object and not all(map(is_int, chosen.flat))):
            fix = "features[3], features[2:5], features[[4, 0, 2]]; np.flatnonzero(mask) for a mask"
            expected = "an int, a slice, or a list or an array of ints"
            at, got = "features[...]", described(index)
            raise type_error("the index does not select examples", at=at, got=got, expected=expected, fix=fix)
        wrong = chosen[(chosen < -len(self)) | (chosen >= len(self))]
        if wrong.size:
            raise IndexError(f"there is no example {wrong.flat[0]}: {len(self)} are stored")
        chosen = chosen.astype(int)  # few bits would overflow below
        chosen = np.where(chosen < 0, chosen + len(self), chosen)
        return chosen if chosen.ndim else int(chosen)

    def _drawn(self, chosen: Any) -> Any:
        if self._draws is None:
            draws = np.random.Philox([self._seed, self._epoch]).random_raw(len(self)) % self.variants
            self._draws = draws.astype(np.min_scalar_type(self.variants))
        drawn = self._draws[chosen].astype(int)
        return drawn if drawn.ndim else int(drawn)

    def _opened(self) -> Reader:
        if self._reader is None:
            self._reader = Reader(self._directory, self._record)
        return self._reader
