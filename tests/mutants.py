"""Mutation tests: one-line changes of the package that must make a test fail. Run with `make mutants`.

Each mutant replaces one piece of source text in a copy of the working tree, and then runs the tests listed with it. If
they pass, the mutant survives: no test checks this behaviour. A run takes about half an hour on two cores and is not
part of `make test`. `tests/mutants.py NAME...` runs the mutants whose file or source text contains one of the names.
"""

import concurrent.futures
import os
import pathlib
import shlex
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


# For each file, and the tests that notice most of its mutants: the text, its replacement, and the selection of these
# tests, or others.
_BY_FILE = {
    ("__main__.py", "tests/test_main.py"): [(' and items <= {"trainable", "masks", "opt_state"}', "", "")],
    ("_audit/audit.py", "tests/test_python_numbers.py"): [
        ("jnp.asarray(value, leaf.dtype) if leaf.inexact and is_number(value) else made_up", "made_up", "-k audit"),
        ("params if is_optimizer(params) else frozen", "frozen", "tests/test_errors.py -k 'optimizer and first'"),
    ],
    ("_audit/optimizer_step.py", "tests/audit/test_audit.py"): [
        ("range(4) if fills", "range(3) if fills", "-k 'its_cure and finite'"),
        ("for i, fill in fills.items()}) - random", "for i, fill in fills.items()})", "-k random"),
        ("i not in turned and i not in nan]", "i not in turned]", "-k noted"),
        ("if waits or None in turned else left", "if None in turned else left", "-k 'pass and freeze_when'"),
    ],
    ("_errors.py", "tests/test_errors.py"): [
        ("map(printable, [at] if isinstance(at, str) else at)", "map(str, [at] if isinstance(at, str) else at)", ""),
        ("if is_int(value) and value >= least:", "if is_int(value):", ""),
    ],
    ("_gradient/explain.py", "tests/gradient/test_hijax.py"): [
        ("Operation(operation_of(eqn)[0],", "Operation(eqn.primitive.name,", "-k primitive_of_a_user"),
    ],
    ("_gradient/group_gradients.py", "tests/gradient/test_group_gradients.py"): [
        ("False], numbers, strict=True)", "True], numbers, strict=True)", "tests/train/test_train_step.py -k toggles"),
        ("[~jnp.asarray(each) for each", "[~each for each", "-k constants"),
        ("selection.put(others, grad)\n", "others\n", "-k two_groups_of_rows"),
        ("zeroed(values, spec.frozen, spec.selections)", "values", "-k cannot_be_traced"),
        ("(grad, Part) and not isinstance(value, Part):", "(grad, Part):", "tests/train/test_train_step.py -k parts"),
    ],
    ("_gradient/grad.py", "tests/state/test_dynamic_rows.py"): [
        (
            "plan.with_sources(plan.parts_of(_tree.flatten(grads)[0]), values)",
            "_tree.flatten(grads)[0]",
            "-k line_search",
        ),
    ],
    ("_gradient/grad.py", "tests/test_what_people_bring.py"): [
        ("treedef if stored is None else _tree.flatten(stored)[1]", "treedef", "-k 'from_state and NNX'"),
    ],
    ("_gradient/freeze_loss.py", "tests/gradient/test_freeze_loss.py"): [
        ("jax.lax.stop_gradient(x) if isinstance(x, Tracer) else x", "x", "-k 'frozen_gradients_are and leaves'"),
        ("if isinstance(selection, DynamicRowIndex):", "if False:", "tests/test_errors.py -k 'loss and trainer'"),
        ("if isinstance(frozen, GroupSpec):", "if False:", "tests/test_errors.py -k 'loss and trainer'"),
        ("of_parameters(fun, argnums, args, kwargs", "of_parameters(fun, 0, args, kwargs", "-k results_and_arguments"),
        ("call_restricted(fun, trainable, rest, complete=True)", "fun(params)", "-k 'are_zeros and grad-rows'"),
    ],
    ("_gradient/leaf_in_rows.py", "tests/gradient/test_freeze_loss.py"): [
        ("return selection.put(array, Part(rows, ", "return selection.put(array, Part(rows * 2, ", "-k second"),
        ("_rows_of(selection, *primals),", "primals[0],", "tests/gradient/test_forward_mode.py -k over_forward"),
        ("jax.jvp(put, primals, tangents)[1]", "put(*tangents)", "-k 16_bits"),
    ],
    ("_gradient/dense_gradient.py", "tests/gradient/test_freeze_loss.py"): [
        ("as_traced(grads)", "grads", "-k is_a_constant"),
    ],
    ("_gradient/custom_derivative.py", "tests/gradient/test_forward_mode.py"): [
        ("found = bind(known, [ad", "_ = bind(known, [ad", "-k 'reverse_of or forward_over_forward'"),
        ("if a is None else a + b", "if a is None else a", "-k forward_over_forward"),
        ("jnp.sum(x, 0) if dim is None else x", "x[0] if dim is None else x", "-k over_a_map"),
        ("except NoReverseModeError", "except KeyError", "-k cannot"),
    ],
    ("_gradient/restricted_call.py", "tests/gradient/test_from_the_host.py"): [
        ("self.given(inputs, True)", "self.given(inputs)", "-k reads_an_unrolled_layer_again"),
        ("else to_memory_of(given, array))", "else array)", "-k on_the_host_too"),
        ("(i in self.whole or is_mapped", "(True or is_mapped", "tests/gradient/test_restrict.py -k put_together"),
        ("as_traced([*outs", "([*outs", "tests/gradient/test_freeze_loss.py -k results_and_arguments"),
        ("if any(isinstance(const, Tracer)", "if any(False", "tests/gradient/test_restrict.py -k closes_over"),
    ],
    ("_optimizer/conditions.py", "tests/gradient/test_group_gradients.py"): [
        ("old.updates + counts.astype(jnp.int32)", "old.updates + counts", "-k strict"),
    ],
    ("_optimizer/convergence.py", "tests/optimizer/test_freeze_converged.py"): [
        ("jnp.cumsum(~settled) == 0", "settled", "-k autofreeze"),
        ("= (seen == self.every) & jnp.isfinite(total)", "= jnp.isfinite(total)", "-k whole_one"),
        ("ends = at_end & ~converged", "ends = at_end", "-k keeps_still"),
        ("), False]", "), jax.tree.leaves(states[-1])[-1]]", "tests/train/test_train_step.py -k any_flags"),
        ("jnp.stack([jnp.asarray(each) for each in frozen])", "old.converged", "-k freeze_from_the_input_end"),
    ],
    ("_optimizer/freeze.py", "tests/state/test_dynamic_rows.py"): [
        ('refuse_other_rows(value, selection, leaf.path, "params")', "pass", "-k different_partitions"),
    ],
    ("_optimizer/freeze_when.py", "tests/optimizer/test_freeze_when.py"): [
        ("jnp.maximum(step, 0)", "step", "tests/train/test_train_step.py -k any_step"),
        ("extra_args, _ALL_GRADIENTS)", "extra_args)", "tests/test_errors.py -k part"),
        ("params, tied, accepted.latest)", "params, tied)", "-k tree_map_params"),
        ("if plans.names != own.names:", "if False:", "-k state_of_other_leaves_or_groups"),
        ("if group.name in keys or not group.each]", "]", "-k leaves_that_cannot_train"),
        ("plans.conditions[n].takes_norm", "False", "tests/optimizer/test_freeze_converged.py -k norms_in_float32"),
        ("own = call.grads if", "own = grads if", "tests/optimizer/test_freeze_converged.py -k given_to_update"),
    ],
    ("_optimizer/freeze_when.py", "tests/train/test_train_step.py"): [
        ('{**extra_args, "grad": grads} if "grad" in extra_args else extra_args', "extra_args", "-k extra_arguments"),
        ("if coupled is None:\n            r", "if True:\n            r", "-k gradient_and_the_update"),
    ],
    ("_optimizer/coupled_update.py", "tests/optimizer/test_freeze_when.py"): [
        ("own), _without_frozen_groups(call, frozen, own)", "own), call", "-k over_the_groups"),
        ("zeroed_tree, with_frozen)", "zeroed_tree)", "-k over_the_groups"),
    ],
    ("_optimizer/parse_groups.py", "tests/optimizer/test_freeze_when.py"): [
        ("is_each = isinstance(key, Each)", "is_each = False", "-k group_of_each_path"),
        ("if is_each and condition.call is not None:", "if False:", "tests/test_errors.py -k compared"),
        ("if all(isinstance(pattern, str) for pattern in patterns):", "if False:", "-k threshold_on_every_leaf"),
    ],
    ("_optimizer/full_updates.py", "tests/optimizer/test_union.py"): [
        (
            "if i in call.missing or not owners[i] else",
            "if not owners[i] else",
            "tests/test_model_libraries.py -k a_gradient",
        ),
        (
            "union.with_sources(new, call.grads)",
            "new",
            "tests/state/test_dynamic_rows.py -k structure_of_their",
        ),
    ],
    ("_optimizer/group_plans.py", "tests/optimizer/test_freeze_when.py"): [
        ("all(plan.all_frozen for _, plan in", "any(plan.all_frozen for _, plan in", "-k leaves_of_other_groups"),
        ("if name in made:", "if False:", "tests/test_errors.py -k named"),
        ("with jax.ensure_compile_time_eval():  # compact elements are counted", "if True:", "-k left_of_the_leaf"),
    ],
    ("_optimizer/group_plans.py", "tests/state/test_dynamic_rows.py"): [
        ("selection.without(*others)", "jnp.arange(selection.count, dtype=jnp.int32)", "-k Groups"),
    ],
    ("_optimizer/inner_update.py", "tests/test_nnx.py"): [
        ("return store(state, plan, trainable)", "return state", "tests/optimizer/test_nnx_variables.py"),
        ("lambda new: as_before(new, state, called, plan)", "lambda new: new", "tests/optimizer/test_nnx_variables.py"),
        ("call = inside(None, fn)", "call = fn", "tests/optimizer/test_outer_transformation.py -k value_function"),
        ("if i not in self.missing:", "if True:", "tests/test_model_libraries.py -k without_a_gradient"),
    ],
    ("_optimizer/group_update.py", "tests/test_model_libraries.py"): [
        ("traced_once if is_traced", "update if is_traced", "tests/optimizer/test_leafwise.py -k share"),
        (" if i not in self.call.missing]", "]", "-k without_a_gradient"),
        (" and is_tree(plan):", ":", "tests/optimizer/test_freeze_when.py -k lone_leaf_and_no_leaf"),
    ],
    ("_optimizer/inner_update.py", "tests/train/test_train_step.py"): [
        ('{**found, "grad": updates} if call.computes_grads and "grad" in found else ', "", "-k extra_arguments"),
    ],
    ("_optimizer/inner_update.py", "tests/optimizer/test_outer_transformation.py"): [
        ("inside(Around(form.plan, _tree.flatten(updates)[1]), form.update)", "form.update", "-k whole_leaves"),
    ],
    ("_optimizer/nnx_variables.py", "tests/optimizer/test_nnx_variables.py"): [
        ("value.ndim != len(leaf.shape or ())", "False", "-k adafactor"),
        ("(plan.boxed and not is_array(_content(node)))", "False", "-k 'boxes and masked and leaf'"),
        (" or jnp.issubdtype(value.dtype, jnp.integer)", "", "-k dynamic"),
        ("value.shape == leaf.shape or mesh.empty", "True", "-k groups"),
    ],
    ("_optimizer/outer_transformation.py", "tests/optimizer/test_outer_transformation.py"): [
        ("spec is not None and differs(spec)", "spec is not None", "-k freezes_as_written"),
        ("id(array) not in before and ", "", "-k one_gradient"),
    ],
    ("_optimizer/freeze.py", "tests/optimizer/test_outer_transformation.py"): [
        ("only_freezes=True", "only_freezes=False", "-k freezes_as_written"),
        ("is_concrete(x) and is_concrete(y) and not np.array_equal(x, y)", "False", "-k other_masks"),
    ],
    ("_optimizer/union.py", "tests/optimizer/test_union.py"): [
        ("if sees_updates:", "if in_place:", "-k value_functions"),
        ("a.axis == b.axis:", "True:", "-k overlap"),
    ],
    ("_optimizer/group_state.py", "tests/optimizer/test_group_state.py"): [
        (" and not any(jax.tree.leaves(x) for i, x in enumerate(its) if i not in own)", "", "-k names_of"),
        ("is_node = _is_node if len(", "is_node = _tree.is_leaf if len(", "-k metadata"),
        ("(GroupLeaves, GroupState)", "GroupLeaves", "tests/optimizer/test_update_params.py -k other_transformations"),
        ("dataclasses.replace(node, values=array) if isinstance(node, Part) else array", "array", "-k no_pl"),
    ],
    ("_optimizer/leafwise.py", "tests/optimizer/test_leafwise.py"): [
        ("return bool(functions) and all(", "return all(", "-k another_version"),
        ("return _code(function) in leafwise", "return True", ""),
    ],
    ("_optimizer/leaf_updates.py", "tests/test_model_libraries.py"): [
        ("if isinstance(numbers[0], bool) else", "if False else", "-k not_an_array"),
        ("complex(-0.0, -0.0)\n", "0j\n", "tests/spec/test_partition.py -k python_numbers"),
        ("and repr(change) == repr(no_change(change))", "and change == 0", "tests/test_python_numbers.py -k added_to"),
    ],
    ("_optimizer/accepted_plans.py", "tests/optimizer/test_freeze.py"): [
        ("        if its != mine:", "        if False:", "-k state_of_another_spec"),
        ("        if its != mine:", "        if False:", "tests/optimizer/test_freeze_when.py -k other_elements"),
    ],
    ("_optimizer/step_conditions.py", "tests/train/test_train_step.py"): [
        ("+ (ahead - period)) // period % 2 == (turns + 1) % 2", "+ offset) // period % 2 == 0", "-k any_step"),
    ],
    ("_optimizer/skip_update.py", "tests/test_python_numbers.py"): [
        ("    old = jnp.asarray(old, new.dtype) if is_scalar(old) else old\n", "", "-k closes_over"),
        ("old) else old", "old) and type(old) is float else old", "tests/test_model_libraries.py -k bool_in"),
        ("list(map(vary_alike, new(carry[1]), carry[1])", "new(carry[1]", "tests/train/test_train_step.py -k ShardMap"),
    ],
    ("_precompute/closures.py", "tests/precompute/test_closures.py"): [
        ("if not depends.isdisjoint(eqn.outputs)", "if True", "-k computed_once"),
        ("if key not in others", "if True", "-k enclosing"),
    ],
    ("_precompute/batch_size.py", "tests/precompute/test_example_axis.py"): [
        ("itertools.chain(by_argument, itertools.product(*choices))", "by_argument", "-k size_of_the_batch"),
        ("for k in range(1, len(here) + 1)", "for k in range(1, 2)", "-k size_of_the_batch"),
    ],
    ("_precompute/cut.py", "tests/precompute"): [
        (
            "set(breadth_first_order(left_over, sink, return_predecessors=False).tolist())",
            "{*range(sink + 1)} - {*breadth_first_order(left_over.T, source, return_predecessors=False).tolist()}",
            "-k last_of_equal",
        ),
        ("if node.eqn.has_effects or (not node.is_known and", "if (not node.is_known and", "-k runs_nothing"),
    ],
    ("_precompute/precompute.py", "tests/precompute/test_precompute.py"): [
        ("return selection.put(value, trained) if is_part else value", "return value", "-k Combine"),
        ("and value.is_deleted()", "and False", "tests/test_errors.py -k together"),
    ],
    ("_precompute/words.py", "tests/precompute/test_precompute.py"): [
        ("of_constant(x.val)", "int(np.ravel(x.val)[0])", "tests/precompute/test_example_axis.py -k in_their_values"),
        ("sorted(value, key=repr) if isinstance(value, frozenset) else value", "value", "-k every_process"),
        ("return is_conversion or eqn.primitive.name ==", "return eqn.primitive.name ==", "-k may_become"),
    ],
    ("_precompute/divide.py", "tests/precompute"): [
        ("without_gradient(features, leaves)", "[*features]", "-k what_is_frozen_is_refused"),
        ("[features[i] for i in places], rows)", "[features[i] for i in places], {})", "-k not_a_number"),
        ("if all(dear[i] for i in twice)", "if True", "tests/precompute/test_precompute.py -k a_comparison"),
        ("and self.inputs[value].is_frozen(region)", "", "-k training_gives_the_same"),
    ],
    ("_precompute/divide.py", "tests/precompute/test_example_axis.py"): [
        ("tasks.without({key for key in at if isinstance(at[key], Mixed)})", "tasks", "-k batch_alone"),
    ],
    ("_precompute/example_axis.py", "tests/precompute/test_example_axis.py"): [
        ("operand.at is None and all(region == first for region in", "all(region == first for region in", "-k refused"),
        ("and all(value.has(at, self.known) for", "and all(True for", "-k refused"),
        ("return needed if _is_one_computation(eqn, found) else None", "return needed", "-k refused"),
        ("[] if len({row.tobytes() for row in rows}) == 1 else", "[] if (rows == rows[0]).all() else", "-k refused"),
    ],
    ("_precompute/graph.py", "tests/precompute"): [(" and not task.eqn.has_effects", "", "-k runs_nothing")],
    ("_precompute/inputs.py", "tests/precompute"): [
        ("which + (which < argnums) if", "which if", "tests/precompute/test_precompute.py -k another_position"),
        ("region.within(self.trainable) is None", "False", "-k frozen_rows_that_are_read"),
    ],
    ("_precompute/inputs.py", "tests/precompute/test_precompute.py"): [
        ("is_rows and not np.intersect1d(region.numbers, self.trainable.numbers).size", "is_rows", "-k scan"),
    ],
    ("_precompute/given_features.py", "tests/precompute"): [
        ("features.cut != division.digest", "len(features.cut) != len(division.digest)", "-k python_values"),
    ],
    ("_audit/probe.py", "tests/audit/test_audit_step.py"): [
        ("if self.change != ZERO and not all(given):", "if False:", "-k 'other and values'"),
        ("if len(fits) == 1:", "if fits:", "-k 'several and parts'"),
        ("self.eager.add(i)", "pass", "-k eagerly"),
    ],
    ("_audit/changed_gradients.py", "tests/audit/test_audit_step.py"): [
        ("return [i for i in inside if i not in needed], [", "return [], [", "-k leave"),
        ("if cells <= self._seen:", "if True:", "-k 'clip and outside'"),
        ("min(len(computed), _GROUPS)", "1", "-k 'by and path'"),
        ("self._set |= {", "_ = {", "-k router"),
    ],
    ("_audit/untaken_branches.py", "tests/audit/test_audit_step.py"): [("left += eqn.reads", "pass", "-k branch")],
    ("_audit/runs.py", "tests/audit/test_audit_step.py"): [
        ("rtol=0.1, atol=epsilon", "rtol=0.1, atol=0", "-k 'one and bit'"),
        ("jnp.asarray(to_device(step.start[k])) + 1", "jnp.ones_like(step.start[k])", "-k momentum"),
        ("if count or updated:", "if count:", "tests/audit/test_audit.py -k small"),
    ],
    ("_audit/diagnosis.py", "tests/audit/test_audit_step.py"): [
        ("i in gradients.set_by_batch and not", "not", "-k noise"),
        ("causes.OTHER_SPEC if other_spec else", "", "-k another"),
        ("causes.FINITE_CHECK if j in by_inf else causes.NORM", "causes.FINITE_CHECK", "-k zero"),
    ],
    ("_audit/step.py", "tests/audit/test_audit_step.py"): [
        ("return copy(leaf) if self.donates else leaf", "return leaf", "-k partition"),
        ("_graph(state) if len({id(v) for _, v in walk.variables}) < len(walk.variables) else ", "", "-k shared"),
        ("if self.objects:\n            candidates.append((given, out))", "if False:\n            pass", "-k NNX"),
        ("and id(leaf) not in seen else copy(leaf)", "else copy(leaf)", "-k average"),
    ],
    ("features/_arrays.py", "tests/test_features.py"): [
        ("if stored != size:", "if stored < size:", "-k damaged_features"),
        ("        if wrong.size:\n", "        if False:\n", "-k damaged_features"),
        ("            os.ftruncate(file.fd, file.begin + entries * file.size)\n", "", "-k become_shorter"),
        ("np.stack(variants, axis=1).reshape", "np.stack(variants, axis=0).reshape", "-k variants_that_were_stopped"),
    ],
    ("features/_sequence.py", "tests/test_features.py"): [
        ("        chosen = chosen.astype(int)  # few bits", "        # few bits", "-k few_bits"),
        ("np.random.Philox([self._seed, self._epoch])", "np.random.Philox([self._seed + self._epoch])", "-k are_drawn"),
        ("(self._directory, record, self._seed, self._epoch)", "(self._directory, record, self._seed)", "-k are_drawn"),
        ("np.r_[chosen] if", "np.arange(chosen.stop - chosen.start) if", "-k one_variant_of_each"),
    ],
    ("_optimizer/update_params.py", "tests/optimizer/test_update_params.py"): [
        ("if full is grads or not succeeds(", "if True or not succeeds(", "-k belong_inside"),
    ],
    ("_optimizer/transformation.py", "tests/optimizer/test_update_params.py"): [
        ('    __name__ = "update"\n', "", "-k name_for_named"),
    ],
    ("_program/host_lookups.py", "tests/gradient/test_from_the_host.py"): [
        ('if eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP:', "if False:", "-k 'Lookups and filled'"),
        ("and _count(indices) < operand.shape[0]", "", "-k as_many_tokens_as_rows"),
        ("_has_experts(eqn) and not _axes(eqn):", "_has_experts(eqn):", "-k may_be_divided"),
        ("is_here = ((numbers >= first) & (numbers < stop)", "is_here = (numbers < stop", "-k 'Experts and gradient'"),
    ],
    ("_memory/offload.py", "tests/memory/test_offload.py"): [
        ("(is_in_blocks(of_device) and of_device[0] == shape[0])", "is_in_blocks(of_device)", "-k test_a_table"),
    ],
    ("_spec/memory_kinds.py", "tests/memory/test_offload.py"): [
        ("shape[0] % ROWS_AT_ONCE == shape[1] % COLUMNS == 0", "shape[0] % ROWS_AT_ONCE == 0", "-k test_a_table"),
    ],
    ("_program/decisions.py", "tests/gradient/test_repeated.py"): [
        ("decides(eqn) or (any(marks) and is_cheap(eqn))", "False", "-k 'max or a_loop'"),
    ],
    ("_program/dependence.py", "tests/precompute"): [
        ("[:: -1 if loop.reverse else 1]", "", "-k counts_with_its_length"),
        ("            found.add(key)\n", "", "-k long_chain"),
    ],
    ("_program/host_array.py", "tests/gradient/test_from_the_host.py"): [
        ("block, i - start, 0", "block, i & 6, 0", "-k 'Lookups and by_index'"),
        ("(*self.starts, start), name", "(*self.starts, start * 0), name", "-k eagerly"),
        ("array = jax.lax.optimization_barrier((array, beside))[0]", "pass", "-k reads_an_unrolled_layer_again"),
        ("FEWEST_AXES = 3", "FEWEST_AXES = 2", "-k a_matrix_is_brought"),
        (" and varies(jax.typeof(beside)) <= varies(jax.typeof(array)):", ":", "-k shard_reads_twice"),
        ("in mapped])(to_device(array), *starts), True", "in mapped])(array, *starts), True", "-k vmap_over_indices"),
    ],
    ("_program/from_host.py", "tests/gradient/test_from_the_host.py"): [
        ("(jax.lax.gather_p, primitives.scan_p)", "(primitives.scan_p,)", "-k Explain"),
        ("isinstance(found, Mapped) and not eqn.has_effects", "False", "-k test_in_shard_map"),
        ("(self._decisive - self._moved).isdisjoint(eqn.outputs)", "True", "-k compared_is_computed"),
        ("isinstance(found, While)", "False", "-k while_loop"),
    ],
    ("_program/host_loops.py", "tests/gradient/test_from_the_host.py"): [
        ("if not whole:", "if True:", "-k what_a_loop_would_read"),
        ("x if isinstance(x, Deferred) and x.has_rows() else part_of", "part_of", "-k no_stack_comes"),
    ],
    ("_program/chain.py", "tests/gradient/test_from_the_host.py"): [
        ("is_here and not self.on_host and", "False and", "tests/gradient/test_dynamic_row_gradients.py -k halves"),
    ],
    ("_program/deferred.py", "tests/gradient/test_from_the_host.py"): [
        ("reader.level is not None and reader.level is self.level", "False", "-k its_row_once"),
    ],
    ("_program/propagation.py", "tests/program/test_loops.py"): [
        ("if is_same(joined, [*carry]):", "if True:", "-k carry"),
        ("if key not in known:\n            known[key]", "if True:\n            known[key]", "-k listed_once"),
    ],
    ("_program/loops.py", "tests/program/test_loops.py"): [
        ("if growths > _MOST_GROWTHS else", "if False else", "tests/gradient/test_rows.py -k Planning"),
        (
            "regions_apart(each, eqn.avals_out[carried + place].shape)",
            "dict.fromkeys(covering(list(each), eqn.avals_out[carried + place].shape), joined_guard([each]))",
            "tests/gradient/test_group_gradients.py -k rows_cost",
        ),
        ("return self.walk.known is None or is_known", "return True", "tests/precompute -k step_by_step"),
        ("+ 1).tolist(), self.known_stop}", "+ 1).tolist()}", "tests/precompute -k counts_with_its_length"),
        ("(stop - 1 - n if reverse else start + n, {}))[0]", "(stop - 1 - n if reverse else n, {}))[0]", "-k known"),
        ("functools.reduce(jnp.maximum, [each[-1] for", "functools.reduce(jnp.minimum, [each[-1] for", "-k two"),
        ("[each[0] for each in numbers]", "[each[-1] for each in numbers]", "-k test_steps"),
        ("self.ends_early = is_last and is_dynamic", "self.ends_early = is_dynamic", "-k test_steps"),
        ("if not found.length:", "if False:", "-k others"),
        ("if not segment.outputs and not any(each.region for each in carry) and", "if False and", "-k start"),
        ("if len(segments) > _MOST_SEGMENTS:", "if False:", "-k segments"),
        ("int(np.searchsorted(o.steps.numbers, part.steps.start)) - p", "-p", "-k test_steps"),
        ("if self.numbers.count == 1:\n            self.carry", "if False:\n            self.carry", "-k needs_more"),
        ("place = jnp.argmax(is_wanted[o]) if o in is_wanted else i + before", "place = i + before", "-k dynamic"),
        ("o.guard in (ALWAYS, part.guard)", "True", "tests/program/test_walk.py -k regions_of_a_loop"),
        ("dynamic = {o: (o.dynamic, o.guard)", "dynamic = {o: (0, 0)", "-k dynamic"),
        ("if guard >= 0 and guard & bit", "if False", "tests/program/test_walk.py -k regions_of_a_loop"),
        ("place = i - begins", "place = i", "-k part"),
        ("if found.by_platform or eqn.has_effects:", "if found.by_platform:", "-k effects"),
        ("branches for region in", "branches[:1] for region in", "-k branches"),
    ],
    ("_program/operations.py", "tests/program/test_operations.py"): [
        ("region.count * sum(a < b for a, b in spans) > edges[-1]", "False", "tests/gradient/test_cost.py -k split"),
        ("math.prod(eqn.avals_in[1].shape[:-1]) > skipped", "False", "tests/gradient/test_cost.py -k sort"),
        (" mulhi ne ", " ne ", "-k elementwise"),
        (" and is_known_primitive(eqn.primitive)", "", "-k not_known"),
        ("found.params.issuperset(eqn.params) and ", "", "-k another_release"),
        ("range(_rank(eqn)) if eqn.avals_in[0].dtype == _independent_keys() else ()", "range(_rank(eqn))", "-k random"),
        ("if eqn.avals_in[0].dtype == _independent_keys() else None", "", "-k fold_in"),
        ("wanted[0].axis not in axes", "False", "tests/precompute/test_example_axis.py -k refused"),
        ("region if aval.shape and aval.shape[region.axis] == size else EVERYTHING for", "EVERYTHING for", "-k add"),
        ("in axes and aval.shape[axes.index(region.axis)] == shape[region.axis]:", "in axes:", "-k broadcast"),
        ('eqn.params["permutation"][region.axis])', 'eqn.params["permutation"].index(region.axis))', "-k transpose"),
        ("[region.along(kept[region.axis])],", "[region.along(region.axis)],", "-k squeeze"),
        ("length <= 1 or ", "", "-k reshape"),
        ("coarse = np.unique(region.numbers // each)", "coarse = region.numbers // each", "-k reshape"),
        ("repeats = math.prod(new[first : region.axis])", "repeats = math.prod(new[: region.axis])", "-k reshape"),
        ("= Rows(axis, start[axis] + step * region.numbers)", "= Rows(axis, start[axis] + region.numbers)", "-k slice"),
        ('"strides": _at(strides, axis, 1),', '"strides": strides,', "-k slice"),
        ("- 1 - region.numbers[::-1])", "- 1 - region.numbers)", "-k rev"),
        ("return jnp.where(of_each_row((i >= 0) & (i < size), axis, x.ndim), x, value)", "return x", "-k pad"),
        ("valid = (rest == 0) & (found >= 0) & (found < size)", "valid = (found >= 0) & (found < size)", "-k pad"),
        ("region.count - 1 - last, max(steps, default=1) - 1)", "region.count - 1 - last, 0)", "-k pad"),
        ("axis != dimension:\n        return [region] * len(", "False:\n        return len(", "-k concatenate"),
        ("if a < b else None for a, b in spans", "for a, b in spans", "-k concatenate"),
        (">= a, axis, out.ndim), part, out)", "> a, axis, out.ndim), part, out)", "-k concatenate"),
        ("start = sum(sizes[:place])", "start = sum(sizes[: place + 1])", "-k split"),
        ("region.axis + (region.axis >= axis)", "region.axis", "-k unstack"),
        ("region.indices.astype(dtype), new,", "jnp.arange(region.count).astype(dtype), new,", "-k iota"),
        ("run = range(first, eqn.avals_in[0].shape[axis]) if reverse", "run = range(last + 1) if reverse", "-k cumsum"),
        (' - {eqn.params["dimension"]}', "", "-k sort"),
        ("any(region != wanted[0] for region in wanted)", "False", "tests/program/test_walk.py -k without_a_rule"),
        ("[region.along(axes[region.axis]) for axes in batch]", "[region.along(batch[0][region.axis])] * 2", "-k dot"),
        ('eqn.params["feature_group_count"] != 1', "False", "-k conv"),
        ("start = min(max(start, 0), shape[axis] - sizes[axis])", "start = max(start, 0)", "-k dynamic_slice"),
        (
            "clipped(starts[axis], operand[axis] - update.shape[axis])",
            "starts[axis].astype(jnp.int32)",
            "-k dynamic_update_slice",
        ),
        ("(place >= 0) & (place < update.shape[axis])", "(place >= 0)", "-k dynamic_update_slice"),
        ("if sizes[of_operand] != operand[of_operand]:", "if False:", "-k gather"),
        ("of_operand = region.along(numbers.operand_batching_dims[place])", "pass", "-k take_along"),
        ("region.along(of_updates[of_indices])", "EVERYTHING", "-k batch"),
        ("if axis in windows and updates[windows[axis]] == operand[axis]:", "if axis in windows:", "-k blocks"),
        ('dict[str, Any] = {"mode": jax.lax.GatherScatterMode.FILL_OR_DROP}', "dict[str, Any] = {}", "-k scatter"),
        ("jnp.issubdtype(indices.dtype, jnp.unsignedinteger) or indices.dtype.itemsize < 4", "False", "-k scatter"),
        ("clipped(indices[..., i], end)", "jnp.maximum(indices[..., i], 0)", "-k clip"),
        ("clipped(indices[..., i], end", "jnp.clip(indices[..., i].astype(jnp.int32), 0, end", "tests/fuzz -k beyond"),
        ("inside = (start >= 0) & (start <= last[component])", "inside = start >= 0", "-k blocks"),
        ("= [x for x, region in zip(operands, needed, strict=True) if region is not None]", "= operands", "-k barrier"),
    ],
    ("_program/regions.py", "tests/program/test_walk.py"): [
        ("return i - start, start == 0", "return i, start == 0", "tests/program/test_operations.py -k scatter"),
        ("jnp.where((i >= 0) & (i < size), position, -1), False", "position, False", "-k find"),
        (">= other.count) or not np.array_equal(", ">= other.count) or np.array_equal([], ", "-k TestRegions"),
        ("len(found) > 1 and math.fsum(region.share(shape) for region in found) >= 1", "False", "-k covering"),
        ("rows[region.axis] | region if region.axis in rows else region", "region", "-k covering"),
        ("first.setdefault(id(array), n)", "n", "tests/gradient/test_dynamic_row_gradients.py -k one_mask"),
        ("else id(self.numbers), self.steps", "else id(self.numbers), 0", "-k dynamic_rows_out"),
        ("self.numbers if self.is_named else id", "id", "-k name_of_numbers"),
        ("        if not self._is_clamped:", "        if True:", "-k equal_rows"),
        ("is_unique=not exist", "is_unique=True", "tests/gradient/test_dynamic_row_gradients.py -k unique"),
        ("return array, int(rows.numbers[0] - positions.numbers[0])", "return array, 0", "-k test_values"),
        ("dict(self._stored[number]) for number in", "self._stored[number] for number in", "-k test_values"),
        ("return int(self.numbers[0]) + self.step * jnp.arange", "return int(self.numbers[0]) + jnp.arange", "-k find"),
    ],
    ("_program/recompute.py", "tests/gradient/test_from_the_host.py"): [
        ("[:: -1 if loop.reverse else 1]", "[::-1]", "-k index"),
        ("    return again if is_cheap and (", "    return None if is_cheap and (", "-k no_stack_comes"),
        ('if dtype.kind not in "iu":', "if False:", "tests/gradient/test_repeated.py -k counters"),
    ],
    ("_program/materialized.py", "tests/test_benchmarks.py -k SmallestCases"): [
        ("(shares - 1) *", "1e9 *", ""),
        ("    @if_undecided(False)\n", "", "tests/program/test_symbolic.py"),
    ],
    ("_program/walk.py", "tests/gradient/test_from_the_host.py"): [
        ("and found.regions[0] is EVERYTHING", "and False", "tests/gradient/test_explain.py -k one_by_one"),
        ("for r in asked]) if is_named else found", "for r in asked]) if False else found", "tests/program -k name_of"),
        ("if without_rule and eqn.primitive is jax.lax.top_k_p:", "if False:", "tests/fuzz -k largest"),
        ("_NEARLY_WHOLE = 0.95", "_NEARLY_WHOLE = 0.98", "tests/fuzz -k maxima"),
        ("            is_few &= ", "            is_few |= ", "tests/gradient/test_cost.py -k tree_of_slices"),
        ("if more := walk.compared_in_part() - compared:", "if more := ():", "tests/fuzz -k maxima"),
        ("        compared |= more\n", "        compared = more\n", "tests/gradient/test_rows.py -k Planning"),
        ("        if key not in self.inner.programs:", "        if True:", "tests/gradient/test_rows.py -k Planning"),
        ("region is not EVERYTHING or sum(", "sum(", "tests/gradient/test_cost.py -k several_times"),
        ("or not is_less:", "or False:", "tests/gradient/test_cost.py -k several_times"),
        (" and not overlap(list(wanted), shape)", "", "tests/program/test_walk.py -k few_times"),
        ("loops.shard_map(self, eqn, found, wanted)", "False", "tests/gradient/test_rows.py -k mapped_loss"),
        ("enter_remat=self.known is None", "enter_remat=True", "tests/precompute -k remat_in_a_step"),
        ("= wanted.get(region, 0) | guard", "= guard", "tests/program/test_walk.py -k TestGuards"),
        ("any(wanted) and not eqn.has_effects and ", "any(wanted) and ", "tests/program/test_loops.py -k effects"),
    ],
    ("_program/tasks.py", "tests/gradient/test_group_gradients.py"): [
        ("guard & ~largest)", "guard & largest)", "-k groups_that_train"),
        ("or n in inputs[guard]", "or True", "tests/train/test_train_step.py -k in_place"),
        ("== 1 or not overlap(", "== 1 and not overlap(", "-k rows_cost"),
        ("own and needed[guard].isdisjoint(task.written_numbers):", "own:", "-k of_each_other"),
        ("kept = {*kept, *(", "kept = {*(", "tests/train/test_train_step.py -k toggles"),
        ("lambda guard: -guard", "lambda guard: guard", "tests/program/test_walk.py -k TestGuards"),
        ("in kept or read_by.get(number, set()) - {guard}}", "in kept}", "tests/program/test_walk.py -k TestGuards"),
        ("kept if not sets else None)", "None)", "tests/program/test_walk.py -k dropped"),
    ],
    ("_jax_tracing.py", "tests/gradient/test_restrict.py"): [
        ("is_of_text and not _is_of_user(error)", "is_of_text", "-k words_of_jax"),
        ("not is_of_jax and frame", "frame", "-k value_is_needed"),
    ],
    ("_jax_internals.py", "tests/program/test_walk.py"): [
        (' or "jvp_jaxpr_fun" in params', "", "tests/precompute/test_closures.py -k refused"),
        ('"remat", "remat2", "RematTraced")', '"remat", "remat2")', "tests/gradient/test_hijax.py -k what"),
        ('if name == "CheckpointName" else', "if False else", "tests/gradient/test_hijax.py -k checkpoint_name"),
        ('if params.get("differentiated") else False', "if False else False", "-k remat"),
        ('return any(type(s).__name__ != "UnspecifiedValue" for s in shardings) or', "return", "-k donated"),
        ("info.name_stack if stack is None else stack + info.name_stack", "info.name_stack", "-k entered"),
        ("if name in _REMAT and enter_remat:", "if name in _REMAT:", "-k remat"),
        ("(enter_placed or not", "(not", "tests/audit/test_audit_step.py -k 'Linen or statistics'"),
        (
            "user_context(self.traceback, name_stack=current_name_stack() + self.name_stack), self.settings",
            "self.settings",
            "-k source_and_context",
        ),
        ('found[:1] == ["transpose"]', '"transpose(" in str(source.name_stack)', "-k scope"),
        ("if primitive.name in _CALLS and len", "if len", "tests/program/test_loops.py -k not_a_call"),
    ],
    ("_program/trace.py", "tests/program/test_walk.py"): [
        ("or any(map(is_reference, self.avals_in))", "", "tests/gradient/test_hijax.py -k right_or_refused"),
    ],
    ("_report/stored_shapes.py", "tests/test_main.py"): [
        ("if version not in _BYTES_OF_LENGTH:", "if version[0] > 9:", "-k header_that_numpy"),
        ("if size > _LONGEST_HEADER:", "if False:", "-k header_that_numpy"),
        ('and ".." not in path.parts', "", "-k names_no_other"),
        ("child.name.isascii() and child.name.isdigit()", "child.name.isdigit()", ""),
        ("if archive.namelist() and not names:", "if not names:", "-k without_leaves"),
        (
            "files[shard][name] for name, shard in shards.items()}",
            "leaf for file in files.values() for name, leaf in file.items()}",
            "-k which_file",
        ),
        (
            "{leaf.path: value for leaf, value in zip(_tree.leaves(tree), ",
            "{path: value for path, value in zip(_tree.paths(tree), ",
            "-k one_path",
        ),
        ("it is damaged ({in_one_line(error)})", "it is damaged", "-k valid_header"),
    ],
    ("_report/safetensors_format.py", "tests/test_main.py"): [
        ('"F4": "float4_e2m1fn",', "", "-k dtypes_of_safetensors"),
    ],
    ("_report/summary.py", "tests/report/test_summary.py"): [
        ("self.frozen_elements, self.frozen_bytes)", "self.frozen_elements, self.trainable_bytes)", ""),
        ('= self.extent == "nothing" and self.frozen_elements', '= self.extent == "nothing"', "-k freezes_some_is_not"),
    ],
    ("_report/state_bytes.py", "tests/report/test_summary.py"): [
        ("[leaf.inexact for leaf in plan.leaves]", "[leaf.dtype for leaf in plan.leaves]", ""),
        ("return jnp.iinfo(dtype).bits", "return np.dtype(dtype).itemsize * 8", "-k narrow_numbers"),
        ("held.rest == full.rest and ", "", "-k not_by_leaf"),
        (", len(self.by_leaf)):", "):", "-k name_of_a_count"),
        ("contextlib.suppress(Exception)", "contextlib.suppress()", "-k ask_for_the_structure"),
    ],
    ("_optimizer/apply_updates.py", "tests/state/test_dynamic_rows.py"): [
        ('refuse_other_rows(change, selection, paths()[i], "updates")', "pass", "-k outside_of_a_program"),
    ],
    ("_spec/selector_algebra.py", "tests/spec/test_masks.py"): [
        ("for leaf, found in pairs if leaf.may_train for", "for leaf, found in pairs for", "-k do_not_combine"),
        ("and both is not True else", "else", "-k do_not_combine"),
    ],
    ("_spec/labels.py", "tests/spec/test_labels.py"): [
        ("scaled(factor**i)", "scaled(factor * i)", ""),
        ("fix if isinstance(word, Selector) else ", "", "-k of_selectors"),
        ('not 0 < factor < float("inf")', "not 0 < factor", "-k bad_arguments"),
    ],
    ("_spec/indexing.py", "tests/state/test_dynamic_rows.py"): [
        ("jnp.full(count, chosen.size)", "jnp.zeros(count, jnp.int32)", "-k given_twice"),
    ],
    ("_optimizer/kept_state.py", "tests/train/test_batch_rows.py"): [
        ('OF_SEVERAL_STEPS) or hasattr(node, "current_plan")', "OF_SEVERAL_STEPS)", "-k same_rows_in_several"),
        ("count += count == size", "pass", "-k more_rows_than_the_leaf"),
        ('if found[n] or axis == "rank" or resize', "if False and resize", "-k 'lazy_self and flatten'"),
        ("array = array.astype(new.dtype)", "pass", "-k bfloat16"),
        ("   if selection.keep_state:\n        raise", "   if False:\n        raise", "tests/test_errors.py -k frozen"),
    ],
    ("_train/batch_rows.py", "tests/train/test_batch_rows.py"): [
        ("if inside.plan.kept:", "if False:", "-k multi_steps_around"),
        ("if needed > selection.count:", "if False:", "-k too_many"),
        ("min(ids[n].size, selection.size)", "ids[n].size", "-k number_that_is_enough"),
    ],
    ("_spec/row_numbers.py", "tests/train/test_batch_rows.py"): [
        ("jnp.where(named < 0, named + size, named)", "named", "-k shape_and_dtype"),
        ("(named >= 0) & (named < size)", "named < size", "-k shape_and_dtype"),
    ],
    ("_gradient/explain.py", "tests/gradient/test_explain.py"): [
        ("if selection.keep_state else ()", "", "-k keep_their_state"),
        (">= size)", ">= 0)", "-k keep_their_state"),
    ],
    ("_program/regions.py", "tests/train/test_batch_rows.py"): [
        ("return wanted * self.count.bit_length() < size", "return False", "-k larger_table"),
    ],
    ("_spec/row_numbers.py", "tests/state/test_dynamic_rows.py"): [
        ("named.astype(jnp.int32) if named.dtype.itemsize < 4 else named", "named", "-k given_twice"),
        ("return array if is_concrete(array) else numbers", "return array", "-k outside_of_a_program"),
    ],
    ("_spec/masks.py", "tests/spec/test_masks.py"): [
        ("index.stop is None and not self.allow_empty:", "False:", "-k selects_no_row"),
        ("if len(axes) == 1:", "if True:", "-k 'do_not_combine or rows_with_rows'"),
        ("first | second if either else first & second", "first | second", "-k rows_with_rows"),
        ("return either if (rows.count == rows.size) is either else other", "return other", "-k rows_with_rows"),
    ],
    ("_spec/merge_pretrained.py", "tests/spec/test_merge_pretrained.py"): [
        ("found |= {i for i in hits if i in reasons}", "found |= set(hits)", "-k ignore"),
        ("    make_plan(params, spec, tied=tied)\n", "", "-k tied"),
        ("if i in walk.settings or not", "if not", "-k settings"),
    ],
    ("_spec/partition.py", "tests/test_python_numbers.py"): [
        ("(value, Part) and not is_number(value)", "(value, Part)", "-k comes_back"),
        ("jnp.shape(b.array), b.selection.part_index", "b.array.shape, b.selection.part_index", "-k eager-float]"),
    ],
    ("_spec/resolve.py", "tests/optimizer/test_freeze.py"): [
        ("if trained.selections[i] is not FROZEN]", "]", "-k both_train"),
        ("s is not TRAINABLE and is_lost", "is_lost", "tests/verify/test_fingerprint.py -k converts"),
    ],
    ("_spec/numpy_leaves.py", "tests/verify/test_fingerprint.py"): [
        ("or not np.array_equal(value, as_in_jax(value)))", "or True)", "-k converts"),
        ("return value.astype(dtype_in_jax(value.dtype))", "return value", "-k 64_bits"),
    ],
    ("_spec/plan_digest.py", "tests/test_checkpoint.py"): [
        ("if line.digest not in found", "", "tests/test_errors.py -k 'other and rows'"),
        ("repr((self.path, self.exact))", "repr(self.path)", "-k its_own_spec"),
    ],
    ("_spec/plan_nodes.py", "tests/optimizer/test_freeze.py"): [
        ("if self.plan.is_placeholder:", "if False:", "-k equal_plans"),
    ],
    ("_spec/plan.py", "tests/state/test_dynamic_rows.py"): [
        ("len(found) != 1 or any(", "not found or any(", "tests/spec/test_resolve.py tests/report/test_summary.py"),
        ("s.with_array(x, of_state=True)", "s.with_array(x)", "-k inside_of_a_program_only"),
        ("selection), trains=None, source=None)", "selection), trains=None)", "-k line_search"),
        (" and not (_is_missing(value) and i in numbers())", "", "tests/test_model_libraries.py -k without_a_gradient"),
        ("jnp.asarray(value) if is_number(value) else value", "value", "tests/test_python_numbers.py -k eager-float]"),
    ],
    ("_spec/plan.py", "tests/test_model_libraries.py"): [
        ("(_is_missing(value) and i in numbers()):", "_is_missing(value):", "-k still_an_error"),
    ],
    ("_spec/pretrained_leaf.py", "tests/spec/test_merge_pretrained.py"): [
        ("or new[axes[0]] < old[axes[0]]:", ":", "-k any_tree"),
        ("or len(axes) != 1 or", "or not axes or", "-k any_tree"),
        ("out_shardings=full.sharding if full.committed else None", "out_shardings=None", "-k shardings"),
        ("if isinstance(own, jax.Array) and not own.committed and not committed:", "if False:", "-k not_put_on"),
        ("dtype_of(value) if keep_dtype else dtype_of(own)", "dtype_of(own)", "-k dtypes"),
    ],
    ("_spec/rename.py", "tests/spec/test_merge_pretrained.py"): [
        ("sorted(rename, key=len, reverse=True)", "rename", "-k longest"),
    ],
    ("_spec/prefix_tree.py", "tests/spec/test_resolve.py"): [
        ("if is_bool(answer) and not jax.tree_util.treedef_is_leaf(treedef):", "if False:", ""),
        ("isinstance(prefix, Mapping) and set(names) == set(prefix):", "isinstance(prefix, Mapping):", ""),
    ],
    ("_spec/selection.py", "tests/spec/test_masks.py"): [
        ("part.values if like is None else like,", "part.values,", "tests/state/test_state_shardings.py -k Explicit"),
    ],
    ("_spec/row_set.py", "tests/spec/test_masks.py"): [
        ("in [(runs, False), (_gaps(size, runs), True)]", "in [(runs, False)]", "-k does_not_grow_with_the_rows"),
        ("if len(runs) > FEW else []", "if len(runs) > 1 else []", "-k record_of_no_selection"),
    ],
    ("_spec/selection_record.py", "tests/spec/test_masks.py"): [
        (" if (found.as_json(), found.others) == (rows, others) else None", "", "-k record_of_no_selection"),
        ("0 < found.count < found.size", "True", "-k record_of_no_selection"),
        ("and 0 < count <= math.prod(shape) if compact else", "if compact else", "tests/test_checkpoint.py -k Damaged"),
    ],
    ("_spec/sharding.py", "tests/state/test_state_shardings.py"): [
        ("size % math.prod(mesh.shape[name] for name in _names(axis)) == 0 else None", "True else None", "-k Explicit"),
    ],
    ("_spec/part_source.py", "tests/state/test_dynamic_rows.py"): [
        ("if is_traced else self.array is not None:", "if is_traced else True:", "-k replaced_after_the_gradient"),
        ("self.trace == current_trace() if is_traced", "True if is_traced", "-k replaced_after_the_gradient"),
        ("self.trace == current_trace() if is_traced", "False if is_traced", "-k outside_of_a_program"),
        ("elif mine.time < _REPLACED.get(selection.array, -1):", "elif False:", "-k replaced_after_the_gradient"),
        ("if is_new else _REPLACED.get(old, -1)", "if is_new else -1", "-k replaced_after_the_gradient"),
        ("return PartSource.now, (self", "return PartSource, (self", "-k replaced_after_the_gradient"),
        ("if _same(mine.array, its.array):", "if True:", "-k outside_of_a_program"),
        ('of_one_spec = name == "trainable" or not', "of_one_spec = not", "-k different_partitions"),
        ("and its.of_state and mine.array is None):", "and its.of_state):", "-k inside_of_a_program_only"),
        ("selection.of_state and not isinstance(beside, Tracer)", "selection.of_state", "-k inside_of_a_program_only"),
    ],
    ("_spec/tree.py", "tests/test_model_libraries.py"): [
        ("        if flatten(full)[1] == treedef:", "        if False:", "-k not_an_array"),
        ("start += len(inside) if isinstance(node, module) else 1", "start += 1", "-k settings"),
        ("return is_number(value) or bool(", "return bool(", "tests/precompute -k weak_types"),
    ],
    ("_spec/tree.py", "tests/test_python_numbers.py"): [
        ("    if is_number(value):\n        return Leaf(path, (), jnp.result_type(value))\n", "", "-k which_numbers"),
    ],
    ("_state/carried_values.py", "tests/state/test_dynamic_rows.py"): [
        ('stays = (jnp.take(a, position, mode="clip") == b) & (b < size)', "stays = b < size", "-k stay_keep"),
        (" & (b < size)", "", "-k are_no_row"),
        ("source.kept for i in moments", "source.kept for i in moments[:1]", "-k all_rows_change"),
        ("if not isinstance(anew, bool):", "if False:", "-k new_rows_and_the_state_of_some[adan]"),
        ("not None or _is_number(entry)", "None and _is_number(entry)", "-k new_rows_and_the_state_of_some[novograd]"),
        ("entry.leaf is None and any(", "False and any(", "-k new_rows_and_the_state_of_some[flatten]"),
        ("return len(rows) == len(others) and equal", "return len(rows) == len(others)", "-k array_of_several"),
        ("_is_history(entries[i]) or ", "", "-k a_history_begins_anew_with"),
        (" or i in self._uncertain", "", "-k shapes_do_not_tell"),
        ("self._held[_place(source.old)[0]] != leaves", "False", "-k where_other_leaves"),
        ('{"grad", "value"} <= fields or ', "", "-k computes_its_gradient"),
        ("[old if axis is None else", "[new if axis is None else", "-k several_arrays_for_a_leaf_move"),
    ],
    ("_state/state_entries.py", "tests/state/test_dynamic_rows.py"): [
        ('wrapper_field=getattr(inner, "shape", None) == ()', "wrapper_field=False", "-k wrappers"),
        ("(entry.value.shape if isinstance(entry.value, Part) else ())", "()", "tests/state/test_migrate.py -k a_hole"),
        (" or not _is_part(entry.value, indices.get(leaf))", "", "tests/state tests/test_compatibility.py -x"),
    ],
    ("_state/migrate.py", "tests/state/test_migrate.py"): [
        ('printable("/".join(line.path) + group)', '"/".join(line.path) + group', "tests/test_errors.py"),
        ("        _refuse_swapped(state, tx, params, error)", "        pass", "tests/test_errors.py -k Migrating"),
        ("each_once(values)", "values", "-k group_of_each_leaf"),
        ("values = map(_placed, values, jax.tree.leaves(fresh))", "pass", "tests/state/test_migrate_models.py -k mesh"),
        (" or isinstance(entry.value, Part)}", "}", "-k several_arrays"),
        (" or (isinstance(entry.value, Part) and entry.address in above)", "", "-k several_arrays"),
    ],
    ("_state/old_leaves.py", "tests/state/test_migrate_models.py"): [
        ("not self.anew >= self.floating", "True", "-k array_of_all_leaves"),
        ("None if old == new and new in given else new", "new", "-k renamed"),
    ],
    ("_state/row_axes.py", "tests/state/test_migrate_models.py"): [
        ("axes[i] == axes_then[i] and ", "", "-k factors"),
    ],
    ("_state/old_shapes.py", "tests/state/test_migrate_models.py"): [
        ("fits[0] if len(fits) == 1 else ()", "()", "-k factors"),
    ],
    ("_state/replace_masks.py", "tests/state/test_dynamic_rows.py"): [
        ("old._replace(plan=new.plan)", "old", "-k without_static_data"),
        ("if np.shape(got) != np.shape(expected):", "if False:", "tests/test_errors.py -k larger"),
        ("jax.device_put(new, old.sharding) if is_concrete(old) and old.committed else ", "", "-k in_host_memory"),
        ("old, new) if old.groups[name].masks != () else []", "old, new)", "-k remainder_of_its_leaf"),
    ],
    ("_state/row_axes.py", "tests/state/test_dynamic_rows.py"): [
        ("[its is node.plan.leaves for its in made]", "[its == node.plan.leaves for its in made]", "-k several_states"),
        ("a == b and ", "", "-k shapes_do_not_tell"),
        (' and "rank" not in a for', " for", "-k shapes_do_not_tell"),
    ],
    ("_state/set_frozen.py", "tests/optimizer/test_freeze_when.py"): [
        ("{each for each, _, _ in known if each == name} or ", "", "-k set_by_path_or_together"),
        ("in known if each in own):", "in known[:1] if each in own):", "-k set_by_path_or_together"),
    ],
    ("_state/spec_of.py", "tests/train/test_train_step.py"): [
        ("(spec := _spec_of_masked(state)) is not None:", "(spec := None) is not None:", "-k groups_of_a_partition"),
    ],
    ("_train/train_step.py", "tests/train/test_train_step.py"): [
        ('"value": value[0] if has_aux else value', '"value": value', "-k extra_arguments"),
        ("(lambda params: of_params(params)[0]) if has_aux else of_params", "of_params", "-k extra_arguments"),
        ("if len(names) > len({*given}) and", "if False and", "-k extra_arguments"),
        ("if succeeds(lambda: update(given)):", "if False:", "-k around_freeze"),
        (" of_groups is not None:\n                found", " True:\n                found", "-k other_transformations"),
    ],
    ("_verify/saved_base.py", "tests/test_checkpoint.py"): [
        ("else os.path.realpath(where)", "else os.path.abspath(where)", "-k 'two_threads and False'"),
        (" and len(value) == 8 * LANES", "", "-k Damaged"),
        ("struct.shape if is_numeric else None", "struct.shape", "-k Damaged"),
        ("is_int(value) and value >= least", "isinstance(value, (int, float)) and value >= least", "-k Damaged"),
        ("record_of(self.selection),", "repr(self.selection),", "tests/test_features.py -k however"),
        ("(local and is_address)", "False", "tests/test_features.py -k wrong_arguments"),
        ("if or_none and self", "if self", "-k Damaged"),
    ],
    ("_verify/bits.py", "tests/verify"): [
        ("functools.reduce(jnp.logical_or,", "functools.reduce(jnp.logical_and,", ""),
    ],
    ("_verify/frozen_leaves.py", "tests/test_python_numbers.py"): [
        ("np.asarray(value, jnp.result_type(value)) if is_number(value) else value", "value", "-k bits_of_frozen"),
    ],
    ("checkpoint/_record.py", "tests/test_checkpoint.py"): [
        (" or jax.dtypes.canonicalize_dtype(written.dtype) != written.dtype:", ":", "-k would_convert"),
        ("if struct.sharding is None or jax", "if jax", "-k compiles_once"),
    ],
    ("_verify/one_writer.py", "tests/test_features.py"): [
        ("            os.unlink(file)", "            pass", "-k one_writer"),
        ("os.path.join(where, LOCK)\n", 'f"{where}.lock"\n', "-k one_writer"),
        ("                os.rmdir(each)", "                pass", "-k wrong_arguments"),
        ("import filelock\n", "import fcntl, filelock\n", "tests/test_package.py -k declared"),
    ],
    ("checkpoint/__init__.py", "tests/test_python_numbers.py"): [
        ("    with _SAVING, contextlib", "    with contextlib", "tests/test_checkpoint.py -k two_threads"),
        ("array if is_array(array) else jnp.asarray(array) for", "array for", "-k checkpoint"),
        ('for character in "*?[")', "for character in ())", "tests/test_checkpoint.py -k wildcards"),
    ],
    ("checkpoint/__init__.py", "tests/test_checkpoint.py"): [
        ("        _record.refuse_other_bits(written[item], found, paths, at)\n", "", "-k flipped"),
    ],
    ("patch/_base.py", "tests/test_patch.py"): [
        ("fits = longer.axis == selection.axis", "pass", "-k onto_another"),
        ("mask = elements(choice.array, compact=True) if", "mask = choice if", "-k makes_of"),
    ],
    ("patch/_file.py", "tests/test_patch.py"): [
        ('if header.rstrip(b" ").endswith(b"}") else None', "", "-k damaged_byte"),
        ('if n != "sha256"}) == text', "}) is not text", "-k damaged_byte"),
        ("            os.unlink(unfinished)", "            pass", "-k complete_or"),
    ],
    ("patch/_layout.py", "tests/test_patch.py"): [
        ("places = places[(numbers >= 0) & (numbers < selection.size)]", "pass", "-k no_rows"),
        ("indices if shape == old else np.ravel", "indices if True else np.ravel", "-k onto_another"),
    ],
    ("features/_batches.py", "tests/test_features.py"): [
        ("    if len(shapes[0]) != len(first[0]):", "    if False:", "tests/test_errors.py -k 'Variants and other'"),
        ("    if shapes.cut != first.cut:", "    if False:", "tests/test_errors.py -k 'seed and variant'"),
        ("(list, tuple)) or len(item) != variants", "(list, tuple))", "tests/test_errors.py -k 'Variants and missing'"),
        ('return " ".join(digests), shapes[0]', "return digests[0], shapes[0]", "-k variants_that_were_stopped"),
        ("        if count == 0:\n", "        if count is False:\n", "-k batches_that_do_not_fit"),
        ("candidates if known is None else [known]:", "[self._shapes] if known is None else [known]:", "-k labels_fit"),
        ("if known is not None or len(errors) == 1:", "if known is not None or errors:", "-k batches_that_do_not_fit"),
    ],
    ("features/_record.py", "tests/test_features.py"): [
        ("        out.seek(record.size)\n        out.truncate()", "        out.seek(0, 2)", "-k between_the_arrays"),
        ("number(record.examples + 1) * record.variants > most", "number(record.examples + 1) > math.inf", "-k power"),
        ("            if 1 < number == len(lines):", "            if False:", "-k between_the_arrays"),
        ("            if 1 < number == len(lines):", "            if 1 < number:", "-k damaged_features"),
        ("    if record.variants != variants:", "    if False:", "-k variants_that_were_stopped"),
    ],
    ("linen/_recording.py", "tests/test_linen.py"): [
        ('{"params": jax.random.key(0), **given}', "given", "-k random_stream"),
    ],
    ("linen/_frozen_call.py", "tests/test_linen.py"): [
        ('return ["params", *self.stats,', 'return ["params",', "-k stat"),
        ("nn.meta.replace_boxed(tree, stopped)", "stopped", "-k boxes"),
        ("lambda value, _: (value,)", "lambda _, gradient: (gradient,)", "-k float8"),
    ],
    ("nnx.py", "tests/test_nnx.py"): [
        ("seen = _thawed(variable) if isinstance(variable, FrozenParam) else variable", "seen = variable", "-k filter"),
        (" and not isinstance(n, _Stored)]", "]", "-k threads"),
        ("param) if issubclass(type(param), nnx.Variable) else param.type", "param)", "-k freeze_and_thaw_hijax"),
        ("        return variable.get_raw_value()", "        pass", "-k freeze_and_thaw_hijax"),
        ("Frozen(value,", "value if isinstance(value, Frozen) else Frozen(value,", "-k frozen_inside_frozen"),
    ],
}

MUTANTS = [
    Mutant(file, old, new, tests if tests.startswith("tests/") else f"{usual} {tests}")
    for (file, usual), mutants in _BY_FILE.items()
    for old, new, tests in mutants
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
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(mutant.tests)]
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
