"""The figures of the benchmarks, the memory of chips and host, and the GPU benchmark on the CPU."""

import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import measure, write_results
from PIL import Image

import optax_freeze as fz

SCRIPTS = write_results.HERE
WITH_A_MAIN = {path.name for path in SCRIPTS.glob("*.py") if "\ndef main(" in path.read_text()} - {"write_results.py"}


def test_every_benchmark_but_that_for_a_gpu_has_its_figures_as_json_and_markdown():
    assert {command.split()[0] for command in write_results.SCRIPTS.values()} == WITH_A_MAIN
    files = {path.name for path in write_results.RESULTS.iterdir()}
    assert files == {f"{name}.{kind}" for name in write_results.SCRIPTS if name != "gpu" for kind in ("json", "md")}
    for path in write_results.RESULTS.glob("*.json"):
        run = json.loads(path.read_text())
        assert run["script"] == write_results.SCRIPTS[path.stem]
        assert {"jax", "jaxlib", "optax", "flax"} <= set(run["versions"])
        text = write_results.markdown(path.stem, run)
        assert path.with_suffix(".md").read_text() == text, "python tests/benchmarks/write_results.py --render"


@pytest.fixture
def bars(monkeypatch):
    """The script that draws the bars of the performance page."""
    monkeypatch.syspath_prepend("docs")
    return importlib.import_module("draw_bars")


def test_the_pictures_of_the_performance_page_are_drawn_from_the_results_as_they_are(bars):
    page = pathlib.Path("docs/performance.md").read_text()
    for picture, (_, names) in bars.PICTURES.items():
        assert Image.open(bars.STATIC / f"{picture}.png").text["Source"] == bars.digest(names), "docs/draw_bars.py"
        assert f"(_static/{picture}.png)" in page


def test_bars_are_as_long_as_the_figures(bars):
    assert bars.memory("scale_gpu", "70B on h100", 2) == {"optax.partition": (324.6, True), "fz.freeze": (75.5, False)}
    last = bars.draw_memory().axes[-1]
    assert [bar.get_width() for bar in last.patches] == [324.6, 75.5]
    assert [text.get_text() for text in last.texts] == ["over 324.6", "75.5"]
    assert dict(bars.costs()["a step, GFLOP"])["fz.freeze"] == 96.2
    assert len(bars.draw_costs().axes) == 7


def test_a_table_is_written_with_times_in_italics_and_what_markdown_reads_escaped(monkeypatch, tmp_path, capsys):
    measure.show("Nothing to see.")
    monkeypatch.setenv(measure.RESULTS, str(tmp_path / "results.json"))
    measure.show("No GPU was at hand.")
    table = measure.table("a title", "exact", timed=["measured"], label="what")
    table.add_row("[bold]a group")
    table.add_row('"layer/**" | a[:-1]', "1.00", "2.00")
    measure.show(table)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results == [
        "No GPU was at hand.",
        {
            "title": "a title",
            "columns": ["what", "exact", "measured"],
            "timed": ["measured"],
            "rows": [["a group", "", ""], ['"layer/**" | a[:-1]', "1.00", "2.00"]],
        },
    ]
    run = {"script": "turns.py", "date": "2026-11-23", "versions": {"jax": "1.0"}, "cores": 2, "results": results}
    assert write_results.markdown("turns", run).splitlines()[-10:] == [
        "*Figures in italics* are times and vary by several percent; all others are exact.",
        "",
        "No GPU was at hand.",
        "",
        "**a title**",
        "",
        "| what | exact | *measured* |",
        "| --- | ---: | ---: |",
        "| **a group** |  |  |",
        r'| "layer/\*\*" \| a[:-1] | 1.00 | *2.00* |',
    ]
    assert "Nothing to see." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "is_alike"),
    [
        ("2,101.35 (1.00)", "2,140.2 (1.01)", True),
        ("2,101.35", "2,146.2", False),
        ("0.05", "0.06", True),  # rounded
        ("1", "2", False),
        ("5.2 + 1.3 = 6.5", "5.2 + 1.3 = 6.5: no", False),
        ("", "1", False),
    ],
)
def test_a_figure_that_is_not_the_one_that_was_written_is_named(old, new, is_alike):
    def results(exact, label="by hand"):
        rows = [["group", "", ""], [label, exact, "1.00"]]
        return ["A note.", {"title": "rows", "columns": ["", "GB", "time"], "timed": ["time"], "rows": rows}]

    found = write_results.differences(results(old), results(new))
    assert found == [f"rows / group / by hand / GB: {old or 'nothing'}, now {new}"] * (not is_alike)
    assert len(write_results.differences(results(new), results(new, "fz.grad"))) == 2


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="nothing to compile for TPU with")


@needs_libtpu
class TestSmallestCasesOfThePages:
    """What the compiler says of rows, for shapes that it compiles in a second; `make bench` compares the pages' own."""

    @pytest.fixture
    def script(self, monkeypatch):
        monkeypatch.syspath_prepend(str(SCRIPTS))
        script = importlib.import_module("frozen_rows")
        shapes = {"positions": (256, 256), "layers": (2, 256, 256), "head": (256, 8192), "bias": (8192,)}
        arrays = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
        monkeypatch.setattr(script, "PARAMS", arrays)
        monkeypatch.setattr(script, "MATRIX", jax.ShapeDtypeStruct((1024, 1024), "float32"))
        return script

    @staticmethod
    def ratios(of, by):
        """FLOPs, bytes, and temporary and output bytes."""
        return np.divide(*((each.flops, each.accessed, each.temporary + each.output) for each in (of, by)))

    @pytest.mark.parametrize(
        ("leaf", "axis", "limits"),
        [("positions", 0, (0.62, 0.81, 1)), ("bias", 0, (0.99, 0.78, 1)), ("head", 1, (0.52, 0.74, 1))],
    )
    def test_rows_beside_the_parameter_concatenated_by_hand(self, script, leaf, axis, limits):
        ways = script.gradients(leaf, axis, 64, layers_train=False)
        names = "fz.grad", "concatenated by hand"
        of = (measure.figures(ways[name], script.PARAMS, *script.batch_of(4), donate=()) for name in names)
        found = self.ratios(*of)
        assert (found <= 1.02 * np.array(limits)).all(), found

    @pytest.mark.parametrize(("name", "limits"), [("lookup", (1, 0.07, 1)), ("tied", (1, 0.82, 0.5))])
    def test_new_rows_of_an_embedding_beside_a_model_that_was_split_by_hand(self, script, name, limits):
        embed, out = (jax.ShapeDtypeStruct((size, 256), "float32") for size in (16_384, 256))
        steps, tokens = script.row_steps(getattr(script, name), len(embed)), jax.ShapeDtypeStruct((1, 64), "int32")
        states = {name: jax.eval_shape(steps[name].init, embed, out) for name in (script.OURS, script.BY_HAND)}
        assert measure.nbytes(states[script.OURS]) == measure.nbytes(states[script.BY_HAND]) < 40_000
        of = (measure.figures(steps[name].step, embed, state, out, tokens) for name, state in states.items())
        found = self.ratios(*of)
        assert (found <= 1.02 * np.array(limits)).all(), found

    def test_a_dense_mask_is_read_once(self, script, monkeypatch):
        tables = []
        monkeypatch.setattr(script.measure, "show", tables.append)
        script.dense_mask()
        assert [float(row[-1]) for row in measure.contents(tables[0])["rows"][1:]] == [1.0, 1.0]

    def test_a_scan_whose_last_layer_is_trainable_copies_no_stack(self):
        stack = jax.ShapeDtypeStruct((16, 256, 256), "float32")
        x = jax.ShapeDtypeStruct((8, 256), "float32")

        def loss(stack, x):
            x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None)), x, stack)
            return jnp.mean(x**2)

        found = measure.figures(fz.grad(loss, fz.rows(slice(0, 15))), stack, x, donate=())
        assert found.temporary + found.output < 2 * measure.nbytes(stack) / 16


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("scale")


def test_a_step_fits_if_its_buffers_fit_the_chip_and_the_host(scale):
    memory = scale.from_buffers(
        f"""
allocation 0: size {2**31}, page 0, parameter 0, shape |bf16[1]| at ShapeIndex {{}}, maybe-live-out:
allocation 1: size {2**32}, color 5, page 0, parameter 1, shape |bf16[1]| at ShapeIndex {{}}:
allocation 2: size {2**30}, page 0, preallocated-temp:
allocation 3: size {2**27}, color 1, page 0, preallocated-temp:
""",
        "v5e",
    )
    assert memory == scale.Memory(2.0, 1.0, 2.0, 2.0, 15.75, 4.0, 48.0)
    assert scale.text(memory) == "2.0 + 1.0 = 3.0, host 4.0"
    assert memory.fits
    assert not dataclasses.replace(memory, argument=15.0).fits
    assert dataclasses.replace(memory, host=48.0).fits
    assert not dataclasses.replace(memory, host=48.1).fits


@needs_libtpu
def test_a_small_decoder_reads_its_frozen_layers_from_the_host(scale, monkeypatch):
    monkeypatch.setitem(scale.SHAPES, "small", (1024, 4, 2048, 8))
    monkeypatch.setitem(scale.TENSOR_PARALLEL, "small", 2)
    cells = (scale.Cell("small", "v5e", 2, "last block and head", way) for way in ("fz.offload", "fz.restrict"))
    (program, there), (_, here) = map(scale.lower, cells)
    of_layers = 4 * (4 * 1024**2 + 3 * 1024 * 2048) * 2 / 2 / 2**30
    assert here.host == 0
    assert there.host == pytest.approx(here.argument - there.argument) == of_layers
    assert "pinned_host" in program.as_text()


def test_a_gpu_is_busy_while_any_of_its_streams_is():
    def events(*spans):
        return " ".join(f"events {{ metadata_id: 1 offset_ps: {a}000 duration_ps: {b - a}000 }}" for a, b in spans)

    profile = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(f"""
        planes {{
          name: "/device:GPU:0"
          event_metadata {{ key: 1 value {{ id: 1 name: "kernel" }} }}
          lines {{ name: "Stream #7(Compute)" timestamp_ns: 100 {events((0, 10), (20, 30), (100, 150))} }}
          lines {{ name: "Stream #9(MemcpyD2D)" timestamp_ns: 100 {events((5, 15), (110, 120))} }}
          lines {{ name: "XLA Modules" timestamp_ns: 100 {events((0, 400))} }}
        }}
        planes {{
          name: "/host:CPU"
          event_metadata {{ key: 1 value {{ id: 1 name: "call" }} }}
          lines {{ name: "Stream" timestamp_ns: 100 {events((0, 900))} }}
        }}
        """)
    )
    assert measure.busy_seconds(profile) == pytest.approx((15 + 10 + 50) / 1e9)


def test_the_gpu_benchmark_runs():
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    if jax.__version_info__ < (0, 12):
        flags += " --xla_cpu_use_fusion_emitters=false"
    run = subprocess.run(
        [sys.executable, "-W", "error", SCRIPTS / "gpu.py", "--tiny"],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "fz.grad, the model unchanged" in run.stdout
