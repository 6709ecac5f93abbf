"""A training process that publishes an adapter to a running vLLM server, version after version: only the adapter is saved.

The server reads each version from a folder of its own: it tells cached prefixes of one name apart by the folder.
"""

import json
import time
import urllib.error
import urllib.request
from pathlib import Path

NAME = "policy"


def post(url: str, path: str, content: dict) -> tuple[int, str]:
    """(status, text) of a server's answer. A status other than 200 is an answer, too."""
    body = json.dumps(content).encode()
    asked = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def train_and_publish(base: str, folder: Path, url: str, versions: tuple[int, ...], published) -> None:
    """Train on an NVFP4 base; after each task (a step of counting) save the adapter and have the server load it, under one name
    for all versions, in place, and under a name of its own.

    To the queue ``published`` goes, for each version, (its folder, when the server was asked to load it, when it had done so), in
    seconds of ``time.monotonic``, one clock for all processes of a machine.
    """
    from _engines import count_in_steps, new_model

    model = new_model(base, backend="nvfp4")
    for number, step in enumerate(versions):
        count_in_steps(model, step)
        version = folder / f"version-{number}"
        model.save_pretrained(version)
        asked = time.monotonic()
        for adapter in (dict(lora_name=NAME, load_inplace=number > 0), dict(lora_name=f"{NAME}-{version.name}")):
            status, text = post(url, "/v1/load_lora_adapter", {**adapter, "lora_path": str(version)})
            assert status == 200, text
        published.put((version, asked, time.monotonic()))
