"""The parameters as a picture: a treemap, in which the area of a leaf is its number of elements.

Squarified (Bruls, Huizing and van Wijk, 2000): rectangles as near to squares as may be, so that areas can be compared.
The two colours are from the palette of Okabe and Ito, which the colour-blind can tell apart, and differ in lightness.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_freeze._errors import message, printable, value_error
from optax_freeze._report.table import Row, natural, nested, share

FROZEN, TRAINABLE = "#0072B2", "#E69F00"


class Box(NamedTuple):
    """A rectangle, by the corner that is nearest to the origin."""

    x: float
    y: float
    width: float
    height: float


class Node(NamedTuple):
    """A leaf, or a subtree of the parameters; no subtree has one child alone, and the largest child comes first."""

    name: str
    elements: int
    frozen: int
    children: Sequence["Node"] = ()


def draw(rows: Sequence[Row], ax: Any = None) -> Any:
    """Draws rows as a treemap on axes, which it makes if it is given none."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            message(
                "matplotlib is missing",
                at="Summary.plot",
                got=str(error),
                expected="matplotlib, which only this picture needs",
                fix="pip install matplotlib",
            )
        ) from error
    root = _node("", nested(row for row in rows if row.elements))
    if not root.elements:
        raise value_error(
            "there is nothing to draw",
            at="Summary.plot",
            got=f"{len(rows)} rows without elements",
            expected="at least one array with elements",
            fix="pass the parameters to fz.summary, not the holes in the place of them",
        )
    if ax is None:
        margins = {"left": 0.01, "right": 0.99, "bottom": 0.07, "top": 0.99}
        ax = plt.subplots(figsize=(8, 6), gridspec_kw=margins)[1]
    _paint(ax, root)
    return ax


def _node(name: str, held: dict[str | None, Any]) -> Node:
    children = [
        Node("", child.elements, child.frozen_elements) if key is None else _node(key, child)
        for key, child in held.items()
    ]
    if len(children) == 1:
        return _below(name, children[0])
    children.sort(key=lambda child: (-child.elements, natural(child.name)))
    return Node(name, sum(child.elements for child in children), sum(child.frozen for child in children), children)


def _below(name: str, child: Node) -> Node:
    return child._replace(name="/".join(part for part in (name, child.name) if part))


def squarify(sizes: Sequence[float], box: Box) -> Iterator[Box]:
    """Boxes that fill ``box``, with areas in proportion to ``sizes``, which descend."""
    scale = box.width * box.height / sum(sizes) if sizes else 0.0
    areas = [size * scale for size in sizes]
    start = 0
    while start < len(areas):
        side = min(box.width, box.height)
        stop, strip = start + 1, areas[start]
        while stop < len(areas):
            longer = strip + areas[stop]
            if _worst(areas[start], areas[stop], longer, side) > _worst(areas[start], areas[stop - 1], strip, side):
                break
            stop, strip = stop + 1, longer
        depth, offset = strip / side, 0.0
        lying = box.width < box.height
        for area in areas[start:stop]:
            length = area / depth
            at, extent = ((offset, 0.0), (length, depth)) if lying else ((0.0, offset), (depth, length))
            yield Box(box.x + at[0], box.y + at[1], *extent)
            offset += length
        if lying:
            box = box._replace(y=box.y + depth, height=box.height - depth)
        else:
            box = box._replace(x=box.x + depth, width=box.width - depth)
        start = stop


def _worst(largest: float, smallest: float, strip: float, side: float) -> float:
    """The aspect ratio farthest from a square, in a strip along one side of boxes of these areas."""
    depth = strip / side
    return max(largest / depth**2, depth**2 / smallest)


def _paint(ax: Any, root: Node) -> None:
    """The treemap on axes, whose coordinates become points of print."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    def add(boxes: Sequence[Box], **style: Any) -> None:
        corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in boxes]
        verts: Any = np.reshape(corners, (-1, 4, 2))
        ax.add_collection(PolyCollection(verts, **style))

    extent, point = ax.get_window_extent(), ax.figure.dpi / 72
    whole = Box(0.0, 0.0, extent.width / point, extent.height / point)
    ax.set(xlim=(0, whole.width), ylim=(whole.height, 0))
    ax.set_axis_off()
    placed = list(_arrange(root, whole, 1))
    halves = [_divide(node, box) for node, box, _ in placed if not node.children]
    frozen, trainable = ([box for box in boxes if box.width and box.height] for boxes in zip(*halves, strict=True))
    add(frozen, facecolor=FROZEN, edgecolor="none")
    add(trainable, facecolor=TRAINABLE, edgecolor="none")
    frames = [min(2.0 / depth if node.children else 0.5, min(box[2:]) / 8) for node, box, depth in placed]
    add([box for _, box, _ in placed], facecolor="none", edgecolor="white", linewidths=frames)
    for node, text, turned, spot in _names(placed):
        x, align = (spot.x, "left") if node.children else (spot.x + spot.width / 2, "center")
        style = {"rotation": turned, "ha": align, "va": "center", "parse_math": False, **_style(node)}
        ax.text(x, spot.y + spot.height / 2, text, **style)
    shares = [("frozen", FROZEN, root.frozen), ("trainable", TRAINABLE, root.elements - root.frozen)]
    handles = [
        Patch(color=color, label=f"{name}: {count:,} elements ({share(count, root.elements)})")
        for name, color, count in shares
    ]
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2, frameon=False)


def _arrange(node: Node, box: Box, depth: int) -> Iterator[tuple[Node, Box, int]]:
    """Nodes and their boxes; one that a single child nearly fills gives its name to that child."""
    children = list(node.children) if box.width * box.height > _SPECK else []
    node = node._replace(children=children)
    if children and children[0].elements > 0.9 * node.elements:
        children[0] = _below(node.name, children[0])
        node = node._replace(name="")
    yield node, box, depth
    for child, inner in zip(children, squarify([child.elements for child in children], box), strict=True):
        yield from _arrange(child, inner, depth + 1)


_SPECK = 4.0
"""Square points of print, below which a subtree is drawn as one leaf."""


def _divide(node: Node, box: Box) -> tuple[Box, Box]:
    """What is frozen of a box, and what trains."""
    frozen = node.frozen / node.elements
    if box.width > box.height:
        cut = box.width * frozen
        return box._replace(width=cut), box._replace(x=box.x + cut, width=box.width - cut)
    cut = box.height * frozen
    return box._replace(height=cut), box._replace(y=box.y + cut, height=box.height - cut)


def _names(placed: Sequence[tuple[Node, Box, int]]) -> Iterator[tuple[Node, str, int, Box]]:
    """Names where they fit: of a subtree in its corner, of a leaf in the middle; none below one without room."""
    above: list[Box] = []  # what the names of the subtrees around take
    for node, box, depth in placed:
        del above[depth - 1 :]
        for text, turned, spot in _spots(node, box, above):
            if _within(spot, box) and not any(_overlap(spot, other) for other in above):
                above.append(spot)
                yield node, text, turned, spot
                break
        else:
            above.append(box if node.name else Box(box.x, box.y, 0.0, 0.0))


def _spots(node: Node, box: Box, above: Sequence[Box]) -> Iterator[tuple[str, int, Box]]:
    name = printable(node.name)
    if not name:
        return
    if node.children:
        y = max([box.y, *(spot.y + spot.height for spot in above if _overlap(spot, box))])
        width, height = _extent(name)
        yield name, 0, Box(box.x + 3, y + 2, width, height)
        return
    for text, turned in ((name, 0), (name.replace("/", "/\n"), 0), (name, 90)):
        width, height = _extent(text)[:: -1 if turned else 1]
        yield text, turned, Box(box.x + (box.width - width) / 2, box.y + (box.height - height) / 2, width, height)


_SIZE = 7.0
"""Of the letters, in points."""


def _extent(text: str) -> tuple[float, float]:
    lines = text.split("\n")
    return (max(map(len, lines)) + 1) * 0.6 * _SIZE, len(lines) * 1.4 * _SIZE


def _style(node: Node) -> dict[str, Any]:
    if not node.children and node.frozen in (0, node.elements):
        return {"fontsize": _SIZE, "color": "white" if node.frozen else "black"}
    plate = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    return {"fontsize": _SIZE, "color": "black", "bbox": plate}


def _within(inner: Box, outer: Box) -> bool:
    return (
        inner.x >= outer.x
        and inner.y >= outer.y
        and inner.x + inner.width <= outer.x + outer.width
        and inner.y + inner.height <= outer.y + outer.height
    )


def _overlap(a: Box, b: Box) -> bool:
    return a.x < b.x + b.width and b.x < a.x + a.width and a.y < b.y + b.height and b.y < a.y + a.height
