# The two commands are `make train` and `make test`; `make help` lists the rest. Needs make, a POSIX shell and a
# Python 3.12 or newer; everything else goes into .venv (scripts/setup.sh).
#
#   ARGS="…"     flags for train.py or pytest:  make train ARGS="--preset tinyshakespeare",  make test ARGS="-k loader"
#   PYTHON=…     the Python to make .venv with, if not the one scripts/find_python.sh finds
#   JAX=…        cpu, cuda12 or cuda13, if not the one that scripts/find_accelerator.sh chooses

python := .venv/bin/python
quick := --quick# empty: all examples of each property
tests := JAX_PLATFORMS=cpu PYTHONDONTWRITEBYTECODE=# hundreds of programs start, each with all modules compiled before
aot_jax := 0.12.0.1 0.11.2# whose compilers tests/aot/table.json knows
aot_of_all := $(addprefix tests/aot/test_,aot.py compile_for.py generate.py graphs.py step_table.py)# the rest with the first alone

unexport PYTHONPATH PYTHONHOME # what runs is .venv alone
export PIP_USER := 0

.PHONY: help train test test-slow test-aot test-triton test-trackers lint plan-tools setup setup-aot setup-dev clean
.NOTPARALLEL:

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 } /^#   [A-Z]/ { print substr($$0, 5) }' Makefile

train: setup ## set up, then train (without ARGS: the demo, about two minutes)
	@$(python) train.py $(ARGS)

test: setup-dev ## set up, then run the tests but the slow ones
	$(tests) $(python) -m pytest -q -n 2 --dist worksteal $(quick) -m "not slow" $(ARGS)

test-slow: setup-dev ## the tests that take longer, half an hour
	$(tests) $(python) -m pytest -q -n 2 --dist worksteal -m slow $(ARGS)

test-aot: setup-aot ## compile the kernels for GPUs that are not there, with each supported JAX (Linux; 2 GB of packages)
	@for jax in $(aot_jax); do \
	    [ $$jax = $(firstword $(aot_jax)) ] && tests=tests/aot || tests="$(aot_of_all)"; \
	    echo "JAX $$jax" && $(tests) .venv-aot-$$jax/bin/python -m pytest -q -n 2 --dist loadfile \
	        -m slow $$tests $(ARGS) || exit 1; \
	done

setup-aot:
	@for jax in $(aot_jax); do scripts/setup_aot.sh $$jax || exit 1; done

test-triton: .venv-triton/.ready ## the Triton kernels: in Triton's interpreter, and compiled (Linux; 2 GB of packages)
	$(tests) .venv-triton/bin/python -m pytest -q -n 2 --dist loadfile tests/kernels/triton $(ARGS)

.venv-triton/.ready: pyproject.toml
	rm -rf .venv-triton
	python=$$(scripts/find_python.sh) && "$$python" -m venv .venv-triton
	.venv-triton/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[triton]" \
		"jax==0.11.2" "jaxlib==0.11.2" pytest pytest-xdist hypothesis
	.venv-triton/bin/python -m pip install -q --disable-pip-version-check --no-deps \
		"jax-cuda12-plugin==0.11.2" "jax-cuda12-pjrt==0.11.2"
	touch $@

test-trackers: .venv-trackers/.ready ## the trackers with their real packages, offline (400 MB of packages)
	$(tests) .venv-trackers/bin/python -m pytest -q tests/trackers $(ARGS)

.venv-trackers/.ready: pyproject.toml
	rm -rf .venv-trackers
	python=$$(scripts/find_python.sh) && "$$python" -m venv .venv-trackers
	.venv-trackers/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt tensorboard rich pytest \
		hypothesis $$(.venv-trackers/bin/python -c \
		"from llmc_jax.trackers.sinks import KINDS; print(*(each.package for each in KINDS.values()))")
	touch $@

plan-tools: setup ## what compiles for GPUs that are not there, for llmc_jax.plan (Linux; 1 GB of packages)
	@scripts/setup_aot.sh $$($(python) -c 'from importlib.metadata import version; print(version("jax"))')

lint: setup-dev ## ruff and mypy
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

setup: ## only make .venv, to train
	@scripts/setup.sh

setup-dev: ## only make .venv, to develop
	@scripts/setup.sh dev

clean: ## delete .venv and what was built, never runs or data
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
