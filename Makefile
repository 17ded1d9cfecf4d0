# The environment is .venv; each command makes it, or what is missing of it.
PYTHON ?= python3
PYTHON312 ?= python3.12
BIN := .venv/bin
export JAX_PLATFORMS ?= cpu

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz test-oldest test-newest docs docs-check bench bench-gpu gallery mutants compatibility format clean

help:  ## list the commands
	@sed -n 's/^\([a-z][a-z -]*\):.*  ## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do printf '%-24s %s\n' "make $$name" "$$what"; done

demo: .venv/demo  ## run the main example: teach a shipped model new file types
	$(BIN)/python examples/teach_magika.py

test: .venv/test  ## run every check; TESTS=... runs only these tests, with any arguments of pytest
ifdef TESTS
	$(BIN)/pytest $(TESTS)
else
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/pytest -n auto --maxprocesses 4 --durations-page tests/durations.md
	$(BIN)/sphinx-build -q -W --keep-going -b html docs .venv/html
endif

fuzz: .venv/test  ## run random programs against JAX and Optax for MINUTES=10, on every core
	$(BIN)/python tests/fuzz/run.py $(or $(MINUTES),10)

# The tests of the sdist against the wheel, in an environment of their own.
test-oldest: VERSIONS = $(shell sed -n 's/^dependencies = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",' | sed 's/>=/==/g')
test-oldest test-newest: .venv/test  ## test the wheel with the oldest or newest versions of what it needs; TESTS=... as above
	rm -rf .venv/of-$@
	$(BIN)/python -m build --no-isolation --outdir .venv/of-$@ .
	$(PYTHON) -m venv .venv/of-$@/env
	.venv/of-$@/env/bin/python -m pip install --quiet "$$(echo .venv/of-$@/*.whl)[test,examples,docs]" $(VERSIONS)
	cd .venv/of-$@ && tar -xf *.tar.gz && rm -r optax_freeze-*/optax_freeze
	cd .venv/of-$@/optax_freeze-* && ../env/bin/pytest -n auto --maxprocesses 4 $(or $(TESTS),tests docs README.md --pyargs optax_freeze)

docs: .venv/test  ## build the documentation, in .venv/html
	$(BIN)/sphinx-build -q -W --keep-going -b html docs .venv/html

docs-check: docs  ## check every page of the documentation in a browser, with screenshots
	$(BIN)/python docs/check_in_browser.py .venv/html

bench: .venv/bench  ## run the benchmarks, and write their figures to tests/benchmarks/results; NAMES=... runs only these
	$(BIN)/python tests/benchmarks/write_results.py $(NAMES)

# JAX's CUDA packages (3 GB) have an environment of their own. Nothing here needs a GPU.
bench-gpu: .venv/gpu/installed  ## compile training steps for GPUs, and write the memory that they take
	.venv/gpu/bin/python tests/benchmarks/write_results.py scale_gpu quantized

# The gallery has an environment of its own, for Python 3.12; its figures stand in a folder beside it. PyTorch and PEFT
# have another, with any Python.
gallery: .venv/gallery/installed .venv/pytorch/installed  ## test models of other packages (Python 3.12) and write their page
	.venv/pytorch/bin/python -m pytest tests/gallery/test_other_frameworks.py
	rm -rf .venv/gallery/figures && mkdir .venv/gallery/figures
	GALLERY=.venv/gallery/figures .venv/gallery/bin/python -m pytest tests/gallery
	.venv/gallery/bin/python tests/gallery/write_page.py .venv/gallery/figures

mutants: .venv/test  ## check that the tests notice one-line changes of the package
	$(BIN)/python tests/mutants.py

compatibility: .venv/test  ## run the whole optimizer matrix and write its page
	$(BIN)/python tests/write_compatibility.py

format: .venv/test  ## format, and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment
	rm -rf .venv

# A stamp for each set of extras: made once, and again when pyproject.toml changes.
.venv/demo: EXTRAS = examples
.venv/test: EXTRAS = test,examples,docs
.venv/bench: EXTRAS = bench
.venv/demo .venv/test .venv/bench: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@

.venv/gpu/installed: pyproject.toml
	test -x .venv/gpu/bin/python || $(PYTHON) -m venv .venv/gpu
	.venv/gpu/bin/python -m pip install --quiet --disable-pip-version-check -e '.[bench-gpu]'
	touch $@

# By uv, since pip searches for hours among the versions of what these packages need.
.venv/gallery/installed: tests/gallery/requirements.txt tests/gallery/constraints.txt tests/gallery/trainers_requirements.txt pyproject.toml
	test -x .venv/gallery/bin/python || $(PYTHON312) -m venv .venv/gallery
	.venv/gallery/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv/gallery/bin/python -m uv pip install --quiet --python .venv/gallery/bin/python -e . -r tests/gallery/requirements.txt -c tests/gallery/constraints.txt
	.venv/gallery/bin/python -m uv pip install --quiet --python .venv/gallery/bin/python --no-deps -r tests/gallery/trainers_requirements.txt
	touch $@

.venv/pytorch/installed: tests/gallery/pytorch_requirements.txt tests/gallery/pytorch_constraints.txt pyproject.toml
	test -x .venv/pytorch/bin/python || $(PYTHON) -m venv .venv/pytorch
	.venv/pytorch/bin/python -m pip install --quiet --disable-pip-version-check -e . -r tests/gallery/pytorch_requirements.txt -c tests/gallery/pytorch_constraints.txt
	touch $@
