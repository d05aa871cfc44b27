# Two commands matter: `make demo` and `make test`. Each makes its own way there from a bare checkout.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.antiphon-ready
MODEL  := models/smollm2-135m-instruct.gguf
PRESET := configs/presets/smollm2-135m-cpu.yaml

export ANTIPHON_CACHE ?= $(CURDIR)/models/converted
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint model install clean

help:
	@echo "make demo   answer several prompts at once with a small model on the CPU"
	@echo "make test   lint, then the whole test suite"
	@echo "make lint   ruff and mypy"
	@echo "make model  obtain the demo's model only"
	@echo "make clean  remove what these commands made, the model included"

demo: $(READY) model
	$(RUN) deploy.py demo $(PRESET)
	@echo "Talk to it yourself:  $(RUN) deploy.py chat $(notdir $(basename $(PRESET)))"

test: lint model
	$(RUN) -m pytest

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

model: $(READY)
	@$(RUN) scripts/demo_model.py $(MODEL)

install: $(READY)

# torch comes first and alone, so that nothing else decides which build of it is taken.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Antiphon needs Python 3.11 or newer; say which: make PYTHON=python3.12")'
	@echo "Installing PyTorch, Ray and the rest into $(VENV): once, some minutes."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt setuptools torch
	$(RUN) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) models build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
