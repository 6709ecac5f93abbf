"""Files for llama.cpp and what is built on it (Ollama, LM Studio).

>>> model, _ = peft_nvfp4.merge(model, to="bf16")
>>> export_gguf(model, tokenizer, "merged/model.gguf")  # the merged model
>>> export_gguf_adapter(peft_model, "served/adapter.gguf")  # the adapter alone, for a GGUF of its base
>>> write_modelfile("merged", tokenizer, model="model.gguf")  # for ``ollama create``

The ``gguf`` package (of llama.cpp) knows names of tensors and metadata and writes the file; what remains are the facts of an
architecture (:mod:`.families`) and of a tokenizer (:mod:`.tokenizer`). Only what was compared with llama.cpp itself is written
(``make test-llama``: logits, tokens). Everything else is refused with a message that names ``convert_hf_to_gguf.py`` of
llama.cpp, which converts the folder that ``save_pretrained`` writes.
"""

from .adapter import export_gguf_adapter
from .model import DTYPES, export_gguf
from .modelfile import write_modelfile

__all__ = ["DTYPES", "export_gguf", "export_gguf_adapter", "write_modelfile"]
