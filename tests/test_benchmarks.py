"""The page of the benchmarks and what writes it; that of a GPU, small and on the CPU."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest
from benchmarks import measure, write_page

SCRIPTS = pathlib.Path(write_page.HERE)
WITH_A_MAIN = {path.stem for path in SCRIPTS.glob("*.py") if "\ndef main(" in path.read_text()} - {"write_page"}


@pytest.fixture(scope="module")
def page():
    return write_page.PAGE.read_text()


class TestThePage:
    def test_every_benchmark_has_its_section(self, page):
        shown = WITH_A_MAIN - {"gpu"}  # which has no figures until it has run on one
        assert {section.script for section in write_page.SECTIONS} == shown
        assert set(write_page.parse(page)) == shown

    def test_it_says_what_the_docstrings_say(self, page):
        assert write_page.render(write_page.parse(page)) == page, "python tests/benchmarks/write_page.py --only"

    @pytest.mark.parametrize("section", write_page.SECTIONS, ids=lambda section: section.script)
    def test_a_section_has_versions_and_figures(self, page, section):
        assert (write_page.PAGE.parent / section.discussed).exists()
        results = write_page.parse(page)[section.script]
        assert all(f"{package} " in results for package in write_page.PACKAGES)
        assert "\n| --- |" in results


class TestATable:
    def test_times_are_in_italics_and_what_markdown_reads_is_escaped(self):
        table = measure.table("a title", "exact", timed=["measured"], label="what")
        table.add_row("[bold]a group")
        table.add_row('"layer/**" | a[:-1]', "1.00", "2.00")
        assert measure.markdown(table).splitlines() == [
            "**a title**",
            "",
            "| what | exact | *measured* |",
            "| --- | ---: | ---: |",
            "| **a group** |  |  |",
            r'| "layer/\*\*" \| a[:-1] | 1.00 | *2.00* |',
        ]

    def test_it_is_shown_on_the_page_if_there_is_one(self, monkeypatch, tmp_path, capsys):
        measure.show("Nothing to see.")
        monkeypatch.setenv(measure.PAGE, str(tmp_path / "page.md"))
        measure.show("No GPU was at hand.")
        measure.show(measure.table("a title", "exact"))
        assert (tmp_path / "page.md").read_text() == (
            "No GPU was at hand.\n\n**a title**\n\n|  | exact |\n| --- | ---: |\n\n"
        )
        assert "Nothing to see." in capsys.readouterr().out


class TestAGPU:
    def test_it_is_busy_while_any_of_its_streams_is(self):
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

    @pytest.mark.parametrize("arguments", [["--tiny"], []])
    def test_the_script_runs(self, arguments):
        flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        run = subprocess.run(
            [sys.executable, "-W", "error", SCRIPTS / "gpu.py", *arguments],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        shown = "fz.grad, the model unchanged" if arguments else "No GPU was at hand."
        assert shown in run.stdout
