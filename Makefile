# Every target sets up what it needs. `make demo` and `make test` are all a newcomer has to know.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# An absolute or relative folder with mnist.npz and friends; tests that need it skip without it.
TRILEMMA_DATA ?= $(if $(wildcard ../shared/data/mnist.npz),$(abspath ../shared/data))
ifneq ($(TRILEMMA_DATA),)
export TRILEMMA_DATA
endif
# Tests start a hundred processes, which read what the first has compiled.
unexport PYTHONDONTWRITEBYTECODE
export MPLBACKEND = Agg

WHOLE = -n 2 --dist worksteal -m "not nightly"

.PHONY: demo lab test slow-list check nightly audit chaos lint types imports docs-reference docs-results docs dist clean help

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime lab/pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e lab
	touch $@

lab: $(VENV)/.runtime  ## add the laboratory: papers, arena, liars who know the defence
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e lab

demo: $(VENV)/.runtime  ## train on phishing with 3 liars among 7 clients: robust, not robust, private
	$(BIN)/trilemma demo --out runs/demo

test: $(VENV)/.dev lint types imports  ## everything CI runs
	$(BIN)/pytest $(WHOLE)

slow-list: $(VENV)/.dev  ## measure which tests are slow: the whole suite, then tests/slow.txt is written
	$(BIN)/pytest $(WHOLE) --write-slow-list

check: $(VENV)/.dev lint types imports  ## the inner loop: everything but the slow tests
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not federation and not nightly" --hypothesis-profile quick

audit: $(VENV)/.runtime  ## nightly: attack every private algorithm under every threat model, beside its certificate
	$(BIN)/python -m trilemma.audit

nightly: audit chaos  ## all that takes too long for every change
	$(BIN)/pytest -m nightly --timeout 1800

chaos: $(VENV)/.dev  ## nightly: kill processes for two minutes, try lists of faults and broken bytes for some more
	TRILEMMA_CHAOS=$${TRILEMMA_CHAOS:-120} $(BIN)/pytest -s tests/federation/deployed/test_deployed_chaos.py
	$(BIN)/pytest -n 2 --hypothesis-profile nightly tests/federation/test_federation_fuzz.py \
		tests/federation/test_federation_simulator.py tests/cli/test_cli_damaged.py --timeout 3600

lint: $(VENV)/.dev
	$(BIN)/ruff check conftest.py src lab tests benchmarks examples tools docs
	$(BIN)/ruff format --check conftest.py src lab tests benchmarks examples tools docs

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

docs-reference: $(VENV)/.runtime  ## write docs/configuration.md from what the source declares
	$(BIN)/python -m trilemma.experiment.reference > docs/configuration.md

docs-results: $(VENV)/.dev  ## write the tables and the picture of results in docs/ from lab/results/
	$(BIN)/python -m trilemma_lab.pages docs/results.md docs/personal-tables.md docs/frontier.md docs/frontier-tables.md docs/short-clip.md
	$(BIN)/python -m trilemma papers figure lp-proj-synthetic00 --to docs/images/personal-fairness.png

docs: $(VENV)/.dev  ## build the documentation site into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --site-dir site

dist: $(VENV)/.dev  ## build the wheel and the source archive, and try the wheel in an environment of its own
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) tools/try_wheel.py dist

clean:           ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis site dist
