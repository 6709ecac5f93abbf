"""Training as people do it: plain loops, activation checkpointing, bitsandbytes' optimizers under HF Trainer, accumulation,
generation, and copies. (Resuming, and TRL: test_resume_matrix.py.)"""

import copy
import pickle

import pytest
import torch
import transformers as hf
from _frozen_models import packed
from _loss_models import distance
from _peft_models import adapter_tensors, by_backend, config, logits, same_tensors
from _steps import steps as optimizer_steps
from conftest import tiny_llama
from low_level import adapted_model
from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn

from peft_nvfp4.autograd.module_hooks import observing
from peft_nvfp4.lora.layer import FrozenLoraLinear
from peft_nvfp4.quantization.freeze import frozen_layers

bnb = pytest.importorskip("bitsandbytes")

IDS = torch.arange(64).reshape(4, 16) * 7 % 128


def adapted(seed: int = 1, dtype: torch.dtype = torch.float32, **settings) -> PeftModel:
    """A tiny Llama with an adapter that depends on the seed alone."""
    base = tiny_llama(dtype)
    torch.manual_seed(seed)
    return adapted_model(base, make=config, **settings)


def gradients(model: nn.Module, ids: torch.Tensor = IDS, seed: int = 5) -> dict[str, torch.Tensor]:
    """Of the mean loss over ``ids``, in training mode, with every random number from ``seed``."""
    model.train()
    model.zero_grad()
    torch.manual_seed(seed)
    model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def fit(model: nn.Module, steps: int, lr: float = 1e-2) -> list[float]:
    model.train()
    return optimizer_steps(model, IDS, steps, lr)


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no-dropout", "dropout"])
def test_a_few_steps_lower_the_loss(backend, dtype, dropout):
    """From about ln 128 = 4.85 by more than 0.5 nats in 8 steps; only the adapter moves."""
    model = adapted(dtype=dtype, backend=backend, lora_dropout=dropout)
    frozen = {n: t.clone() for n, t in packed(model).items()}
    rest = {n: p.clone() for n, p in model.named_parameters() if "lora_" not in n}
    losses = fit(model, 8)
    assert abs(losses[0] - 4.85) < 0.3 and losses[-1] < losses[0] - 0.5
    assert same_tensors(packed(model), frozen)
    assert all(torch.equal(p, rest[n]) for n, p in model.named_parameters() if "lora_" not in n)
    assert all(t.abs().max() > 0 and t.isfinite().all() for t in adapter_tensors(model).values())


@by_backend
@pytest.mark.parametrize("parts", [2, 4])
def test_gradient_accumulation(backend, parts):
    """Micro-batches of equal size, each loss divided by their number (a power of two, so exact). No token's codes depend on its
    batchmates, so what differs is the order of FP32 sums over tokens, 2**-24 a term, and with NVFP4 a code that such a difference
    moves across a threshold: at most one in a thousand, each off by a tenth of its value."""
    model = adapted(backend=backend, init_lora_weights=False)
    whole = gradients(model)
    model.zero_grad()
    for ids in IDS.chunk(parts):
        (model(input_ids=ids, labels=ids).loss / parts).backward()
    bound = 5e-3 if backend == "nvfp4" else 1e-5
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert distance(parameter.grad, whole[name]) < bound, name


def checkpointing_enable(model):
    """transformers renamed gradient_checkpointing_enable after 5.12."""
    return getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable


@by_backend
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no-dropout", "dropout"])
def test_checkpointing_leaves_gradients_bit_equal(backend, reentrant, dropout):
    """The recomputed forward must quantise alike and draw the same dropout mask."""
    settings = dict(backend=backend, lora_dropout=dropout, init_lora_weights=False)
    expected = gradients(adapted(**settings))
    model = adapted(**settings)
    checkpointing_enable(model.base_model.model)({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    calls = []
    layer = next(m for m in model.modules() if isinstance(m, FrozenLoraLinear))
    layer.register_forward_hook(observing(lambda *args: calls.append(1)))
    assert same_tensors(gradients(model), expected) and len(expected) == 28
    assert len(calls) == 2, "nothing was recomputed, so nothing was tested"


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_prepare_model_for_kbit_training_before_the_adapter(backend, dtype):
    """PEFT's own preparation of a QLoRA script: everything in 16 bits goes to FP32, then the base is frozen from that. The codes
    are those of the unprepared model (BF16 to FP32 is exact)."""
    model = prepare_model_for_kbit_training(tiny_llama(dtype), gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    model = get_peft_model(model, config(backend=backend))
    direct = adapted(dtype=dtype, backend=backend)
    assert len(frozen_layers(model)) == 14
    if backend != "bf16":  # a dense weight is kept in FP32 then
        assert same_tensors(packed(model), packed(direct))
    dense = {n: p.dtype for n, p in model.named_parameters() if "base_layer" not in n}
    assert set(dense.values()) == {torch.float32}
    losses = fit(model, 4)
    assert losses[-1] < losses[0]


ROWS = [dict(input_ids=row, labels=row) for row in torch.randint(0, 128, (8, 16), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("backend", ["nf4", "nvfp4"])
@pytest.mark.parametrize("optim, bits", [("paged_adamw_8bit", 8), ("adamw_bnb_8bit", 8), ("paged_adamw_32bit", 32)])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_bitsandbytes_optimizers(tmp_path, backend, optim, bits):
    """Selected by name and used: states of 4096 or more values are kept in 8 bits. Paging itself needs CUDA."""
    model = adapted(backend=backend, r=64)  # A and B of a 64 x 64 projection hold 4096 values
    settings = dict(use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no", seed=3)
    settings |= dict(optim=optim, max_steps=6, per_device_train_batch_size=2, learning_rate=1e-2)
    trainer = hf.Trainer(model, hf.TrainingArguments(tmp_path, **settings), train_dataset=ROWS)
    trainer.train()
    optimizer = trainer.optimizer
    while not isinstance(optimizer, bnb.optim.optimizer.Optimizer8bit):
        optimizer = optimizer.optimizer
    assert optimizer.args.optim_bits == bits and optimizer.is_paged is optim.startswith("paged")
    states = [s["state1"].dtype for p, s in optimizer.state.items() if p.numel() >= 4096]
    assert states and set(states) == {torch.uint8 if bits == 8 else torch.float32}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] and len(losses) == 6


@by_backend
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_compute_the_same_and_share_nothing(backend, way):
    model = adapted(backend=backend, init_lora_weights=False)
    expected, weights = logits(model), adapter_tensors(model)
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(twin), expected)
    tensors = lambda m: {t.data_ptr() for t in [*m.parameters(), *packed(m).values()] if t.numel()}
    assert not tensors(twin) & tensors(model)
    fit(twin, 2)
    assert not torch.equal(logits(twin), expected)
    assert torch.equal(logits(model), expected) and same_tensors(adapter_tensors(model), weights)
    merged = twin.merge_and_unload()  # also rewrites what is frozen
    assert not torch.equal(logits(merged), expected) and torch.equal(logits(model), expected)


@by_backend
def test_generate_follows_the_teacher_forced_path(backend):
    """Greedy, with a KV cache: one token at a time gives the logits of the whole sequence at once. FP32 sums in another order
    differ by 2**-24 a term (1e-4 is ample); with NVFP4 such a difference can move a code (see test_gradient_accumulation)."""
    model = adapted(backend=backend, init_lora_weights=False).eval()
    prompt = IDS[:2, :5] + 1
    settings = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    out = model.generate(input_ids=prompt, **settings, output_logits=True, return_dict_in_generate=True)
    stepwise, at_once = torch.stack(out.logits, 1), logits(model, out.sequences)[:, 4:-1]
    bound = 2e-2 if backend == "nvfp4" else 1e-4
    assert stepwise.shape == at_once.shape == (2, 8, 128)
    assert distance(stepwise, at_once) < bound
    chosen = out.sequences[:, 5:]
    lost = at_once.amax(-1) - at_once.gather(-1, chosen[..., None])[..., 0]
    assert (lost <= bound * at_once.abs().amax()).all(), "a chosen token is the teacher-forced argmax, or a tie"
    assert (chosen == at_once.argmax(-1)).float().mean() > 0.8
    with model.disable_adapter():
        without = model.generate(input_ids=prompt, **settings)
    assert not torch.equal(without, out.sequences), "the adapter takes part in generation"
