"""The program of a function's outputs and its gradient, of which only the wanted regions are computed."""

import functools
from collections.abc import Collection, Sequence
from typing import Any

from optax_freeze._program.dependence import divided
from optax_freeze._program.regions import EVERYTHING, Region, Values
from optax_freeze._program.tasks import ALWAYS, PLAIN, Context, Schedule, Task, read_all
from optax_freeze._program.trace import Program
from optax_freeze._program.walk import schedule


class GradientProgram:
    """The tasks that compute the outputs of a function and regions of its gradient.

    They can be evaluated together, or the outputs first and the gradient later: the forward pass then evaluates what
    does not depend on the cotangents.

    Attributes:
      schedule: the tasks, whose first ``outs`` outputs are those of the function, and the others gradients.
      cotangents: the inputs that are cotangents of the outputs; none if the gradient has none.
    """

    def __init__(self, schedule: Schedule, outs: int, cotangents: Collection[int] = ()) -> None:
        self.schedule, self.outs, self.cotangents = schedule, outs, cotangents

    @property
    def gradients(self) -> Sequence[tuple[Any, Region]]:
        """The values that are gradients, and the regions of them that are computed."""
        return self.schedule.outputs[self.outs :]

    @property
    def stored(self) -> Sequence[tuple[int, Region]]:
        """What the forward pass computes and the backward pass reads beside the inputs."""
        return self._divided[2]

    def forward(self, values: Values, context: Context = PLAIN) -> list[Any]:
        """The outputs, given the inputs except cotangents, and what is ``stored``."""
        self._run(self._divided[0], values, context)
        outs = read_all(self.schedule.outputs[: self.outs], values, context, self.schedule.program)
        return [*outs, *(values.read(number, context.bound(region)) for number, region in self.stored)]

    def backward(self, values: Values, context: Context = PLAIN) -> list[Any]:
        """The gradients, given all inputs and what is ``stored``."""
        self._run(self._divided[1], values, context)
        return read_all(self.gradients, values, context, self.schedule.program)

    def _run(self, tasks: Sequence[Task], values: Values, context: Context) -> None:
        self.schedule.fill(values)
        for task in tasks:
            task.run(context, values)

    @functools.cached_property
    def _divided(self) -> tuple[list[Task], list[Task], list[tuple[int, Region]]]:
        return divided(self.schedule.tasks, self.cotangents, (value for value, _ in self.gradients))


def gradient_program(
    program: Program, count: int, wanted: Sequence[tuple[int, Region, int]], cotangents: Collection[int] = ()
) -> GradientProgram:
    """The outputs of a program, of which the last ones, ``count`` of them, are gradients.

    Of these only regions are ``wanted``, each with its place among the gradients and its guard.
    """
    outs = len(program.outputs) - count
    grads = [(program.outputs[outs + place], region, guard) for place, region, guard in wanted]
    value = [(x, EVERYTHING, ALWAYS) for x in program.outputs[:outs]]
    return GradientProgram(schedule(program, [*value, *grads]), outs, cotangents)
