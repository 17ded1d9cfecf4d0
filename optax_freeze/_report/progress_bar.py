"""A progress bar for what takes minutes. It is on stderr, only in a terminal or a notebook, and gone at the end."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

from optax_freeze._errors import printable


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to be called before each of ``total`` pieces of work, with its name."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    has_widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None  # without, rich warns
    shown = console.is_terminal or has_widgets
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns, console=console, transient=True, disable=not shown, redirect_stdout=False, redirect_stderr=False
    )
    with bar:
        task, begun = bar.add_task("", total=total), 0

        def show(name: str) -> None:
            nonlocal begun
            bar.update(task, description=printable(name), completed=begun)
            begun += 1

        yield show
