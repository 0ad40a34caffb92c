# Two commands for a fresh machine: `make demo` and `make test`. PYTHON picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check

# Without an NVIDIA GPU on Linux the CPU build is asked for by its exact name, so that CUDA can never be downloaded.
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
ifeq ($(shell uname -s),Linux)
ifeq ($(shell nvidia-smi -L 2>/dev/null),)
TORCH := $(TORCH)+cpu --no-deps --retries 2 --extra-index-url https://download.pytorch.org/whl/cpu
endif
endif

.PHONY: demo test lint

demo: $(STAMP)
	$(BIN)/hf-linattn demo --output demo-output --overwrite

test: lint
	$(BIN)/python -m pytest -n $(JOBS)
# The Triton kernels on the CPU, in Triton's interpreter; pytest fails if it finds none of these tests. The slowest are left out.
ifeq ($(shell uname -s),Linux)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) tests/kernels/test_gated_linear_attention.py \
		tests/kernels/test_latent_attention.py tests/kernels/test_macchiato_attention.py tests/kernels/test_rg_lru.py \
		tests/kernels/test_short_convolution.py tests/kernels/test_sliding_window_attention.py \
		tests/kernels/test_cluster_logits.py tests/kernels/test_rotary_embedding.py \
		-k "triton and not (long_memory or half_precision or split_anywhere or permutations or same_bits or \
		test_latent_attention and (definition or attention_mask or large_logits or rows_are))"
endif

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mlinter --no-cache --no-progress hf_linattn/models

$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "hf-linattn needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt $(TORCH) || \
	{ echo "torch could not be installed; name a build that fits: make TORCH='torch>=2.11' $(MAKECMDGOALS)" >&2; exit 1; }
	$(PIP) -c constraints.txt -e '.[test]'
	@touch $@
