"""vLLM, for tests on a CPU. A module that imports it is skipped where vLLM is not installed (``make test-serving`` does that)."""

import os

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine is in this process: a test may look into it

vllm = pytest.importorskip("vllm", reason="not run: vLLM is not installed")
