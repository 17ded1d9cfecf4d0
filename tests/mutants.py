"""Mutation tests: one-line changes of the package that must make a test fail. Run with `make mutants`.

Each mutant replaces one piece of source text in a copy of the working tree, and then runs the tests listed with it. If
they pass, the mutant survives: no test checks this behaviour. A run takes about half an hour on two cores and is not
part of `make test`. `tests/mutants.py NAME...` runs the mutants whose file or source text contains one of the names.
"""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
COPIED = ("optax_freeze", "tests", "docs", "examples", "pyproject.toml", "README.md", "Makefile")


class Mutant(NamedTuple):
    """``old`` occurs once in ``optax_freeze/<file>`` and is replaced by ``new``; ``tests`` are arguments of pytest."""

    file: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant(
        "_gradient/stacked_step.py",
        "return trains, jnp.where(trains, jnp.argmax(here), len(self.numbers))",
        "return trains, jnp.argmax(here)",
        "tests/gradient/test_dynamic_row_scan.py -k other_rows_and_static",
    ),
    Mutant(
        "_gradient/stacked_step.py",
        "kind = _Kind.ROWS if is_row or (varies and not needs_others) else",
        "kind = _Kind.ROWS if False else",
        "tests/gradient/test_dynamic_row_scan.py -k stored",
    ),
    Mutant(
        "_gradient/dynamic_row_scan.py",
        "[stack.numbers[0] for stack in stacks]",
        "[stack.numbers[-1] for stack in stacks]",
        "tests/gradient/test_dynamic_row_scan.py -k forward",
    ),
    Mutant(
        "_gradient/dynamic_row_scan.py",
        "steps = self._steps(stacks) if linear.alone and not linear.reaches_back and stacks else self.length",
        "steps = self.length",
        "tests/gradient/test_dynamic_row_scan.py -k skipped",
    ),
    Mutant(
        "_gradient/dynamic_row_scan.py",
        "jax.lax.cond(trains, transposed, without_rows, i, of_outs)",
        "transposed(i, of_outs)",
        "tests/gradient/test_dynamic_row_scan.py -k skipped",
    ),
    Mutant(
        "_state/replace_masks.py",
        'stays = jnp.take(old.array, position, mode="clip") == new.array',
        'stays = jnp.take(old.array, position, mode="clip") >= 0',
        "tests/state/test_dynamic_rows.py -k stay_keep",
    ),
    Mutant(
        "_state/replace_masks.py",
        "owned <= replaced.keys()",
        "True",
        "tests/state/test_dynamic_rows.py -k all_rows_change",
    ),
    Mutant(
        "_optimizer/groups.py",
        "masks[i] = selection.without(*others)",
        "masks[i] = jnp.arange(selection.count, dtype=jnp.int32)",
        "tests/state/test_dynamic_rows.py -k Groups",
    ),
    Mutant(
        "_gradient/groups_now.py",
        "    if spec.sets and len(spec.sets) == len(branches):",
        "    if spec.sets:",
        "tests/gradient/test_groups_now.py -k program_for_each",
    ),
    Mutant(
        "_optimizer/conditions.py",
        "steps.update(range(first, min(stop, start + cycle), turn.period))",
        "steps.update(range(first, min(stop, start + turn.period), turn.period))",
        "tests/gradient/test_groups_now.py -k occur",
    ),
    Mutant(
        "_precompute/cut.py",
        "_reached(csr_array(left_over.T), sink)",
        "{*range(sink + 1)} - _reached(left_over, source)",
        "tests/precompute -k last_of_equal",
    ),
    Mutant(
        "_precompute/cut.py",
        "        if matters or has_effects(node.eqn):",
        "        if matters:",
        "tests/precompute -k runs_nothing",
    ),
    Mutant(
        "_precompute/divide.py",
        "        _refuse_mixed([at[value] for value in mixed])",
        "        _refuse_mixed([at[value] for value in mixed[:0]])",
        "tests/precompute/test_example_axis.py -k refused",
    ),
    Mutant(
        "_precompute/example_axis.py",
        "    if others or not all(axis in u for u in shared):",
        "    if others:",
        "tests/precompute/test_example_axis.py -k refused",
    ),
    Mutant(
        "_precompute/example_axis_rules.py",
        "    return Layout(axis, new[axis] // max(count, 1), frozenset(uniform) - {axis})",
        "    return Layout(axis, layout.block, frozenset(uniform) - {axis})",
        "tests/precompute/test_example_axis.py -k shuffled",
    ),
    Mutant(
        "_precompute/leaf_parts.py",
        "        return LeafParts(HOLE, _constant(value))",
        "        return LeafParts(HOLE, value)",
        "tests/precompute -k zeros_at_what_is_frozen",
    ),
    Mutant(
        "_precompute/precompute.py",
        "features.cut != division.digest",
        "len(features.cut) != len(division.digest)",
        "tests/precompute -k another_spec",
    ),
    Mutant(
        "_precompute/program.py",
        "is_known = all(known) and not has_effects(eqn)",
        "is_known = all(known)",
        "tests/precompute -k callback_with_a_result",
    ),
    Mutant(
        "_gradient/interpreter.py",
        "        closed = jax.make_jaxpr(traced)(*",
        "        with jax.ensure_compile_time_eval():\n            closed = jax.make_jaxpr(traced)(*",
        "tests/gradient/test_rules.py -k TestEffects",
    ),
    Mutant(
        "_gradient/interpreter.py",
        "    except Exception:",
        "    except jax.errors.ConcretizationTypeError:",
        "tests/gradient/test_rules.py -k TestEffects",
    ),
    Mutant("_gradient/rules_calls.py", " or closed.effects:", ":", "tests/gradient/test_rules.py -k TestEffects"),
    Mutant(
        "_gradient/rules_calls.py",
        ' or any(params["donated_invars"]):',
        ":",
        "tests/gradient/test_rules.py -k donated",
    ),
    Mutant(
        "_gradient/rules_calls.py",
        "x.like(x.guarded(x.frozen, x.frozen.shape), x.rows) if isinstance(x, SplitArray) else x for x in",
        "x for x in",
        "tests/gradient/test_rules.py -k TestNotFinite",
    ),
    Mutant(
        "_gradient/rules_calls.py",
        "if any(isinstance(value, Tracer) for value in compress(values, inexact)):",
        "if False:",
        "tests/gradient/test_rules.py",
    ),
    Mutant(
        "_gradient/split_array.py",
        "operand, jax.lax.stop_gradient(operand))",
        "operand, operand)",
        "tests/gradient/test_rules.py -k TestNotFinite",
    ),
    Mutant(
        "_gradient/split_array.py",
        "if self.in_jvp:\n            return jnp.where",
        "if False:\n            return jnp.where",
        "tests/gradient/test_rules.py",
    ),
    Mutant(
        "_gradient/rules_rowwise.py",
        "frozen.append(first.guarded(x, shape))",
        "frozen.append(x)",
        "tests/gradient/test_rules.py -k TestNotFinite",
    ),
    Mutant(
        "_gradient/rules_rowwise.py",
        "x.frozen if x.in_jvp else first.guarded(x.frozen, shape)",
        "x.frozen",
        "tests/gradient/test_rules.py -k TestNotFinite",
    ),
    Mutant(
        "_gradient/rules_rowwise.py",
        "        or len({x.axis for x in splits}) > 1\n",
        "",
        "tests/gradient/test_rules.py -k two_axes_of_a_square",
    ),
    Mutant(
        "_gradient/rules_rowwise.py",
        "        eqn.has_activation(operands)\n        or",
        "        False or",
        "tests/gradient/test_cost.py -k positions",
    ),
    Mutant(
        "_gradient/rules.py",
        "if not is_zero(tangent.frozen) or _is",
        "if True or _is",
        "tests/gradient/test_cost.py -k head",
    ),
    Mutant(
        "_gradient/with_rows.py",
        "index=dataclasses.replace(index, axis=index.axis + 1)",
        "index=index",
        "tests/gradient/test_rules.py",
    ),
    Mutant(
        "_gradient/rules_indexing.py",
        "number = jnp.clip(number, 0, x.size - 1)",
        "pass",
        "tests/gradient/test_rules.py -k clipped_lookup",
    ),
    Mutant(
        "_gradient/rules_indexing.py",
        "jnp.where(trains, position, -1)",
        "position",
        "tests/gradient/test_rules.py -k lookup_on_tpu",
    ),
    Mutant(
        "_gradient/explain.py",
        "    except ASKED_FOR_A_VALUE:",
        "    except KeyError:",
        "tests/gradient/test_explain.py",
    ),
    Mutant(
        "checkpoint/_record.py",
        "lambda number: _is_int(number, 1)",
        "lambda number: _is_int(number, 0)",
        "tests/test_checkpoint.py -k Damaged",
    ),
    Mutant("checkpoint/_record.py", " and len(lanes) == LANES", "", "tests/test_checkpoint.py -k Damaged"),
    Mutant(
        "checkpoint/_record.py",
        "lambda paths: len(set(paths)) == len(paths)",
        "lambda paths: True",
        "tests/test_checkpoint.py -k Damaged",
    ),
    Mutant(
        "checkpoint/_record.py",
        "lambda paths: paths == frozen",
        "lambda paths: True",
        "tests/test_checkpoint.py -k Damaged",
    ),
    Mutant(
        "checkpoint/_record.py", "all(before[1] <= after[0] for", "all(True for", "tests/test_checkpoint.py -k Damaged"
    ),
    Mutant(
        "checkpoint/_record.py",
        "return is_int(value) and least",
        "return isinstance(value, (int, float)) and least",
        "tests/test_checkpoint.py -k Damaged",
    ),
    Mutant(
        "_report/stored_shapes.py",
        "child.name.isascii() and child.name.isdigit()",
        "child.name.isdigit()",
        "tests/test_main.py",
    ),
    Mutant("__main__.py", ' and items <= {"trainable", "masks", "opt_state"}', "", "tests/test_main.py"),
    Mutant("_errors.py", "return text if text.isprintable() else repr(text)", "return text", "tests/test_errors.py"),
    Mutant(
        "_errors.py",
        "map(printable, [at] if isinstance(at, str) else at)",
        "map(str, [at] if isinstance(at, str) else at)",
        "tests/test_errors.py",
    ),
    Mutant("_errors.py", "if is_int(value) and value >= least:", "if is_int(value):", "tests/test_errors.py"),
    Mutant(
        "_gradient/explain.py",
        'rows: {operation}" for operation in self.whole]\n        return "\\n".join(map(printable, lines))',
        'rows: {operation}" for operation in self.whole]\n        return "\\n".join(lines)',
        "tests/test_errors.py",
    ),
    Mutant("_state/migrate.py", "', '.join(map(printable, addresses))", "', '.join(addresses)", "tests/test_errors.py"),
    Mutant(
        "_report/summary.py",
        "_state(tx.init, params, keep=_can_train)",
        "_state(tx.init, params, keep=is_array)",
        "tests/report/test_summary.py",
    ),
    Mutant(
        "_report/summary.py",
        "self.frozen_elements, self.frozen_bytes)",
        "self.frozen_elements, self.trainable_bytes)",
        "tests/report/test_summary.py",
    ),
    Mutant(
        "_optimizer/inner_update.py",
        "values=variable.unflatten([value.values])) if swapped else node",
        "values=value.values) if swapped else node",
        "tests/test_nnx.py -k keeps_its_structure",
    ),
    Mutant(
        "_optimizer/inner_update.py",
        "return variable.unflatten([dataclasses.replace(node, values=value)])",
        "return node",
        "tests/test_nnx.py -k state_of_variables",
    ),
    Mutant(
        "_optimizer/inner_update.py", "if kind is bool:", "if False:", "tests/test_model_libraries.py -k not_an_array"
    ),
    Mutant(
        "_optimizer/plan_in_state.py",
        "            if mine != its:",
        "            if False:",
        "tests/optimizer/test_freeze.py -k state_of_another_spec",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        "                if in_state != here:",
        "                if False:",
        "tests/optimizer/test_freeze_when.py -k other_groups",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        'align(updates, "updates", _ALL_GRADIENTS)',
        'align(updates, "updates")',
        "tests/optimizer/test_freeze_when.py -k part_of_the_groups",
    ),
    Mutant(
        "_optimizer/convergence.py",
        "(jnp.cumsum(~settled) == 0)",
        "settled",
        "tests/optimizer/test_freeze_converged.py -k autofreeze",
    ),
    Mutant(
        "_optimizer/convergence.py",
        "whole = (each.seen == interval) & jnp.isfinite(each.sum)",
        "whole = jnp.isfinite(each.sum)",
        "tests/optimizer/test_freeze_converged.py -k whole_one",
    ),
    Mutant(
        "_optimizer/convergence.py",
        "ends = at_end & ~each.converged",
        "ends = at_end",
        "tests/optimizer/test_freeze_converged.py -k keeps_still",
    ),
    Mutant(
        "_optimizer/groups.py",
        "if owners[0][0] is TRAINABLE:",
        "if len(owners) == 1:",
        "tests/optimizer/test_freeze_when.py -k every_element",
    ),
    Mutant(
        "_optimizer/groups.py",
        "merged = laid_out(explicit_sharding(like), lambda: jnp.zeros(shape, dtype))",
        "merged = jnp.zeros(shape, dtype)",
        "tests/state/test_shardings.py -k Explicit",
    ),
    Mutant(
        "_spec/selection.py",
        "explicit_sharding(part.values if like is None else like, shape)",
        "explicit_sharding(part.values, shape)",
        "tests/state/test_shardings.py -k Explicit",
    ),
    Mutant(
        "_spec/layout.py",
        "if size % math.prod(mesh.shape[name] for name in _names(axis)) == 0 else None",
        "if True else None",
        "tests/state/test_shardings.py -k Explicit",
    ),
    Mutant(
        "_spec/partition.py",
        "return not adds or (isinstance(change, (int, float, complex)) and change == 0)",
        "return True",
        "tests/test_model_libraries.py -k number_that_is_moved",
    ),
    Mutant(
        "_spec/tree.py",
        "        if flatten(full)[1] == treedef:",
        "        if False:",
        "tests/test_model_libraries.py -k not_an_array",
    ),
    Mutant(
        "_state/migrate.py",
        "        _refuse_swapped(state, tx, params, error)",
        "        pass",
        "tests/state/test_migrate.py -k parameters_first",
    ),
    Mutant(
        "_spec/prefix_tree.py",
        "if is_bool(answer) and not jax.tree_util.treedef_is_leaf(treedef):",
        "if False:",
        "tests/spec/test_resolve.py",
    ),
    Mutant("_spec/prefix_tree.py", "    if not _takes_one(function):", "    if False:", "tests/spec/test_resolve.py"),
    Mutant(
        "_spec/prefix_tree.py",
        "isinstance(prefix, Mapping) and set(names) == set(prefix):",
        "isinstance(prefix, Mapping):",
        "tests/spec/test_resolve.py",
    ),
    Mutant(
        "_spec/plan.py",
        "if len(found) != 1 or any(",
        "if not found or any(",
        "tests/spec/test_resolve.py tests/report/test_summary.py",
    ),
    Mutant(
        "_spec/fit_mask.py",
        "rows.index.stop is None and not rows.allow_empty:",
        "False:",
        "tests/spec/test_masks.py -k selects_no_row",
    ),
    Mutant(
        "nnx.py",
        "seen = _thawed(variable) if isinstance(variable, FrozenParam) else variable",
        "seen = variable",
        "tests/test_nnx.py -k filter",
    ),
    Mutant("_spec/labels.py", "scaled(factor**i)", "scaled(factor * i)", "tests/spec/test_labels.py"),
    Mutant("_verify/bits.py", "functools.reduce(jnp.logical_or,", "functools.reduce(jnp.logical_and,", "tests/verify"),
    Mutant("_audit/diagnosis.py", '    if "again" in reacting:', "    if False:", "tests/audit -k random"),
    Mutant(
        "linen/_frozen_call.py", 'return ["params", *self.stats,', 'return ["params",', "tests/test_linen.py -k stat"
    ),
]


def run(mutant: Mutant) -> str:
    """Returns ``killed``, ``survived``, or the reason why the mutant could not be run."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        copy = pathlib.Path(directory)
        for name in COPIED:
            source = ROOT / name
            shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
        path = copy / "optax_freeze" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"occurs {text.count(mutant.old)} times in {mutant.file}, not once"
        path.write_text(text.replace(mutant.old, mutant.new))
        environment = {**os.environ, "PYTHONPATH": directory, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()]
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    # 1 means that tests failed; any other code but 0 means that the command itself is wrong.
    return {0: "survived", 1: "killed"}.get(
        done.returncode, f"pytest exited with {done.returncode}: {done.stdout[-500:]}"
    )


def main(names: list[str]) -> int:
    """Runs the mutants, one per core at a time, and returns how many were not killed."""
    chosen = [m for m in MUTANTS if not names or any(name in m.file or name in m.old for name in names)]
    left = 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for mutant, outcome in zip(chosen, pool.map(run, chosen), strict=True):
            left += outcome != "killed"
            print(f"{outcome:9} {mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r}", flush=True)
    print(f"{len(chosen) - left} of {len(chosen)} mutants killed")
    return left


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
