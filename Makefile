# make demo  runs the main job; make test  runs every check;
# make bench  runs the benchmarks and writes their page;
# make mutants  checks that the tests notice one-line changes of the package;
# make compatibility  runs the whole optimizer matrix and writes its page;
# make docs  builds the documentation, in .venv/html;
# make test-oldest, test-newest  test the wheel with the oldest and newest versions of what it needs.
PYTHON ?= python3
BIN := .venv/bin
export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-oldest test-newest docs bench mutants compatibility format clean

demo: .venv/demo
	$(BIN)/python examples/finetune_digits.py

test: .venv/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/pytest -n 2
	$(BIN)/sphinx-build -q -W --keep-going -b html docs .venv/html

# The tests of the sdist against the wheel, in an environment of their own.
test-oldest: VERSIONS = $(shell sed -n 's/^dependencies = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",' | sed 's/>=/==/g')
test-oldest test-newest: .venv/test
	rm -rf .venv/of-$@
	$(BIN)/python -m build --no-isolation --outdir .venv/of-$@ .
	$(PYTHON) -m venv .venv/of-$@/env
	.venv/of-$@/env/bin/python -m pip install --quiet "$$(echo .venv/of-$@/*.whl)[test,examples,docs]" $(VERSIONS)
	cd .venv/of-$@ && tar -xf *.tar.gz && rm -r optax_freeze-*/optax_freeze
	cd .venv/of-$@/optax_freeze-* && ../env/bin/pytest -n 2 tests docs README.md --pyargs optax_freeze

docs: .venv/test
	$(BIN)/sphinx-build -q -W --keep-going -b html docs .venv/html

bench: .venv/bench
	$(BIN)/python tests/benchmarks/write_page.py

mutants: .venv/test
	$(BIN)/python tests/mutants.py

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
