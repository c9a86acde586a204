# `make help` lists what can be made. Each target does its own set-up: nothing to install first but Python, make and a shell.
#
#   PYTHON=python3.12   the Python that set-up uses (3.10, 3.11 or 3.12)
#   CHECKPOINT=DIR      a Fish Speech 1.5 directory for demo, serve and archive; default: model_store/demo
#   ARGS="..."          more arguments for pytest

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Relative, so that a path with spaces above the project does no harm.
PY := .venv/bin/python
export PYTHON CHECKPOINT

.PHONY: help setup demo test lint serve stop doctor archive notebooks dashboard bench-gpu clean distclean

help:  ## this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup:  ## the environment in .venv, at the versions of constraints.txt
	@bash scripts/setup.sh

demo: setup  ## serve, speak texts in several languages over REST into demo-output/, print a table, stop
	@$(PY) -m shoal demo

test: setup  ## all tests; ARGS="-k name" picks some
	@$(PY) -m pytest $(ARGS)

lint: setup  ## ruff: check and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

serve: setup  ## start the server in the background and print a curl line for it
	@$(PY) -m shoal serve --background

stop:  ## stop the server that `make serve` started
	@if [ -x $(PY) ]; then $(PY) -m shoal stop; else echo "no server of ours is running"; fi

doctor: setup  ## what this machine has and lacks
	@$(PY) -m shoal doctor

archive: setup  ## build model_store/fish_speech.mar
	@$(PY) -m shoal archive

notebooks: setup  ## open the notebooks in JupyterLab
	@$(PY) -m jupyterlab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

dashboard: setup  ## notebooks 07 and 08 as an app in the browser, without their code (Voila)
	@$(PY) -m voila notebooks --VoilaConfiguration.file_allowlist="['0[78]_.*', 'static/.*', 'voila/.*']"

bench-gpu: setup  ## on a GPU: its tests and all benchmarks at real size, into benchmarks/results (ARGS="--quick")
	@$(PY) -m benchmarks.gpu $(ARGS)

clean: stop  ## remove what demo, serve and tests wrote; .venv stays
	@rm -rf demo-output .shoal build dist logs .pytest_cache .ruff_cache .hypothesis model_store/smoke model_store/*.mar
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## remove .venv as well
	@rm -rf .venv
