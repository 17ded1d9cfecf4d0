"""The command line: reading checkpoints, output, and exit status."""

import doctest
import importlib
import json
import os
import pathlib
import pickle
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile

import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.flax
import safetensors.numpy
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


ADAMW, MUON = optax.adamw(1e-3), optax.contrib.muon(1e-3)
SUMMARIES = {
    "": fz.summary(PARAMS, False),
    "--freeze encoder/** --optimizer adamw": fz.summary(PARAMS, "encoder", ADAMW),
    "--all-except head --optimizer adamw": fz.summary(PARAMS, fz.all_except("head"), ADAMW),
    "--freeze **/kernel --freeze head --depth 1": fz.summary(PARAMS, ["**/kernel", "head"], depth=1),
    "--freeze **/kernel head": fz.summary(PARAMS, ["**/kernel", "head"]),
    "--all-except **/kernel head": fz.summary(PARAMS, fz.all_except("**/kernel", "head")),
    "--freeze encoder --optimizer muon": fz.summary(PARAMS, "encoder", MUON),
    "--freeze encoder --optimizer contrib.muon": fz.summary(PARAMS, "encoder", MUON),
}


class TestWhatItPrints:
    @pytest.mark.parametrize(("arguments", "expected"), SUMMARIES.items())
    def test_the_summary_of_the_parameters_themselves(self, base, capsys, monkeypatch, arguments, expected):
        """Without reading an array."""
        monkeypatch.delattr(ocp.StandardCheckpointer, "restore")
        assert lines(capsys, base, *arguments.split()) == str(expected).splitlines()

    def test_json_has_the_numbers_of_the_summary(self, base, capsys):
        got = json.loads("\n".join(lines(capsys, base, "--freeze", "encoder", "--optimizer", "adam", "--json")))
        summary = fz.summary(PARAMS, "encoder", optax.adam(1e-3))
        rows = got.pop("rows")
        assert got == {name: getattr(summary, name) for name in got}
        assert set(got) == {
            *("elements", "trainable_elements", "frozen_elements", "bytes", "trainable_bytes", "frozen_bytes"),
            *("state_bytes", "full_state_bytes", "extent"),
        }
        assert [row["path"] for row in rows] == [row.path for row in summary.rows]
        numbers = dict.fromkeys(["elements", "frozen_elements"], 600) | dict.fromkeys(["bytes", "frozen_bytes"], 1200)
        shape = {"path": "encoder/kernel", "shape": [300, 2], "dtype": "bfloat16", "leaves": 1}
        assert rows[0] == {**shape, **numbers, "host_bytes": 0, "state_bytes": 0, "trainable_rows": ""}
        assert [row["state_bytes"] for row in rows] == list(summary.row_state_bytes)

    def test_as_a_program_and_as_a_script(self, base, capsys, monkeypatch):
        done = program(base)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == lines(capsys, base)
        scripts = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["scripts"]
        module, _, name = scripts["optax-freeze"].partition(":")
        monkeypatch.setattr(sys, "argv", ["optax-freeze", base])
        assert getattr(importlib.import_module(module), name)() == 0
        assert capsys.readouterr().out == done.stdout


class TestWhereItLooks:
    def test_the_latest_step_of_a_manager(self, tmp_path, capsys):
        """And not in directories whose names are not those of steps."""
        manage(tmp_path, [9, 10], default={"old": jnp.ones(2)})
        for name in ("²", "٣", "⑦", "+12", "1_2", "x12"):
            (tmp_path / name).mkdir()
        assert lines(capsys, tmp_path / "9") == lines(capsys, tmp_path) == lines(capsys, tmp_path / "10" / "default")

    def test_the_item_named_params_beside_a_foreign_one_named_spec(self, tmp_path, capsys):
        for step, others in enumerate(({}, {"opt_state": ocp.args.StandardSave({"m": jnp.ones(9)})})):
            with ocp.CheckpointManager(tmp_path) as manager:
                items = {"params": ocp.args.StandardSave({"w": jnp.ones(2)}), "spec": ocp.args.JsonSave({"leaves": 3})}
                manager.save(step, args=ocp.args.Composite(**items, **others))
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
        params, mask = {**PARAMS, "key": jax.random.key(0)}, fz.elements(jnp.array([True, False]))
        encoder = {"kernel": fz.rows(slice(290)), "layers": [mask, True], "rate": True}
        frozen = {"encoder": encoder, "head": False, "key": True}
        checkpoint.save(tmp_path, params, frozen, step=7)
        shown = {line.split("  ")[0]: line for line in lines(capsys, tmp_path)}
        assert shown["encoder/kernel"].endswith("20 train (3.333 %): rows 290:300 of axis 0")
        assert shown["encoder/layers/0"].endswith("1 train (50 %)")
        assert shown["encoder/layers/1"].endswith("frozen")
        assert shown["head"].endswith("trains")
        other = lines(capsys, tmp_path, "--freeze", "head")
        assert next(line for line in other if line.startswith("head")).endswith("frozen")


FLAT = {"encoder/kernel": np.ones((3, 2), np.float32), "encoder/steps": np.int32(4), "head": np.ones(2, np.float16)}
NESTED = {"encoder": {"kernel": FLAT["encoder/kernel"], "steps": FLAT["encoder/steps"]}, "head": FLAT["head"]}


def as_safetensors(file):
    safetensors.numpy.save_file({name: np.asarray(array) for name, array in FLAT.items()}, file)


FORMATS = {
    "model.safetensors": as_safetensors,
    "model.npz": lambda file: np.savez(file, **FLAT),
    "compressed.npz": lambda file: np.savez_compressed(file, **FLAT),
    "model.msgpack": lambda file: file.write_bytes(flax.serialization.to_bytes(NESTED)),
    "checkpoint_1000": lambda file: file.write_bytes(flax.serialization.to_bytes(NESTED)),  # flax.training.checkpoints
}


class TestFiles:
    @pytest.mark.parametrize("name", FORMATS)
    def test_the_summary_of_the_arrays_themselves(self, tmp_path, capsys, name):
        FORMATS[name](tmp_path / name)
        got = lines(capsys, tmp_path / name, "--freeze", "encoder", "--optimizer", "adam")
        assert got == str(fz.summary(NESTED, "encoder", optax.adam(1e-3))).splitlines()
        within = lines(capsys, tmp_path / name, "--params", "encoder")
        assert [line.split()[0] for line in within[2:4]] == ["kernel", "steps"]

    def test_dtypes(self, tmp_path, capsys):
        names = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "uint16", "bool")
        params = {name: jnp.zeros((2, 3), name) for name in names}
        safetensors.flax.save_file(params, tmp_path / "a.safetensors")
        (tmp_path / "a.msgpack").write_bytes(flax.serialization.to_bytes(params))
        expected = str(fz.summary(params, False)).splitlines()
        assert lines(capsys, tmp_path / "a.safetensors") == lines(capsys, tmp_path / "a.msgpack") == expected

    def test_what_npz_cannot_say(self, tmp_path, capsys):
        arrays = {"names": np.array(["a", "b"]), "objects": np.array([{}, None]), "big": np.ones(2, ">f4")}
        np.savez(tmp_path / "a.npz", w=jnp.ones(2, jnp.bfloat16), **arrays, fields=np.zeros(1, [("ä", "f4")]))
        found = {row["path"]: row for row in json.loads("\n".join(lines(capsys, tmp_path / "a.npz", "--json")))["rows"]}
        dtypes = {"big": "float32", "fields": None, "names": None, "objects": None, "w": "bfloat16"}
        assert {path: row["dtype"] for path, row in found.items()} == dtypes

    def test_an_index_says_which_file_a_tensor_is_in(self, tmp_path, capsys):
        shards = {"a.safetensors": {"w": np.ones(2), "other": np.ones(5)}, "b.safetensors": {"w": np.ones(3)}}
        for shard, arrays in shards.items():
            safetensors.numpy.save_file(arrays, tmp_path / shard)
        assert f"fix: name one: {tmp_path}/a.safetensors" in refused(capsys, tmp_path)
        index = tmp_path / "model.safetensors.index.json"

        def indexed(other, **shards):
            index.write_text(json.dumps({"metadata": {}, "weight_map": {**shards, "other": f"{other}.safetensors"}}))
            return index

        both = {"other": np.ones(5), "w": np.ones(3)}
        assert lines(capsys, indexed("a", w="b.safetensors")) == str(fz.summary(both, False)).splitlines()
        assert lines(capsys, indexed("a")) == str(fz.summary({"other": np.ones(5)}, False)).splitlines()
        assert "got: an index that names the tensor other in b.safetensors, which does" in refused(capsys, indexed("b"))
        missing = f"got: an index whose files are missing: {tmp_path}/c.safetensors\n"
        assert missing in refused(capsys, indexed("c"))
        (tmp_path / "b.safetensors").write_bytes(b"")
        assert f"at: {tmp_path}/b.safetensors\n" in refused(capsys, indexed("b"))

    @pytest.mark.parametrize("name", ["model.safetensors.index.json", "../a.safetensors", "/a.safetensors"])
    def test_an_index_names_no_other_files(self, tmp_path, capsys, name):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        assert f"got: an index that names {name}\n" in refused(capsys, index)

    def test_of_npz_only_a_header_that_numpy_knows_is_read(self, tmp_path, capsys, monkeypatch):
        read = []
        to_read = lambda file, n=-1, of=zipfile.ZipExtFile.read: read.append(n) or of(file, n)  # noqa: E731
        monkeypatch.setattr(zipfile.ZipExtFile, "read", to_read)
        for start, expected in {
            b"\x93NUMPY\2\0" + (1 << 30).to_bytes(4, "little"): "w.npy: a header of 1,073,741,824 bytes",
            b"\x93NUMPY\x09\x09" + bytes(4): "w.npy: the version 9.9 of the format is not known",
        }.items():
            with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
                archive.writestr("w.npy", start + b" " * 20_000)
            assert expected in refused(capsys, tmp_path / "a.npz")
        assert max(read) < 20
        assert min(read) >= 0

    def test_a_pipe(self, tmp_path, capsys):
        os.mkfifo(tmp_path / "x.npz")
        assert "got: a pipe, a socket or a device\n" in refused(capsys, tmp_path / "x.npz")

    def test_dtypes_of_safetensors_alone(self, tmp_path, capsys):
        dtypes = {"F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn"}
        dtypes |= {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu"}
        header, size = {}, 0
        for name in dtypes:
            end = size + int(name[1])  # of 8 elements in bytes, that of one in bits
            header[name], size = {"dtype": name, "shape": [8], "data_offsets": [size, end]}, end
        text = json.dumps(header).encode()
        (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
        params = {name: jax.ShapeDtypeStruct((8,), np.dtype(dtype)) for name, dtype in dtypes.items()}
        assert lines(capsys, tmp_path / "a.safetensors") == str(fz.summary(params, False)).splitlines()

    def test_two_leaves_with_one_path(self, tmp_path, capsys):
        data = flax.serialization.to_bytes({"a/b": np.ones(1), "a": {"b": np.ones(2)}})
        (tmp_path / "a.msgpack").write_bytes(data)
        assert "two leaves have the same path\n  at: a/b\n" in refused(capsys, tmp_path / "a.msgpack")

    def test_a_train_state_of_flax_with_other_leaves_and_an_array_in_chunks(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 16)
        state = {"step": 3, "rate": 1j, "scale": np.float32(2), "name": "run", "none": None, "params": NESTED}
        (tmp_path / "a.msgpack").write_bytes(flax.serialization.to_bytes(state))
        assert (tmp_path / "a.msgpack").read_bytes().count(b"__msgpack_chunked_array__") == 1
        assert lines(capsys, tmp_path / "a.msgpack") == str(fz.summary(state, False)).splitlines()

    def test_only_headers_are_read(self, tmp_path, capsys):
        """A file of 64 GiB, of which only the header takes space on the disk."""
        header = json.dumps({"w": {"dtype": "F32", "shape": [2**16, 2**18], "data_offsets": [0, 2**36]}}).encode()
        with open(tmp_path / "big.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 2**36)
        assert "64.0 GiB" in lines(capsys, tmp_path / "big.safetensors")[2]

    def test_nothing_is_unpickled(self, tmp_path, capsys):
        class Harmful:
            def __reduce__(self):
                return (pathlib.Path.touch, (tmp_path / "harm",))

        np.savez(tmp_path / "a.npz", harm=np.array([Harmful()], object))
        assert "no array" in lines(capsys, tmp_path / "a.npz")[2]
        (tmp_path / "a.pt").write_bytes(pickle.dumps(Harmful()))
        assert "got: a .pt file" in refused(capsys, tmp_path / "a.pt")
        assert not (tmp_path / "harm").exists()

    @pytest.mark.parametrize("name", FORMATS)
    def test_a_damaged_file(self, tmp_path, capsys, name):
        FORMATS[name](tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        for size in (0, 1, 20, -60):
            (tmp_path / name).write_bytes(whole[:size])
            assert "it is damaged" in refused(capsys, tmp_path / name)

    def test_msgpack_that_flax_did_not_write(self, tmp_path, capsys):
        packed = [msgpack.packb((shape, "float32", b"")) for shape in ([-1], ["2"], 3)]
        arrays = [msgpack.packb({"w": msgpack.ExtType(1, array)}) for array in packed]
        no_dict = flax.serialization.to_bytes(np.ones(2))
        for data in (b"\x05", msgpack.packb([1]), no_dict, b"\x81\xa1a\xc7\x01\x01\x00", *arrays):
            (tmp_path / "a.msgpack").write_bytes(data)
            assert "it is damaged" in refused(capsys, tmp_path / "a.msgpack")

    @pytest.mark.parametrize("arguments", [[], ["--depth", "1", "--optimizer", "adam"], ["--json"]])
    def test_a_file_without_leaves(self, tmp_path, capsys, arguments):
        np.savez(tmp_path / "a.npz")
        (tmp_path / "a.msgpack").write_bytes(msgpack.packb({}))
        texts = [lines(capsys, tmp_path / name, *arguments) for name in ("a.npz", "a.msgpack")]
        assert texts[0] == texts[1]
        assert "--json" in arguments or "all 0 elements, 0 B" in texts[0]

    def test_a_file_without_a_valid_header(self, tmp_path, capsys):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("data.pkl", "")
        assert "it is damaged" in refused(capsys, tmp_path / "a.npz")
        (tmp_path / "a.safetensors").write_bytes(bytes(8))
        assert re.search(r"it is damaged \(.*header.*\)\n", refused(capsys, tmp_path / "a.safetensors"))

    def test_without_safetensors(self, tmp_path, capsys, monkeypatch):
        as_safetensors(tmp_path / "a.safetensors")
        monkeypatch.setitem(sys.modules, "safetensors", None)
        assert "pip install safetensors" in refused(capsys, tmp_path / "a.safetensors")


class TestWrongInput:
    def test_an_optimizer_that_is_none(self, base, capsys):
        for name, expected in {
            "adamx": "nearest names: adamax, adam",
            "AdamW": "nearest names: adamw, adam",
            "contrib.muom": "nearest names: muon",
            "": "no such function",
            "apply_updatez": "for an optimizer of your own call fz.summary",
            "dpsgd": "missing 3 required positional arguments",
            "apply_updates": "missing 1 required",
            "chain": "has no attribute 'init'",
            "constant_schedule": "got: the function",
        }.items():
            assert expected in refused(capsys, base, "--optimizer", name)

    def test_what_is_no_checkpoint(self, base, tmp_path, capsys):
        (tmp_path / "file").touch()
        for path, got, fix in (
            (tmp_path / "nothing/0/default", "got: no such file or directory", f"look into {tmp_path}\n"),
            (tmp_path / "file", "got: a file\n", "convert it, or call fz.summary on shapes"),
            (pathlib.Path(base) / "_METADATA", "got: a file", f"give the directory that Orbax wrote: {base}\n"),
            (tmp_path, "Orbax did not write", "give one that holds _METADATA"),
        ):
            error = refused(capsys, path)
            assert "expected: a directory that Orbax wrote, or a .safetensors, .npz or Flax .msgpack file\n" in error
            assert got in error
            assert f"fix: {fix}" in error

    def test_a_path_that_is_not_there_names_what_is(self, tmp_path, capsys):
        manage(tmp_path / "run", [1, 2], default={"w": jnp.ones(2)})
        as_safetensors(tmp_path / "model.safetensors")
        (tmp_path / "notes.txt").touch()
        for missing, *there in (
            ("rum", "run"),
            ("run/3/default", "run/1", "run/2"),
            ("run/2/defualt", "run/2/default"),
            ("modle.safetensors", "model.safetensors"),
            ("other", "model.safetensors"),
        ):
            error = refused(capsys, tmp_path / missing)
            assert "got: no such file or directory" in error
            assert f"fix: there is {', '.join(str(tmp_path / path) for path in there)}\n" in error

    def test_a_damaged_checkpoint(self, tmp_path):
        """In a process of its own, which the tasks that Orbax leaves behind do not outlive."""
        write(tmp_path / "base", PARAMS)
        for data in (tmp_path / "base").glob("d/*"):
            data.unlink()
        done = program(tmp_path / "base")
        assert done.returncode == 2
        assert "a damaged checkpoint" in done.stderr
        assert "fix: give another step, or write it again" in done.stderr

    def test_damaged_shapes(self, tmp_path, capsys):
        write(tmp_path / "base", PARAMS)
        for text in ("", "{}", "[]", "null", "[" * 100_000, '{"tree_metadata": {"a": {}}}'):
            (tmp_path / "base" / "_METADATA").write_text(text)
            assert "a damaged checkpoint" in refused(capsys, tmp_path / "base")


def test_the_page_shows_what_it_prints(tmp_path, capsys, monkeypatch):
    layers = {f"layer_{i}": {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)} for i in range(12)}
    params = {"encoder": layers, "head": {"kernel": jnp.ones((64, 10))}}
    page = pathlib.Path("docs/checks.md").read_text().partition("\n## Checkpoint files\n")[2].partition("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "base", params)
    attention = {f"h.{i}.attn.{name}.weight": np.ones((64, 64), np.float16) for i in range(12) for name in "kv"}
    safetensors.numpy.save_file({"wte.weight": np.ones((512, 64), np.float16)} | attention, "model.safetensors")
    checkpoint.save("adapters", params, fz.all_except("head", "**/bias"), step=1000)
    blocks = re.findall(r"```console\n\$ optax-freeze (.*)\n([^`]*)```", page)
    assert len(blocks) == page.count("```") / 2 > 0  # no other commands
    for command, shown in blocks:
        assert main(shlex.split(command)) == (2 if shown.startswith("error") else 0)
        printed = capsys.readouterr()
        out = printed.out + printed.err
        assert doctest.OutputChecker().check_output(shown, out, doctest.ELLIPSIS), out
