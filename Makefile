# Everything from a fresh clone. The first target that needs it makes .venv; after that nothing is installed until pyproject.toml or
# constraints.txt change. With PYTHON=/path/to/python that environment is used as it is, and nothing is installed.
# PYTHON_BASE names the interpreter that .venv is made from; default: the first below that is 3.11, 3.12 or 3.13.

VENV := .venv
# Test files that run at a time, on two cores: some wait for processes, and many start up to four ranks of their own.
WORKERS := 3
# A file at a time. xdist would start a crashed worker again and then wait for ever; without that it names the test and ends.
SHARED = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
ifndef PYTHON_BASE
PYTHON_BASE := $(shell for p in python3 python3.13 python3.12 python3.11; do $$p -c '$(SUITABLE)' >/dev/null 2>&1 && echo $$p && break; done)
endif
BASE := $(or $(PYTHON_BASE),python3)
# $(call refuse,INTERPRETER,WHAT IS WRONG AND WHAT TO DO): one line, and make stops. A comma would end the text.
refuse = { echo "make: $(1) ($$($(1) --version 2>&1 | head -n 1)): $(2)" >&2; exit 1; }

ifeq ($(origin PYTHON),command line)
ENVIRONMENT := check-python
else
PYTHON := $(VENV)/bin/python
ENVIRONMENT := $(VENV)/.installed $(VENV)/transformers-tests
endif

# Some images forbid Python to keep compiled modules; every process would compile torch and Megatron anew, for twenty seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup check-python demo gpu test test-slurm test-draw test-all lint format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(ENVIRONMENT)  ## make .venv with the tested versions of everything, once

$(VENV)/.installed: pyproject.toml constraints.txt tests/oldest-transformers.txt tests/oldest-triton.txt
	@$(BASE) -c '$(SUITABLE)' 2>/dev/null || $(call refuse,$(BASE),Python 3.11 to 3.13 is needed; install one or name one with PYTHON_BASE=/path/to/python)
	@$(BASE) -c 'import ensurepip, venv' 2>/dev/null || $(call refuse,$(BASE),it has no venv; install that (Debian and Ubuntu: python3-venv) or name another with PYTHON_BASE=/path/to/python)
	$(BASE) -m venv $(VENV)
	@# --no-compile: Python does it at the first import, and most of these modules are never imported
	$(VENV)/bin/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,eval,deepspeed]'
	rm -rf $(VENV)/oldest $(VENV)/oldest-triton
	$(VENV)/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps --target $(VENV)/oldest -r tests/oldest-transformers.txt
	$(VENV)/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps --target $(VENV)/oldest-triton -r tests/oldest-triton.txt
	@touch $@

# transformers' own model tests, which only its source distribution has. No isolation: setuptools, which pip reads it with, is installed.
$(VENV)/transformers-tests: $(VENV)/.installed
	rm -rf $@ $@.new
	$(VENV)/bin/python -m pip download --disable-pip-version-check --no-build-isolation --no-deps --no-binary transformers -c constraints.txt -d $@.new transformers || \
		$(call refuse,$(VENV)/bin/python,transformers' source distribution was not downloaded; its tests are needed from PyPI or an index that has it)
	$(VENV)/bin/python -m tarfile -e $@.new/transformers-*.tar.gz $@.new
	rm -r $@.new/*.tar.gz $@.new/*/src && mv $@.new $@ && touch $@

# A release of Megatron-core that is not installed, for PYTHONPATH=build/megatron-VERSION. The wheels for Python 3.11 work, although
# newer releases require 3.12.
build/megatron-%: | $(ENVIRONMENT)
	rm -rf $@.new
	$(PYTHON) -m pip download -q --disable-pip-version-check --no-deps --ignore-requires-python --only-binary :all: -d $@.new megatron-core==$*
	$(PYTHON) -m zipfile -e $@.new/*.whl $@.new
	rm $@.new/*.whl && mv $@.new $@

# Another torch, 4.5 GB with the CUDA libraries that it needs for its import. Triton is the environment's.
build/torch-%: | $(ENVIRONMENT)
	rm -rf $@.new
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-compile --target $@.new torch==$*
	rm -rf $@.new/triton $@.new/triton-* && mv $@.new $@

check-python:
	@$(PYTHON) -c '$(SUITABLE)' 2>/dev/null || $(call refuse,$(PYTHON),Python 3.11 to 3.13 is needed)
	@$(PYTHON) -c 'import importlib.metadata as m; m.version("megatron-core")' 2>/dev/null || $(call refuse,$(PYTHON),megatron-core is not installed there; leave PYTHON out or run $(PYTHON) -m pip install -c constraints.txt -e .[dev,eval,deepspeed])

demo: $(ENVIRONMENT)  ## text in, a Hugging Face model out, on this machine alone: three to five minutes on two cores
	$(PYTHON) -m tools.demo

gpu: $(ENVIRONMENT)  ## prove a GPU in eight minutes: correctness, the trainer, speed; the page is in runs/gpu_suite
	$(PYTHON) -m tools.bench.gpu_suite --minutes 8 --out runs/gpu_suite

test: lint  ## static checks and the quick tests, before a commit
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q --durations=10 $(SHARED)

test-slurm: $(ENVIRONMENT)  ## launch on a real Slurm of its own, in three minutes; root gets it installed on Debian, elsewhere it is skipped and says why
	bash tests/slurm/install.sh
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q --durations=10 -rs $(SHARED) -m 'slurm and not slow' tests/slurm

SEED ?= $(shell git rev-parse HEAD 2>/dev/null || echo 0)
test-draw: $(ENVIRONMENT)  ## three minutes of the slow tests, drawn by the commit; SEED=... draws those of another one
	@# recorded seconds of all workers, which on two cores take half as long
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -v -rs $(SHARED) -m slow --slow-seconds 340 --slow-seed $(SEED)

test-all: lint build/megatron-0.19.2 build/torch-2.11.0  ## the night's: the slow tests too, a real Slurm, and ten of the mutants
	bash tests/slurm/install.sh
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q --durations=10 $(SHARED) --record-durations -m 'not slurm'
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q --durations=10 -rs --record-durations -m slurm tests/slurm
	$(PYTHON) -m tests.mutants --sample 10 --seed 1

lint: $(ENVIRONMENT)  ## ruff (rules and format) and mypy
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	@# its workers give up on a busy machine, which is exit code 2; mistakes are 1
	$(PYTHON) -m mypy --num-workers 2 || { [ $$? -eq 2 ] && $(PYTHON) -m mypy; }

format: $(ENVIRONMENT)  ## let ruff mend and format what it can
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format

clean:  ## remove caches and build leftovers; .venv, data and runs stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './runs/*' -prune -exec rm -rf {} +
