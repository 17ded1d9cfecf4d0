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
    Mutant(
        "features/_record.py",
        "        lock.acquire()",
        "        pass",
        "tests/test_features.py -k one_writer",
    ),
    Mutant(
        "features/_record.py",
        "            os.unlink(file)",
        "            pass",
        "tests/test_features.py -k one_writer",
    ),
    Mutant(
        "features/_record.py",
        "import filelock\n",
        "import fcntl, filelock\n",
        "tests/test_package.py -k declared",
    ),
    Mutant(
        "_spec/source.py",
        "is_traced and self.trace != _current_trace() else self",
        "False else self",
        "tests/state/test_dynamic_rows.py -k what_jit_remembers",
    ),
    Mutant(
        "_spec/source.py",
        "is_traced and self.trace != _current_trace() else self",
        "is_traced else self",
        "tests/state/test_dynamic_rows.py -k outside_of_a_program",
    ),
    Mutant(
        "_spec/source.py",
        "if _same(mine.array, its.array):",
        "if True:",
        "tests/state/test_dynamic_rows.py -k outside_of_a_program",
    ),
    Mutant(
        "_spec/source.py",
        'of_one_spec = name == "trainable" or not',
        "of_one_spec = not",
        "tests/state/test_dynamic_rows.py -k different_partitions",
    ),
    Mutant(
        "_spec/source.py",
        "(mine.of_state and its.of_state and mine.array is None):",
        "(mine.of_state and its.of_state):",
        "tests/state/test_dynamic_rows.py -k inside_of_a_program_only",
    ),
    Mutant(
        "_spec/source.py",
        "selection.of_state and not isinstance(beside, Tracer)",
        "selection.of_state",
        "tests/state/test_dynamic_rows.py -k inside_of_a_program_only",
    ),
    Mutant(
        "_spec/plan.py",
        "s.with_array(x, of_state=True)",
        "s.with_array(x)",
        "tests/state/test_dynamic_rows.py -k inside_of_a_program_only",
    ),
    Mutant(
        "_spec/plan.py",
        "values=values_of(part, selection), trains=None",
        "trains=None",
        "tests/state/test_dynamic_rows.py -k inside_of_a_program_only",
    ),
    Mutant(
        "_state/replace_masks.py",
        " & (new.array < new.size)",
        "",
        "tests/state/test_dynamic_rows.py -k are_no_row",
    ),
    Mutant(
        "_spec/plan.py",
        "values=values_of(part, selection), trains=None, source=None)",
        "values=values_of(part, selection), trains=None)",
        "tests/state/test_dynamic_rows.py -k line_search",
    ),
    Mutant(
        "_optimizer/plan_in_state.py",
        'refuse_other_rows(value, selection, leaf.path, "params")',
        "pass",
        "tests/state/test_dynamic_rows.py -k different_partitions",
    ),
    Mutant(
        "_spec/partition.py",
        'refuse_other_rows(change, selection, paths()[i], "updates")',
        "pass",
        "tests/state/test_dynamic_rows.py -k outside_of_a_program",
    ),
    Mutant(
        "_optimizer/update_call.py",
        "new = plans.whole.with_sources(new, self.values)",
        "pass",
        "tests/state/test_dynamic_rows.py -k structure_of_their_gradients",
    ),
    Mutant(
        "_optimizer/freeze.py",
        "new = jax.tree.unflatten(treedef, plan.with_sources(new, values))",
        "new = jax.tree.unflatten(treedef, new)",
        "tests/state/test_dynamic_rows.py -k structure_of_their_gradients",
    ),
    Mutant(
        "_gradient/groups_now.py",
        "_refuse_constant_rows(spec, params)\n    if",
        "if",
        "tests/state/test_dynamic_rows.py -k constant_of_the_program",
    ),
    Mutant(
        "_gradient/restrict.py",
        "jax.tree.unflatten(treedef, plan.with_sources(_tree.flatten(grads)[0], values))",
        "grads",
        "tests/state/test_dynamic_rows.py -k line_search",
    ),
    Mutant(
        "_spec/fit_mask.py",
        "return jnp.nonzero(trains, size=count, fill_value=size)[0]",
        "return jnp.nonzero(trains, size=count)[0]",
        "tests/state/test_dynamic_rows.py -k given_twice",
    ),
    Mutant(
        "_spec/fit_mask.py",
        "named = named.astype(jnp.int32) if named.dtype.itemsize < 4 else named",
        "pass",
        "tests/state/test_dynamic_rows.py -k given_twice",
    ),
    Mutant(
        "_spec/fit_mask.py",
        "return array if is_concrete(array) else numbers",
        "return array",
        "tests/state/test_dynamic_rows.py -k outside_of_a_program",
    ),
    Mutant(
        "_optimizer/convergence.py",
        "            new[i] = so_far",
        "            new[i] = frozen[i]",
        "tests/state/test_train_step.py -k any_flags",
    ),
    Mutant(
        "_optimizer/convergence.py",
        "        new[last] = False",
        "        new[last] = frozen[last]",
        "tests/state/test_train_step.py -k any_flags",
    ),
    Mutant(
        "_optimizer/convergence.py",
        "            old = old._replace(converged=~trained)\n",
        "",
        "tests/optimizer/test_freeze_converged.py -k freeze_from_the_input_end",
    ),
    Mutant(
        "_optimizer/convergence.py",
        "old.updates + counts.astype(jnp.int32)",
        "old.updates + counts",
        "tests/gradient/test_groups_now.py -k strict",
    ),
    Mutant(
        "_optimizer/conditions.py",
        "return (step + (rest - self.period)) // self.period % 2 == (turns + 1) % 2",
        "return (step + self.offset) // self.period % 2 == 0",
        "tests/state/test_train_step.py -k any_step",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        "jnp.maximum(step, 0)",
        "step",
        "tests/state/test_train_step.py -k any_step",
    ),
    Mutant(
        "_gradient/groups_now.py",
        "jnp.all(now[None] |",
        "jnp.all(now |",
        "tests/gradient/test_groups_now.py -k strict",
    ),
    Mutant(
        "_optimizer/update_unless.py",
        "return jnp.ones_like(carry[0]), step(carry[1])",
        "return True, step(carry[1])",
        "tests/state/test_train_step.py -k each_device_with",
    ),
    Mutant(
        "_optimizer/update_unless.py",
        "return jnp.ones_like(carry[0]), step(carry[1])",
        "return ~carry[0], step(carry[1])",
        "tests/optimizer/test_update_params.py -k size_of_a_leaf",
    ),
    Mutant(
        "_optimizer/update_unless.py",
        "(varies(new) | varies(frozen)) - varies(old)",
        "varies(new) - varies(old)",
        "tests/state/test_train_step.py -k each_device_with",
    ),
    Mutant(
        "_optimizer/update_unless.py",
        "(varies(new) | varies(frozen)) - varies(old)",
        "varies(frozen) - varies(old)",
        "tests/state/test_train_step.py -k each_device_has_rows",
    ),
    Mutant(
        "_state/replace_masks.py",
        "nodes[i] = jnp.where(anew[_place(entry)], jnp.full_like(entry.value, start.number), entry.value)",
        "nodes[i] = entry.value",
        "tests/state/test_dynamic_rows.py::TestEveryOptimizer::test_the_first_step_on_new_rows_and_the_state_of_some[adan]",
    ),
    Mutant(
        "_state/replace_masks.py",
        "return values if anew is None else jnp.where(anew, jnp.full_like(values, initial.number), values)",
        "return values",
        "tests/state/test_dynamic_rows.py::TestEveryOptimizer::test_the_first_step_on_new_rows_and_the_state_of_some[novograd]",
    ),
    Mutant(
        "_state/replace_masks.py",
        "elif start is not None and start.axis is not None:",
        "elif False:",
        "tests/state/test_dynamic_rows.py::TestEveryOptimizer::test_the_first_step_on_new_rows_and_the_state_of_some[flatten]",
    ),
    Mutant(
        "_state/replace_masks.py",
        "if start is None or start.number is None:",
        "if False:",
        "tests/state/test_dynamic_rows.py -k depends_on",
    ),
    Mutant(
        "_state/replace_masks.py",
        "if _is_number(entry) and all(inside) and not all(named):",
        "if False:",
        "tests/state/test_dynamic_rows.py -k another_container",
    ),
    Mutant(
        "_state/entries.py",
        'of_wrapper=getattr(inner, "shape", None) == ()',
        "of_wrapper=False",
        "tests/state/test_dynamic_rows.py -k wrappers",
    ),
    Mutant(
        "_state/migrate.py",
        "elif entry.leaf is None and _contains_other_rows(entry, old):",
        "elif False:",
        "tests/state/test_dynamic_rows.py -k array_of_several",
    ),
    Mutant(
        "_state/migrate.py",
        "elif entry.leaf is not None and _is_shared_by_rows(entry, old):",
        "elif False:",
        "tests/state/test_dynamic_rows.py -k static_rows_migrate",
    ),
    Mutant(
        "_state/migrate.py",
        "return len(shapes) == 2 and shapes[0] == shapes[1] and _same_axes(new, old)",
        "return False",
        "tests/state/test_dynamic_rows.py -k static_rows_migrate",
    ),
    Mutant(
        "_state/entries.py",
        "is_one_array = isinstance(node, Part) and len(jax.tree.leaves(node)) == 1",
        "is_one_array = isinstance(node, Part)",
        "tests/state/test_dynamic_rows.py -k arrays_for_a_leaf_migrate",
    ),
    Mutant(
        "_report/summary.py",
        'of_others = self.extent == "nothing" and self.frozen_elements',
        "of_others = False",
        "tests/report/test_summary.py -k freezes_nothing_or",
    ),
    Mutant(
        "_report/summary.py",
        'of_others = self.extent == "nothing" and self.frozen_elements',
        'of_others = self.extent == "nothing"',
        "tests/report/test_summary.py -k never_train",
    ),
    Mutant(
        "_report/stored_shapes.py",
        "if archive.namelist() and not names:",
        "if not names:",
        "tests/test_main.py -k without_leaves",
    ),
    Mutant(
        "_report/summary.py",
        "[leaf.inexact for leaf in plan.leaves]",
        "[leaf.dtype for leaf in plan.leaves]",
        "tests/report/test_summary.py",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        "align_gradients(updates, params, _ALL_GRADIENTS)",
        "align_gradients(updates, params)",
        "tests/optimizer/test_freeze_when.py -k part_of_the_groups",
    ),
    Mutant(
        "_spec/partition.py",
        "return is_number(change) and repr(change) == repr(no_change(change))",
        "return True",
        "tests/test_model_libraries.py -k number_that_is_moved",
    ),
    Mutant(
        "_optimizer/inner_update.py",
        "if isinstance(numbers[0], bool) else",
        "if False else",
        "tests/test_model_libraries.py -k not_an_array",
    ),
    Mutant(
        "_spec/partition.py",
        "        return complex(-0.0, -0.0)\n",
        "        return 0j\n",
        "tests/spec/test_partition.py -k python_numbers",
    ),
    Mutant(
        "_spec/tree.py",
        "    if is_number(value):\n        return Leaf(path, (), jnp.result_type(value))\n",
        "",
        "tests/test_python_numbers.py -k not_differentiated",
    ),
    Mutant(
        "_spec/tree.py",
        "            described[i] = Leaf(self.paths[i])\n",
        "            pass\n",
        "tests/test_model_libraries.py -k settings",
    ),
    Mutant(
        "_spec/tree.py",
        "start += len(inside) if isinstance(node, module) else 1",
        "start += 1",
        "tests/test_model_libraries.py -k settings",
    ),
    Mutant(
        "_spec/tree.py",
        "return is_number(value) or bool(",
        "return bool(",
        "tests/precompute -k weak_types",
    ),
    Mutant(
        "_spec/plan.py",
        "if selection is not FROZEN and not (_is_missing(value) and i in numbers()):",
        "if selection is not FROZEN:",
        "tests/test_model_libraries.py -k without_a_gradient",
    ),
    Mutant(
        "_spec/plan.py",
        "if selection is not FROZEN and not (_is_missing(value) and i in numbers()):",
        "if selection is not FROZEN and not _is_missing(value):",
        "tests/test_model_libraries.py -k still_an_error",
    ),
    Mutant(
        "_spec/plan.py",
        "[jnp.asarray(value) if is_number(value) else value for value in self.take(values)]",
        "self.take(values)",
        "tests/test_python_numbers.py -k eager-float]",
    ),
    Mutant(
        "_spec/partition.py",
        "return is_number(change) and repr(change) == repr(no_change(change))",
        "return is_number(change) and change == 0",
        "tests/test_python_numbers.py -k added_to",
    ),
    Mutant(
        "_spec/partition.py",
        " or isinstance(value, Part) or is_number(value)",
        " or isinstance(value, Part)",
        "tests/test_python_numbers.py -k comes_back",
    ),
    Mutant(
        "_spec/partition.py",
        "jnp.shape(b.array), b.selection.part_index",
        "b.array.shape, b.selection.part_index",
        "tests/test_python_numbers.py -k eager-float]",
    ),
    Mutant(
        "_optimizer/freeze.py",
        "[FROZEN if i in missing else selection for i, selection in enumerate(plan.selections)]",
        "plan.selections",
        "tests/test_model_libraries.py -k without_a_gradient",
    ),
    Mutant(
        "_optimizer/freeze.py",
        'plan.align(updates, "updates", params=params)',
        'plan.align(updates, "updates")',
        "tests/test_model_libraries.py -k without_a_gradient",
    ),
    Mutant(
        "_optimizer/freeze.py",
        "negative_zero(jnp.result_type(update))",
        "negative_zero(update.dtype)",
        "tests/test_python_numbers.py -k gradients_may_be",
    ),
    Mutant(
        "_optimizer/update_call.py",
        " or i in self.missing",
        "",
        "tests/test_model_libraries.py -k without_a_gradient",
    ),
    Mutant(
        "_optimizer/update_call.py",
        " and i not in self.missing",
        "",
        "tests/test_model_libraries.py -k without_a_gradient",
    ),
    Mutant(
        "_optimizer/update_unless.py",
        "    old = jnp.asarray(old, new.dtype) if is_number(old) else old\n",
        "",
        "tests/test_python_numbers.py -k closes_over",
    ),
    Mutant(
        "_gradient/groups_now.py",
        "jnp.zeros((), jnp.result_type(x))",
        "jnp.zeros((), x.dtype)",
        "tests/test_python_numbers.py -k gradients_may_be",
    ),
    Mutant(
        "_gradient/groups_now.py",
        "jnp.zeros((), jnp.result_type(value))",
        "jnp.zeros((), value.dtype)",
        "tests/test_python_numbers.py -k eager-float]",
    ),
    Mutant(
        "_verify/frozen_leaves.py",
        "        value = np.asarray(value, jnp.result_type(value)) if is_number(value) else value\n",
        "",
        "tests/test_python_numbers.py -k bits_of_frozen",
    ),
    Mutant(
        "_audit/audit.py",
        "jnp.asarray(value, leaf.dtype) if leaf.inexact and is_number(value) else made_up(value)",
        "made_up(value)",
        "tests/test_python_numbers.py -k audit",
    ),
    Mutant(
        "_precompute/digest.py",
        " or _changes_weak_type_alone(program, node)",
        "",
        "tests/precompute/test_precompute.py -k may_become",
    ),
    Mutant(
        "checkpoint/__init__.py",
        "    arrays = {name: jnp.asarray(array) if is_number(array) else array for name, array in arrays.items()}\n",
        "",
        "tests/test_python_numbers.py -k checkpoint",
    ),
    Mutant(
        "_precompute/divide.py",
        "given.append(Layout(axis if is_batch else None))\n        if is_batch:",
        "given.append(Layout(axis if is_batch and shape else None))\n        if is_batch and shape:",
        "tests/precompute/test_example_axis.py -k all_examples_share",
    ),
    Mutant(
        "_precompute/batch_size.py",
        "for few in range(len(names) + 1)",
        "for few in range(1)",
        "tests/precompute/test_example_axis.py -k size_of_the_batch",
    ),
    Mutant(
        "_precompute/batch_size.py",
        "itertools.chain(by_argument, itertools.product(*choices))",
        "by_argument",
        "tests/precompute/test_example_axis.py -k size_of_the_batch",
    ),
    Mutant(
        "_precompute/batch_size.py",
        "for k in range(1, len(here) + 1)",
        "for k in range(1, 2)",
        "tests/precompute/test_example_axis.py -k size_of_the_batch",
    ),
    Mutant(
        "_precompute/digest.py",
        "return repr(value).translate(_WITHOUT_DIGITS)",
        "return repr(value)",
        "tests/precompute/test_example_axis.py -k in_their_values",
    ),
    Mutant(
        "_precompute/digest.py",
        "    if isinstance(value, (int, float)):\n        return _of_value(value)\n",
        "    if isinstance(value, (int, float)):\n        return repr(value)\n",
        "tests/precompute/test_example_axis.py -k in_their_values",
    ),
    Mutant(
        "features/_batches.py",
        "        if count == 0:\n",
        "        if count is False:\n",
        "tests/test_features.py -k batches_that_do_not_fit",
    ),
    Mutant(
        "features/_batches.py",
        "for shapes in candidates if known is None else [known]:",
        "for shapes in [self._shapes] if known is None else [known]:",
        "tests/test_features.py -k labels_fit",
    ),
    Mutant(
        "features/_batches.py",
        "if known is not None or len(errors) == 1:",
        "if known is not None or errors:",
        "tests/test_features.py -k batches_that_do_not_fit",
    ),
    Mutant(
        "features/__init__.py",
        "isinstance(batches, (str, Mapping))",
        "isinstance(batches, str)",
        "tests/test_features.py -k batches_that_do_not_fit",
    ),
    Mutant(
        "features/_record.py",
        '"frozen": record_of(selection),',
        '"frozen": repr(selection.as_spec()),',
        "tests/test_features.py -k however",
    ),
    Mutant(
        "features/_record.py",
        '("leaves", _selections_of), ',
        "",
        "tests/test_features.py -k damaged",
    ),
    Mutant(
        "_spec/selection.py",
        "in [(trains, True), (~trains, False)]",
        "in [(trains, True)]",
        "tests/spec/test_masks.py -k does_not_grow_with_the_rows",
    ),
    Mutant(
        "_spec/selection.py",
        "if runs is None or len(runs) > _FEW:",
        "if runs is None:",
        "tests/spec/test_masks.py -k however",
    ),
    Mutant(
        "_spec/selection_record.py",
        "before[1] < after[0]",
        "True",
        "tests/test_checkpoint.py -k Damaged",
    ),
    Mutant(
        "_spec/selection_record.py",
        "record_of(index.canonical()) == record",
        "True",
        "tests/spec/test_masks.py -k record_of_no_selection",
    ),
    Mutant(
        "_spec/selection_record.py",
        "0 < index.count < index.size and ",
        "",
        "tests/spec/test_masks.py -k record_of_no_selection",
    ),
    Mutant(
        "_gradient/with_rows.py",
        "return set_rows(index.axis, index.indices(*array), jnp.zeros(shape, rows.dtype), rows)",
        "return index.with_array(*array).spread(Part(rows, index, shape), np.zeros((), rows.dtype))",
        "tests/test_dtypes.py -k grad-bfloat16",
    ),
    Mutant(
        "_gradient/split_array.py",
        "rows)\n        if self.in_jvp:",
        "rows)\n        if False:",
        "tests/test_dtypes.py -k restrict-bfloat16",
    ),
    Mutant(
        "_gradient/interpreter.py",
        "        if not _needs_value(error):\n            raise\n",
        "",
        "tests/gradient/test_rules.py -k error_of_the_function_is_its_own",
    ),
    Mutant(
        "_gradient/interpreter.py",
        "return _needs_value(error.__cause__ or error.__context__)",
        "return False",
        "tests/gradient/test_rules.py -k needs_a_value_is_called_again",
    ),
    Mutant(
        "_gradient/rules_products.py",
        "return InRows(eqn.bind if other_axis is None else _with_cut(eqn, x.index, 1 - mine, other_axis), out)",
        "return InRows(lambda *v: _with_cut(eqn, x.index, 1 - mine, other_axis)(*v), out)",
        "tests/test_strict_modes.py -k leaks",
    ),
    Mutant(
        "_gradient/dynamic_row_scan.py",
        "return (_refusing_a_second(found._replace(xs=xs)),)",
        "return (found._replace(xs=xs),)",
        "tests/gradient/test_dynamic_row_scan.py -k over_reverse",
    ),
    Mutant(
        "_report/stored_shapes.py",
        "return {name: files[shard][name] for name, shard in shards.items()}",
        "return {name: leaf for file in files.values() for name, leaf in file.items()}",
        "tests/test_main.py -k which_file",
    ),
    Mutant(
        "_report/stored_shapes.py",
        "if name not in files[shard]:",
        "if False:",
        "tests/test_main.py -k which_file",
    ),
    Mutant(
        "_report/stored_shapes.py",
        "{leaf.path: value for leaf, value in zip(_tree.leaves(tree), ",
        "{path: value for path, value in zip(_tree.paths(tree), ",
        "tests/test_main.py -k one_path",
    ),
    Mutant(
        "_report/stored_shapes.py",
        "it is damaged ({in_one_line(error)})",
        "it is damaged",
        "tests/test_main.py -k reason",
    ),
    Mutant(
        "_report/stored_shapes.py",
        '"F4": "float4_e2m1fn",',
        "",
        "tests/test_main.py -k dtypes_of_safetensors",
    ),
    Mutant(
        "_spec/labels.py",
        "if is_array(word) or not",
        "if not",
        "tests/spec/test_labels.py -k bad_arguments",
    ),
    Mutant(
        "_spec/labels.py",
        "if isinstance(word, Selector):",
        "if False:",
        "tests/spec/test_labels.py -k of_selectors",
    ),
    Mutant(
        "_spec/labels.py",
        'not 0 < factor < float("inf")',
        "not 0 < factor",
        "tests/spec/test_labels.py -k bad_arguments",
    ),
    Mutant(
        "_spec/labels.py",
        "if not _is_rate(base):",
        "if False:",
        "tests/spec/test_labels.py -k bad_arguments",
    ),
    Mutant(
        "nnx.py",
        " and not isinstance(n, _Stored)]",
        "]",
        "tests/test_nnx.py -k threads",
    ),
    Mutant(
        "checkpoint/__init__.py",
        'for character in "*?[")',
        "for character in ())",
        "tests/test_checkpoint.py -k wildcards",
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
