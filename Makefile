# make run: a real model behind an OpenAI-compatible API.   make test: everything the tests need, and the tests.
# On x86 Linux the public registry's torch is the CUDA build (several GB). For the CPU build:
#   make run PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'
PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000
PIP_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

.PHONY: run test sanitize lint types format clean

run: $(VENV)/.serve
	$(BIN)/anaphora pull $(MODEL)
	$(BIN)/anaphora serve $(MODEL) --host $(HOST) --port $(PORT) --demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

# The native kernels' tests under the address and undefined-behaviour sanitizers.
sanitize: $(VENV)/.dev
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-O1 -DANAPHORA_SANITIZE=ON \
		-DANAPHORA_TEST_TARGETS=ON -DPython_EXECUTABLE=$(abspath $(BIN))/python -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja
	$(BIN)/cmake --build build/sanitize
	ANAPHORA_SANITIZED=$(abspath build/sanitize) ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest -p no:cacheprovider tests/native $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make run PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "venv is missing; on Debian: apt-get install python3-venv"; exit 1; }

$(VENV)/.serve: pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*) | $(BIN)/python
	@echo "Installing (torch is about 200 MB; once) ..."
	$(PIP) -e '.[serve]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*) | $(BIN)/python
	@echo "Installing with test tools ..."
	$(PIP) -C cmake.define.ANAPHORA_TEST_TARGETS=ON -e '.[dev]'
	@touch $@
