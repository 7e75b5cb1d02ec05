# make install | demo | test | lint     (PYTHON=python3.12 picks another interpreter)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMMA := ,
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH ?= $(if $(HAS_GPU),torch>=2.11$(COMMA)<2.14,torch==2.13.0)
EXTRAS := $(if $(HAS_GPU),[cuda])
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: install install-dev demo test test-gpu lint clean

install: $(STAMP)

# torch comes first and alone: with it in place nothing that follows asks the index for another build.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("cotenant needs Python 3.11 or 3.12; this is %d.%d (set PYTHON=python3.12)" % sys.version_info[:2] if not (3, 11) <= sys.version_info[:2] < (3, 13) else 0)'
	$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian, apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install -q --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.$(EXTRAS)'
	touch $@

install-dev: $(DEV_STAMP)

$(DEV_STAMP): $(STAMP) pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

demo: install
	$(BIN)/cotenant demo

test: install-dev
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-gpu: install-dev
	$(BIN)/python -m pytest tests/gpu

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist demo-report
