# Two commands do everything on a machine with python3.11 and make:  make run  ·  make test
# Each sets itself up first. `make help` lists the rest.

PYTHON ?= python3.11
CONFIG ?= configs/cpu.yaml
BASE_URL ?= http://127.0.0.1:8000
PYTEST_ARGS ?=

# What configs/orthrus.yaml and its twins serve, for the job that fills a cluster's volume.
FETCH := --fetch 'mistralai/Mistral-7B-v0.1=~/models/Mistral-7B-v0.1' \
         --fetch 'intfloat/e5-mistral-7b-instruct:lora/*=~/models/e5-mistral-7b-instruct'

VENV := .venv
PY := $(VENV)/bin/python
ORTHRUS := $(VENV)/bin/orthrus-serve
SERVER := $(PY) -m orthrus_serve.ops.local_server

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: fuzz soak help setup setup-dev model run demo stop lint check test test-unit test-repo test-engine test-serve format manifests

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Read by Ray when it starts. A local Ray asks for a token by default, and makes one (~/.ray/auth_token): keep that, on purpose.
# It sends usage reports unless told not to.
run: export RAY_AUTH_MODE ?= token
run: export RAY_USAGE_STATS_ENABLED = 0
run: model ## Set up, start the server, run the worked example, leave the server up
	@$(SERVER) start $(CONFIG)
	@$(ORTHRUS) demo --base-url $(BASE_URL)
	@echo "The server is still up. Stop it with:  make stop"

demo: setup ## Run the worked example against a server that is up
	@$(ORTHRUS) demo --base-url $(BASE_URL)

stop: ## Stop the server that `make run` started
	@$(SERVER) stop

test: setup-dev lint ## Everything: format, lint, types, layers, then all suites (half an hour or more on 2 cores)
	$(PY) -m pytest --numprocesses=2 --no-loadscope-reorder --durations=25 $(PYTEST_ARGS)

check: setup-dev lint ## Format, lint, types, layers, unit tests (under a minute; no GPU, no Ray, no vLLM)
	$(PY) -m pytest -q tests/unit $(PYTEST_ARGS)

test-unit: setup-dev ## Unit tests only
	$(PY) -m pytest tests/unit $(PYTEST_ARGS)

test-repo: setup-dev ## What the repository promises about itself
	$(PY) -m pytest tests/repo $(PYTEST_ARGS)

test-engine: setup-dev ## Real forwards with vLLM on CPU
	$(PY) -m pytest tests/engine $(PYTEST_ARGS)

test-serve: setup-dev ## The real server on a local Ray
	$(PY) -m pytest tests/serve $(PYTEST_ARGS)

fuzz: setup-dev ## Many random rounds on the real engine (ROUNDS=60 SEED=1 RUNNER=v1 or v2; some seconds each)
	OMP_NUM_THREADS=1 $(PY) -m $(if $(filter v2,$(RUNNER)),tests.engine.triton_interpreter )tests.engine.fuzz --rounds $(or $(ROUNDS),60) --seed $(or $(SEED),1)

soak: setup-dev ## Mixed traffic on two real engines with one fault after the other (SECONDS=3600 SEED=1 THINK_S=0.5)
	OMP_NUM_THREADS=1 $(PY) -m tests.serve.soak --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),1) --think-s $(or $(THINK_S),0.5) $(if $(JSON),--json $(JSON))

lint: setup-dev ## Format, lint, types and layers, without tests
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/basedpyright
	$(VENV)/bin/lint-imports

format: setup-dev ## Rewrite the sources as `make check` wants them
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

manifests: setup ## Make deploy/kuberay/ anew from configs/
	@$(ORTHRUS) manifests configs/orthrus.yaml --gpus 1 2 4 8 --out deploy/kuberay $(FETCH)
	@$(ORTHRUS) manifests configs/dedicated.yaml --gpus 4 --out deploy/kuberay $(FETCH)

model: setup ## Fetch the demo model, its adapter and its corpus (skips what is there)
	@$(ORTHRUS) model fetch $(if $(findstring separate_models,$(CONFIG)),--with-embedder)

setup: $(VENV)/.done ## Install the locked CPU list into .venv (skipped when done)

setup-dev: $(VENV)/.done-dev ## The same, and the tools for tests and checks

# The stamps are written last. `.started` without a stamp means that an installation was interrupted: pip may take a half
# written package for a whole one, so the environment is made anew.
$(VENV)/.done: requirements/cpu.lock pyproject.toml
	@if [ -e $(VENV)/.started ] || [ ! -x $(PY) ]; then echo "Making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(VENV)/.started
	@echo "Installing the locked CPU list (a few minutes the first time)"
	@$(PY) -m pip install -q --disable-pip-version-check --no-deps -r requirements/cpu.lock || { \
	  echo "If torch==2.13.0+cpu was not found: README.md, 'Where torch comes from'." >&2; exit 1; }
	@$(PY) -m pip install -q --disable-pip-version-check --no-deps -e .
	@rm $(VENV)/.started
	@touch $@

$(VENV)/.done-dev: $(VENV)/.done requirements/dev.lock
	@touch $(VENV)/.started
	@$(PY) -m pip install -q --disable-pip-version-check --no-deps -r requirements/dev.lock
	@rm $(VENV)/.started
	@touch $@
