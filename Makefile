# What a person does here, one word each; `make` alone lists the words.
#
# The first use makes .venv from requirements.lock.  That happens once, and
# again when requirements.lock or pyproject.toml change.

# A Python from 3.11 to 3.13, e.g. `make quickstart PYTHON=/opt/python3.12`.
PYTHON ?= python3
# More flags for the command behind a word, e.g. `make test ARGS="-k resume"`.
ARGS ?=
# Where the quickstart's run is kept.
WORKDIR ?= runs/digits
# Test processes; each has its own JAX and TensorFlow (about 1.5 GB).
WORKERS ?= 2

RUN := .venv/bin/python

.PHONY: help quickstart test test-all test-tpu lint format bench lock clean

help:
	@echo 'make quickstart   train a small ViT on handwritten digits'
	@echo 'make test         the tests, without the slow ones'
	@echo 'make test-all     all tests'
	@echo 'make test-tpu     plans by the TPU compiler, which this installs'
	@echo 'make lint         format, lint, types and import order, checked only'
	@echo 'make format       format and fix what can be fixed'
	@echo 'make bench        images per second of the train step and the input'
	@echo 'make lock         refresh requirements.lock from pyproject.toml'
	@echo 'make clean        remove .venv, caches and builds (runs/ stays)'

quickstart: .venv/.ready
	$(RUN) -m vit_jax.main --config=configs/digits.py --workdir=$(WORKDIR) \
	  $(ARGS)
	@echo
	@echo 'make quickstart again: nothing left to do (an interrupted run goes on).'
	@echo 'To train afresh: rm -r $(WORKDIR)'

test: .venv/.ready
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile -m 'not slow' $(ARGS)

test-all: .venv/.ready
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

# Needs no TPU.  With libtpu installed JAX looks for one in every start; where
# there is none, JAX_PLATFORMS=cpu spares it the search.
test-tpu: .venv/.ready
	$(RUN) -m pip install -q 'jax[tpu]'
	$(RUN) -m pytest tests/tpu_plan.py $(ARGS)

lint: .venv/.ready
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	.venv/bin/lint-imports --no-logo

format: .venv/.ready
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

bench: .venv/.ready
	$(RUN) benchmarks/step.py --model=S/16 --image_size=224 --batch_size=8 \
	  --dtype=float32 $(ARGS)
	$(RUN) benchmarks/input.py --source=digits: --split=train
	$(RUN) benchmarks/input.py --source=fake:256,10,1000 --split=train \
	  --ops='decode_and_random_crop(224)|flip_lr'
	$(RUN) benchmarks/ops.py

# Keeps the pins that still fit; `make lock ARGS=--upgrade` takes the newest.
lock: .venv/.ready
	.venv/bin/uv pip compile pyproject.toml --quiet --universal \
	  --python-version=3.11 --extra=quickstart --extra=test --extra=dev \
	  --annotation-style=line --custom-compile-command='make lock' \
	  --output-file=requirements.lock $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: requirements.lock pyproject.toml
	@set -e; \
	fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	if ! .venv/bin/python -c "import pip; $$fits" 2>/dev/null; then \
	  for python in '$(PYTHON)' python3.13 python3.12 python3.11 none; do \
	    if "$$python" -c "$$fits" 2>/dev/null; then break; fi; \
	  done; \
	  if [ "$$python" = none ]; then \
	    version=$$('$(PYTHON)' --version 2>/dev/null) || version='not there'; \
	    echo "vit_jax needs Python 3.11, 3.12 or 3.13;" \
	      "$(PYTHON) is $$version." >&2; \
	    echo "Name one that fits: make PYTHON=/path/to/python3.12" >&2; \
	    exit 1; \
	  fi; \
	  echo "Making .venv with $$("$$python" --version) ($$python)"; \
	  "$$python" -m venv --clear .venv || { rm -rf .venv; exit 1; }; \
	fi; \
	echo 'Installing requirements.lock into .venv (once, a few minutes)'; \
	quiet=-q; if [ -t 1 ]; then quiet=; fi; \
	pip='.venv/bin/python -m pip --disable-pip-version-check install'; \
	$$pip $$quiet -r requirements.lock; \
	$$pip -q --no-deps --no-build-isolation -e .; \
	touch $@
