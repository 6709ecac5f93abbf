# make demo: fine-tune a real model on real data (CPU or GPU).  make test: the test-suite.  Both make their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
CUTLASS = nvidia-cutlass==4.2.0.0
BIN = $(VENV)/bin
export HF_HUB_OFFLINE = 1
export PEFT_NVFP4_BUILD ?= 0# the CUDA extension takes minutes: make build-ext

.PHONY: demo test peer-tests build-ext lint clean

# PyTorch first: on a machine without CUDA a smaller CPU build may be wanted, see README
$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[nf4]"
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(BIN)/python -m pip install -q -e ".[demo]"
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install -q -e ".[test]"
	if command -v nvcc >/dev/null; then $(BIN)/python -m pip install -q --no-deps $(CUTLASS); fi  # one kernel is compiled
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m peft_nvfp4.data fetch
	$(BIN)/python examples/demo.py --out demo-out

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests $(PYTEST_ARGS)

# PEFT's own tests, from its source distribution: without and with this package imported, and its common helpers on our bases
peer-tests: $(VENV)/.test
	$(BIN)/python -m pip install -q parameterized diffusers scipy
	$(BIN)/python tests/peer/run.py $(PEER_ARGS)

# FP4 GEMMs for RTX 50xx: needs nvcc from CUDA 12.8 or later, no GPU
build-ext: $(VENV)/.base
	$(BIN)/python -m pip install -q --no-deps $(CUTLASS)
	$(BIN)/python csrc/build.py

lint:
	$(BIN)/python -m pip install -q ruff
	$(BIN)/ruff check src tests examples benchmarks

clean:
	rm -rf $(VENV) demo-out
