"""The command line: what it reads of a checkpoint, what it prints, and its exit status."""

import pathlib
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import optax_freeze as fz
from optax_freeze import checkpoint
from optax_freeze.__main__ import main

PARAMS = {
    "encoder": {"kernel": jnp.ones((300, 2), jnp.bfloat16), "layers": [jnp.ones(2), jnp.ones(3)], "rate": 0.1},
    "head": jnp.ones(2),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "base"
    write(directory, PARAMS)
    return str(directory)


def write(directory, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, tree)


def manage(directory, steps, **items):
    with ocp.CheckpointManager(directory) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.Composite(**{k: ocp.args.StandardSave(v) for k, v in items.items()}))


def lines(capsys, *argv):
    assert main([str(arg) for arg in argv]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys, *argv):
    assert main([str(arg) for arg in argv]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def program(*argv):
    command = [sys.executable, "-m", "optax_freeze", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class TestWhatItPrints:
    @pytest.mark.parametrize("spec", [("--freeze", "encoder/**"), ("--only", "head")])
    def test_the_summary_of_the_parameters_themselves(self, base, capsys, spec):
        got = lines(capsys, base, *spec, "--optimizer", "adamw")
        assert got == str(fz.summary(PARAMS, "encoder/**", optax.adamw(1e-3))).splitlines()

    def test_without_a_pattern_everything_trains(self, base, capsys):
        assert lines(capsys, base) == str(fz.summary(PARAMS, False)).splitlines()

    def test_patterns_add_up_and_depth_sums_up(self, base, capsys):
        got = lines(capsys, base, "--freeze", "**/kernel", "--freeze", "head", "--depth", "1")
        assert got == str(fz.summary(PARAMS, ["**/kernel", "head"], depth=1)).splitlines()

    @pytest.mark.parametrize("name", ["muon", "contrib.muon"])
    def test_optimizers_of_contrib(self, base, capsys, name):
        got = lines(capsys, base, "--freeze", "encoder", "--optimizer", name)
        assert got == str(fz.summary(PARAMS, "encoder", optax.contrib.muon(1e-3))).splitlines()

    def test_as_a_program(self, base):
        done = program(base, "--freeze", "encoder")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == str(fz.summary(PARAMS, "encoder")).splitlines()

    def test_no_array_is_read(self, base, capsys, monkeypatch):
        monkeypatch.delattr(ocp.StandardCheckpointer, "restore")
        assert lines(capsys, base, "--freeze", "encoder")

    def test_help_has_examples(self, capsys):
        with pytest.raises(SystemExit) as stop:
            main(["--help"])
        assert stop.value.code == 0
        assert "--freeze 'encoder/**'" in capsys.readouterr().out


class TestWhereItLooks:
    def test_the_latest_step_of_a_manager(self, tmp_path, capsys):
        manage(tmp_path, [9, 10], default={"old": jnp.ones(2)})
        assert lines(capsys, tmp_path / "9") == lines(capsys, tmp_path) == lines(capsys, tmp_path / "10" / "default")

    @pytest.mark.parametrize("name", ["²", "٣", "⑦", "+12", "1_2", "x12"])
    def test_a_directory_that_is_not_a_step(self, tmp_path, capsys, name):
        manage(tmp_path, [1, 2], default={"w": jnp.ones(2)})
        shown = lines(capsys, tmp_path)
        (tmp_path / name).mkdir()
        assert lines(capsys, tmp_path) == shown

    def test_a_foreign_item_named_spec(self, tmp_path, capsys):
        with ocp.CheckpointManager(tmp_path) as manager:
            items = {"params": ocp.args.StandardSave({"w": jnp.ones(2)}), "spec": ocp.args.JsonSave({"leaves": 3})}
            manager.save(0, args=ocp.args.Composite(**items))
        assert lines(capsys, tmp_path)[2].split()[0] == "w"

    def test_the_item_named_params(self, tmp_path, capsys):
        manage(tmp_path, [0], params={"w": jnp.ones(2)}, opt_state={"m": jnp.ones(9)})
        assert lines(capsys, tmp_path, "--freeze", "w")[2].split()[0] == "w"

    def test_several_items_without_that_name(self, tmp_path, capsys):
        manage(tmp_path, [0], generator={"w": jnp.ones(2)}, critic={"m": jnp.ones(9)})
        error = refused(capsys, tmp_path)
        assert "the items critic, generator" in error
        assert f"fix: name one: {tmp_path}/0/critic, {tmp_path}/0/generator\n" in error

    def test_steps_with_a_prefix(self, tmp_path, capsys):
        options = ocp.CheckpointManagerOptions(step_prefix="step")
        with ocp.CheckpointManager(tmp_path, options=options) as manager:
            for step in range(4):
                manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
        paths = [f"{tmp_path}/step_{step}/default" for step in range(3)]
        assert f"fix: name one: {', '.join(paths)} and 1 more\n" in refused(capsys, tmp_path)

    def test_parameters_within_a_state(self, tmp_path, capsys):
        write(tmp_path / "state", {"step": jnp.int32(3), "state": {"params": PARAMS}})
        got = lines(capsys, tmp_path / "state", "--params", "state/params", "--freeze", "encoder")
        assert got == str(fz.summary(PARAMS, "encoder")).splitlines()
        assert "begins with one of state, step" in refused(capsys, tmp_path / "state", "--params", "stat")

    def test_the_paths_of_nnx_end_before_value(self, tmp_path, capsys):
        write(tmp_path / "nnx", nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
        assert [line.split()[0] for line in lines(capsys, tmp_path / "nnx")[2:4]] == ["bias", "kernel"]

    def test_a_checkpoint_of_what_trains_says_what_was_frozen(self, tmp_path, capsys):
        params = {**PARAMS, "key": jax.random.key(0)}
        frozen = {"encoder": {"kernel": fz.rows(slice(290)), "layers": [fz.elements(jnp.array([True, False])), True]}}
        frozen = {"encoder": {**frozen["encoder"], "rate": True}, "head": False, "key": True}
        checkpoint.save(tmp_path, params, frozen, step=7)
        shown = {line.split("  ")[0]: line for line in lines(capsys, tmp_path)}
        assert shown["encoder/kernel"].endswith("20 train (3.333 %)")
        assert shown["encoder/layers/0"].endswith("1 train (50 %)")
        assert shown["encoder/layers/1"].endswith("frozen")
        assert shown["head"].endswith("trains")
        other = lines(capsys, tmp_path, "--freeze", "head")
        assert next(line for line in other if line.startswith("head")).endswith("frozen")


class TestWrongInput:
    def test_a_wrong_pattern_names_the_nearest_paths(self, base, capsys):
        error = refused(capsys, base, "--freeze", "encoder/kernal")
        assert "'encoder/kernal' matches no leaf" in error
        assert "nearest paths: encoder/kernel" in error

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("adamx", "nearest names: adamax, adam"),
            ("dpsgd", "missing 3 required positional arguments"),
            ("apply_updates", "missing 1 required"),
            ("chain", "has no attribute 'init'"),
            ("cosine_decay_schedule", "missing 1 required"),
            ("constant_schedule", "got: the function"),
        ],
    )
    def test_an_optimizer_that_is_none(self, base, capsys, name, expected):
        assert expected in refused(capsys, base, "--optimizer", name)

    def test_what_is_no_checkpoint(self, base, tmp_path, capsys):
        (tmp_path / "file").touch()
        for missing in ("nothing", "nothing/0/default"):
            error = refused(capsys, tmp_path / missing)
            assert "got: no such directory" in error
            assert f"fix: look into {tmp_path}\n" in error
        error = refused(capsys, tmp_path / "file")
        assert "got: a file" in error
        assert f"fix: give the directory that Orbax wrote: {tmp_path}?\n" in error
        error = refused(capsys, tmp_path)
        assert "Orbax did not write" in error
        assert "fix: give one that holds _METADATA" in error

    @pytest.mark.parametrize(
        ("missing", "there"),
        [("rum", ["run"]), ("run/3/default", ["run/1", "run/2"]), ("run/2/defualt", ["run/2/default"])],
    )
    def test_a_path_that_is_not_there_names_what_is(self, tmp_path, capsys, missing, there):
        manage(tmp_path / "run", [1, 2], default={"w": jnp.ones(2)})
        error = refused(capsys, tmp_path / missing)
        assert "got: no such directory" in error
        assert f"fix: there is {', '.join(str(tmp_path / path) for path in there)}\n" in error

    def test_a_damaged_checkpoint(self, tmp_path):
        write(tmp_path / "base", PARAMS)
        for data in (tmp_path / "base").glob("d/*"):
            data.unlink()
        done = program(tmp_path / "base")
        assert done.returncode == 2
        assert "a damaged checkpoint" in done.stderr
        assert "fix: give another step, or write it again" in done.stderr

    @pytest.mark.parametrize("text", ["", "{}", "[]", "null", "[" * 100_000, '{"tree_metadata": {"a": {}}}'])
    def test_damaged_shapes(self, tmp_path, capsys, text):
        write(tmp_path / "base", PARAMS)
        (tmp_path / "base" / "_METADATA").write_text(text)
        assert "a damaged checkpoint" in refused(capsys, tmp_path / "base")

    @pytest.mark.parametrize("wrong", [("--freeze", "head", "--only", "head"), ("--depth", "few"), ()])
    def test_arguments_that_do_not_parse(self, base, wrong, capsys):
        with pytest.raises(SystemExit) as stop:
            main([base, *wrong] if wrong else [])
        assert stop.value.code == 2
        assert "usage: python -m optax_freeze" in capsys.readouterr().err

    def test_a_depth_below_zero(self, base, capsys):
        assert "a depth counts segments of a path" in refused(capsys, base, "--depth", "-1")


def test_the_page_shows_what_it_prints(tmp_path, capsys, monkeypatch):
    layers = {f"layer_{i}": {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)} for i in range(12)}
    params = {"encoder": layers, "head": {"kernel": jnp.ones((64, 10))}}
    page = pathlib.Path("docs/command_line.md").read_text()
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "base", params)
    checkpoint.save("adapters", params, fz.only("head", "**/bias"), step=1000)
    blocks = re.findall(r"```console\n\$ python -m optax_freeze (.*)\n([^`]*)```", page)
    assert blocks
    for command, shown in blocks:
        assert main(shlex.split(command)) == (2 if shown.startswith("error") else 0)
        printed = capsys.readouterr()
        assert shown == printed.out + printed.err
