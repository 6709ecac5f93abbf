"""A new version of an adapter while a vLLM server answers: the server is one process, training on an NVFP4 base another. No
request fails, and those that come after a version was loaded are answered by it."""

import json
import os
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from _engines import TOKENS, VOCABULARY, Answer, in_bf16, in_fp32, logprobs_of, prompts, save_base
from _publishing import NAME, post, train_and_publish
from _server import PATIENCE, server
from _tiny_models import tiny_tokenizer

VERSIONS = (1, 5, 3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "base"
    tiny_tokenizer(words=[f"w{i}" for i in range(VOCABULARY - 5)]).save_pretrained(folder)
    return save_base(folder)


@pytest.fixture(scope="module")
def url(base):
    with server(base) as url:
        yield url


@dataclass
class Asked:
    """One request: seconds, status, and the answer's tokens where it did not fail."""

    start: float
    end: float
    status: int
    prompt: list[int]
    tokens: list[int]


def asked_of(url: str, adapter: str, row: list[int]) -> Asked:
    content = dict(model=adapter, prompt=row, max_tokens=TOKENS, temperature=0, ignore_eos=True, return_token_ids=True)
    start = time.monotonic()
    status, text = post(url, "/v1/completions", content)
    tokens = json.loads(text)["choices"][0]["token_ids"] if status == 200 else []
    return Asked(start, time.monotonic(), status, row, tokens)


class Client(threading.Thread):
    """Asks one prompt after another until it is told to stop."""

    def __init__(self, url: str, rows: list[list[int]]):
        super().__init__(daemon=True)
        self.url, self.rows, self.asked, self.stopping = url, rows, [], threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            self.asked.append(asked_of(self.url, NAME, self.rows[len(self.asked) % len(self.rows)]))


def test_a_new_version_while_requests_are_answered(url, base, tmp_path, record_property):
    processes = torch.multiprocessing.get_context("spawn")
    queue = processes.Queue()
    trainer = processes.Process(target=train_and_publish, args=(base, tmp_path, url, VERSIONS, queue), daemon=True)
    trainer.start()
    versions = [queue.get(timeout=PATIENCE)]
    clients = [Client(url, prompts(10, seed)) for seed in range(2)]
    for client in clients:
        client.start()
    versions += [queue.get(timeout=PATIENCE) for _ in VERSIONS[1:]]
    time.sleep(3)  # requests for the last one
    for client in clients:
        client.stopping.set()
        client.join(PATIENCE)
    trainer.join(PATIENCE)
    assert trainer.exitcode == 0
    asked = [one for client in clients for one in client.asked]
    assert {one.status for one in asked} == {200}
    ends = [begin for _, begin, _ in versions[1:]] + [float("inf")]
    for (folder, _, loaded), end in zip(versions, ends, strict=True):
        own = [one for one in asked if loaded < one.start and one.end < end]
        assert len(own) >= 5, "requests between two versions"
        assert_answered_by(base, folder, own)
        own_name = f"{NAME}-{folder.name}"  # which stays this version's
        assert_answered_by(base, folder, [asked_of(url, own_name, row) for row in prompts(3, seed=7)])
    during = sum(one.start < end and one.end > end for one in asked for end in ends)
    record_property("requests", len(asked))
    record_property("during", during)
    assert {file.suffix for file in folder.iterdir()} <= {".json", ".md", ".safetensors"}
    assert sum(file.stat().st_size for file in folder.iterdir()) < os.path.getsize(f"{base}/model.safetensors") / 2


def assert_answered_by(base: str, folder, asked: list[Asked]) -> None:
    """Every token is the best that this version's model has, or as good (the bound of :mod:`_engines`)."""
    model, exact = in_bf16(base, folder), in_fp32(base, folder)
    for one in asked:
        answer = Answer(one.prompt, one.tokens, torch.empty(0))
        ours, truth = logprobs_of(model, answer), logprobs_of(exact, answer)
        behind = ours.amax(-1) - ours[range(len(one.tokens)), one.tokens]
        assert behind.max() <= 3 * (ours - truth).abs().max()
