"""Random losses, written as Python: each row of the table `ROWS` writes a line, or a function and its call.

A row reads values that were written before it, picks its parameters by `choose(n)`, an integer below n, and is left out
if JAX refuses what it wrote. So a program shrinks as its choices do, and is printed as the Python that is run.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_freeze._spec.sharding import eval_types

WAYS = (
    *("grad", "restrict", "value_and_grad", "restrict", "train_step", "restrict", "freeze_loss"),
    *("groups", "precompute", "precompute by example", "from the host"),
)
HOW = ("quick", "as users", "quick", "quick", "eager", "quick")
MOST = 20000
"""The most elements of a value."""
SIZES = (4, 6, 1, 3, 2)
INTEGERS = ("int32", "uint32", "int8", "uint8", "int16", "uint16")
LOGS: dict[str, list[float]] = {"io": [], "debug": [], "unordered": []}
"""What callbacks were called with: JAX orders those of one effect among themselves."""
KEYS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}


def total(*values, of=lambda value: value):
    """The sum of all elements, each with a weight of its own."""
    out = jnp.float32(0)
    for value in values:
        value = of(jnp.real(value) - jnp.imag(value) if jnp.iscomplexobj(value) else value)
        weights = np.cos(np.arange(value.size, dtype=np.float32)).reshape(value.shape)
        out += jnp.sum(value.astype(jnp.float32) * weights)
    return out


def curved(*values):
    """A sum with a gradient that depends on the values."""
    return total(*values, of=lambda value: value * jnp.tanh(value))


def like(shape, dtype, value):
    """An array of this shape that depends on the value."""
    return jnp.broadcast_to(jnp.mean(value).astype(dtype), shape)


def log(name, value):
    LOGS[name].append(float(value))


MESHES = {
    "automatic": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}
if jax.__version_info__ < (0, 9):  # explicit axes changed much
    MESHES.clear()


def mesh(kind=None):
    """Two devices; or those over which the parameters of a case are placed, with the axes of this kind."""
    if kind is None:
        return jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    return jax.make_mesh((2, 2), ("d", "m"), axis_types=MESHES[kind])


def on_mesh(kind):
    """The context of a case."""
    return jax.set_mesh(mesh(kind)) if kind else contextlib.nullcontext()


NAMESPACE = {
    **{f.__name__: f for f in (total, curved, like, log, mesh, checkpoint_name, io_callback)},
    "functools": functools,
    "jax": jax,
    "jnp": jnp,
    "np": np,
    "lax": lax,
    "P": P,
}


class NoValueError(Exception):
    """There is no value that a row could read."""


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_complex(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def is_integer(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


class Body:
    """The lines of a function so far, and the values that they may read."""

    def __init__(self, choose: Callable[[int], int], values: dict[str, Any], inputs: dict[str, Any], depth: int = 0):
        self.choose, self.values, self.inputs, self.depth = choose, dict(values), inputs, depth
        self.lines: list[str] = []
        self.unread: list[str] = []
        self.counter = [0]
        self.rows: list[str] = []
        self.table: list[str] = [name for name in (*ROWS, *OFTEN) if name not in OF_MESHES[:2]]
        self.axes: dict[str, bool] = {}
        """The axes of the mesh on which the parameters are, and whether they are explicit."""
        self.follow = 2
        """One operation less often than once in so many reads what was not written last."""

    def one(self, of: Any) -> Any:
        if not of:
            raise NoValueError
        return of[self.choose(len(of))]

    def number(self, low: int, high: int) -> int:
        """Between both, zero first if it is among them."""
        numbers = sorted(range(low, high + 1), key=abs)
        return self.one(numbers)

    def chance(self, of: int) -> bool:
        return self.choose(of) == of - 1

    def pick(self, test: Callable[[Any], bool] = is_float) -> str:
        """A value: often the one that was written last, so that operations follow each other; leaves come often."""
        found = [name for name, aval in self.values.items() if test(aval)]
        last = [name for name in self.unread if test(self.values[name])][-1:]
        leaves = [name for name in found if name[0] == "p"]
        return self.one(last if last and self.choose(self.follow) else [*leaves * 3, *found])

    def spec(self, shape: Sequence[int]) -> str:
        """A placement over explicit axes of the mesh."""
        return said(placement(self.choose, shape, [name for name, is_explicit in self.axes.items() if is_explicit]))

    def array(self, least: int = 1, test: Callable[[Any], bool] = is_float) -> tuple[str, tuple[int, ...]]:
        """A value with axes, and its shape."""
        name = self.pick(lambda x: test(x) and len(x.shape) >= least)
        return name, self.values[name].shape

    def name(self, letter: str = "v") -> str:
        self.counter[0] += 1
        return f"{letter}{self.counter[0]}"

    def types(self, expression: str, lines: Any = ()) -> Any:
        """The types of what an expression returns."""
        text = "\n".join(lines)
        names = [n for n in self.values if re.fullmatch(r"\w+", n) and re.search(rf"\b{n}\b", text + expression)]

        def run(inputs: Any, values: Any) -> Any:
            space = {**NAMESPACE, **inputs, **dict(zip(names, values, strict=True))}
            exec(text, space)
            return eval(expression, space)

        return eval_types(run, self.inputs, [self.values[name] for name in names])

    def write(self, expression: str, lines: Any = ()) -> None:
        """Adds the line that assigns the results of an expression, after the lines of the functions that it calls."""
        types = self.types(expression, lines)
        leaves = jax.tree.leaves(types)
        if not leaves or any(np.prod(leaf.shape) > MOST for leaf in leaves):
            raise NoValueError
        names = [self.name() for _ in leaves]
        flat = type(types) in (tuple, list) and all(hasattr(each, "shape") for each in types)
        found = expression if flat or hasattr(types, "shape") else f"jax.tree.leaves({expression})"
        comma = "," if len(names) == 1 and not hasattr(types, "shape") else ""
        self.lines += [*lines, f"{', '.join(names)}{comma} = {found}"]
        text = "\n".join([*lines, expression])
        self.unread = [name for name in self.unread if not re.search(rf"\b{re.escape(name)}(?!\w)", text)]
        for name, leaf in zip(names, leaves, strict=True):
            self.values[name] = leaf
            if is_float(leaf) or is_complex(leaf):
                self.unread.append(name)

    def inner(self, arguments: dict[str, Any], closed: bool = True) -> "Body":
        """The body of a function of these arguments, which may read everything that is visible here."""
        values = {**self.values, **arguments} if closed else arguments
        body = Body(self.choose, values, self.inputs, self.depth + 1)
        body.counter, body.rows, body.table, body.follow = self.counter, self.rows, self.table, self.follow
        body.axes = self.axes
        body.unread = [name for name, aval in arguments.items() if is_float(aval)]
        body.some_rows(1, 2)
        return body

    def some_rows(self, least: int, most: int) -> None:
        for step in range(most):
            if step < least or self.choose(4):
                self.row()

    def row(self) -> None:
        table = [name for name in self.table if self.depth < 2 or name not in COMPOSED]
        self.apply(self.one(table or OFTEN[:3]))

    def program(self) -> None:
        """Some rows of few kinds, so that they meet, often of those of one theme; more of them without functions."""
        drawn = [self.one(self.table) for _ in range(self.number(1, 3))]
        theme = self.one([(), *THEMES, *([THEME_OF_MESHES] * 2 if self.axes else ())])
        self.table = [*theme * 3, *drawn, *(OF_MESHES if self.axes else ())]
        self.follow = self.one((2, 5))
        self.some_rows(1, 8 if theme and COMPOSED.isdisjoint(self.table) else 4)

    def apply(self, name: str) -> bool:
        """Writes what one row says; not if it finds no value, or if JAX refuses it."""
        kept = self.values.copy(), list(self.lines), list(self.unread), list(self.rows)
        try:
            ROWS[name](self)
        except Exception:  # JAX knows best which of the many combinations it takes
            self.values, self.lines, self.unread, self.rows[:] = *kept[:3], kept[3]
            return False
        self.rows.append(name)
        return True

    def returning(self, aval: Any) -> str:
        """An expression of this type that depends on what was written last."""
        known = lambda x: (x.shape, x.dtype, spec_of(x))  # noqa: E731
        found = [n for n in self.unread if known(self.values[n]) == known(aval)]
        if found:
            return found[-1]
        last = (self.unread or [self.pick()])[-1]
        text = f"like({aval.shape}, jnp.{aval.dtype}, {last})"
        return f"jax.sharding.reshard({text}, {said(spec_of(aval))})" if any(spec_of(aval)) else text

    def function(self, name: str, arguments: str, result: str) -> list[str]:
        """The lines of a function with this body."""
        return [f"def {name}({arguments}):", *(f"    {line}" for line in [*self.lines, f"return {result}"])]

    def results(self) -> str:
        return ", ".join([name for name in self.unread if name[0] != "p"] or [self.pick()])


ROWS: dict[str, Callable[[Body], None]] = {}
OFTEN = (
    *("unary", "unary", "unary", "binary", "reduced", "reduced", "ordered", "reshaped", "repeated", "random", "random"),
    *("decided", "decided", "scanned", "scanned", "checkpointed", "custom_vjp", "empty"),
)
"""The rows that are drawn more often: those that wrong gradients came from."""
THEMES = [
    ("random", "random", "checkpointed", "mapped", "unary"),  # what differs from row to row
    ("decided", "decided", "decided", "sum_of_products", "ordered", "binary"),  # one bit decides
    ("repeated", "reshaped", "unary", "sliced", "dynamic"),  # rows of rows
    ("written", "looked_up", "dynamic", "integers", "binary"),
    ("scanned", "counted_loop", "branches", "checkpointed", "mapped", "custom_jvp", "custom_vjp", "unary"),
]
"""Rows whose operations the same rules have to understand together."""
THEME_OF_MESHES = ("automatic", "automatic", "scanned", "counted_loop", "branches", "product", "unary")
OF_MESHES = ("laid_out", "automatic", "placed")
"""The rows that are drawn more often on a mesh, and nowhere else except the last one."""
COMPOSED: set[str] = set()
"""The rows that write functions."""


def row(function: Callable[[Body], None]) -> Callable[[Body], None]:
    ROWS[function.__name__.strip("_")] = function
    return function


def composed(function: Callable[[Body], None]) -> Callable[[Body], None]:
    COMPOSED.add(function.__name__.strip("_"))
    return row(function)


A, POSITIVE, WITHIN = "{a}", "(0.5 + jnp.abs({a}))", "(0.9 * jnp.tanh({a}))"
UNARY = """
jnp.tanh(A) ; jnp.sin(A) ; lax.cos(A) ; A * 1.3 + 0.2 ; A * A + 0.3 * A ; jax.nn.relu(A) ; jax.nn.silu(A)
jax.nn.gelu(A) ; jnp.abs(A) ; lax.logistic(A) ; jnp.exp(jnp.sin(A)) ; jnp.exp2(WITHIN) ; lax.expm1(WITHIN)
lax.log(POSITIVE) ; lax.log1p(POSITIVE)
A ; lax.sqrt(POSITIVE) ; lax.rsqrt(POSITIVE) ; lax.cbrt(POSITIVE) ; lax.tan(WITHIN) ; lax.acos(WITHIN)
lax.asin(WITHIN) ; lax.atan(A) ; lax.acosh(POSITIVE + 1) ; lax.asinh(A) ; lax.atanh(WITHIN) ; lax.sinh(WITHIN)
lax.cosh(WITHIN) ; lax.erf(A) ; lax.erfc(A) ; lax.erf_inv(WITHIN) ; lax.lgamma(POSITIVE) ; lax.digamma(POSITIVE)
-A ; lax.bessel_i0e(A) ; lax.bessel_i1e(A) ; lax.floor(A) + A ; lax.ceil(A) * A ; lax.round(A) + A ; lax.sign(A) * A
lax.integer_pow(A, 3) ; lax.square(A) ; lax.reduce_precision(A, 8, 5) ; lax.stop_gradient(A) * A ; jnp.copy(A)
checkpoint_name(A, "kept") ; A.astype(jnp.bfloat16) ; A.astype(jnp.float16) ; A.astype(jnp.float32)
jnp.where(lax.is_finite(A), A, 0) ; jnp.clip(A, -0.5, 0.5) ; jax.nn.leaky_relu(A) ; jnp.modf(A)[0] ; jnp.log(A)
lax.polygamma(jnp.ones_like(A), POSITIVE) ; lax.igamma(POSITIVE, jnp.ones_like(A)) ; lax.nextafter(A, jnp.ones_like(A))
lax.clamp(A - 1, A * 2, A + 1) ; lax.betainc(jnp.ones_like(A), jnp.ones_like(A), lax.logistic(A)) ; lax.exp(WITHIN)
"""
BINARY = """
A + B ; A * B ; A - B ; A / (1.5 + jnp.abs(B)) ; jnp.maximum(A, B) ; jnp.minimum(A, B) ; jnp.arctan2(A, B + 2)
jnp.where(A > B, A, B * 2) ; jnp.where(A <= B, A, -B) ; jnp.where((A < B) & (A != 0), A * B, B) ; A * (A == B) + B
jnp.where((A >= B) | (A < 0), A, B) ; jnp.where((A < B) ^ (B > 0), A, B) ; jnp.where(~(A < B), A, B * B)
jnp.nextafter(A, B) + A ; lax.rem(A, 1 + jnp.abs(B)) ; lax.pow(POSITIVE, jnp.tanh(B) + 0 * A)
lax.igamma(POSITIVE, 0.5 + jnp.abs(B) + 0 * A) ; lax.igammac(POSITIVE, 0.5 + jnp.abs(B) + 0 * A)
lax.zeta(lax.stop_gradient(POSITIVE + 1), 0.5 + jnp.abs(B) + 0 * A) ; lax.complex(A, B + 0 * A) ; lax.add(A, 0 * A + B)
"""
SLOW = "igamma|zeta|betainc|polygamma"
OF_INTEGERS = """
A + 1 ; A * 3 ; ~A ; A & 6 ; A | 1 ; A ^ 5 ; A << 1 ; lax.shift_right_logical(A, jnp.ones_like(A)) ; A >> 1
lax.clz(A) ; lax.population_count(A) ; lax.rem(A, jnp.ones_like(A) * 3) ; lax.max(A, jnp.ones_like(A)) ; lax.sign(A)
A // 2 ; jnp.abs(A) ; lax.mulhi(A, A)
"""
OF_COMPLEX = (
    "lax.real(A) ; lax.imag(A) ; lax.conj(A) * A ; jnp.abs(A) ; A * A + 1 ; jnp.exp(lax.imag(A) * 1j) ; jnp.tanh(A)"
)


def alternatives(text: str) -> list[str]:
    text = text.replace("\n", " ; ").replace("POSITIVE", POSITIVE).replace("WITHIN", WITHIN)
    return [re.sub(r"\bB\b", "{b}", re.sub(r"\bA\b", "{a}", e)).strip() for e in text.split(" ; ") if e.strip()]


def spec_of(x: Any) -> P:
    """Along which axes of the mesh a type says that an array is divided."""
    return getattr(jax.typeof(x).sharding, "spec", P())


def said(spec: P) -> str:
    return f"P({', '.join(map(repr, spec))})"


def placement(choose: Callable[[int], int], shape: Sequence[int], names: Sequence[str]) -> P:
    """Any placement of an array: along each axis over none, one or several of these axes of a mesh, each of size 2."""
    left, chosen = list(names), []
    for size in shape:
        fits = [some for some in (*((name,) for name in left), tuple(left)) if size % 2 ** len(some) == 0]
        some = (*[()] * (1 + len(left)), *fits)[choose(1 + len(left) + len(fits))]
        left = [name for name in left if name not in some]
        chosen.append(some if len(some) > 1 else next(iter(some), None))
    return P(*chosen)


def axis_of(b: Body, shape: tuple[int, ...]) -> int:
    return b.one([0, *range(len(shape))])


def at(shape: Any, axis: int, value: Any) -> tuple[Any, ...]:
    return (*shape[:axis], value, *shape[axis + 1 :])


def indices(b: Body, size: int, count: int, integers: Sequence[str] = INTEGERS) -> str:
    """Row numbers of any integer type, some out of range: constants, or values of the program."""
    dtype = b.one(["int32", "uint32"] if b.axes else integers)  # XLA divides no lookup by others over a mesh
    low = -size if dtype[0] == "i" else 0
    if b.chance(3):
        source = b.one(['x["i"]', *(n for n, v in b.values.items() if n[0] == "v" and is_integer(v) and v.ndim == 1)])
        return f"jnp.resize({source}, {count}).astype(jnp.{dtype})"
    numbers = [b.number(low, size) if b.chance(4) else b.number(0, size - 1) for _ in range(count)]
    return f"jnp.array({numbers}, jnp.{dtype})"


def index(b: Body, size: int) -> str:
    """A row number, of a type that has the size: XLA on a CPU reads and writes elsewhere with others."""
    return f"{indices(b, size, 1, [t for t in INTEGERS if jnp.iinfo(t).max >= size])}[0]"


@row
def unary(b: Body) -> None:
    written = b.one(alternatives(UNARY))
    b.write(written.format(a=b.pick(lambda x: is_float(x) and (x.size < 100 or not re.search(SLOW, written)))))


@row
def binary(b: Body) -> None:
    written = b.one(alternatives(BINARY))
    fits = lambda x: is_float(x) and (x.size < 100 or not re.search(SLOW, written))  # noqa: E731
    b.write(written.format(a=b.pick(fits), b=b.pick(fits)))


def product_sum(b: Body, v: str, w: str) -> str:
    """What a compiler rounds once or twice, as it fuses it."""
    kinds = [f"{v} * {v} + 0.3 * {v}", f"{v} * 1.3 + {w} * 0.7", f"{v} * {w} - 0.3 * {v}"]
    return b.one([*kinds, f"jnp.tanh({v} * 0.7 + {w} * {w})"])


@row
def sum_of_products(b: Body) -> None:
    b.write(product_sum(b, b.pick(), b.pick()))


@row
def decided(b: Body) -> None:
    """What the last bit of a sum decides."""
    v, shape = b.array()
    x, axis = product_sum(b, v, v), axis_of(b, shape)
    kinds = [f"jnp.max({x}, axis={axis})", f"jnp.min({x}, axis={axis})"] * 2
    kinds += [f"jnp.sort({x}, axis={axis})", f"lax.top_k({x}, 1)[0]"]
    b.write(b.one(kinds))


@row
def integers(b: Body) -> None:
    if b.choose(2):
        b.write(f"({b.pick()} * 3).astype(jnp.{b.one(INTEGERS)})")
    a = b.one([n for n, v in b.values.items() if is_integer(v)])
    b.write(b.one(alternatives(OF_INTEGERS)).format(a=a))
    if b.choose(2):
        b.write(f"{list(b.values)[-1]}.astype(jnp.float32) * jnp.mean({b.pick()})")


@row
def of_complex(b: Body) -> None:
    b.write(b.one(alternatives(OF_COMPLEX)).format(a=b.pick(is_complex)))


@row
def reduced(b: Body) -> None:
    v, shape = b.array()
    axis = axis_of(b, shape)
    smooth = ["jnp.sum", "jnp.mean", "jnp.prod", "jnp.var", "jax.nn.logsumexp", "jnp.linalg.norm"]
    name = b.one(smooth) if b.choose(2) else b.one(["jnp.max", "jnp.min"])
    b.write(f"{name}({v}, axis={axis}{b.one(['', ', keepdims=True'])})")


@row
def places(b: Body) -> None:
    v, shape = b.array()
    axis = axis_of(b, shape)
    kinds = [
        f"jnp.argmax({v}, axis={axis})",
        f"jnp.argmin({v}, axis={axis})",
        f"lax.reduce_or(({v} * 4).astype(jnp.int32), ({axis},))",
        f"lax.reduce_and(({v} * 4).astype(jnp.int32), ({axis},))",
        f"lax.reduce_xor(({v} * 4).astype(jnp.int32), ({axis},))",
    ]
    b.write(b.one(kinds))


@row
def softmax(b: Body) -> None:
    v, shape = b.array()
    b.write(f"{b.one(['jax.nn.softmax', 'jax.nn.log_softmax', 'jax.nn.standardize'])}({v}, axis={axis_of(b, shape)})")


@row
def product(b: Body) -> None:
    v, left = b.array()
    w, right = b.array(test=lambda x: is_float(x) and set(x.shape) & set(left))
    pairs = [(i, j) for i, m in enumerate(left) for j, n in enumerate(right) if m == n]
    summed = b.one(pairs)
    others = [(i, j) for i, j in pairs if i != summed[0] and j != summed[1]]
    batch = b.one([(), *others])
    dims = f"((({summed[0]},), ({summed[1]},)), {(batch[:1], batch[1:])})"
    b.write(f"lax.dot_general({v}, {w}, {dims}, preferred_element_type=jnp.float32) * 0.4")


@row
def transposed(b: Body) -> None:
    v, shape = b.array(2)
    b.write(f"jnp.moveaxis({v}, {axis_of(b, shape)}, {axis_of(b, shape)})")


@row
def reshaped(b: Body) -> None:
    v, shape = b.array()
    size, new = int(np.prod(shape)), []
    while size > 1 and len(new) < 3:
        factor = b.one([n for n in (size, *SIZES) if size % n == 0])
        new.append(factor)
        size //= factor
    some = (*new, size) if size > 1 else tuple(new)
    b.write(f"{v}.reshape({b.one([some, -1, (-1, shape[-1]), (shape[0], -1)])})")


@row
def extended(b: Body) -> None:
    v, shape = b.array(0)
    kinds = [f"lax.expand_dims({v}, ({b.choose(len(shape) + 1)},))", f"jnp.squeeze({v})"]
    n = b.one(SIZES)
    kinds += [
        f"lax.broadcast_in_dim({v}, {(n, *shape)}, {tuple(range(1, len(shape) + 1))})",
        f"{v} * jnp.ones(({n}, 1))",
    ]
    b.write(b.one(kinds))


@row
def repeated(b: Body) -> None:
    v, shape = b.array()
    kinds = [
        f"jnp.repeat({v}, {b.number(1, 3)}, {axis_of(b, shape)})",
        f"jnp.tile({v}, {tuple(b.one((1, 2)) for _ in shape)})",
        f"jnp.kron({v}, jnp.ones({(2,) * len(shape)}))",
    ]
    b.write(b.one(kinds) + b.one(["", f"[:{b.number(1, 5)}]"]))


@row
def sliced(b: Body) -> None:
    v, shape = b.array()
    start = [b.number(0, n - 1) for n in shape]
    limit = [n - b.number(0, n - 1 - s) for n, s in zip(shape, start, strict=True)]
    before = ":, " * axis_of(b, shape)
    kinds = [f"{v}[{before}{b.one((1, 2, -1))}:]", f"{v}[{before}:{b.one((1, 5, -1))}]"]
    kinds.append(f"lax.slice({v}, {start}, {limit}, {[b.one((1, 2, 3)) for _ in shape]})")
    b.write(b.one(kinds))


@row
def reversed_(b: Body) -> None:
    v, shape = b.array()
    axis = axis_of(b, shape)
    b.write(b.one([f"lax.rev({v}, ({axis},))", f"jnp.roll({v}, {b.number(1, 2)}, {axis})"]))


@row
def padded(b: Body) -> None:
    v, shape = b.array()
    config = [(b.number(-1, 2), b.number(-2, 2), b.one((0, 0, 1, 2))) if b.choose(2) else (0, 0, 0) for _ in shape]
    value = b.one([f"jnp.ones((), {v}.dtype)", f"jnp.mean({v})"])  # JAX cannot differentiate the value alone
    b.write(f"lax.pad({v}, {value}, {config})")


@row
def concatenated(b: Body) -> None:
    v, shape = b.array()
    axis = axis_of(b, shape)
    fits = lambda x: is_float(x) and len(x.shape) == len(shape) and at(x.shape, axis, 0) == at(shape, axis, 0)  # noqa: E731
    others = [b.pick(fits) for _ in range(b.number(1, 2))]
    joined = ", ".join([v, *others])
    empty = f"jnp.zeros({at(shape, axis, 0)})"
    kinds = [
        f"jnp.concatenate([{joined}], axis={axis})",
        f"jnp.split(jnp.concatenate([{joined}], axis={axis}), [{b.choose(shape[axis])}], axis={axis})[1]",
        f"jnp.concatenate([{empty}, {joined}], axis={axis})",
        f"jnp.concatenate([{v}, {empty}, {v}], axis={axis})",
        f"jnp.stack([{v}, {v} * 2], axis={axis})",
    ]
    b.write(b.one(kinds))


@row
def split(b: Body) -> None:
    v, shape = b.array()
    axis = axis_of(b, shape)
    edge = b.number(0, shape[axis] - 1)
    kinds = [f"lax.split({v}, [{edge}, {shape[axis] - edge}], axis={axis})[1]", f"jnp.unstack({v}, axis={axis})[0]"]
    if shape[axis] > 1:
        kinds.append(f"jnp.split({v}, [1], axis={axis})")
    b.write(b.one(kinds))


@row
def counted(b: Body) -> None:
    v, shape = b.array()
    b.write(f"{v} * lax.broadcasted_iota(jnp.float32, {shape}, {axis_of(b, shape)})")


@row
def cumulative(b: Body) -> None:
    v, shape = b.array()
    name = b.one(["cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod"])
    b.write(f"lax.{name}({v}, axis={axis_of(b, shape)}, reverse={b.chance(2)})")


@row
def ordered(b: Body) -> None:
    v, shape = b.array()
    axis, n = axis_of(b, shape), shape[-1]
    other = b.pick(lambda x: x.shape == shape and is_float(x))
    kinds = [
        f"jnp.sort({v}, axis={axis})",
        f"lax.sort(({v}, {other}), dimension={axis}, num_keys=1)[1]",
        f"lax.top_k({v}, {min(2, n)})[0]",
        f"jnp.median({v}, axis={axis})",
        f"jnp.take_along_axis({v}, jnp.argsort({other}, axis={axis}), axis={axis})",
    ]
    b.write(b.one(kinds))


@row
def windows(b: Body) -> None:
    v, shape = b.array()
    sizes = [b.one((1, min(2, n))) for n in shape]
    strides, dilations = ([b.one((1, 1, 2)) for _ in shape] for _ in "ab")
    kind, start = b.one([("lax.max", "-np.inf"), ("lax.add", "0.0"), ("lax.min", "np.inf"), ("lax.mul", "1.0")])
    text = (
        f"lax.reduce_window({v}, np.array({start}, {v}.dtype), {kind}, {sizes}, {strides}, '{b.one(['SAME', 'VALID'])}'"
    )
    b.write(f"{text}, None, {dilations})" if b.chance(3) else f"{text})")


@row
def convolved(b: Body) -> None:
    v, shape = b.array(test=lambda x: x.dtype == jnp.float32 and len(x.shape) == 3)
    kernel = b.pick(lambda x: x.dtype == jnp.float32 and len(x.shape) == 3 and x.shape[1] == shape[2])
    padding = b.one(["'SAME'", "'VALID'", f"[({b.number(-1, 2)}, {b.number(-1, 2)})]"])
    dilated = b.one((1, 2)) if padding[0] == "[" else 1
    how = f"({b.one((1, 2))},), {padding}, ({dilated},), ({b.one((1, 2))},)"
    b.write(f"lax.conv_general_dilated({v}, {kernel}, {how}, ('NWC', 'WIO', 'NWC')) * 0.3")


@row
def matrices(b: Body) -> None:
    v, shape = b.array(2, test=lambda x: x.dtype == jnp.float32)
    gram = f"(jnp.einsum('...ij,...kj->...ik', {v}, {v}) + 2 * jnp.eye({shape[-2]}))"
    kinds = [
        f"jnp.linalg.cholesky({gram})",
        f"jnp.linalg.solve({gram}, {v})",
        f"jnp.linalg.qr({gram})[1]",
        f"jnp.linalg.eigh({gram})[0]",
        f"jnp.linalg.svd({gram}, compute_uv=False)",
        f"lax.linalg.triangular_solve({gram}, {v}, left_side=True, lower=True)",
        f"lax.linalg.tridiagonal_solve({v}[..., 0], {v}[..., 0] + 3, {v}[..., 0], {v})",
        f"lax.linalg.householder_product({gram}, {gram}[..., 0])",
        f"lax.linalg.qr({gram}, use_magma=None)[0]",
    ]
    b.write(b.one(kinds))


@row
def fourier(b: Body) -> None:
    v, shape = b.array(test=lambda x: x.dtype == jnp.float32)
    b.write(f"jnp.fft.{b.one(['rfft', 'fft'])}({v}, axis={axis_of(b, shape)})")


@row
def bits(b: Body) -> None:
    v = b.pick(lambda x: x.dtype == jnp.float32)
    b.write(f"lax.bitcast_convert_type({v}, jnp.{b.one(['uint8', 'int32', 'uint16'])}).astype(jnp.float32) * 1e-9")


@row
def ragged(b: Body) -> None:
    v, left = b.array(test=lambda x: x.dtype == jnp.float32 and len(x.shape) == 2)
    w, right = b.array(test=lambda x: x.dtype == jnp.float32 and len(x.shape) == 3 and x.shape[1] == left[1])
    cuts = sorted(b.number(0, left[0]) for _ in range(right[0] - 1))
    sizes = np.diff([0, *cuts, left[0]]).tolist()
    b.write(f"lax.ragged_dot({v}, {w}, {b.one(['jnp', 'np'])}.array({sizes}, '{b.one(['int32', 'uint8'])}')) * 0.4")


@row
def looked_up(b: Body) -> None:
    v, shape = b.array()
    axis = axis_of(b, shape)
    i = indices(b, shape[axis], b.number(1, 4))
    mode = b.one(["clip", "fill", "wrap", "promise_in_bounds"])
    row = f"lax.dynamic_slice_in_dim({v}, i, {b.number(1, shape[axis])}, {axis})"
    kinds = [
        f"jnp.take({v}, {i}, axis={axis}, mode='{mode}'" + (", fill_value=0.5)" if mode == "fill" else ")"),
        f"{v}[{':, ' * axis}{i}]",
        f"jax.vmap(lambda i: {row})({i})",
        f"jax.vmap(lambda r, i: r[i])({v}, {indices(b, shape[-1], shape[0])})",
        f"jax.vmap(lambda r, i: jnp.take(r, i, axis=0))({v}, jnp.stack([{indices(b, shape[-1], 2)}] * {shape[0]}))",
        f"jax.vmap(lambda r, i: lax.dynamic_slice_in_dim(r, i, 1), {axis}, 0)({v}, {indices(b, 2, shape[axis])})",
        f"jax.nn.one_hot({i}, {shape[0]}) @ {v}",
    ]
    b.write(b.one(kinds))


@row
def written(b: Body) -> None:
    v, shape = b.array()
    axis, count = axis_of(b, shape), b.number(1, 3)
    i, before = indices(b, shape[axis], count), ":, " * axis
    target = at(shape, axis, count)
    fits = lambda x: is_float(x) and x.ndim <= len(shape) and x.shape == target[len(shape) - x.ndim :]  # noqa: E731
    kind = b.one(["add", "set", "multiply", "max", "min", "subtract"])
    u = b.one([*(n for n, x in b.values.items() if fits(x)), "0.7"])
    mode = b.one(["drop", "clip", "wrap"])
    block = b.number(1, shape[axis])
    update = f"lax.dynamic_update_slice_in_dim({v}, r, i, {axis})"
    rows = f"jnp.ones({(count, *at(shape, axis, block))}) * jnp.mean({b.pick()})"
    kinds = [
        *[f"{v}.at[{before}{i}].{kind}({u}, mode='{mode}')"] * 2,
        f"jax.ops.segment_sum({v}, {indices(b, 3, shape[0])}, num_segments=3)",
        f"jax.vmap(lambda i, r: {update})({i}, {rows})",
        f"jax.vmap(lambda r, i: r.at[i].{kind}(0.3))({v}, {indices(b, shape[-1], shape[0])})",
        f"jax.vmap(lambda r, i: lax.dynamic_update_slice_in_dim(r, r[:1] * 2, i, 0), {axis}, 0)"
        f"({v}, {indices(b, 3, shape[axis])})",
        f"{v}.at[{before}{i[:-1]}[:2].sort()) % 3].{kind}({u})",
    ]
    b.write(b.one(kinds))


@row
def dynamic(b: Body) -> None:
    v, shape = b.array()
    axis = axis_of(b, shape)
    sizes = tuple(b.number(1, n) if i == axis else n for i, n in enumerate(shape))
    at_one = index(b, shape[axis])
    starts = at([f"jnp.zeros_like({at_one})"] * len(shape), axis, at_one)
    part = f"lax.dynamic_slice({v}, ({', '.join(starts)},), {sizes})"
    fits = [n for n, x in b.values.items() if is_float(x) and x.shape == sizes]
    update = b.one([*fits, f"{part} * 2"])
    kinds = [
        f"lax.dynamic_slice_in_dim({v}, {at_one}, {sizes[axis]}, {axis})",
        f"lax.dynamic_update_slice_in_dim({v}, ({update}).astype({v}.dtype), {at_one}, {axis})",
        f"lax.dynamic_index_in_dim({v}, {at_one}, {axis}, keepdims=False)",
        part,
    ]
    b.write(b.one(kinds))


@row
def barrier(b: Body) -> None:
    b.write(f"lax.optimization_barrier(({b.pick()}, {b.pick()}))")


@row
def random(b: Body) -> None:
    """Noise of keys of each implementation, also of several keys at once."""
    impl = b.one(list(KEYS))
    v, shape = b.array()
    n, words = shape[0], KEYS[impl]
    of_row = b.one(["jax.random.uniform(k, {s})", "jax.random.normal(k, {s})", "jax.random.bernoulli(k, 0.5, {s})"])
    keys = b.one([
        f"jax.random.split(jax.random.key({b.choose(3)}, impl='{impl}'), {n})",
        f"jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1, impl='{impl}'), jnp.arange({n}))",
        f"jax.random.wrap_key_data(jnp.resize(x['k'], ({n}, {words})), impl='{impl}')",
        f"jax.vmap(jax.random.split)(jax.random.split(jax.random.key(2, impl='{impl}'), {n}))[:, 1]",
    ])  # fmt: skip
    one = f"{v} * {of_row.format(s=shape).replace('(k', f'({keys}[0]')}"
    several = f"jax.vmap(lambda r, k: r * {of_row.format(s=shape[1:])})({v}, {keys})"
    apart = f"jax.checkpoint(jax.vmap(lambda r, k: jnp.sin(r * {of_row.format(s=shape[1:])})))({v}, {keys})"
    data = f"{v} * jax.random.key_data({keys}).sum().astype(jnp.float32) * 1e-9"
    b.write(b.one([several, apart, one, several, apart, data]))


@row
def called_back(b: Body) -> None:
    """A callback, in order or not; its value is compared, too."""
    v = b.pick()
    ordered = b.chance(2)
    debug, io = (f"functools.partial(log, '{name if ordered else 'unordered'}')" for name in ("debug", "io"))
    kinds = [f"jax.debug.callback({debug}, jnp.sum({v}), ordered={ordered})"]
    kinds.append(f"io_callback({io}, None, lax.stop_gradient(jnp.sum({v})), ordered={ordered})")
    if b.depth:
        raise NoValueError
    b.lines.append(b.one(kinds))


@row
def on_devices(b: Body) -> None:
    """Each of two devices has a part of the rows of one value, and another value as a whole."""
    if b.depth or b.axes:
        raise NoValueError
    v, shape = b.array(test=lambda x: x.dtype == jnp.float32 and x.shape and x.shape[0] % 2 == 0)
    w, whole = b.array(test=lambda x: x.dtype == jnp.float32)
    r, s = b.name("r"), b.name("s")
    part = jax.ShapeDtypeStruct((shape[0] // 2, *shape[1:]), jnp.float32)
    body = b.inner({r: part, s: jax.ShapeDtypeStruct(whole, jnp.float32)}, closed=False)
    last = body.one(body.unread)
    axis = body.choose(len(body.values[last].shape) or 1)
    kinds = [
        f"lax.psum({last}, 'd')",
        f"lax.pmean({last}, 'd')",
        f"lax.psum(lax.all_gather({last}, 'd', axis={axis}, tiled={body.chance(2)}), 'd')",
        f"lax.psum(lax.pmax(lax.stop_gradient({last}), 'd') * {last} + lax.pmin(lax.stop_gradient({last}), 'd'), 'd')",
        f"lax.psum(lax.psum_scatter({last}, 'd', scatter_dimension={axis}, tiled=True), 'd')",
        f"lax.psum({last} * lax.axis_index('d'), 'd')",
    ]
    name = b.name("f")
    lines = body.function(name, f"{r}, {s}", body.one(kinds))
    checks = "" if body.choose(2) else ", check_vma=False"
    b.write(f"jax.shard_map({name}, mesh=mesh(), in_specs=(P('d'), P()), out_specs=P(){checks})({v}, {w})", lines)


@row
def placed(b: Body) -> None:
    """On two devices; or on the mesh of the case, over some of its axes."""
    v, shape = b.array()
    if not b.axes:
        where = b.one(["P()", *(f"P({'None, ' * i}'d')" for i, n in enumerate(shape) if n % 2 == 0)])
        b.write(f"lax.with_sharding_constraint({v}, jax.NamedSharding(mesh(), {where}))")
    elif any(b.axes.values()) and b.choose(3):
        b.write(f"jax.sharding.reshard({v}, {b.spec(shape)})")
    else:
        automatic = [name for name, is_explicit in b.axes.items() if not is_explicit]
        b.write(f"lax.with_sharding_constraint({v}, {said(placement(b.choose, shape, automatic))})")


@row
def laid_out(b: Body) -> None:
    """Operations whose result is laid out as they say, on a mesh with explicit axes."""
    v, shape = b.array()
    axis, w = axis_of(b, shape), b.pick(lambda x: is_float(x) and x.shape and x.shape[0] == shape[-1])
    i, right = indices(b, shape[axis], 4, ("int32",)), b.values[w].shape
    looked_up, product = at(shape, axis, 4), (*shape[:-1], *right[1:])
    b.write(
        b.one([
            f"{v}.at[{':, ' * axis}{i}].get(out_sharding={b.spec(looked_up)})",
            f"jnp.tensordot({v}, {w}, 1, out_sharding={b.spec(product)}) * 0.4",
            f"jnp.broadcast_to({v}, {(2, *shape)}, out_sharding={b.spec((2, *shape))})",
            f"jnp.reshape({v}, {(*shape, 1)}, out_sharding={b.spec((*shape, 1))})",
        ])
    )  # fmt: skip


def row_type(aval: Any, axis: int = 0) -> Any:
    sharding = aval.sharding
    if isinstance(sharding, NamedSharding):
        names = spec_of(aval)
        sharding = NamedSharding(sharding.mesh, P(*names[:axis], *names[axis + 1 :]))
    return jax.ShapeDtypeStruct((*aval.shape[:axis], *aval.shape[axis + 1 :]), aval.dtype, sharding=sharding)


@composed
def automatic(b: Body) -> None:
    """A function inside of which the explicit axes of the mesh are automatic."""
    v, w = b.pick(), b.pick()
    c, d, name = b.name("c"), b.name("d"), b.name("f")
    body = b.inner({c: b.values[v], d: b.values[w]}, closed=False)
    result = body.results().split(", ")[0]
    where = b.spec(body.values[result].shape)
    axes = tuple(name for name, is_explicit in b.axes.items() if is_explicit)
    lines = body.function(name, f"{c}, {d}", result)
    b.write(f"jax.sharding.auto_axes({name}, axes={axes}, out_sharding={where})({v}, {w})", lines)


@composed
def scanned(b: Body) -> None:
    """A loop over the rows of a value, or over nothing, with carries of several kinds."""
    over = b.one([n for n, v in b.values.items() if is_float(v) and v.shape and v.shape[0] > 0])
    carry = b.pick()
    c, r, body_name = b.name("c"), b.name("r"), b.name("f")
    length = b.values[over].shape[0]
    start, arguments = [carry], {c: b.values[carry], r: row_type(b.values[over])}
    xs = over
    if b.chance(5):
        xs, length = "None", b.one([3, 8, 1, 300])
        arguments.pop(r)
    steps = {}
    for kind in b.one([[], ["integer"], ["float"], ["leaf"], ["integer", "float"]]):
        n = b.name("n")
        if kind == "integer":
            dtype = b.one(["int32", "uint8", "int16"])
            begin, steps[n] = f"jnp.{dtype}({b.number(0, 3)})", f"{n} + {b.one([1, 2])}"
        elif kind == "float":
            dtype = b.one(["float32", "bfloat16"])
            begin = f"jnp.{dtype}({b.one(['0.0', '250.0', '16777210.0'])})"
            steps[n] = f"{n} + {b.one(['1.0', '0.1'])}"
        else:
            leaf = b.pick()
            begin, steps[n] = leaf, b.one([n, f"jnp.roll({n}, 1, 0)" if b.values[leaf].shape else n])
        start.append(begin)
        arguments[n] = b.types(begin)
    body = b.inner({n: v for n, v in arguments.items() if v is not None})
    for n in steps:
        if arguments[n].shape == ():
            body.write(f"jnp.sin({n}.astype(jnp.float32)) * {body.one([c, *body.unread])}")
    result = body.returning(arguments[c])
    new = [b.one([f"0.5 * {c} + 0.3 * {result}", f"jnp.tanh({result})", result]), *steps.values()]
    out = b.one([body.unread[-1] if body.unread else c, "None", c])
    carries = ", ".join([c, *steps])
    carried = "".join(f"({e}).astype({n}.dtype), " for e, n in zip(new, [c, *steps], strict=True))
    body.lines.insert(0, f"{carries}, = s")
    lines = body.function(body_name, f"s, {r}", f"({carried}), {out}")
    extra = b.one(["", ", reverse=True", ", unroll=2", ", reverse=True, unroll=True"])
    extra += f", length={length}" if xs == "None" else ""
    wrapped = b.one([body_name, body_name, f"jax.checkpoint({body_name})"])
    b.write(f"lax.scan({wrapped}, ({', '.join(start)},), {xs}{extra})", lines)


@composed
def counted_loop(b: Body) -> None:
    v = b.pick()
    c, i, name = b.name("c"), b.name("i"), b.name("f")
    stack, rows = b.array()
    body = b.inner({c: b.values[v], i: jax.ShapeDtypeStruct((), jnp.int32)})
    body.write(f"{stack}[{i} % {rows[0]}] * 0.5")
    last = body.unread[-1]
    fitting = f"0.6 * {c} + 0.1 * {body.returning(b.values[v])}"
    if body.returning(b.values[v]) != last:
        fitting += f" * jnp.mean({last})"
    lines = body.function(name, f"{i}, {c}", f"({fitting}).astype({c}.dtype)")
    b.write(f"lax.fori_loop({b.number(0, 2)}, {b.number(1, 5)}, {name}, {v})", lines)


@composed
def awhile(b: Body) -> None:
    """JAX has no gradient through it, but of what reads it."""
    v = b.pick()
    c, name = b.name("c"), b.name("f")
    body = b.inner({c: b.values[v]}, closed=False)
    lines = body.function(name, c, f"({body.returning(b.values[v])} * 0.5).astype({c}.dtype)")
    step = f"lambda s: (s[0] + 1, lax.stop_gradient({name}(s[1])))"
    start = f"(0, lax.stop_gradient({v}))"
    b.write(f"lax.while_loop(lambda s: s[0] < {b.number(1, 4)}, {step}, {start})[1] * {v}", lines)


@composed
def branches(b: Body) -> None:
    v = b.pick()
    of = b.values[v]
    names, lines = [b.name("f") for _ in range(b.number(2, 3))], []
    for name in names:
        c = b.name("c")
        body = b.inner({c: of})
        lines += body.function(name, c, body.returning(of))
    indices = [f"(jnp.sum({b.pick()}) > 0).astype(jnp.int32)", "x['i'][0]", "1"]
    at_one = b.one(indices[:2] if b.axes else indices)  # XLA takes differently placed branches if the index is known
    b.write(f"lax.switch({at_one}, [{', '.join(names)}], {v})", lines)


POLICIES = ["", "everything_saveable", "nothing_saveable", "dots_saveable", "save_only_these_names('kept')"]


@composed
def checkpointed(b: Body) -> None:
    v, w = b.pick(), b.pick()
    c, d, name = b.name("c"), b.name("d"), b.name("f")
    body = b.inner({c: b.values[v], d: b.values[w]})
    policy = b.one(POLICIES)
    how = f", policy=jax.checkpoint_policies.{policy}" if policy else ""
    b.write(f"jax.checkpoint({name}{how})({v}, {w})", body.function(name, f"{c}, {d}", body.results()))


@composed
def jitted(b: Body) -> None:
    v = b.pick()
    c, name = b.name("c"), b.name("f")
    body = b.inner({c: b.values[v]})
    b.write(f"jax.jit({name})({v})", body.function(name, c, body.results()))


@composed
def mapped(b: Body) -> None:
    v, shape = b.array()
    axis, c, name = axis_of(b, shape), b.name("c"), b.name("f")
    body = b.inner({c: row_type(b.values[v], axis)})
    how = b.one(
        [f"jax.vmap({name}, {axis})({v})", f"lax.map({name}, {v})" if axis == 0 else f"jax.vmap({name}, {axis})({v})"]
    )
    b.write(how, body.function(name, c, body.results()))


@composed
def custom_jvp(b: Body) -> None:
    v = b.pick()
    c, name = b.name("c"), b.name("f")
    body = b.inner({c: b.values[v]}, closed=b.chance(2))
    result = body.results().split(", ")[0]
    tangent = f"jax.jvp({name}.fun, ({c},), (t,))[1] * {b.one(['1.5', f'jnp.cos(jnp.mean({c}))'])}"
    tangent = f"jnp.asarray({tangent}).astype({name}({c}).dtype)"
    lines = [
        "@jax.custom_jvp",
        *body.function(name, c, result),
        f"@{name}.defjvp",
        f"def {name}_jvp(primals, tangents):",
    ]
    lines += [f"    ({c},), (t,) = primals, tangents", f"    return {name}({c}), {tangent}"]
    b.write(f"{name}({v})", lines)


@composed
def custom_vjp(b: Body) -> None:
    """With an argument that is not differentiated, and a value of the loss that its rule reads."""
    v = b.pick()
    c, name = b.name("c"), b.name("f")
    body = b.inner({c: b.values[v]}, closed=False)
    result = body.results().split(", ")[0]
    scale = b.one(["", " * jnp.mean(x['x'] * 2)", " * jnp.sin(x['i'][0])"])
    given = b.choose(2)
    lines = [f"@functools.partial(jax.custom_vjp, nondiff_argnums={(0,) if given else ()})"]
    lines += body.function(name, f"k, {c}" if given else c, result)
    k = "k, " if given else ""
    pull = f"jax.vjp(lambda {c}: {name}.fun({k}{c}), {c})[1](ct * 1.5)[0]"
    cotangent = b.one([f"({pull}{scale}).astype({c}.dtype)", f"(jnp.cos({c}) * jnp.mean(ct){scale}).astype({c}.dtype)"])
    lines.append(f"{name}.defvjp(lambda {k}{c}: ({name}({k}{c}), {c}), lambda {k}{c}, ct: ({cotangent},))")
    b.write(f"{name}({'2, ' if given else ''}{v})", lines)


@composed
def inner_gradient(b: Body) -> None:
    v = b.pick()
    c, name = b.name("c"), b.name("f")
    body = b.inner({c: b.values[v]})
    b.write(f"jax.grad({name})({v})", body.function(name, c, f"curved({body.results()})"))


@row
def empty(b: Body) -> None:
    """Loops over no rows, and rows of nothing."""
    v, shape = b.array()
    zero = f"{v}[0:0]"
    kinds = [
        f"lax.scan(lambda c, r: (c * jnp.sum(r), None), {v}, {zero})[0]",
        f"jnp.concatenate([{zero}, {v}])[{b.choose(shape[0])}:]",
        f"jnp.sum({zero}) + {v}",
        zero,
        f"jnp.split(jnp.concatenate([{v}, {b.pick()}]), [0])",
        f"jnp.split(jnp.concatenate([{v}, {v} * 2]), [0])[1]",
        f"{v}.at[jnp.zeros((0,), int)].add(1.0)",
        f"jax.vmap(jnp.sin)({zero}).sum() * {v}",
        f"jnp.take({v}, jnp.zeros((0,), int), axis=0).sum(0) + {v}",
    ]
    b.write(b.one(kinds))


SHAPES = [(6, 4), (4, 4), (3, 4, 4), (6,), (4, 6), (1, 4), (6, 1), (), (2, 3, 4), (5, 3, 3)]
LARGE = [(64, 64), (64, 64), (64,), (64, 1), (3, 64, 64), (64, 96), ()]
"""Shapes for which a compiler does not fuse everything: below, what is computed twice is rounded in the same way."""
DTYPES = ["float32"] * 6 + ["bfloat16", "float16", "complex64"]
BATCH = {
    "x": jax.ShapeDtypeStruct((6, 4), jnp.float32),
    "i": jax.ShapeDtypeStruct((6,), jnp.int32),
    "k": jax.ShapeDtypeStruct((6, 4), jnp.uint32),
}


class Drawn:
    """A case, as the Python that makes it."""

    def __init__(self, choose: Callable[[int], int], rows: Any = None, leaves: Any = None) -> None:
        if leaves is None:
            leaves, shapes = {}, (SHAPES, LARGE)[choose(2)]
            for name in "abc"[: 1 + choose(3)]:
                shape = shapes[choose(len(shapes))]
                leaves[name] = shape, DTYPES[choose(len(DTYPES))]
        params = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in leaves.items()}
        self.mesh, batch = [*[None] * 6, *MESHES][0 if rows else choose(6 + len(MESHES))], BATCH
        self.places: dict[str, P] = {}
        with on_mesh(self.mesh):
            if self.mesh:
                self.places = {n: placement(choose, x.shape, ("d", "m")) for n, x in {**params, **batch}.items()}
                placed = lambda n, x: x.update(sharding=NamedSharding(mesh(self.mesh), self.places[n]))  # noqa: E731
                params, batch = ({n: placed(n, x) for n, x in tree.items()} for tree in (params, batch))
            values = {f'{tree}["{n}"]': x for tree, each in (("p", params), ("x", batch)) for n, x in each.items()}
            body = Body(choose, values, {"p": params, "x": batch})
            if self.mesh:
                body.axes = {n: kind is AxisType.Explicit for n, kind in zip("dm", MESHES[self.mesh], strict=True)}
            body.unread = [f'p["{name}"]' for name, leaf in params.items() if is_float(leaf)]
            for name in rows or ():
                body.apply(name)
            if rows is None:
                body.program()
        self.rows, self.leaves = body.rows, leaves
        self.loss = "\n".join(body.function("loss", "p, x", f"{body.one(['total', 'curved'])}({body.results()})"))
        way, how = body.one(WAYS), body.one(HOW)
        self.numbers: list[tuple[int, ...]] = []
        is_group, self.has_rows = way == "groups", choose(2)
        spec = {n: body.choose(4) if is_group else self.frozen(body, way, shape) for n, (shape, _) in leaves.items()}
        if not is_group and set(spec.values()) == {"True"}:
            spec["a"] = "False"
        chosen = ", ".join(f'"{name}": {said}' for name, said in spec.items())
        names = "".join(f"n{i}, " for i in range(len(self.numbers)))[:-2]
        odd = body.one([*[None] * 30, 0.0, "np.nan", "np.inf", 1e38])
        self.case = (
            f"Case(\n    loss,\n    {leaves},\n    lambda{names and ' ' + names}: {{{chosen}}},\n"
            f"    {tuple(self.numbers)},\n    way={way!r},\n    how={how!r},\n    odd={odd},\n"
        )
        if self.mesh:
            places = ", ".join(f"{n!r}: {said(where)}" for n, where in self.places.items())
            self.case += f"    mesh={self.mesh!r},\n    places={{{places}}},\n"
        self.case += ")"

    def frozen(self, b: Body, way: str, shape: tuple[int, ...]) -> str:
        """What is frozen of one leaf."""
        if way[0] == "p" and b.choose(2):
            return "True"
        kind = b.choose(5 if self.has_rows else 8)
        if not shape or kind > 5:
            return str(b.chance(3))
        axis = b.one([0, *range(len(shape))])
        size = shape[axis]
        if kind > 4:
            return f"fz.elements(mask({shape}, {b.choose(3)}), compact={b.chance(2)})"
        numbers = sorted({b.choose(size) for _ in range(3)})
        some = b.one([numbers, numbers, numbers[:1], f"slice({b.choose(size)}, None)"])
        not_ = b.one(["~", ""])
        if kind and isinstance(some, list) and way != "freeze_loss":
            self.numbers.append(tuple(some[:: b.one((1, -1))]))
            some = f"n{len(self.numbers) - 1}"
        return f"{not_}fz.rows({some}, {axis})"
