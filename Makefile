# Each target sets up what it needs in .venv, from a bare Python 3.11; a second run starts at once.
# On a machine without an NVIDIA driver the light installation is used: see docker/cpu.txt.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROFILE := $(shell if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi)
STAMP := $(VENV)/.ready-$(PROFILE)
export PYTHONDONTWRITEBYTECODE :=
# SGLang is imported by three processes of each server: compiled byte code matters.

.PHONY: demo serve test test-full lint setup clean
setup: $(STAMP)

$(BIN)/uv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check uv

$(STAMP): $(BIN)/uv pyproject.toml docker/constraints.txt docker/cpu.txt
	@echo "setting up $(VENV) ($(PROFILE))"
ifeq ($(PROFILE),cpu)
	$(BIN)/uv pip install -q --python $(BIN)/python torch -c docker/constraints.txt
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -r docker/cpu.txt -c docker/constraints.txt
	$(BIN)/uv pip install -q --python $(BIN)/python pytest pytest-timeout hypothesis ruff matplotlib setuptools -c docker/constraints.txt
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .
else
	$(BIN)/uv pip install -q --python $(BIN)/python -e '.[test,lint,report]' -c docker/constraints.txt
endif
	$(BIN)/python -m compileall -q -j 0 $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/{sglang/srt,sglang/kernels,transformers/utils,torch/_inductor,torch/_dynamo} >/dev/null 2>&1 || true
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m sgl_det.demo

serve: $(STAMP)
	$(BIN)/python -m sgl_det.launch_server $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not long and not soak" $(ARGS)

test-full: $(STAMP)
	$(BIN)/python -m pytest -m "not soak" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m sgl_det.ledger --check
	$(BIN)/python -m sgl_det.readme --check

clean:
	rm -rf $(VENV) build *.egg-info
