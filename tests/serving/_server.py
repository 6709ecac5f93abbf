"""A vLLM server in a process of its own, which may load adapters while it serves."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from _engines import RANK, SLOTS

PATIENCE = 240  # seconds, for a server to start or for a training to end


@contextmanager
def server(model: str, *words: str) -> Iterator[str]:
    """The address of a server of the model in a folder; ``words`` are further flags."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = dict(port=port, host="127.0.0.1", dtype="bfloat16", max_model_len=64, max_lora_rank=RANK, max_loras=SLOTS)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--enable-lora", "--enforce-eager"]
    environment = {**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    process = subprocess.Popen([*command, *flags, *words], env=environment)
    try:
        yield _when_ready(f"http://127.0.0.1:{port}", process)
    finally:
        process.terminate()
        process.wait(60)


def _when_ready(url: str, process: subprocess.Popen) -> str:
    for _ in range(PATIENCE):
        assert process.poll() is None, "the server did not start"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
        except OSError:
            time.sleep(1)
    raise TimeoutError(f"no server after {PATIENCE} s")
