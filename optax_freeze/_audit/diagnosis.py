"""The leaks that the runs of a step, and other gradients in it, show: each with the most likely cause and the fix."""

from collections.abc import Iterator

from optax_freeze._audit import causes
from optax_freeze._audit.causes import EXPECTED, Cause
from optax_freeze._audit.reactions import Gradients
from optax_freeze._audit.report import Audit, Kind, Leak
from optax_freeze._audit.runs import ANOTHER_BATCH, ANOTHER_STATE, ANOTHER_VALUES, Runs
from optax_freeze._errors import counted
from optax_freeze._spec.selection import TRAINABLE


def audit_of(runs: Runs, gradients: Gradients) -> Audit:
    leaks = tuple(_leaks(runs, gradients))
    notes = "; ".join([*runs.notes, *gradients.notes])
    selections = runs.step.plan.selections
    in_part_or_whole = sum(selection is not TRAINABLE for selection in selections)
    return Audit(leaks, len(selections), in_part_or_whole, runs.steps, notes, runs.step.calls)


def _leaks(runs: Runs, gradients: Gradients) -> Iterator[Leak]:
    step = runs.step
    for i in step.frozen:
        yield from _moved(runs, gradients, i)
    for path, position in step.bits.items():
        for move in [*runs.moves(position).values()][:1]:
            yield _leak("moved", step.other_part, path, str(move), move.count)
    yield from _moved_state(runs)
    yield from _changed(runs, gradients)
    yield from _computed(runs, gradients)
    yield from _held(runs)
    for i in gradients.untrained:
        elements = step.elements(i, frozen=False)
        got = f"{elements} elements with the same update and state whatever their gradient"
        yield _leak("untrained", causes.IGNORED, step.plan.leaves[i].path, got, elements)


def _moved(runs: Runs, gradients: Gradients, i: int) -> Iterator[Leak]:
    """Frozen elements of a parameter with other bits after a step."""
    step = runs.step
    path, position = step.plan.leaves[i].path, step.params[i]
    moves = runs.moves(position)
    later = [name for name in moves if name.startswith("counters")]
    now = [name for name in moves if name not in later]
    thaws = all((name, position) in runs.thawed for name in later)

    def leak(cause: Cause, name: str | None = None) -> Leak:
        move = moves[next(iter(moves)) if name is None else name]
        return _leak("moved", cause, path, str(move), move.count)

    reacts = runs.reacts(position)
    if now == [ANOTHER_VALUES] and not step.is_fresh:
        runs.notes.append(f"{path or 'the parameter'} moves with other frozen values alone: {moves[ANOTHER_VALUES]}")
        now = later = []
    unexplained = next(iter(now), "")  # the first run in which it moves
    if {*now} - {ANOTHER_STATE}:
        decays = runs.decays(position, ["", ANOTHER_VALUES])
        is_set = i in gradients.set_by_batch and not decays
        trains = any(("frozen", i) in g.negative for g in gradients.gradients if i in g.leaves)
        if trains or (not is_set and runs.differ(ANOTHER_BATCH, position)):
            other_spec = path in step.trains_in_state
            yield leak(causes.OTHER_SPEC if other_spec else causes.TRAINS if trains else causes.BATCH)
            return
        rounds = not step.is_fresh and runs.is_rounding(position)
        if is_set or decays or rounds:
            unexplained = ANOTHER_STATE
            yield leak(causes.SET if is_set else causes.DECAY if decays else causes.ROUNDING)
        elif step.is_fresh or not reacts:  # a fresh state has no moments that could have moved it
            unexplained = ANOTHER_STATE
            yield leak(step.other_part)
    elif later and not thaws and runs.decays(position, later[:1]):
        yield leak(causes.DECAY, later[0])
    elif later and not thaws and not step.is_fresh:
        yield leak(causes.LATER, later[0])
    elif later:
        runs.notes.append(f"{path or 'the parameter'} moves in a later step ({later[0]}), as a schedule may want it")
    if reacts and unexplained in moves:
        yield leak(causes.STATE_AFTER, unexplained)
    if not now and any(("frozen", i) in g.nan for g in gradients.gradients):
        elements = step.elements(i, frozen=True)
        yield _leak("moved", causes.PRODUCT, path, f"{elements} frozen elements: NaN with a gradient of NaN", elements)


def _moved_state(runs: Runs) -> Iterator[Leak]:
    """Averages of frozen values, and statistics of frozen modules, with other bits after a step."""
    step = runs.step
    for k, (_, count, far) in runs.averages.items():
        if count:
            got = f"{count} elements of an average that equals the frozen value move in some steps{far}"
            yield _leak("moved", causes.AVERAGE, step.paths[k], got, count)
    moved = [(k, causes.DECAY if runs.decays(k, [""]) else causes.COPY) for k in runs.copies]
    for k, cause in [*moved, *((k, causes.STATISTICS) for k in runs.statistics())]:
        move = next(iter(runs.moves(k).values()))
        yield _leak("moved", cause, step.paths[k], str(move).replace("frozen elements", "elements"), move.count)


def _changed(runs: Runs, gradients: Gradients) -> Iterator[Leak]:
    """Updates of trainable elements that depend on gradients, or on values, of frozen ones."""
    step = runs.step
    found: dict[tuple[int, Cause], list[str]] = {}
    for g in gradients.gradients:
        signs, by_size, by_nan, by_inf = (g.trainable(answer) for answer in (g.negative, g.huge, g.nan, g.inf))
        coupled = {j for j in signs if j not in g.leaves}
        for j in sorted(by_size | by_nan | by_inf):
            if step.is_frozen(j):
                continue
            if j in coupled:
                cause = causes.COUPLED
            elif j in by_size:
                cause = causes.STATISTIC if by_size <= {*g.leaves} else causes.NORM
            else:
                cause = causes.FINITE_CHECK if j in by_inf else causes.NORM
            found.setdefault((j, cause), []).extend(step.plan.leaves[i].path for i in g.leaves)
    explained = {j for j, cause in found if cause is not causes.FINITE_CHECK}  # of some, only NaN may be seen
    for (j, cause), paths in found.items():
        if cause is causes.FINITE_CHECK and j in explained:
            continue
        numbers = {causes.FINITE_CHECK: "of NaN", causes.COUPLED: "of the other sign"}.get(cause, "of 1e15 or NaN")
        more = f" or of {counted(len(paths) - 1, 'other frozen leaf', 'other frozen leaves')}" * (len(paths) > 1)
        got = f"another update with a gradient {numbers} of {paths[0]}{more}"
        yield _leak("changed", cause, step.plan.leaves[j].path, got, step.elements(j, frozen=False))
    for j in sorted(gradients.by_values - {j for j, _ in found}):
        got = "another update with other frozen parameters"
        yield _leak("changed", causes.STATISTIC, step.plan.leaves[j].path, got, step.elements(j, frozen=False))


def _computed(runs: Runs, gradients: Gradients) -> Iterator[Leak]:
    """Gradients of frozen elements that a step computes, and that something reads beside results."""
    step = runs.step
    for g in gradients.gradients:
        if gradients.are_given or g.is_logged:
            continue
        total, flops = gradients.flops
        together = {j for a in (g.huge, g.nan) for j in g.trainable(a) if not step.is_frozen(j)}
        with_sign, names = g.trainable(g.negative), g.read
        cost = "computed" if flops is None else f"{flops:,} of {total:,} FLOPs of a step, for all frozen leaves"
        others = counted(len(g.leaves) - 1, "other leaf", "other leaves")
        cost += f"; changed together with {others}" * (len(g.leaves) > 1)
        for i in g.leaves:
            readers = {
                "a norm or a finite check": together - with_sign - {i},
                "a sum or a preconditioner": (together & with_sign) - {i},
                "its state": ("state", i) in g.negative | g.huge | g.nan,
                "its update": ("frozen", i) in g.negative | g.huge | g.nan,
                "other state": "other" in names or "state" in names,
                "a result": "result" in names,
                "nothing, but it leaves a jitted function": g.leaves_call,
            }
            read_by = [name for name, reads in readers.items() if reads] or ["its own leaf"]
            got, elements = f"{cost}; read by {', '.join(read_by)}", step.elements(i, frozen=True)
            path = step.plan.leaves[i].path
            yield _leak("gradient", causes.reading(read_by[0]), path, got, elements, flops=flops or 0)


def _held(runs: Runs) -> Iterator[Leak]:
    """State that is held for frozen elements; averages that follow the parameters are not counted."""
    step = runs.step
    by_leaf: dict[int | None, list[int]] = {}
    for k, i in runs.held.items():
        by_leaf.setdefault(i, []).append(k)
    for i, places in by_leaf.items():
        whole = [i] if i is not None else [*step.params]
        frozen, trains = (sum(step.elements(i, frozen=each) for i in whole) for each in (True, False))
        nbytes = sum(step.start[k].nbytes for k in places) * frozen // max(frozen + trains, 1)
        got = f"{nbytes:,} bytes, at {', '.join(dict.fromkeys(map(step.tree, places)))}"
        yield _leak("state", causes.STATE, "" if i is None else step.plan.leaves[i].path, got, frozen, nbytes)


def _leak(kind: Kind, cause: Cause, path: str, got: str, elements: int, nbytes: int = 0, flops: int = 0) -> Leak:
    return Leak(kind, path, cause.name, got, EXPECTED[kind], cause.fix, int(elements), nbytes, flops)
