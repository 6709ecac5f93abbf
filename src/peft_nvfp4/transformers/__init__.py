"""The package inside transformers: load, quantise while loading, save and reload a model with ``from_pretrained``.

>>> model = AutoModelForCausalLM.from_pretrained(name, quantization_config=PactConfig(), dtype=torch.bfloat16)

Importing this registers the method ``"peft_nvfp4"``; a saved model is recognised by the word in its ``config.json``. The same
line loads what compressed-tensors or ModelOpt have packed (:mod:`.published`, a hook that ``peft_nvfp4.register()`` installs).
"""

from .config import PactConfig
from .prepare import prepare_model_for_nvfp4_training
from .quantizer import PactQuantizer

__all__ = ["PactConfig", "PactQuantizer", "prepare_model_for_nvfp4_training"]
