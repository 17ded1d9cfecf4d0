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
    Mutant("__main__.py", ' and items <= {"trainable", "masks", "opt_state"}', "", "tests/test_main.py"),
    Mutant("_audit/diagnosis.py", '    if "again" in reacting:', "    if False:", "tests/audit -k random"),
    Mutant(
        "_audit/audit.py",
        "jnp.asarray(value, leaf.dtype) if leaf.inexact and is_number(value) else made_up(value)",
        "made_up(value)",
        "tests/test_python_numbers.py -k audit",
    ),
    Mutant("_errors.py", "return text if text.isprintable() else repr(text)", "return text", "tests/test_errors.py"),
    Mutant(
        "_errors.py",
        "map(printable, [at] if isinstance(at, str) else at)",
        "map(str, [at] if isinstance(at, str) else at)",
        "tests/test_errors.py",
    ),
    Mutant("_errors.py", "if is_int(value) and value >= least:", "if is_int(value):", "tests/test_errors.py"),
    Mutant(
        "_gradient/restrict.py",
        "jax.tree.unflatten(treedef, plan.with_sources(_tree.flatten(grads)[0], values))",
        "grads",
        "tests/state/test_dynamic_rows.py -k line_search",
    ),
    Mutant(
        "_gradient/group_gradients.py",
        "{*range(len(traced.arrays))} - own",
        "set()",
        "tests/state/test_train_step.py -k in_place",
    ),
    Mutant(
        "_gradient/group_gradients.py",
        "for number in own if number in after)",
        "for number in ())",
        "tests/state/test_train_step.py -k in_place",
    ),
    Mutant(
        "_gradient/group_gradients.py",
        "zip([*spec.frozen, False], numbers, strict=True)",
        "zip([*spec.frozen, True], numbers, strict=True)",
        "tests/state/test_train_step.py -k toggles",
    ),
    Mutant(
        "_gradient/group_gradients.py",
        "self._trains = [~jnp.asarray(each) for each in spec.frozen]",
        "self._trains = [~each for each in spec.frozen]",
        "tests/gradient/test_group_gradients.py -k constants",
    ),
    Mutant(
        "_gradient/group_gradients.py",
        "            grad = jax.tree.unflatten(jax.tree.structure(leaf), [grad])\n",
        "",
        "tests/state/test_train_step.py -k parts",
    ),
    Mutant(
        "_gradient/group_gradients.py",
        "    return selection.put(others, grad)\n",
        "    return others\n",
        "tests/gradient/test_group_gradients.py -k two_groups_of_rows",
    ),
    Mutant(
        "_gradient/group_gradients.py",
        "zeroed(values, spec.frozen, spec.selections)",
        "values",
        "tests/gradient/test_group_gradients.py -k cannot_be_traced",
    ),
    Mutant(
        "_gradient/group_gradients.py",
        "if isinstance(grad, Part) and not isinstance(value, Part):",
        "if isinstance(grad, Part):",
        "tests/state/test_train_step.py -k parts",
    ),
    Mutant(
        "_gradient/restricted_call.py",
        "self.given(inputs, True)",
        "self.given(inputs)",
        "tests/gradient/test_from_the_host.py -k reads_an_unrolled_layer_again",
    ),
    Mutant(
        "_gradient/explain.py",
        "Operation(operation_of(eqn)[0], eqn.line)",
        "Operation(eqn.primitive.name, eqn.line)",
        "tests/gradient/test_hijax.py -k primitive_of_a_user",
    ),
    Mutant(
        "_optimizer/groups.py",
        "masks[i] = selection.without(*others)",
        "masks[i] = jnp.arange(selection.count, dtype=jnp.int32)",
        "tests/state/test_dynamic_rows.py -k Groups",
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
        "tests/optimizer/test_freeze_when.py -k other_elements",
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
        "_optimizer/plan_in_state.py",
        'refuse_other_rows(value, selection, leaf.path, "params")',
        "pass",
        "tests/state/test_dynamic_rows.py -k different_partitions",
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
        "tests/gradient/test_group_gradients.py -k strict",
    ),
    Mutant(
        "_optimizer/conditions.py",
        "return (step + (rest - self.period)) // self.period % 2 == (turns + 1) % 2",
        "return (step + self.offset) // self.period % 2 == 0",
        "tests/state/test_train_step.py -k any_step",
    ),
    Mutant("_optimizer/freeze_when.py", "jnp.maximum(step, 0)", "step", "tests/state/test_train_step.py -k any_step"),
    Mutant(
        "_optimizer/freeze_when.py",
        "align_gradients(updates, params, _ALL_GRADIENTS)",
        "align_gradients(updates, params)",
        "tests/optimizer/test_freeze_when.py -k part_of_the_groups",
    ),
    Mutant(
        "_optimizer/inner_update.py",
        "if isinstance(numbers[0], bool) else",
        "if False else",
        "tests/test_model_libraries.py -k not_an_array",
    ),
    Mutant(
        "_optimizer/freeze.py",
        "[FROZEN if i in missing else selection for i, selection in enumerate(plan.selections)]",
        "plan.selections",
        "tests/test_model_libraries.py -k without_a_gradient",
    ),
    Mutant(
        "_optimizer/freeze.py",
        "negative_zero(jnp.result_type(update))",
        "negative_zero(update.dtype)",
        "tests/test_python_numbers.py -k gradients_may_be",
    ),
    Mutant(
        "_optimizer/update_call.py", " or i in self.missing", "", "tests/test_model_libraries.py -k without_a_gradient"
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
        "_optimizer/given_groups.py",
        "each = isinstance(key, Each)",
        "each = False",
        "tests/optimizer/test_freeze_when.py -k group_of_each_path",
    ),
    Mutant(
        "_optimizer/given_groups.py",
        "if each and isinstance(condition, Converged):",
        "if False:",
        "tests/test_errors.py -k compared",
    ),
    Mutant(
        "_optimizer/given_groups.py",
        "inner = next((pattern for pattern in patterns if isinstance(pattern, Each)), None)",
        "inner = None",
        "tests/test_errors.py -k wrong_call",
    ),
    Mutant(
        "_optimizer/given_groups.py",
        "if all(isinstance(pattern, str) for pattern in patterns):",
        "if False:",
        "tests/optimizer/test_freeze_when.py -k patterns_and_selectors",
    ),
    Mutant(
        "_optimizer/groups.py",
        "own = [(leaves[i].path, [i]) for i in selected] if group.each else",
        "own = [(leaves[i].path, selected) for i in selected] if group.each else",
        "tests/optimizer/test_freeze_when.py -k leaves_of_other_groups",
    ),
    Mutant(
        "_optimizer/groups.py",
        "if group.each and plan.all_frozen:",
        "if False:",
        "tests/optimizer/test_freeze_when.py -k leaves_of_other_groups",
    ),
    Mutant(
        "_optimizer/groups.py",
        "if all(plan.all_frozen for _, plan in pairs) and all(leaves[i].inexact for i in selected):",
        "if any(plan.all_frozen for _, plan in pairs) and all(leaves[i].inexact for i in selected):",
        "tests/optimizer/test_freeze_when.py -k leaves_of_other_groups",
    ),
    Mutant(
        "_optimizer/groups.py",
        "if name in made:",
        "if False:",
        "tests/test_errors.py -k named",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        "make_group_plans(given, params, tied, accepted.latest)",
        "make_group_plans(given, params, tied)",
        "tests/optimizer/test_freeze_when.py -k tree_map_params",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        'make_group_plans(groups, tree, "ignore", accepted.latest)',
        'make_group_plans(groups, tree, "ignore")',
        "tests/optimizer/test_freeze_when.py -k lone_leaf_and_no_leaf",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        "if list(dict.fromkeys(plans.keys)) != names:",
        "if False:",
        "tests/optimizer/test_freeze_when.py -k TheStateOf",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        "if plans.names != own.names:",
        "if False:",
        "tests/optimizer/test_freeze_when.py -k state_of_other_leaves_or_groups",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        "if spec.names != state.spec.names:",
        "if False:",
        "tests/optimizer/test_freeze_when.py -k TheStateOf",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        "if group.name in plans.keys or not group.each]",
        "]",
        "tests/optimizer/test_freeze_when.py -k leaves_that_cannot_train",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        "if isinstance(updates, GradientOfGroups) and coupled is not None:",
        "if isinstance(updates, GradientOfGroups) and False:",
        "tests/state/test_train_step.py -k gradient_and_the_update",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        "has_stats = n < len(plans.names) and stats_of(plans.conditions[n]) is not None",
        "has_stats = False",
        "tests/optimizer/test_freeze_converged.py -k norms_in_float32",
    ),
    Mutant(
        "_optimizer/freeze_when.py",
        "own = values if of_group is None else of_group(n)",
        "own = grads if of_group is None else of_group(n)",
        "tests/optimizer/test_freeze_converged.py -k coupled",
    ),
    Mutant(
        "_optimizer/update_unless.py",
        "jax.tree.map(_varying_as, step(carry[1]), carry[1])",
        "step(carry[1])",
        "tests/state/test_train_step.py -k ShardMap",
    ),
    Mutant(
        "_precompute/cut.py",
        "set(breadth_first_order(left_over, sink, return_predecessors=False).tolist())",
        "{*range(sink + 1)} - {*breadth_first_order(left_over.T, source, return_predecessors=False).tolist()}",
        "tests/precompute -k last_of_equal",
    ),
    Mutant(
        "_precompute/divide.py",
        "    if mixed:",
        "    if False:",
        "tests/precompute/test_example_axis.py -k refused",
    ),
    Mutant(
        "_precompute/precompute.py",
        "features.cut != division.digest",
        "len(features.cut) != len(division.digest)",
        "tests/precompute -k another_spec",
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
        'yield "" if x is None else _of_constant(x.val)',
        'yield "" if x is None else int(np.ravel(x.val)[0])',
        "tests/precompute/test_example_axis.py -k in_their_values",
    ),
    Mutant(
        "_precompute/digest.py",
        "yield from _words(value[name])",
        "yield from [value[name]] if is_int(value[name]) else _words(value[name])",
        "tests/precompute/test_example_axis.py -k in_their_values",
    ),
    Mutant("_precompute/graph.py", " and not task.eqn.has_effects", "", "tests/precompute -k runs_nothing"),
    Mutant(
        "_precompute/cut.py",
        "if node.eqn.has_effects or (not node.is_known and",
        "if (not node.is_known and",
        "tests/precompute -k runs_nothing",
    ),
    Mutant(
        "_precompute/divide.py",
        "tasks.without({key for key in at if isinstance(at[key], Mixed)})",
        "tasks",
        "tests/precompute/test_example_axis.py -k batch_alone",
    ),
    Mutant(
        "_precompute/divide.py",
        "jax.lax.stop_gradient(array) if is_frozen else array",
        "array",
        "tests/precompute -k zeros_at_what_is_frozen",
    ),
    Mutant(
        "_precompute/divide.py",
        "and self.inputs[value].is_frozen(region)",
        "",
        "tests/precompute -k training_gives_the_same",
    ),
    Mutant(
        "_precompute/inputs.py",
        "region.within(self.trainable) is None",
        "False",
        "tests/precompute -k frozen_rows_that_are_read",
    ),
    Mutant(
        "_precompute/inputs.py",
        "return is_rows and not np.intersect1d(region.numbers, self.trainable.numbers).size",
        "return is_rows",
        "tests/precompute/test_precompute.py -k scan",
    ),
    Mutant(
        "_precompute/example_axis.py",
        "            if operand.at is None and all(region == first for region in regions):",
        "            if all(region == first for region in regions):",
        "tests/precompute/test_example_axis.py -k refused",
    ),
    Mutant(
        "_precompute/example_axis.py",
        "if regions != tuple(map(at.rows, numbers)) or not operand.has(at):",
        "if regions != tuple(map(at.rows, numbers)):",
        "tests/precompute/test_example_axis.py -k looks_apart",
    ),
    Mutant(
        "_precompute/example_axis.py",
        "        return _is_one_computation(eqn, found)",
        "        return True",
        "tests/precompute/test_example_axis.py -k refused",
    ),
    Mutant(
        "_precompute/example_axis.py",
        "carry = [_Value(x.at) for x in carry]",
        "carry = list(carry)",
        "tests/precompute/test_example_axis.py -k looks_apart",
    ),
    Mutant(
        "_precompute/example_axis.py",
        "return len({row.tobytes() for row in rows}) == 1",
        "return bool((rows == rows[0]).all())",
        "tests/precompute/test_example_axis.py -k looks_apart",
    ),
    Mutant(
        "_precompute/precompute.py",
        "if selection is FROZEN and theirs is not FROZEN:",
        "if False:",
        "tests/precompute -k gradient_of_more",
    ),
    Mutant(
        "_precompute/digest.py",
        "sorted(value, key=repr) if isinstance(value, frozenset) else value",
        "value",
        "tests/precompute/test_precompute.py -k every_process",
    ),
    Mutant(
        "_precompute/digest.py",
        "return is_conversion or eqn.primitive.name in",
        "return eqn.primitive.name in",
        "tests/precompute/test_precompute.py -k may_become",
    ),
    Mutant(
        "_program/tasks.py",
        "if bit & label & ~largest]",
        "if bit & label & largest]",
        "tests/gradient/test_group_gradients.py -k groups_that_train",
    ),
    Mutant(
        "_program/tasks.py",
        "if len(labels) == 1 or not _overlap(",
        "if len(labels) == 1 and not _overlap(",
        "tests/gradient/test_group_gradients.py -k rows_cost",
    ),
    Mutant(
        "_program/tasks.py",
        "and set(apart).isdisjoint(task.read_numbers)",
        "and True",
        "tests/state/test_train_step.py -k in_place",
    ),
    Mutant(
        "_program/tasks.py",
        "if needed.isdisjoint(task.written_numbers) and",
        "if True and",
        "tests/gradient/test_group_gradients.py -k of_each_other",
    ),
    Mutant(
        "_program/tasks.py",
        "kept.update(number for i in postponed for number in self.tasks[i].read_numbers)",
        "pass",
        "tests/state/test_train_step.py -k toggles",
    ),
    Mutant(
        "_program/tasks.py",
        "for label in sorted(sets, key=lambda label: -label.bit_count()):",
        "for label in sorted(sets, key=lambda label: label.bit_count()):",
        "tests/gradient/test_group_gradients.py -k groups_that_train",
    ),
    Mutant(
        "_program/loops.py",
        "chosen = regions_apart(each, eqn.avals_out[carried + place].shape)",
        "chosen = dict.fromkeys(covering(list(each), eqn.avals_out[carried + place].shape), joined_label([each]))",
        "tests/gradient/test_group_gradients.py -k rows_cost",
    ),
    Mutant(
        "_program/schedule.py",
        "chosen = regions_apart(wanted, shape)",
        "chosen = {EVERYTHING: joined_label([wanted])}",
        "tests/gradient/test_group_gradients.py -k rows_cost",
    ),
    Mutant(
        "_program/host_array.py",
        "if is_known else _never, (*self.starts, start))",
        "if is_known else _never, (*self.starts, start * 0))",
        "tests/gradient/test_from_the_host.py -k eagerly",
    ),
    Mutant(
        "_program/host_array.py",
        "            array = jax.lax.optimization_barrier((array, beside))[0]",
        "            pass",
        "tests/gradient/test_from_the_host.py -k reads_an_unrolled_layer_again",
    ),
    Mutant(
        "_program/host_array.py",
        "FEWEST_AXES = 3",
        "FEWEST_AXES = 2",
        "tests/gradient/test_from_the_host.py -k a_matrix_is_brought",
    ),
    Mutant(
        "_program/late.py",
        'name not in ("gather", "scan")',
        'name != "scan"',
        "tests/gradient/test_from_the_host.py -k Explain",
    ),
    Mutant(
        "_program/host_array.py",
        "        return jax.vmap(sliced, [0 if here else None for here in mapped])(to_device(array), *starts), True",
        "        return jax.vmap(sliced, [0 if here else None for here in mapped])(array, *starts), True",
        "tests/gradient/test_from_the_host.py -k vmap_over_indices",
    ),
    Mutant(
        "_program/loops.py",
        " if p < loop.consts and EVERYTHING in self.body.given.get(p, ())}",
        " if False}",
        "tests/gradient/test_from_the_host.py -k what_a_loop_would_read",
    ),
    Mutant(
        "_program/loops.py",
        "        return row.read(EVERYTHING) if EVERYTHING in given and LAZY not in given else row",
        "        return row.read(EVERYTHING)",
        "tests/gradient/test_from_the_host.py -k groups",
    ),
    Mutant(
        "_program/residuals.py",
        '[:: -1 if eqn.params["reverse"] else 1]',
        "[::-1]",
        "tests/gradient/test_from_the_host.py -k index",
    ),
    Mutant(
        "_program/residuals.py",
        '[:: -1 if eqn.params["reverse"] else 1]',
        "",
        "tests/gradient/test_from_the_host.py -k count",
    ),
    Mutant(
        "_program/residuals.py",
        "    return again if is_cheap and (",
        "    return None if is_cheap and (",
        "tests/gradient/test_from_the_host.py -k brings_no_stack",
    ),
    Mutant(
        "_program/schedule.py",
        '        return name == "shard_map" and self.late is not None and loops.shard_map(self, eqn, wanted)',
        "        return False",
        "tests/gradient/test_from_the_host.py -k shard_map",
    ),
    Mutant(
        "_program/dependence.py",
        '[:: -1 if eqn.params["reverse"] else 1]',
        "",
        "tests/precompute -k counts_with_its_length",
    ),
    Mutant(
        "_program/loops.py",
        "return self.walk.known is None or is_known",
        "return True",
        "tests/precompute -k step_by_step",
    ),
    Mutant(
        "_program/loops.py",
        ".any(0)) + 1).tolist(), self.known_stop}",
        ".any(0)) + 1).tolist()}",
        "tests/precompute -k counts_with_its_length",
    ),
    Mutant(
        "_program/schedule.py",
        "enter_remat=self.known is None",
        "enter_remat=True",
        "tests/precompute -k remat_in_a_step",
    ),
    Mutant(
        "_gradient/restricted_call.py",
        "if EVERYTHING not in wanted.get(i, ())",
        "if False",
        "tests/gradient/test_restrict.py -k put_together",
    ),
    Mutant("_program/operations.py", " mulhi name ", " name ", "tests/program/test_operations.py -k elementwise"),
    Mutant(
        "_program/operations.py",
        "wanted[0].axis not in axes",
        "False",
        "tests/precompute/test_example_axis.py -k refused",
    ),
    Mutant(
        "_program/trace.py",
        '_REMAT = ("checkpoint", "remat", "remat2", "RematTraced")',
        '_REMAT = ("checkpoint", "remat", "remat2")',
        "tests/gradient/test_hijax.py -k what",
    ),
    Mutant(
        "_program/trace.py",
        'is_name = name == "CheckpointName"',
        "is_name = False",
        "tests/gradient/test_hijax.py -k checkpoint_name",
    ),
    Mutant(
        "_program/trace.py",
        "return named or any(map(is_reference, self.avals_in))",
        "return named",
        "tests/gradient/test_hijax.py -k right_or_refused",
    ),
    Mutant(
        "_program/operations.py",
        "region if aval.shape and aval.shape[region.axis] == size else EVERYTHING for aval",
        "EVERYTHING for aval",
        "tests/program/test_operations.py -k add",
    ),
    Mutant(
        "_program/operations.py",
        "if region.axis in axes and aval.shape[axes.index(region.axis)] == shape[region.axis]:",
        "if region.axis in axes:",
        "tests/program/test_operations.py -k broadcast",
    ),
    Mutant(
        "_program/operations.py",
        'region.along(eqn.params["permutation"][region.axis])',
        'region.along(eqn.params["permutation"].index(region.axis))',
        "tests/program/test_operations.py -k transpose",
    ),
    Mutant(
        "_program/operations.py",
        "return [region.along(kept[region.axis])], functools.partial(eqn.bind, **_laid_out(eqn, region))",
        "return [region.along(region.axis)], functools.partial(eqn.bind, **_laid_out(eqn, region))",
        "tests/program/test_operations.py -k squeeze",
    ),
    Mutant(
        "_program/operations.py",
        "(numbers[:, None] * each + np.arange(each, dtype=np.int32)).reshape(-1)",
        "(numbers[:, None] + size * np.arange(each, dtype=np.int32)).reshape(-1)",
        "tests/program/test_operations.py -k reshape",
    ),
    Mutant("_program/operations.py", "            and length > 1\n", "", "tests/program/test_operations.py -k reshape"),
    Mutant(
        "_program/operations.py",
        "coarse = np.unique(numbers // each)",
        "coarse = numbers // each",
        "tests/program/test_operations.py -k reshape",
    ),
    Mutant(
        "_program/operations.py",
        "if old_inner == inner and length == size:",
        "if False:",
        "tests/program/test_operations.py -k reshape",
    ),
    Mutant(
        "_program/operations.py",
        "repeats = math.prod(new[first : region.axis])",
        "repeats = math.prod(new[: region.axis])",
        "tests/program/test_operations.py -k reshape",
    ),
    Mutant(
        "_program/operations.py",
        "rows: Region = Rows(axis, start[axis] + step * region.numbers)",
        "rows: Region = Rows(axis, start[axis] + region.numbers)",
        "tests/program/test_operations.py -k slice",
    ),
    Mutant(
        "_program/operations.py",
        '"strides": _at(strides, axis, 1),',
        '"strides": strides,',
        "tests/program/test_operations.py -k slice",
    ),
    Mutant(
        "_program/operations.py",
        "rows = region.shifted(start[axis])",
        "rows = region",
        "tests/program/test_operations.py -k slice",
    ),
    Mutant(
        "_program/operations.py",
        "- 1 - region.numbers[::-1])",
        "- 1 - region.numbers)",
        "tests/program/test_operations.py -k rev",
    ),
    Mutant(
        "_program/operations.py",
        "inside = region.shifted(-low)",
        "inside = region",
        "tests/program/test_operations.py -k pad",
    ),
    Mutant(
        "_program/operations.py",
        "return jnp.where(_where_rows((i >= 0) & (i < size), x.ndim, axis), x, value)",
        "return x",
        "tests/program/test_operations.py -k pad",
    ),
    Mutant(
        "_program/operations.py",
        "valid = (rest == 0) & (found >= 0) & (found < size)",
        "valid = (found >= 0) & (found < size)",
        "tests/program/test_operations.py -k pad",
    ),
    Mutant(
        "_program/operations.py",
        "edges = (first, region.count - 1 - last, max(steps, default=1) - 1)",
        "edges = (first, region.count - 1 - last, 0)",
        "tests/program/test_operations.py -k pad",
    ),
    Mutant(
        "_program/operations.py",
        "order = np.full(region.count, len(positions))",
        "order = np.zeros(region.count, int)",
        "tests/program/test_operations.py -k pad",
    ),
    Mutant(
        "_program/operations.py",
        "if axis != dimension:\n        return [region] * len(eqn.inputs), eqn.bind",
        "if False:\n        return None",
        "tests/program/test_operations.py -k concatenate",
    ),
    Mutant(
        "_program/operations.py",
        "(region.numbers >= a) & (region.numbers < b)] - a",
        "(region.numbers >= a) & (region.numbers < b)]",
        "tests/program/test_operations.py -k concatenate",
    ),
    Mutant(
        "_program/operations.py",
        "region.shifted(-a) if a < b else None for a, b in spans",
        "region.shifted(-a) for a, b in spans",
        "tests/program/test_operations.py -k concatenate",
    ),
    Mutant(
        "_program/operations.py",
        "region.indices >= a, out.ndim, axis), part, out)",
        "region.indices > a, out.ndim, axis), part, out)",
        "tests/program/test_operations.py -k concatenate",
    ),
    Mutant(
        "_program/operations.py",
        "start = sum(sizes[:place])",
        "start = sum(sizes[: place + 1])",
        "tests/program/test_operations.py -k split",
    ),
    Mutant(
        "_program/operations.py",
        "region.axis + (region.axis >= axis)",
        "region.axis",
        "tests/program/test_operations.py -k unstack",
    ),
    Mutant(
        "_program/operations.py",
        "region.indices.astype(dtype), new, (dimension,)",
        "jnp.arange(region.count).astype(dtype), new, (dimension,)",
        "tests/program/test_operations.py -k iota",
    ),
    Mutant(
        "_program/operations.py",
        "else range(last + 1)",
        "else range(first, last + 1)",
        "tests/program/test_operations.py -k cumsum",
    ),
    Mutant(
        "_program/operations.py",
        "run = range(first, eqn.avals_in[0].shape[axis]) if reverse",
        "run = range(last + 1) if reverse",
        "tests/program/test_operations.py -k cumsum",
    ),
    Mutant(
        "_program/operations.py",
        '    axes.pop(eqn.params.get("dimension", eqn.params.get("axis", -1)))\n',
        "",
        "tests/program/test_operations.py -k sort",
    ),
    Mutant(
        "_program/operations.py",
        "any(region != wanted[0] for region in wanted)",
        "False",
        "tests/program/test_schedule.py -k without_a_rule",
    ),
    Mutant(
        "_program/operations.py",
        "if region.axis < len(batch_left):",
        "if False:",
        "tests/program/test_operations.py -k dot",
    ),
    Mutant(
        "_program/operations.py",
        "region.along(batch_right[region.axis])], bind",
        "region.along(batch_left[region.axis])], bind",
        "tests/program/test_operations.py -k dot",
    ),
    Mutant(
        "_program/operations.py",
        'eqn.params["feature_group_count"] != 1',
        "False",
        "tests/program/test_operations.py -k conv",
    ),
    Mutant(
        "_program/operations.py",
        "return [EVERYTHING, region.along(numbers.rhs_spec[0])], eqn.bind",
        "return None",
        "tests/program/test_operations.py -k conv",
    ),
    Mutant(
        "_program/operations.py",
        "start = min(max(start, 0), shape[axis] - sizes[axis])",
        "start = max(start, 0)",
        "tests/program/test_operations.py -k dynamic_slice",
    ),
    Mutant(
        "_program/operations.py",
        "jnp.clip(starts[axis], jnp.zeros((), dtype), jnp.asarray(last, dtype)).astype(jnp.int32)",
        "starts[axis].astype(jnp.int32)",
        "tests/program/test_operations.py -k dynamic_update_slice",
    ),
    Mutant(
        "_program/operations.py",
        "(place >= 0) & (place < update.shape[axis])",
        "(place >= 0)",
        "tests/program/test_operations.py -k dynamic_update_slice",
    ),
    Mutant(
        "_program/operations.py",
        "if sizes[of_operand] != operand[of_operand]:",
        "if False:",
        "tests/program/test_operations.py -k gather",
    ),
    Mutant(
        "_program/operations.py",
        "of_operand = region.along(numbers.operand_batching_dims[place])",
        "pass",
        "tests/program/test_operations.py -k take_along",
    ),
    Mutant(
        "_program/operations.py",
        "region.along(of_indices), region.along(of_updates[of_indices])",
        "region.along(of_indices), EVERYTHING",
        "tests/program/test_operations.py -k batch",
    ),
    Mutant(
        "_program/operations.py",
        "if axis in windows and updates[windows[axis]] == operand[axis]:",
        "if axis in windows:",
        "tests/program/test_operations.py -k blocks",
    ),
    Mutant(
        "_program/operations.py",
        'changed: dict[str, Any] = {"mode": jax.lax.GatherScatterMode.FILL_OR_DROP}',
        "changed: dict[str, Any] = {}",
        "tests/program/test_operations.py -k scatter",
    ),
    Mutant(
        "_program/operations.py",
        "jnp.issubdtype(indices.dtype, jnp.unsignedinteger) or indices.dtype.itemsize < 4",
        "False",
        "tests/program/test_operations.py -k scatter",
    ),
    Mutant(
        "_program/operations.py",
        "indices = jnp.clip(indices, 0, last)",
        "indices = jnp.maximum(indices, 0)",
        "tests/program/test_operations.py -k clip",
    ),
    Mutant(
        "_program/operations.py",
        "indices = jnp.clip(indices, 0, last)",
        "pass",
        "tests/program/test_operations.py -k clip",
    ),
    Mutant(
        "_program/operations.py",
        "inside = (start >= 0) & (start <= last[component])",
        "inside = start >= 0",
        "tests/program/test_operations.py -k blocks",
    ),
    Mutant(
        "_program/operations.py",
        "order = [*of_updates, windows[axis], *others]",
        "order = [*of_updates, *others, windows[axis]]",
        "tests/program/test_operations.py -k blocks",
    ),
    Mutant(
        "_program/operations.py",
        "given = [x for x, region in zip(operands, needed, strict=True) if region is not None]",
        "given = operands",
        "tests/program/test_operations.py -k barrier",
    ),
    Mutant(
        "_program/regions.py",
        "jnp.where(i >= start, i - start, -1) if start else i, start == 0",
        "i - start, start == 0",
        "tests/program/test_operations.py -k scatter",
    ),
    Mutant(
        "_program/regions.py",
        "jnp.where((i >= 0) & (i < size), position, -1), False",
        "position, False",
        "tests/program/test_schedule.py -k find",
    ),
    Mutant(
        "_program/regions.py",
        "(positions.size and positions[-1] >= other.count) or not np.array_equal(",
        "(positions.size and positions[-1] >= other.count) or np.array_equal([], ",
        "tests/program/test_schedule.py -k TestRegions",
    ),
    Mutant(
        "_program/regions.py",
        "len(found) > 1 and math.fsum(region.share(shape) for region in found) >= 1",
        "False",
        "tests/program/test_schedule.py -k covering",
    ),
    Mutant(
        "_program/regions.py",
        "rows[region.axis] | region if region.axis in rows else region",
        "region",
        "tests/program/test_schedule.py -k covering",
    ),
    Mutant("_program/regions.py", "elif region not in others:", "else:", "tests/program/test_schedule.py -k covering"),
    Mutant(
        "_program/regions.py",
        "return self.axis, id(self.numbers), self.offset",
        "return self.axis, id(self.numbers)",
        "tests/program/test_schedule.py -k dynamic_rows_out",
    ),
    Mutant(
        "_program/regions.py",
        "return array, int(rows.numbers[0] - positions.numbers[0])",
        "return array, 0",
        "tests/program/test_schedule.py -k test_values",
    ),
    Mutant(
        "_program/regions.py",
        "new._stored = {number: dict(self._stored[number]) for number in numbers}",
        "new._stored = {number: self._stored[number] for number in numbers}",
        "tests/program/test_schedule.py -k test_values",
    ),
    Mutant(
        "_program/regions.py",
        "return int(self.numbers[0]) + self.step * jnp.arange",
        "return int(self.numbers[0]) + jnp.arange",
        "tests/program/test_schedule.py -k find",
    ),
    Mutant(
        "_program/loops.py",
        "step(state, (stop - 1 - n if reverse else start + n, {}))[0]",
        "step(state, (stop - 1 - n if reverse else n, {}))[0]",
        "tests/program/test_loops.py -k known",
    ),
    Mutant(
        "_program/loops.py",
        "functools.reduce(jnp.maximum, [each[-1] for each in numbers]) + 1, stop)",
        "functools.reduce(jnp.minimum, [each[-1] for each in numbers]) + 1, stop)",
        "tests/program/test_loops.py -k two",
    ),
    Mutant(
        "_program/loops.py",
        "[each[0] for each in numbers]",
        "[each[-1] for each in numbers]",
        "tests/program/test_loops.py -k test_steps",
    ),
    Mutant(
        "_program/loops.py",
        "if len(i) == 1:\n            (carry, buffers), ys = step",
        "if len(i) == 1 and not self.ends_early:\n            (carry, buffers), ys = step",
        "tests/program/test_loops.py -k known",
    ),
    Mutant(
        "_program/loops.py",
        "self.ends_early = not any(carry) and is_dynamic",
        "self.ends_early = is_dynamic",
        "tests/program/test_loops.py -k test_steps",
    ),
    Mutant(
        "_program/loops.py",
        "is_dynamic = all(o in self.conditions for o in self.outputs)",
        "is_dynamic = False",
        "tests/program/test_loops.py -k dynamic",
    ),
    Mutant("_program/loops.py", 'if not eqn.params["length"]:', "if False:", "tests/program/test_loops.py -k others"),
    Mutant(
        "_program/loops.py",
        "if not segment.outputs and not any(carry) and not self.eqn.has_effects:",
        "if False:",
        "tests/program/test_loops.py -k start",
    ),
    Mutant(
        "_program/loops.py",
        "segments = segments[::-1] if self.reverse else segments",
        "",
        "tests/program/test_loops.py -k test_steps",
    ),
    Mutant(
        "_program/loops.py",
        "if len(segments) > _MOST_SEGMENTS:",
        "if False:",
        "tests/program/test_loops.py -k segments",
    ),
    Mutant(
        "_program/loops.py",
        "earlier = {o for other in segments[:n] for o in other.outputs}",
        "earlier = set()",
        "tests/program/test_loops.py -k test_steps",
    ),
    Mutant(
        "_program/loops.py",
        "before = int(np.searchsorted(o.steps.numbers, self.steps.start)) - self.steps.start",
        "before = -self.steps.start",
        "tests/program/test_loops.py -k test_steps",
    ),
    Mutant(
        "_program/loops.py",
        "if joined == carry and found == labels:",
        "if True:",
        "tests/program/test_loops.py -k carry",
    ),
    Mutant(
        "_program/loops.py",
        "if len(self.numbers.numbers) == 1:\n                return carry, needed, labels",
        "if False:\n                return carry, needed, labels",
        "tests/program/test_loops.py -k needs_more",
    ),
    Mutant(
        "_program/loops.py",
        "place = jnp.argmax(steps[o]) if o in steps else i + before",
        "place = i + before",
        "tests/program/test_loops.py -k dynamic",
    ),
    Mutant(
        "_program/loops.py",
        "hits[o] if o.label in (ALWAYS, self.label) else hits[o] & context.holds(o.label)",
        "hits[o]",
        "tests/program/test_schedule.py -k regions_of_a_loop",
    ),
    Mutant(
        "_program/loops.py",
        "dynamic = {o: (id(o.dynamic.numbers), o.label)",
        "dynamic = {o: (0, 0)",
        "tests/program/test_loops.py -k dynamic",
    ),
    Mutant(
        "_program/loops.py",
        "label = label & ~bit | output.label if label >= 0 and label & bit else label",
        "label = label",
        "tests/program/test_schedule.py -k regions_of_a_loop",
    ),
    Mutant(
        "_program/loops.py",
        "i - begins, 0, keepdims=False)",
        "i, 0, keepdims=False)",
        "tests/program/test_loops.py -k part",
    ),
    Mutant(
        "_program/loops.py",
        'eqn.params.get("branches_platforms") is not None or eqn.has_effects',
        'eqn.params.get("branches_platforms") is not None',
        "tests/program/test_loops.py -k effects",
    ),
    Mutant(
        "_program/loops.py",
        "for branch in branches for region in branch.given.get(place, ())]",
        "for branch in branches[:1] for region in branch.given.get(place, ())]",
        "tests/program/test_loops.py -k branches",
    ),
    Mutant(
        "_program/schedule.py",
        "wanted[region] = wanted.get(region, 0) | label",
        "wanted[region] = label",
        "tests/program/test_schedule.py -k TestLabels",
    ),
    Mutant(
        "_program/schedule.py",
        "if not any(wanted) and not eqn.has_effects:",
        "if not any(wanted):",
        "tests/program/test_loops.py -k effects",
    ),
    Mutant(
        "_program/schedule.py",
        "if not any(wanted) and not eqn.has_effects:",
        "if False:",
        "tests/program/test_schedule.py -k not_wanted",
    ),
    Mutant(
        "_program/tasks.py",
        "sorted(sets, key=lambda label: -label.bit_count())",
        "sorted(sets, key=lambda label: label.bit_count())",
        "tests/program/test_schedule.py -k TestLabels",
    ),
    Mutant(
        "_program/tasks.py",
        "read = {number for task in others for number in task.read_numbers} | kept",
        "read = kept",
        "tests/program/test_schedule.py -k TestLabels",
    ),
    Mutant("_program/tasks.py", "kept if not sets else None)", "None)", "tests/program/test_schedule.py -k dropped"),
    Mutant(
        "_program/tasks.py",
        "if kept is not None and number not in kept:",
        "if kept is not None:",
        "tests/program/test_schedule.py -k dropped",
    ),
    Mutant("_program/tasks.py", "kept if not sets else None)", "kept)", "tests/program/test_schedule.py -k TestLabels"),
    Mutant(
        "_program/trace.py",
        "behind = [i for i, value in enumerate(inputs) if prevent[i] and isinstance(value, int)]",
        "behind = []",
        "tests/program/test_schedule.py -k remat",
    ),
    Mutant(
        "_program/trace.py",
        'any(params.get("donated_invars", ()))',
        "False",
        "tests/program/test_schedule.py -k donated",
    ),
    Mutant(
        "_program/trace.py",
        'if any(type(s).__name__ != "UnspecifiedValue" for s in shardings) or',
        "if",
        "tests/program/test_schedule.py -k donated",
    ),
    Mutant(
        "_program/trace.py",
        "here = eqn.source_info.name_stack if stack is None else stack + eqn.source_info.name_stack",
        "here = eqn.source_info.name_stack",
        "tests/program/test_schedule.py -k entered",
    ),
    Mutant(
        "_program/trace.py",
        "if name in _REMAT and enter_remat:",
        "if name in _REMAT:",
        "tests/program/test_schedule.py -k remat",
    ),
    Mutant(
        "_program/tasks.py",
        "with self.eqn.source.scope(), self.eqn.context.manager:",
        "with self.eqn.context.manager:",
        "tests/program/test_schedule.py -k source_and_context",
    ),
    Mutant(
        "_report/stored_shapes.py",
        "child.name.isascii() and child.name.isdigit()",
        "child.name.isdigit()",
        "tests/test_main.py",
    ),
    Mutant(
        "_report/summary.py",
        "self.frozen_elements, self.frozen_bytes)",
        "self.frozen_elements, self.trainable_bytes)",
        "tests/report/test_summary.py",
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
        "_report/stored_shapes.py",
        "return {name: files[shard][name] for name, shard in shards.items()}",
        "return {name: leaf for file in files.values() for name, leaf in file.items()}",
        "tests/test_main.py -k which_file",
    ),
    Mutant("_report/stored_shapes.py", "if name not in files[shard]:", "if False:", "tests/test_main.py -k which_file"),
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
    Mutant("_report/stored_shapes.py", '"F4": "float4_e2m1fn",', "", "tests/test_main.py -k dtypes_of_safetensors"),
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
    Mutant("_spec/labels.py", "scaled(factor**i)", "scaled(factor * i)", "tests/spec/test_labels.py"),
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
        "_spec/plan.py",
        "values=values_of(part, selection), trains=None, source=None)",
        "values=values_of(part, selection), trains=None)",
        "tests/state/test_dynamic_rows.py -k line_search",
    ),
    Mutant(
        "_spec/partition.py",
        'refuse_other_rows(change, selection, paths()[i], "updates")',
        "pass",
        "tests/state/test_dynamic_rows.py -k outside_of_a_program",
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
        "_spec/partition.py",
        "return is_number(change) and repr(change) == repr(no_change(change))",
        "return True",
        "tests/test_model_libraries.py -k number_that_is_moved",
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
    Mutant("_spec/tree.py", "return is_number(value) or bool(", "return bool(", "tests/precompute -k weak_types"),
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
    Mutant("_spec/selection_record.py", "before[1] < after[0]", "True", "tests/test_checkpoint.py -k Damaged"),
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
    Mutant("_spec/labels.py", "if is_array(word) or not", "if not", "tests/spec/test_labels.py -k bad_arguments"),
    Mutant(
        "_spec/labels.py", "if isinstance(word, Selector):", "if False:", "tests/spec/test_labels.py -k of_selectors"
    ),
    Mutant(
        "_spec/labels.py",
        'not 0 < factor < float("inf")',
        "not 0 < factor",
        "tests/spec/test_labels.py -k bad_arguments",
    ),
    Mutant("_spec/labels.py", "if not _is_rate(base):", "if False:", "tests/spec/test_labels.py -k bad_arguments"),
    Mutant("_state/migrate.py", "', '.join(map(printable, addresses))", "', '.join(addresses)", "tests/test_errors.py"),
    Mutant(
        "_state/migrate.py",
        "        _refuse_swapped(state, tx, params, error)",
        "        pass",
        "tests/state/test_migrate.py -k parameters_first",
    ),
    Mutant(
        "_state/entries.py",
        'of_wrapper=getattr(inner, "shape", None) == ()',
        "of_wrapper=False",
        "tests/state/test_dynamic_rows.py -k wrappers",
    ),
    Mutant(
        "_state/carry.py",
        'stays = (jnp.take(a, position, mode="clip") == b) & (b < size)',
        "stays = b < size",
        "tests/state/test_dynamic_rows.py -k stay_keep",
    ),
    Mutant(
        "_state/carry.py",
        " & (b < size)",
        "",
        "tests/state/test_dynamic_rows.py -k are_no_row",
    ),
    Mutant(
        "_state/carry.py",
        "source.kept for i in moments for source",
        "source.kept for i in moments[:1] for source",
        "tests/state/test_dynamic_rows.py -k all_rows_change",
    ),
    Mutant(
        "_state/carry.py",
        "if not isinstance(anew, bool):",
        "if False:",
        "tests/state/test_dynamic_rows.py::TestEveryOptimizer::test_the_first_step_on_new_rows_and_the_state_of_some[adan]",
    ),
    Mutant(
        "_state/carry.py",
        "if entry.leaf is not None or _is_number(entry) else False",
        "if entry.leaf is None and _is_number(entry) else False",
        "tests/state/test_dynamic_rows.py::TestEveryOptimizer::test_the_first_step_on_new_rows_and_the_state_of_some[novograd]",
    ),
    Mutant(
        "_state/carry.py",
        "if entry.leaf is None and any(axis is not None for axis in axes) and not",
        "if False and not",
        "tests/state/test_dynamic_rows.py::TestEveryOptimizer::test_the_first_step_on_new_rows_and_the_state_of_some[flatten]",
    ),
    Mutant(
        "_state/carry.py",
        "return len(rows) == len(others) and known",
        "return len(rows) == len(others)",
        "tests/state/test_dynamic_rows.py -k array_of_several",
    ),
    Mutant(
        "_state/carry.py",
        " or any(_is_history(entries[i]) for i in moments)",
        "",
        "tests/state/test_dynamic_rows.py -k a_history_begins_anew_with",
    ),
    Mutant(
        "_state/carry.py",
        "bool(entries[i].arrays or olds[i]) for i",
        "False for i",
        "tests/state/test_dynamic_rows.py -k where_other_leaves",
    ),
    Mutant(
        "_state/carry.py",
        '{"grad", "value"} <= fields or ',
        "",
        "tests/state/test_dynamic_rows.py -k computes_its_gradient",
    ),
    Mutant(
        "_state/carry.py",
        "[old if axis is None else self._move(axis, new, old)",
        "[new if axis is None else self._move(axis, new, old)",
        "tests/state/test_dynamic_rows.py -k several_arrays_for_a_leaf_move",
    ),
    Mutant(
        "_state/row_axes.py",
        "[its is node.spec.leaves for its in made]",
        "[its == node.spec.leaves for its in made]",
        "tests/state/test_dynamic_rows.py -k several_states",
    ),
    Mutant(
        "_state/replace_masks.py",
        "old._replace(spec=new.spec)",
        "old",
        "tests/state/test_dynamic_rows.py -k without_static_data",
    ),
    Mutant(
        "_state/replace_masks.py",
        "if np.shape(got) != np.shape(expected):",
        "if False:",
        "tests/state/test_dynamic_rows.py -k TestOtherStates",
    ),
    Mutant(
        "_state/replace_masks.py",
        "return jax.device_put(new, old.sharding) if is_concrete(old) and old.committed else new",
        "return new",
        "tests/state/test_dynamic_rows.py -k in_host_memory",
    ),
    Mutant(
        "_state/replace_masks.py",
        "_new_masks(plan, new) if old.groups[name].masks != () else []",
        "_new_masks(plan, new)",
        "tests/state/test_dynamic_rows.py -k remainder_of_its_leaf",
    ),
    Mutant(
        "_state/migrate.py",
        "if first[id(array)] == i else",
        "if True else",
        "tests/state/test_migrate.py -k of_leaves_that_trained",
    ),
    Mutant(
        "_optimizer/groups.py",
        "with jax.ensure_compile_time_eval():",
        "if True:",
        "tests/optimizer/test_freeze_when.py -k left_of_the_leaf",
    ),
    Mutant(
        "_state/set_frozen.py",
        "own = [name] if name in known else by_key.get(name, [])",
        "own = [name] if name in known else []",
        "tests/optimizer/test_freeze_when.py -k set_by_path_or_together",
    ),
    Mutant(
        "_state/set_frozen.py",
        "own = [name] if name in known else by_key.get(name, [])",
        "own = by_key.get(name, [])",
        "tests/optimizer/test_freeze_when.py -k set_by_path_or_together",
    ),
    Mutant(
        "_state/train_step.py",
        "and updates_in_place(tx):",
        "and True:",
        "tests/state/test_train_step.py -k other_transformations",
    ),
    Mutant("_verify/bits.py", "functools.reduce(jnp.logical_or,", "functools.reduce(jnp.logical_and,", "tests/verify"),
    Mutant(
        "_verify/frozen_leaves.py",
        "        value = np.asarray(value, jnp.result_type(value)) if is_number(value) else value\n",
        "",
        "tests/test_python_numbers.py -k bits_of_frozen",
    ),
    Mutant(
        "_verify/base_record.py",
        'record["format"].number(1)',
        'record["format"].number(0)',
        "tests/test_checkpoint.py -k Damaged",
    ),
    Mutant(
        "_verify/base_record.py",
        " and len(value) == 8 * LANES",
        "",
        "tests/test_checkpoint.py -k Damaged",
    ),
    Mutant(
        "_verify/base_record.py",
        "if len({record.path for record in records}) < len(records):",
        "if False:",
        "tests/test_checkpoint.py -k Damaged",
    ),
    Mutant(
        "_verify/base_record.py",
        "struct.shape if is_numeric else None",
        "struct.shape",
        "tests/test_checkpoint.py -k Damaged",
    ),
    Mutant(
        "_verify/base_record.py",
        "lambda value: is_int(value) and value >= least",
        "lambda value: isinstance(value, (int, float)) and value >= least",
        "tests/test_checkpoint.py -k Damaged",
    ),
    Mutant(
        "_spec/selection_record.py",
        "is_int(count) and 0 < count <= math.prod(shape) if compact else count is None",
        "is_int(count) if compact else count is None",
        "tests/test_checkpoint.py -k Damaged",
    ),
    Mutant(
        "_verify/base_record.py",
        'frozen = {"frozen": record_of(self.selection),',
        'frozen = {"frozen": repr(self.selection.as_spec()),',
        "tests/test_features.py -k however",
    ),
    Mutant(
        "checkpoint/__init__.py",
        "    arrays = {name: jnp.asarray(array) if is_number(array) else array for name, array in arrays.items()}\n",
        "",
        "tests/test_python_numbers.py -k checkpoint",
    ),
    Mutant(
        "checkpoint/__init__.py",
        'for character in "*?[")',
        "for character in ())",
        "tests/test_checkpoint.py -k wildcards",
    ),
    Mutant("features/_record.py", "        lock.acquire()", "        pass", "tests/test_features.py -k one_writer"),
    Mutant(
        "features/_record.py", "            os.unlink(file)", "            pass", "tests/test_features.py -k one_writer"
    ),
    Mutant("features/_record.py", "import filelock\n", "import fcntl, filelock\n", "tests/test_package.py -k declared"),
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
        "linen/_frozen_call.py", 'return ["params", *self.stats,', 'return ["params",', "tests/test_linen.py -k stat"
    ),
    Mutant(
        "nnx.py",
        "seen = _thawed(variable) if isinstance(variable, FrozenParam) else variable",
        "seen = variable",
        "tests/test_nnx.py -k filter",
    ),
    Mutant("nnx.py", " and not isinstance(n, _Stored)]", "]", "tests/test_nnx.py -k threads"),
    Mutant(
        "nnx.py",
        "original = {} if param.type is nnx.Param else {_ORIGINAL_TYPE: param.type}",
        "original = {} if type(param) is nnx.Param else {_ORIGINAL_TYPE: type(param)}",
        "tests/test_nnx.py -k freeze_and_thaw_hijax",
    ),
    Mutant(
        "nnx.py",
        "param = _thawed(self, hijax=False)",
        "param = _thawed(self)",
        "tests/test_nnx.py -k freeze_and_thaw_hijax",
    ),
    Mutant(
        "nnx.py",
        "        return variable.get_raw_value()",
        "        pass",
        "tests/test_nnx.py -k freeze_and_thaw_hijax",
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
