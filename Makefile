# make demo  runs the main job; make test  runs every check; make bench  compiles the benchmarks for TPU;
# make compatibility  runs the whole optimizer matrix and writes its page.
PYTHON ?= python3
BIN := .venv/bin
export JAX_PLATFORMS ?= cpu

.PHONY: demo test bench compatibility format clean

demo: .venv/demo
	$(BIN)/python examples/finetune_digits.py

test: .venv/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/pytest -n 2
	$(BIN)/sphinx-build -q -W --keep-going -b html docs .venv/html

bench: .venv/bench
	$(BIN)/python tests/benchmarks/transformer.py
	$(BIN)/python tests/benchmarks/element_masks.py
	$(BIN)/python tests/benchmarks/frozen_rows.py
	$(BIN)/python tests/benchmarks/tracing.py
	$(BIN)/python tests/benchmarks/schedules.py
	$(BIN)/python tests/benchmarks/fingerprint.py
	$(BIN)/python tests/benchmarks/summary.py
	$(BIN)/python tests/benchmarks/flax_linen.py
	$(BIN)/python tests/benchmarks/flax_nnx.py

compatibility: .venv/test
	$(BIN)/python tests/write_compatibility.py

format: .venv/test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv

# A stamp for each set of extras: made once, and again when pyproject.toml changes.
.venv/demo: EXTRAS = examples
.venv/test: EXTRAS = test,examples,docs
.venv/bench: EXTRAS = bench
.venv/demo .venv/test .venv/bench: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@
