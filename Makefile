# Every target makes .venv from nothing when it is missing, and brings it up to date when it is stale.
#   make demo   train a small GPT on 2 ranks, capture it into runs/demo, analyse it
#   make test   ruff, mypy, and each test but the exhaustive ones; those on Ceph's S3 gateway where `make ceph` has been said
#   make test-all  the exhaustive tests alone: full sweeps, hundreds of kills, long outages. CI runs both
#   make affected  the tests of `make test` that what differs from the commit BASE (main) can break, with ruff and mypy
#   make ceph   fetch Ceph's packages (66 MB of Debian's) into the user's cache; nothing is installed
#   make lint   ruff and mypy alone
#   make docs   write to build/docs the documentation site, and a JSON schema of what each command answers
#   make support  run the tests that prove what is captured from what, and write docs/support.md from them
#   make bench  the benchmarks
#   make clean  remove what the other targets made

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test test-all affected kernels ceph lint docs support bench clean

# The first interpreter that works, is new enough and can make a virtual environment (a name on the PATH may be an empty shim).
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ranktape-installed
# What a user installs: `make demo` needs no framework and no test tool.
USED := $(VENV)/.ranktape-used
# More than cores: many tests wait, for a server that hangs or for a deadline.
WORKERS ?= 4
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Those that fail are named and run once more, alone: what a machine that stalls did is no defect. The second argument is
# for the first time only.
TESTS = $(BIN)/python -m pytest $(1) $(2) $(TEST_OPTIONS) || { test $$? = 1; \
	echo "== once more, alone: what fails only beside others is a race or a deadline to look into"; \
	$(BIN)/python -m pytest $(1) $(TEST_OPTIONS) --last-failed --last-failed-no-failures none; }

$(STAMP): EXTRAS := [test]
$(STAMP) $(USED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11+ with venv on the PATH: install one, or say make PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.$(EXTRAS)'
	touch $@ $(USED)

demo: $(USED)
	$(BIN)/ranktape demo --output runs/demo --overwrite

# One thread for each process of a test; modules keep to one worker, for what they make once.
test test-all: export OMP_NUM_THREADS := 1
# Else each worker rewrites and compiles each module of tests.
unexport PYTHONDONTWRITEBYTECODE
test: $(STAMP)
	@# mypy takes one core: on another one the kernels are compiled meanwhile, once for all processes of the tests.
	$(MAKE) --no-print-directory --jobs=2 lint kernels
	$(call TESTS,-m 'not alone and not exhaustive',$(PARALLEL))
	@# Only the files that have such tests: to look through all of them takes a quarter of a minute.
	$(call TESTS,-m alone $$(grep -rlE --include='*.py' 'mark\.alone' tests))

test-all: $(STAMP) kernels
	$(call TESTS,--run-exhaustive -m exhaustive,$(PARALLEL))

BASE ?= main
affected: lint
	files=$$($(BIN)/python -m tests.affected $(BASE)); test -z "$$files" || \
		$(BIN)/python -m pytest -m 'not exhaustive' -n 2 --dist loadfile $(TEST_OPTIONS) $$files

# Where this fails, the tests compile what is missing. pytest keeps the modules of tests as it rewrites them.
kernels: $(STAMP)
	-PYTHONPATH=. $(BIN)/python tests/kernels.py
	-$(BIN)/python tests/device/accelerator.py
	-$(BIN)/python -m pytest --quiet --collect-only > $(VENV)/collected

ceph:
	tests/ceph_packages.sh

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	PYTHONPATH=. $(BIN)/python docs/schemas.py build/docs/schemas
	@echo "$(BIN)/python -m http.server --directory build/docs/site serves it; pages open from disk, too, but without search"

support: $(STAMP)
	$(BIN)/python -m pytest -p tests.support --run-exhaustive

bench: $(STAMP)
	for script in benchmarks/*.py; do echo "== $$script"; PYTHONPATH=. $(BIN)/python "$$script"; done

clean:
	rm -rf $(VENV) runs dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
