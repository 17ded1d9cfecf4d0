"""The tasks of a function's outputs and its gradient, of which only the wanted regions are computed."""

from collections.abc import Collection, Sequence

from optax_freeze._program.regions import EVERYTHING, Region
from optax_freeze._program.tasks import ALWAYS, Schedule
from optax_freeze._program.trace import Program
from optax_freeze._program.walk import schedule


def gradient_schedule(program: Program, count: int, wanted: Sequence[tuple[int, Region, int]]) -> Schedule:
    """The tasks for the outputs of a program, of which the last ones, ``count`` of them, are gradients.

    Of these only regions are ``wanted``, each with its place among the gradients and its guard.
    """
    outs = len(program.outputs) - count
    grads = [(program.outputs[outs + place], region, guard) for place, region, guard in wanted]
    return schedule(program, [*((x, EVERYTHING, ALWAYS) for x in program.outputs[:outs]), *grads])


def divided(whole: Schedule, outs: int, cotangents: Collection[int]) -> tuple[Schedule, Schedule]:
    """The tasks of a forward pass, which do not depend on the cotangents, and those of the backward pass.

    The forward pass gives the first outputs, ``outs`` of them, and then what the backward pass reads beside the inputs.
    """
    first, second, found = [], [], set(cotangents)
    for task in whole.tasks:
        depends = not found.isdisjoint(task.read_numbers)
        found.update(task.written_numbers if depends else ())
        (second if depends else first).append(task)
    backward = whole._replace(tasks=second, outputs=whole.outputs[outs:])
    read = backward.read_numbers
    stored = [write for task in first for write in task.writes if write is not None and write[0] in read]
    return whole._replace(tasks=first, outputs=[*whole.outputs[:outs], *stored]), backward
