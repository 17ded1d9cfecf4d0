"""Every example runs, and its output has the expected content."""

import ast
import importlib.util
import itertools
import pathlib
import re
import runpy
import subprocess
import sys

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

EXAMPLES = sorted(path.stem for path in pathlib.Path("examples").glob("*.py"))
INDEX = pathlib.Path("docs/examples.md").read_text()


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example as a script and returns what it printed."""

    def run_example(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        monkeypatch.setenv("COLUMNS", "120")
        runpy.run_path(f"examples/{name}.py", run_name="__main__")
        return capsys.readouterr().out

    return run_example


@pytest.fixture
def drawn(monkeypatch):
    """The figures that an example saves."""
    figures, save = [], Figure.savefig

    def savefig(figure, path, **options):
        save(figure, path, **options)
        assert pathlib.Path(path).stat().st_size > 5000
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def differ_by(what, output):
    """By how much an example says that two trainings differ: by rounding."""
    return float(re.search(f"{what} differ by at most ([^ \\n]+)", output)[1])


def row(output, name):
    """The cells of a line of a printed table."""
    between = r"\s*│\s*|(?<=\S)\s{2,}(?=\S)"
    line = next(line for line in output.splitlines() if name in line and re.search(between, line))
    return [cell for cell in re.split(between, line) if cell][1:]


def number(cell):
    return float(cell.split()[0].replace(",", "").rstrip("%"))


def numbers(output, name):
    return [number(cell) for cell in row(output, name)]


def core_and_rest(example):
    """The lines between the docstring and the first ``# %%``, and those below it."""
    text = pathlib.Path(f"examples/{example}.py").read_text()
    before, _, rest = text.partition("\n# %%\n")
    return "\n".join(before.splitlines()[ast.parse(text).body[0].end_lineno :]).strip("\n"), rest


def defined(code):
    """The names of the functions, classes and constants of a module."""
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Assign):
            names = [name for target in statement.targets for name in ast.walk(target)]
            yield from (name.id for name in names if isinstance(name, ast.Name))


def used(code):
    return {
        each.id for each in ast.walk(ast.parse(code)) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_begins_with_a_core_that_can_be_copied(example):
    core, rest = core_and_rest(example)
    assert len(core.splitlines()) <= 30
    assert re.search(r"\bf(z|nnx)\.\w", core)
    exec(compile(core, f"the core of {example}", "exec"), {})
    names = set(defined(core))
    assert names & used(rest)
    assert names <= used(core) | used(rest)
    assert not names & set(defined(rest))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F", "-"]  # undefined names, unused imports
    checked = subprocess.run(ruff, input=core, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_short_has_a_test_and_a_page_shows_its_core(example):
    lines = pathlib.Path(f"examples/{example}.py").read_text().splitlines()
    limit = 205 if example == "teach_magika" else 140  # it reads a model, and makes files
    assert len(lines) <= limit
    assert max(map(len, lines[: lines.index("# %%")])) <= 100  # which the page shows without scrolling
    assert f"test_{example}" in globals()
    assert re.search(rf"^\| \[{example}\]\(#{example}\) \| .+ \|$", INDEX, re.MULTILINE)
    [section] = re.findall(rf"^## {example}\n\n(.*?)(?=^## |\Z)", INDEX, re.MULTILINE | re.DOTALL)
    core = f'```{{literalinclude}} ../examples/{example}.py\n:language: python\n:end-before: "# %%"\n```\n'
    assert section.startswith(core)  # whose docstring says what the example does
    assert section.count("literalinclude") == 1


def test_the_page_has_no_other_examples():
    assert sorted(set(re.findall(r"\.\./examples/(\w+)\.py", INDEX))) == EXAMPLES


@pytest.mark.usefixtures("as_users_compile")
def test_finetune_digits(run, tmp_path):
    output = run("finetune_digits", "--draws", 4, "--picture", tmp_path / "curves.png")
    line = r"^(unfrozen|frozen|precomputed) +([\d.]+)%, ([\d.]+) CPU s, ([\d,]+) B, ([\d.]+) MFLOP$"
    names, *columns = zip(*re.findall(line, output, re.MULTILINE), strict=True)
    accuracies, seconds, state_bytes, flops = ([number(cell) for cell in each] for each in columns)
    assert names == ("unfrozen", "frozen", "precomputed")
    assert accuracies[1] == pytest.approx(accuracies[2], abs=0.1)
    assert min(accuracies[1:]) >= accuracies[0] > 75
    assert min(seconds) > 0
    full, frozen, once = state_bytes
    assert frozen == once == 4 + 2 * 4 * 512 * 10
    assert full == frozen + 2 * 4 * (64 * 512 + 512 * 512)
    full, frozen, once = flops
    assert once < 0.1 * frozen < 0.05 * full
    assert differ_by("the parameters", output) < 1e-5
    assert "; its encoder kept its bits" in output
    assert (tmp_path / "curves.png").stat().st_size > 5000


@pytest.mark.usefixtures("as_users_compile")
def test_teach_magika(run, tmp_path):
    output = run("teach_magika", "--files", 4, "--draws", 1, "--picture", tmp_path / "right.png")
    assert "loaded: 8 leaves\ngrown: 2 leaves: Dense_1/bias (rows 0:214 of 218 along axis 0), Dense_1/kernel" in output
    assert float(re.search(r"scores differ from the original by at most (\S+)", output)[1]) < 1e-2
    shares = re.findall(r"^(as shipped|new columns|whole head).*?((?: +[\d.]+){6}) *$", output, re.MULTILINE)
    shipped, columns, head = ([float(share) for share in row.split()] for _, row in shares)
    assert shipped == [0, 0, 0, 0, 100, 100]
    assert min(columns) >= 75
    assert min(head[:4]) >= 75
    trained = 4 * (512 + 1)
    assert f"{4 + 2 * 4 * trained:,} bytes of optimizer state" in output
    assert (tmp_path / "right.png").stat().st_size > 5000


@pytest.mark.usefixtures("as_users_compile")
def test_sparse_channels(run, tmp_path):
    output = run("sparse_channels", "--epochs", 8, "--picture", tmp_path / "costs.png")
    assert float(re.search(r"changes a logit by at most (\S+)", output)[1]) < 1e-4
    channels, lora, everything = (numbers(output, f"│ {name} ") for name in ("S2FT", "LoRA", "all"))
    assert channels[0] == lora[0] == 0.08 * 8 * 128 * 1000
    assert channels[1] < 0.95 * lora[1] < 0.8 * everything[1]
    assert channels[2] < 0.85 * lora[2] < 0.6 * everything[2]
    assert channels[3] > 60
    assert (tmp_path / "costs.png").stat().st_size > 5000


@pytest.mark.usefixtures("as_users_compile")
def test_train_on_features(run, tmp_path):
    output = run("train_on_features", "--epochs", 1, "--picture", tmp_path / "features.png")
    in_each_step, once = numbers(output, "last loss")
    assert in_each_step == pytest.approx(once, abs=1e-4)
    assert differ_by("the 28 losses", output) < 1e-5
    in_each_step, once = numbers(output, "compiled step")
    assert once < 0.4 * in_each_step
    in_each_step, once = numbers(output, "parameters in the step")
    assert once < 0.2 * in_each_step
    assert "not read in a step: 115 frozen leaves" in output
    assert "stored: 1 array, 256.0 KiB" in output
    assert "features of 1792 images: 7.0 MiB" in output
    assert (tmp_path / "features.png").stat().st_size > 5000


def test_latent_diffusion(run):
    output = run("latent_diffusion", "--epochs", 8)
    assert re.search(r"stored: 2 arrays, 4.0 KiB\n.*: split at .*\n.*: exp at ", output)
    assert "first on its path that cannot be computed once:\n  mul at" in output
    assert re.search("1792 examples .*, 3 variants each: epoch 0 of seed 0", output)
    with_encoder, on_features = map(int, re.search(r"(\d+) MFLOP with the encoder, (\d+) MFLOP", output).groups())
    assert on_features < 0.5 * with_encoder
    assert differ_by("the 224 losses", output) < 1e-4
    assert int(re.search(r"(\d+)% of 200 generated digits", output)[1]) > 40


@pytest.mark.usefixtures("as_users_compile")
def test_many_heads(run, drawn, tmp_path):
    output = run("many_heads", "--epochs", 2, "--picture", tmp_path / "heads.png")
    assert "16 heads, one compilation: 1; no bit of the trunk changed" in output
    assert float(re.search(r"best head: ([\d.]+)%", output)[1]) > 60
    together, separate, tails = (numbers(output, name) for name in ("│ together ", "│ separate ", "│ tails "))
    assert together[0] <= 1.02 * tails[0]  # heads: the FLOPs of one trunk and 16 tails
    assert together[0] < 0.25 * separate[0]
    assert together[1] < 0.25 * separate[1]
    assert together[3] < 0.5 * separate[3]  # LoRA: memory of one base
    accuracy, *_ = drawn.pop().axes
    assert len(accuracy.lines[0].get_xdata()) == 16


@pytest.mark.usefixtures("as_users_compile")
def test_recommender(run, drawn, tmp_path):
    sizes = "--users", 20_000, "--items", 500, "--batch", 128, "--steps", 60
    output = run("recommender", *sizes, "--picture", tmp_path / "recommender.png")
    dense, rows, dense_adagrad, rows_adagrad = (
        numbers(output, f"{name}, {way}")
        for name in ("Adam", "row-wise Adagrad")
        for way in ("dense", "rows of the batch")
    )
    assert rows[1] < dense[1] / 5
    assert rows[2] < dense[2] / 5
    assert rows_adagrad[3] == dense_adagrad[3]
    assert "no bit of the other rows changed" in output
    assert len(drawn.pop().axes[0].lines) == 4


def test_new_token_rows(run):
    output = run("new_token_rows", "--steps", 60)
    before, after = numbers(output, "loss, nats per character")
    assert after < before
    before, after = numbers(output, "chance of the right new token")
    assert after > before
    assert "trainable 1,024 of" in output
    assert "optimizer state 8.0 KiB instead of" in output
    assert "no bit of the old rows and of all other parameters moved" in output
    assert re.search(r"embed/embedding: 16 of \d+ rows train; only their gradient is computed", output)
    assert int(re.search(r"([\d,]+) characters of text", output)[1].replace(",", "")) > 50_000


def test_last_layers_of_a_scanned_transformer(run):
    output = run("last_layers_of_a_scanned_transformer", "--steps", 8)
    before, after = numbers(output, "held-out loss")
    assert after < before
    for name in ("a step", "optimizer state"):
        dense, in_parts = numbers(output, name)
        assert in_parts < 0.7 * dense
    assert row(output, "frozen layers") == ["the same bits"]
    assert "only their gradient is computed" in output
    assert "everything is computed by" not in output


def test_lisa(run, tmp_path):
    output = run("lisa", "--steps", 10, "--picture", tmp_path / "losses.png")
    (before,) = numbers(output, "before")
    figures = [numbers(output, name) for name in ("AdamW of everything", "LISA", "the last two layers")]
    assert all(loss < before for loss, *_ in figures)
    full, lisa, last = (size for *_, size in figures)
    assert last < lisa < 0.3 * full
    assert (tmp_path / "losses.png").stat().st_size > 5000


def test_finetune_beyond_memory(run):
    output = run("finetune_beyond_memory")
    gib = {tuple(line.split()[1:4:2]): line.split()[5::2] for line in output.splitlines() if re.match(r"│ \d+B ", line)}
    assert gib["8B", "1"][:3] == ["21.9", "9.3", "13.0"]
    assert gib["405B", "16"][:3] == ["50.3", "3.9", "46.8"]
    planned = f"{6 * 2 * (2 * 128**2 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128):,}"
    assert row(output, "bytes on the host") == ["0", planned]
    by_compiler = planned if importlib.util.find_spec("libtpu") else "left out: no libtpu"
    assert row(output, "by the TPU compiler") == [by_compiler]
    on_device, from_host = row(output, "first and last loss")
    before, after = map(float, from_host.split(", "))
    assert list(map(float, on_device.split(", "))) == pytest.approx([before, after], abs=1e-3)
    assert after < before - 1
    assert len(set(row(output, "frozen weights"))) == 1
    assert float(row(output, "losses and parameters differ by")[0].removeprefix("at most ")) < 1e-5


def test_lottery_ticket(run, drawn, tmp_path):
    output = run("lottery_ticket", "--epochs", 4, "--picture", tmp_path / "accuracies.png")
    assert "no frozen weight moved" in output
    accuracy, _, state = row(output, "5,168 (30.0%)")
    assert number(accuracy) > 80
    assert state == f"{4 + 8 * 5168:,} + 17,226"
    [axes] = drawn.pop().axes
    most_moved, at_random = axes.lines
    shares, cells = [1, 0.3, 0.1, 0.03, 0.01], ["(100 %)", "(30.0%)", "(10.0%)", "(3.0%)", "(1.0%)"]
    assert list(most_moved.get_xdata()) == list(at_random.get_xdata()) == shares
    plotted = zip(most_moved.get_ydata(), at_random.get_ydata(), strict=True)
    assert [[f"{y:.1%}" for y in pair] for pair in plotted] == [row(output, cell)[:2] for cell in cells]


def test_lora_and_frozen_base(run):
    output = run("lora_and_frozen_base", "--epochs", 6)
    assert row(output, "layer_1/kernel")[1:] == ["int8", "65,536", "64.0 KiB", "frozen"]
    assert row(output, "layer_1/adapter_in")[-1] == "trains"
    assert "trainable 4,392 of 89,916 elements" in output
    state, floats = 4 + 2 * 4 * 4_392, 4 + 2 * (4 * 4_392 + (4 + 2) * (256 + 256 + 10))  # adapters, scales, biases
    assert f"optimizer state {state / 1024:.1f} KiB instead of {floats / 1024:.1f} KiB" in output
    assert "jax.grad of all parameters refuses: grad requires real- or complex-valued inputs" in output
    before, after = re.search(r"fingerprint of the base: (\w+) before, (\w+) after", output).groups()
    assert before == after
    upright, rotated = numbers(output, "int8 alone")
    assert upright > 90 > 40 > rotated
    assert numbers(output, "int8 and adapters")[1] > rotated + 30


def test_freeze_a_backbone_linen(run):
    output = run("freeze_a_backbone_linen", "--epochs", 6)
    assert min(numbers(output, "accuracy")) > 50
    assert row(output, "optimizer state") == ["2,644 bytes"] * 2
    assert row(output, "parameters of the backbone") == ["the same", "the same"]
    assert row(output, "statistics of the backbone") == ["the same", "moved"]
    same, changed = numbers(output, "change of a logit")
    assert same == 0
    assert changed > 0


def test_freeze_at_construction(run):
    output = run("freeze_at_construction", "--steps", 12)
    for model, frozen in (("Perceptron", "16,640"), ("Stack", "4,160"), ("Convolutions", "4,752")):
        cells = row(output, model)
        assert (cells[0], cells[4]) == (frozen, "0")
        assert number(cells[2]) == 23 * 4 * number(cells[1]) + 64  # 20 differences, parameters, updates and gradient
        assert number(cells[3]) > 75


def test_freeze_a_backbone_nnx(run):
    output = run("freeze_a_backbone_nnx", "--epochs", 4)
    trained, frozen, wrapped = (row(output, name) for name in ("everything", "fnnx.freeze", "fnnx.Frozen"))
    assert number(trained[0]) > 90
    assert min(number(frozen[0]), number(wrapped[0])) > 60
    devices, kernels = jax.device_count(), 9 * 32 + 9 * 32 * 64
    assert frozen[1:3] == wrapped[1:3] == [f"{8 + 2 * 4 * (640 // n + 10):,} bytes" for n in (1, devices)]
    assert trained[1:3] == [f"{8 + 2 * 4 * ((640 + kernels) // n + 10 + 288):,} bytes" for n in (1, devices)]
    assert "0" not in (trained[3], trained[4], frozen[4])
    assert (frozen[3], *wrapped[3:]) == ("0", "0", "0")


def test_gradual_unfreezing(run, drawn, tmp_path):
    output = run("gradual_unfreezing", "--epochs", 4, "--picture", tmp_path / "accuracies.png")
    assert row(output, "compilations") == ["1", "3"]
    layers = ("head", "hidden_1", "hidden_0")
    flops = [numbers(output, f"{layer} thaws: MFLOP") for layer in layers]
    assert [a for a, _ in flops] == [flops[2][0]] * 3
    assert flops[0][1] < 0.5 * flops[2][1]
    assert flops[0][1] < flops[1][1] < flops[2][1] == flops[2][0]
    steps = [row(output, f"{layer} thaws: its first step") for layer in layers]
    assert steps[0][0] == steps[0][1]
    assert steps[1][0] != steps[1][1]
    assert min(numbers(output, "held-out accuracy")) > 90
    assert "counts from 0" in output
    axes, bars = drawn.pop().axes
    curves = [line.get_ydata() for line in axes.lines if line.get_label() in ("one program", "static phases")]
    assert [len(curve) for curve in curves] == [1 + 3 * 4] * 2
    assert [f"{curve[-1]:.1%}" for curve in curves] == row(output, "held-out accuracy")
    assert curves[0][0] == curves[1][0] < 0.6  # five of the ten digits
    assert [float(f"{bar.get_height():.1f}") for bar in bars.patches] == [static for _, static in flops]


def test_autofreeze(run, drawn, tmp_path):
    output = run("autofreeze", "--epochs", 12, "--picture", tmp_path / "costs.png")
    layers = ["stem", "block_0", "block_1", "block_2"]
    rows = [line.split("│")[1:-1] for line in output.splitlines() if re.match(r"│ \d", line)]
    frozen = [cells[1].strip().split(", ") for cells in rows]
    assert frozen[0] == ["nothing"]
    assert len(frozen) > 1
    assert all(names == layers[: len(names)] for names in frozen[1:])
    costs = [[float(cell) for cell in cells[2:]] for cells in rows]
    assert costs[0][0] == costs[0][1]
    for (before, before_once), (after, after_once) in itertools.pairwise(costs):
        assert after < before
        assert after_once < min(before_once, after)
    totals = numbers(output, "GFLOP of the training")
    assert totals[2] < totals[1] < 0.8 * totals[0]
    assert totals[3] < totals[0]
    assert int(re.search(r"GradES: (\d) of 5 matrices are frozen", output)[1]) > 1
    assert min(numbers(output, "held-out accuracy")) > 95
    steps, losses = drawn.pop().axes
    plotted = [1347 // 64 * patch.get_data().values.sum() / 1e3 for patch in steps.patches]
    assert [f"{total:.2f}" for total in plotted[:2]] == [f"{total:.2f}" for total in totals[:2]]
    assert plotted[2] < totals[2]  # which includes running the frozen layers once
    assert [len(line.get_ydata()) for line in losses.lines] == [12] * 4


def test_gan_alternating(run, drawn, tmp_path):
    output = run("gan_alternating", "--turns", 400, "--picture", tmp_path / "points.png")
    turns = [row(output, f"│ {turn}  ") for turn in range(4)]
    assert [frozen for frozen, *_ in turns] == ["generator", "discriminator"] * 2
    for (_, *before), (frozen, *after) in itertools.pairwise(turns):
        still, moves = (slice(0, 2), slice(2, 4)) if frozen == "generator" else (slice(2, 4), slice(0, 2))
        assert before[still] == after[still]
        assert all(a != b for a, b in zip(before[moves], after[moves], strict=True))
    assert "In all 400 turns, no bit of the frozen network and of its Adam moved" in output
    assert "2000 updates, 1 compilation\n" in output
    before, after, data = (numbers(output, f"│ {name} ")[0] for name in ("before", "after", "data"))
    assert before + 30 < after < data
    clouds = [axes.collections[0].get_offsets() for axes in drawn.pop().axes]
    angles = np.arange(8) * np.pi / 4
    centres = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    near = [(np.linalg.norm(points[:, None] - centres, axis=-1).min(axis=1) < 0.2).mean() for points in clouds]
    assert near == pytest.approx([before / 100, after / 100, data / 100], abs=0.05)


def test_audit_a_training_script(run):
    output = run("audit_a_training_script", "--epochs", 4)
    as_found, fixed = output.split("The optimizer, fixed:")
    assert "audit: 4 leaks (4 of 6 leaves frozen, 3 steps a run)" in as_found
    leaks = ("moved: weight decay", "moved: the state of an optimizer", "changed: a norm", "state: state for frozen")
    assert all(leak in as_found for leak in leaks)
    assert "at: encoder/0/weight" in as_found
    assert "audit: no leak" in fixed
    assert row(output, "audit") == ["leaks", "passes"]
    assert row(output, "bits of the encoder") == ["4 of 4 frozen leaves changed", "the same"]
    full, frozen = numbers(output, "optimizer state")
    assert frozen == 4 + 2 * 4 * 650
    assert full == 4 + 2 * 4 * (650 + 16_576)
    assert min(numbers(output, "accuracy")) > 60
