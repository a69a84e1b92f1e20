# make run and make test set everything up in .venv first; a second call starts at once.
#
#   make run ARGS="capture=all padding=nearest"     the main job, with overrides
#   make test ARGS="-k padding"                     the tests, with pytest's options
#   make run PYTHON=python3.12                      another Python to set up with
#   make smollm2                                    the weights of model=smollm2_135m, once (89 MiB)

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,gguf,sweep
ARGS ?=
# Tests wait for processes and sockets as often as they compute.
WORKERS ?= 4

comma := ,
BIN := $(VENV)/bin
# One stamp a set of extras: asking for others installs them.
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.DEFAULT_GOAL := help
.PHONY: help run test test-long smollm2 slurm slurm-stop lint doctor clean

help:
	@echo "make run     set up, then run the main job      (ARGS=\"key=value ...\")"
	@echo "make test    set up, then run the tests         (ARGS=\"-k name\")"
	@echo "make test-long  set up, then run the tests that take minutes"
	@echo "make smollm2 set up, then fetch the weights of model=smollm2_135m into ~/.cache (once)"
	@echo "make slurm   install and start a Slurm of one node for its tests (Debian, root); make slurm-stop ends it"
	@echo "make lint    set up, then ruff and mypy"
	@echo "make doctor  set up, then say what this machine can run"
	@echo "make clean   remove $(VENV)"
	@echo
	@echo "On a GPU machine: make run EXTRAS=dev,gguf,sweep,gpu"

run: $(STAMP)
	$(BIN)/python -m harness $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m harness.fetch || echo "the tests of real weights will be skipped"
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m long $(ARGS)

smollm2: $(STAMP)
	$(BIN)/python -m harness.fetch smollm2_135m

slurm:
	scripts/slurm.sh start $(ARGS)

slurm-stop:
	scripts/slurm.sh stop

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict harness runners

doctor: $(STAMP)
	$(BIN)/python -m harness doctor

clean:
	rm -rf $(VENV)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "$(PYTHON) has no venv: apt install python3-venv"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@
