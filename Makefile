# `make help` lists the targets. Every environment is made with venv, uv and pip from pyproject.toml.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/digits_resnet.py
PROCESSES ?= 4
WORKERS ?= 2

# Versions to hold in the environment, e.g. jax==0.10.2 (`make test-oldest` fills this in).
PINS ?=
# The lower bounds of the library's own dependencies, as pins.
OLDEST = $(shell sed -nE 's/^    "(jax|numpy|optax)>=([0-9.]+)",$$/\1==\2/p' pyproject.toml)

# Modules are compiled when they are first imported: most never are, and compiling all takes as long
# as installing them. The bytecode is kept, whatever is set outside: else every process compiles anew.
export PYTHONDONTWRITEBYTECODE =
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile
# uv takes a fifth of pip's time; pip installs where uv cannot, for instance because its settings say
# where packages are.
INSTALL = install() { \
	  { $(PIP) uv && UV_NO_PROGRESS=1 $(VENV)/bin/uv pip install --quiet \
	    --python $(VENV)/bin/python "$$@"; } || { \
	    echo "uv could not install it; now pip tries."; $(PIP) "$$@"; }; \
	}; install
VERSIONS = $(VENV)/bin/python -c "import platform, importlib.metadata as m; print( \
	'Python', platform.python_version(), *(f'{p} {m.version(p)}' for p in ('jax', 'optax', 'numpy')))"
# The tests whose processes wait for each other run after all others; they are looked for in their own
# files, as collecting takes seconds.
# Where QUICK is set, programs compile quickly: without LLVM's optimizations and, where XLA still has
# it, with its simpler code generator they take half of the time; as one module for LLVM, not as many
# for threads that two cores do not have, a tenth less. XLA ends the process for a flag that it does
# not know. With all optimizations run the processes of tests/collectives/test_real_processes.py
# and all of `make test-oldest`.
define run_tests
	@$(VERSIONS)
	@if [ -n "$(QUICK)" ]; then \
	  export XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0"; \
	  for flag in use_fusion_emitters=false parallel_codegen_split_count=1; do \
	    more="$$XLA_FLAGS --xla_cpu_$$flag"; \
	    XLA_FLAGS=$$more $(VENV)/bin/python -c "import jax; jax.devices('cpu')" 2>/dev/null && \
	      export XLA_FLAGS="$$more"; \
	  done; \
	fi; \
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "$(1) and not multiprocess" $(2) && \
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist load -m "$(1) and multiprocess" \
	  $$(grep -rl --include='test_*.py' mark.multiprocess $(or $(2),tests))
endef
# Where the tests of the subset are; the others import what its environment does not have.
SUBSET = $(addprefix tests/,codecs collectives kernels transforms test_compiling.py test_docs.py \
  test_processes.py test_readme.py test_structure.py test_wire.py)

.PHONY: help
help:  ## list these targets
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/make \1\t\2/p' Makefile | expand -t 22

.PHONY: train
train: $(VENV)/.installed-train  ## the main job: PROCESSES=4 processes train CONFIG
	$(VENV)/bin/python -m train.launch --processes=$(PROCESSES) -- --config=$(CONFIG)

# The closing line of pytest is the last line, so what is not run is said first. Both environments are
# made at the same time: an installation keeps one core busy.
.PHONY: test
test:  ## lint, the whole suite, and a small part of it on the newest jax
	@newest=$$(.ci/newest_python.sh "$$(command -v $(VENV)/bin/python || echo "$(PYTHON)")") || exit 1; \
	subset="$(MAKE) --no-print-directory VENV=.venv-newest PYTHON=$$newest"; \
	if [ -n "$$newest" ]; then \
	  $$subset .venv-newest/.installed-test-subset & \
	else \
	  echo "The subset for the newest jax is NOT run: found no Python that is newer than" \
	    "the one in $(VENV) and at least 3.12."; \
	fi; \
	$(MAKE) --no-print-directory lint; status=$$?; \
	wait; \
	[ $$status = 0 ] || exit 1; \
	$(MAKE) --no-print-directory test-suite || exit 1; \
	if [ -n "$$newest" ]; then \
	  $$subset test-subset QUICK=yes; \
	fi

.PHONY: lint
lint: $(VENV)/.installed-test  ## ruff, pyright, sizes of modules and functions
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/python tests/test_structure.py

.PHONY: test-suite
test-suite: QUICK = yes
test-suite: $(VENV)/.installed-test  ## all tests but the slow ones, on the default Python
	$(call run_tests,not slow and not gpu)

.PHONY: test-slow
test-slow: $(VENV)/.installed-test  ## the slow tests
	$(VENV)/bin/python -m pytest -m "slow and not gpu"

.PHONY: test-subset
test-subset: $(VENV)/.installed-test-subset
	$(call run_tests,newest and not slow and not gpu,$(SUBSET))

.PHONY: test-newest
test-newest:  ## all tests but the slow ones on the newest jax, with all interpreted kernels
	@newest=$$(.ci/newest_python.sh "$(PYTHON)"); \
	$(MAKE) --no-print-directory test-suite VENV=.venv-newest PYTHON="$${newest:-$(PYTHON)}"

.PHONY: test-oldest
test-oldest:  ## the subset on the lower bounds of jax, optax and numpy
	@$(MAKE) --no-print-directory test-subset VENV=.venv-oldest PINS="$(OLDEST)"

.PHONY: test-gpu
test-gpu:  ## the tests that run on a GPU
	@$(MAKE) --no-print-directory test-gpu-here VENV=.venv-gpu

.PHONY: test-gpu-here
test-gpu-here: $(VENV)/.installed-gpu
	@$(VERSIONS)
	@$(VENV)/bin/python -c 'import jax; print(*jax.devices("cuda"))' 2>/dev/null || { \
	  echo "JAX finds no NVIDIA GPU here, so there is nothing to run these tests on."; exit 1; }
	JAX_PLATFORMS=cuda,cpu $(VENV)/bin/python -m pytest -m gpu -rs

.PHONY: test-gpu-aot
test-gpu-aot:  ## compile for GPUs that need not be there, with the oldest and the newest jax
	@$(MAKE) --no-print-directory test-gpu-aot-here VENV=.venv-gpu-aot-oldest \
	  PINS="$(OLDEST) $(patsubst jax==%,jax-cuda13-plugin==%,$(filter jax==%,$(OLDEST)))"
	@newest=$$(.ci/newest_python.sh "$(PYTHON)"); \
	$(MAKE) --no-print-directory test-gpu-aot-here VENV=.venv-gpu-aot PYTHON="$${newest:-$(PYTHON)}"

.PHONY: test-gpu-aot-here
test-gpu-aot-here: $(VENV)/.installed-gpu-aot
	@$(VERSIONS)
	$(VENV)/bin/python -m pytest -m gpu_aot -rs

.PHONY: test-tpu-aot
test-tpu-aot:  ## compile every kind of exchange for TPUs that need not be there
	@$(MAKE) --no-print-directory test-tpu-aot-here VENV=.venv-tpu-aot

.PHONY: test-tpu-aot-here
test-tpu-aot-here: $(VENV)/.installed-tpu-aot
	@$(VERSIONS)
	$(VENV)/bin/python -m pytest -m tpu_aot -rs tests/gpu_aot

.PHONY: peers
peers:  ## PyTorch in .venv-peers, for `python -m benchmarks.allreduce --peers`
	@$(MAKE) --no-print-directory .venv-peers/.installed-peers VENV=.venv-peers

.PHONY: notebooks
notebooks: $(VENV)/.installed-test  ## run the notebooks at their full sizes
	$(VENV)/bin/python -m pytest -m slow tests/test_notebooks.py

.PHONY: docs
docs: $(VENV)/.installed-test  ## the site, in build/site; a warning or a broken link is an error
	$(VENV)/bin/python -m sphinx -c docs -b html -j $(WORKERS) -W --keep-going -n -q . build/site
	@echo "Open build/site/index.html"

.PHONY: test-docs
test-docs: $(VENV)/.installed-test  ## look at every page of the site in headless Chromium
	$(VENV)/bin/python -m pytest -m slow -rs tests/test_site.py

.PHONY: clean
clean:  ## remove the environments, the caches and what runs left behind
	rm -rf .venv .venv-newest .venv-oldest .venv-gpu .venv-gpu-aot .venv-gpu-aot-oldest .venv-tpu-aot \
	  .venv-peers workdir build dist *.egg-info
	rm -rf .jax_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed again whenever pyproject.toml changes; `test` holds all that `train` needs.
$(VENV)/.installed-train: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing jaxcomm and what the training program needs into $(VENV) ..."
	@$(INSTALL) --editable ".[train]" $(PINS)
	@touch $@

$(VENV)/.installed-test-subset: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing jaxcomm and what a subset of its tests needs into $(VENV) ..."
	@$(INSTALL) --editable ".[test-subset]" $(PINS)
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing jaxcomm and what its tests need into $(VENV) ..."
	@$(INSTALL) --editable ".[test]" $(PINS)
	@touch $@ $(VENV)/.installed-train $(VENV)/.installed-test-subset

$(VENV)/.installed-gpu: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing jaxcomm and what runs on GPUs into $(VENV) ..."
	@$(INSTALL) --editable ".[test,gpu]" $(PINS)
	@touch $@ $(VENV)/.installed-test $(VENV)/.installed-train

$(VENV)/.installed-gpu-aot: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing jaxcomm and what compiles for GPUs into $(VENV) ..."
	@$(INSTALL) --editable ".[test,gpu-aot]" $(PINS)
	@touch $@ $(VENV)/.installed-test $(VENV)/.installed-train

$(VENV)/.installed-tpu-aot: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing jaxcomm and what compiles for TPUs into $(VENV) ..."
	@$(INSTALL) --editable ".[test-subset,tpu-aot]" $(PINS)
	@touch $@ $(VENV)/.installed-test-subset

$(VENV)/.installed-peers: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing PyTorch into $(VENV) ..."
	@$(INSTALL) --editable ".[peers]" $(PINS)
	@touch $@

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jaxcomm needs Python 3.11 or newer, and \`$(PYTHON)\` is not:" \
	    "$$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "\`$(PYTHON)\` cannot make environments. On Debian and Ubuntu: apt install python3-venv"; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
