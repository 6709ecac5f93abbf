"""vLLM engines in the process of the tests, tiny models for them to serve, and log-probabilities to compare.

An engine takes seconds to start, so fixtures share one between the tests of a module.

**How close.** Two programs that compute the same model in BF16 round in different places, so their logits differ. The yardstick
is the same model in FP32: :func:`compare` measures how far transformers' BF16 is from it, e, the largest difference of a
log-probability over every token of the vocabulary at every position. Rounding errors add like their root of the sum of squares,
so an engine that rounds four times as often is at most about 2 e from FP32, and with the triangle inequality at most 3 e from
transformers' BF16. Where the two best tokens of a position are closer than that, either is right: a near tie.
"""

import gc
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from _vllm import vllm
from conftest import tiny_llama
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

from peft_nvfp4 import NVFP4LoraConfig

VOCABULARY = 128
SIZES = dict(hidden_size=128, intermediate_size=256, vocab_size=VOCABULARY, max_position_embeddings=128)
"""Heads of 32: the smallest that vLLM's attention on a CPU takes."""
TOKENS = 12  # of an answer
GREEDY = dict(temperature=0, ignore_eos=True, detokenize=False)
SLOTS = 8  # for adapters
RANK = 8  # the smallest of vLLM's ranks above 1


def prompts(count: int = 50, seed: int = 0) -> list[list[int]]:
    """Token ids, 3 to 20 in a prompt."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 21, (count,), generator=random)
    return [torch.randint(3, VOCABULARY, (int(length),), generator=random).tolist() for length in lengths]


def save_base(folder, **sizes) -> str:
    """A random Llama in BF16."""
    tiny_llama(torch.bfloat16, **{**SIZES, **sizes}).save_pretrained(folder)
    return str(folder)


def new_model(base: str, backend: str = "bf16", **settings) -> PeftModel:
    """A base with a new adapter."""
    own = dict(r=RANK, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", backend=backend)
    torch.manual_seed(1)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), NVFP4LoraConfig(**own | settings))


def count_in_steps(model: PeftModel, step: int, steps: int = 40) -> None:
    """Train the adapter to count in steps of ``step``, modulo the vocabulary: other steps, other answers."""
    tokens = model.config.vocab_size
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        ids = (torch.randint(tokens, (16, 1)) + step * torch.arange(16)) % tokens
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def train_adapter(base: str, folder, step: int, backend: str = "bf16") -> PeftModel:
    """The model with an adapter that counts in steps of ``step``; the adapter is saved in ``folder``."""
    model = new_model(base, backend)
    count_in_steps(model, step)
    model.save_pretrained(folder)
    return model


# ---------------------------------------------------------------------------------------------- engines


@contextmanager
def engine(folder, **settings):
    """A ``vllm.LLM`` on a model's folder, which serves token ids. The next one can start after the context."""
    defaults = dict(dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64, max_logprobs=-1)
    llm = vllm.LLM(str(folder), **{**defaults, **settings})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def lora_engine(folder, **settings):
    """With more slots than a module has adapters: vLLM's kernels for CPUs (0.32, ``lora/ops/torch_ops``: an index of -1) give
    prompts without an adapter, in a batch with others, that of the last slot. Empty, it adds nothing."""
    return engine(folder, enable_lora=True, max_lora_rank=RANK, max_loras=SLOTS, **settings)


def request(name: str, number: int, folder) -> LoRARequest:
    return LoRARequest(name, number, str(folder))


@dataclass
class Answer:
    """What an engine answered to one prompt, greedily."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor  # (tokens, vocabulary), nats


def ask(llm, rows, adapter: LoRARequest | list[LoRARequest | None] | None = None, tokens: int = TOKENS) -> list[Answer]:
    """One answer to each row of token ids, or text; one adapter for all of them, or one for each."""
    sampling = vllm.SamplingParams(**GREEDY, max_tokens=tokens, logprobs=-1)
    asked = [{"prompt": row} if isinstance(row, str) else {"prompt_token_ids": row} for row in rows]
    found = llm.generate(asked, sampling, lora_request=adapter, use_tqdm=False)
    return [Answer(list(one.prompt_token_ids), list(one.outputs[0].token_ids), _logprobs(one.outputs[0])) for one in found]


def _logprobs(output) -> torch.Tensor:
    rows = [[entry[token].logprob for token in range(len(entry))] for entry in output.logprobs]
    return torch.tensor(rows)


# ---------------------------------------------------------------------------------------------- comparisons


@torch.no_grad()
def logprobs_of(model, answer: Answer) -> torch.Tensor:
    """What a transformers model says at the tokens of an answer, given those before: (tokens, vocabulary), FP32."""
    ids = torch.tensor([answer.prompt + answer.tokens])
    start = len(answer.prompt) - 1
    return model(input_ids=ids).logits[0, start:-1].float().log_softmax(-1)


@dataclass
class Comparison:
    """An engine's answers against a transformers model and against the same model in FP32."""

    bf16: float  # e: largest difference of a log-probability, the transformers model against FP32
    engine: float  # the same, the engine against FP32
    apart: float  # the same, the engine against the transformers model
    ties: int  # positions whose two best tokens are closer than 3 e
    other: int  # positions where the engine chose another token than the transformers model, among the ties
    wrong: int  # the same, elsewhere
    positions: int


def compare(answers: list[Answer], model, exact) -> Comparison:
    """``model`` computes in BF16, ``exact`` in FP32."""
    ours, truth = (torch.cat([logprobs_of(m, answer) for answer in answers]) for m in (model, exact))
    theirs = torch.cat([answer.logprobs for answer in answers])
    chosen = torch.tensor([token for answer in answers for token in answer.tokens])
    e = _largest(ours - truth)
    best = ours.topk(2).values
    tie, other = best[:, 0] - best[:, 1] < 3 * e, chosen != ours.argmax(-1)
    counts = (int(which.sum()) for which in (tie, other & tie, other & ~tie))
    return Comparison(e, _largest(theirs - truth), _largest(theirs - ours), *counts, len(chosen))


def _largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


@dataclass
class Drift:
    """An engine's answers against the model that was trained, where these are not meant to be the same."""

    largest: float  # difference of a log-probability, nats
    mean: float  # the same, over the vocabulary and all positions
    agree: float  # share of positions where both choose the same token


def drift(answers: list[Answer], model) -> Drift:
    ours, theirs = torch.cat([logprobs_of(model, a) for a in answers]), torch.cat([a.logprobs for a in answers])
    apart = (ours - theirs).abs()
    return Drift(apart.max().item(), apart.mean().item(), (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item())


def record(record_property, prefix: str, found: Comparison | Drift) -> None:
    """Figures for docs/works-with.md, in the report of ``--junitxml``."""
    for name, value in vars(found).items():
        record_property(f"{prefix}_{name}", value)


def in_bf16(base: str, adapter=None):
    """The model in BF16, as it was trained with ``backend="bf16"``."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    if adapter is not None:
        config = NVFP4LoraConfig.from_pretrained(adapter)
        config.backend = "bf16"
        model = PeftModel.from_pretrained(model, adapter, config=config)
    return model.eval()


def in_fp32(base: str, adapter=None):
    """The model in FP32, by stock PEFT: weights and adapter as they are in their files."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()


def assert_same_model(found: Comparison) -> None:
    """The bound of this module's docstring."""
    assert found.engine <= 2 * found.bf16 and found.apart <= 3 * found.bf16, found
    assert found.wrong == 0, found
