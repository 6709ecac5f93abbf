"""GRPO or RLOO of TRL with a vLLM server that generates, and that gets the adapter after each step instead of weights.

TRL merges the adapter and sends every weight by NCCL. A packed base has no weights to send so, and merging into 4 bits would
round most of the adapter away. An adapter is some megabytes, and vLLM loads it while it serves. Start the server with the model
that the training starts from (its BF16 files, or what ``peft-nvfp4 export`` writes), and the training in another process:

    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL \\
        --enable-lora --max-lora-rank 16 --max-loras 2 --logprobs-mode processed_logprobs

    use_adapters(folder="versions")          # a folder that both processes see
    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://localhost:8000"))

The server computes with other roundings than the training, and on the BF16 files with other weights. TRL's importance sampling
correction, on by default, is for that. Tried with TRL 1.16 and vLLM 0.32; it replaces methods that are not public.
"""

import shutil
from pathlib import Path

from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer, rloo_trainer

KEPT = 2
"""Versions: the one that answers, and the one before."""


class AdapterGeneration(VLLMGeneration):
    """TRL's generation by a vLLM server, which is sent adapters. One training process."""

    folder = Path("versions")

    def _init_vllm(self) -> None:
        if self.mode != "server" or self.accelerator.num_processes > 1:
            raise ValueError("adapters are sent by one training process, and to a server: set vllm_mode='server'")
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self.vllm_client = VLLMClient(base_url=url, connection_timeout=self.server_timeout)
        self.version = 0

    def sync_weights(self) -> None:
        """Save the adapter in a new folder, have the server load it under a new name, and ask that from now on."""
        self.version += 1
        self.model.save_pretrained(self.folder / str(self.version))
        self._post("load", lora_name=f"version-{self.version}", lora_path=str((self.folder / str(self.version)).resolve()))
        self.vllm_client.model = f"version-{self.version}"
        if (old := self.version - KEPT) > 0:
            self._post("unload", lora_name=f"version-{old}")
            shutil.rmtree(self.folder / str(old))

    def _post(self, what: str, **content: str) -> None:
        answer = self.vllm_client.session.post(f"{self.vllm_client.base_url}/v1/{what}_lora_adapter", json=content)
        if answer.status_code != 200:
            raise RuntimeError(f"the vLLM server did not {what} {content['lora_name']}: {answer.text}")


def use_adapters(folder: str | Path) -> None:
    """Trainers that are made from now on send adapters, by way of ``folder``."""
    AdapterGeneration.folder = Path(folder)
    for module in (grpo_trainer, rloo_trainer):
        module.VLLMGeneration = AdapterGeneration
