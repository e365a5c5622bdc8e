# Everything runs in .venv, made here from `python3` (>= 3.10; another one: make demo PYTHON=python3.12).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet
NAME   ?= all
# Older ones that the panel's Stop is tested with: each sends a button's message another way.
IPYKERNELS := 6.31.0 7.3.0
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)

.DEFAULT_GOAL := help
.PHONY: help demo lab check test faults slow multinode chaos bench interop browser clean

help:   ## this list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /make \1	/' | expand -t 14

demo: $(VENV)/examples.stamp   ## run the quickstart on 2 local ranks; leaves an executed notebook and a web page in demo/
	$(BIN)/python -m nbdist demo

lab: $(VENV)/examples.stamp   ## open JupyterLab on the notebooks
	$(BIN)/python -m nbdist lab

check: $(VENV)/test.stamp   ## lint, formatting, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# One pytest a suite: what a suite shares (a cluster, a browser and its event loop) is no business of the next one.
# Stop pressed a hundred times at random moments, and kept clusters, have `make faults` to themselves.
FAULTS := $(addprefix tests/faults/test_,chaos.py errors.py guard.py hangs.py deaths.py)
SUITES := tests/unit tests/cluster "$(FAULTS)" tests/training tests/notebooks tests/gpu tests/multinode tests/browser
test: check browser $(VENV)/ipykernels.stamp   ## check, then every suite (PYTEST_ARGS="-k folds tests/cluster" for some tests)
	@export NBDIST_TEST_IPYKERNELS=$(subst $(SPACE),:,$(IPYKERNELS:%=$(CURDIR)/$(VENV)/ipykernels/%)); \
	if [ -n "$(PYTEST_ARGS)" ]; then exec $(BIN)/python -m pytest $(PYTEST_ARGS); fi; \
	for suite in $(SUITES); do \
		echo "== $$suite"; $(BIN)/python -m pytest $$suite || exit; \
	done

faults: $(VENV)/test.stamp   ## every test of faults
	$(BIN)/python -m pytest tests/faults $(PYTEST_ARGS)

slow: $(VENV)/test.stamp   ## what takes a minute a test: three axes on eight ranks
	NBDIST_TEST_SLOW=1 $(BIN)/python -m pytest -m slow tests/training

multinode: $(VENV)/test.stamp   ## every test of several hosts, schedulers and users (root; installs what is missing by apt)
	$(BIN)/python -m pytest --multinode --require-multinode tests/multinode $(PYTEST_ARGS)

chaos: $(VENV)/test.stamp   ## two hundred random faults on one cluster (CHAOS_ARGS="--seed 7 --ranks 4")
	$(BIN)/python -m tests.faults.chaos --faults 200 $(CHAOS_ARGS)

bench: $(VENV)/test.stamp   ## measure against peers (NAME=start|cell|stream|train|trainer|records|faults|checkpoint|strategies|hosts|scale; default all)
	$(BIN)/python -m tests.benchmarks $(NAME)

interop: $(VENV)/test.stamp   ## train by Accelerate, Hugging Face, Lightning inside cells (HEAVY=1: DeepSpeed, Megatron)
	@$(PIP) --constraint constraints.txt --editable '.[interop]'
	@# DeepSpeed's setup imports the torch that is there
	@if [ -n "$(HEAVY)" ]; then $(PIP) setuptools wheel hatchling editables && \
		DS_BUILD_OPS=0 $(PIP) --no-build-isolation --constraint constraints.txt --editable '.[interop-heavy]'; fi
	$(BIN)/python -m pytest tests/interop

clean:   ## remove what make made
	rm -rf $(VENV) demo dist build .mypy_cache .ruff_cache .pytest_cache
	find nbdist tests -name __pycache__ -prune -exec rm -rf {} +

# torch goes first and pinned (constraints.txt says why); everything else then finds it satisfied.
$(VENV)/torch.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"nbdist needs Python >= 3.10, this is {sys.version.split()[0]}; try: make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch into $(VENV) ..."
	@$(PIP) --constraint constraints.txt torch
	@touch $@

$(VENV)/examples.stamp: $(VENV)/torch.stamp pyproject.toml
	@echo "Installing nbdist into $(VENV) ..."
	@$(PIP) --constraint constraints.txt --editable '.[examples]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/examples.stamp
	@echo "Installing what the tests need into $(VENV) ..."
	@$(PIP) --constraint constraints.txt --editable '.[test]'
	@touch $@

$(VENV)/ipykernels.stamp: $(VENV)/test.stamp
	@for version in $(IPYKERNELS); do $(PIP) --no-deps --target $(VENV)/ipykernels/$$version ipykernel==$$version || exit; done
	@touch $@

# A browser for tests/browser: Debian's where apt may install it, else the one that Playwright brings.
browser: $(VENV)/test.stamp
	@if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing chromium ..."; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null; \
	else $(BIN)/python -m playwright install chromium; fi
