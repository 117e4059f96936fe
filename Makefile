# `make demo` and `make test` do everything on a fresh machine; ARGS passes words to the command.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
# Empty where Python is older than the tested set.
CONSTRAINTS ?= --constraint constraints.txt

# Each process that tests start would compile all that it imports anew, a sixth of its start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-light all-tests check quick slow long mutants lint types bench generate certificates docs dist clean

demo: $(STAMP)
	$(BIN)/headrace $(ARGS)

# All tests, in under six minutes on two idle cores. Types are checked meanwhile.
test: lint
	$(MAKE) --no-print-directory -j2 types all-tests

all-tests: $(STAMP)
	$(BIN)/python -m pytest -n auto $(ARGS)

# What batches become, in under a minute: laws, golden numbers, the contract, the house. A file whose `pytestmark` is
# `slow` is not even imported.
check: lint
	$(MAKE) --no-print-directory -j2 types quick

quick: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not slow" $(ARGS)

# The tests that `make check` leaves out; SHARD=2/3 is the second third of them, for machines in parallel.
slow: $(STAMP)
	$(BIN)/python -m pytest -n auto -m slow $(if $(SHARD),--shard $(SHARD)) $(ARGS)

# Processes that are killed at many points of their streams, and soaks of SOAK seconds: with slow trainer steps, and on Ray
# beside busy processes.
long: $(STAMP)
	SOAK=$(or $(SOAK),900) $(BIN)/python -m pytest -m long $(ARGS)

# The same beside other packages and other versions, each in an environment that is made anew; docs/beside.json has what
# was found. ARGS="verl oldest" are two of them.
test-light: $(STAMP)
	$(BIN)/python tools/beside.py $(ARGS)
	$(BIN)/python tools/generate.py

# Plants faults one at a time, and runs the tests that reach them: in the lines that differ from main, in ARGS=adapters,
# or at random places: ARGS="--sample 200 --seed 1" takes an hour or two, and writes docs/benchmarks.md.
mutants: $(STAMP)
	$(BIN)/python tools/mutants.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Writes benchmarks/results/ and docs/benchmarks.md; ARGS="--only pipeline" measures one of them again.
bench: $(STAMP)
	$(BIN)/python benchmarks $(ARGS)

# What follows from the code, in seconds: the listings of stages, their YAML, the pages of recipes and symptoms.
generate: $(STAMP)
	$(BIN)/python tools/generate.py

# docs/certificates.json, in some minutes, and the page that shows them; ARGS=dapo computes those of one recipe.
certificates: $(STAMP)
	$(BIN)/python tools/make_certificates.py $(ARGS)
	$(BIN)/python tools/generate.py

# The site, in site/, where a warning is an error. Its search needs a server: python -m http.server -d site
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# torch alone and first: see constraints.txt.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) --editable '.[dev,llm,ray,tq,docs]'
	touch $@

# dist/: the wheel and the source distribution, as an index takes them.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf .venv build site dist src/*.egg-info outputs multirun
