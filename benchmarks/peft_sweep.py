"""LoRA on tiny random models of transformers' classes, in stock PEFT and in this package: the table of docs/peft_sweep.md.

    python benchmarks/peft_sweep.py [--match REGEX] [--json FILE] [--page docs/peft_sweep.md]

For every class of the auto mappings below, a configuration is shrunk by the names of its fields (:data:`SIZES`) and a random
model made of it. Classes for which that gives no model that runs are listed, not counted. Then, from the same seeds:

* ``LoraConfig`` with this package's hooks removed, and with them: every step must give the same bits or the same error;
* ``NVFP4LoraConfig`` on every backend: every step that works in stock PEFT must work, with finite numbers.

Steps: ``wrap`` (get_peft_model and a forward), ``train`` (backward and an optimizer step), ``merge`` (merge_and_unload and a
forward), ``unload`` (of a fresh adapter, and a forward).
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import ModelOutput

import peft_nvfp4
from peft_nvfp4 import NVFP4LoraConfig

BACKENDS = ("nvfp4", "nf4", "bf16")
STEPS = ("wrap", "train", "merge", "unload")

MAPPINGS = {  # of transformers' auto classes -> modality
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "vision",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES": "vision",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES": "vision",
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES": "vision",
    "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES": "vision",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": "audio",
    "MODEL_FOR_CTC_MAPPING_NAMES": "audio",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "audio",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "multimodal",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES": "multimodal",
    "MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES": "multimodal",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "text",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "text",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "text",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "text",
}

SIZES: dict[str, Any] = {  # pattern of a field's name -> its value (None: as it is), the first that matches
    r".*token_id|.*token_index|pad_token|.*_idx": lambda value: min(value, 90),
    r"max_(source_)?positions?.*|max_target_positions|.*position_embeddings|n_positions|n_ctx|max_length": lambda v: min(v, 64),
    r"attn_layer_(period|offset)|expert_layer_.*|mlp_only_layers|.*layers_pattern|full_att.*|out_(features|indices)": None,
    r"num_feat_extract_layers|.*token_merg.*|type_vocab_size": None,
    r".*layer_types|no_rope_layers|.*layers_block_type|.*block_type": "ends",
    r".*(num|n)_.*layers?|.*_layers|depth|num_blocks": lambda value: min(value, 2),
    r"depths|layers_per.*": 1,
    r".*kv_heads.*|.*key_value_heads|n_head_kv|num_kv": lambda value: min(value, 2),
    r".*heads?": lambda value: 1 if value == 1 else 4 if value % 4 == 0 else 2,
    r"(global_)?head_dim|.*head_size|d_kv|v_head_dim|qk_(nope|rope)_head_dim|d_head": 16,
    r".*lora_rank": 16,
    r"rotary_dim": 8,
    r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts": 4,
    r"num_experts_per_tok|moe_k|num_selected_experts|moe_topk|top_k": 2,
    r"n_group|topk_group": 1,
    r"vocab_size(_.*)?|.*_vocab_size|num_embeddings": lambda value: min(value, 128),
    r".*(intermediate|ffn|inner|mlp|feedforward|feed_forward).*(size|dim|channels).*|.*ffn_dim|d_ff|n_inner|ffn_hidden.*": 96,
    r"hidden_size|d_model|dim|n_embd|embed_dim|encoder_hidden|d_embed|embedding_size|projection_dim|out_hidden_size|proj_dim"
    r"|word_embed_proj_dim|text_embed_dim|decoder_hidden_size|output_dim|emb_dim|input_dim|classifier_proj_size|hidden_dim": 64,
    r"hidden_sizes|embed_dims|neck_hidden_sizes": 64,
    r"image_size|input_size|img_size": lambda value: [32, 32] if isinstance(value, list | tuple) else 32,
    r"patch_size": lambda value: value if isinstance(value, list | tuple) or value <= 8 else 8,
    r"num_frames": 4,
    r"num_mel_bins": 16,
    r"num_queries": 8,
}

FAMILIES: dict[str, dict[str, Any]] = {  # model type -> fields that the rules above get wrong
    "llama4_text": {"moe_layers": [1], "intermediate_size_mlp": 96},
    "wav2vec2": {"num_conv_pos_embedding_groups": 4},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "qwen2_vl_text": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
    "qwen2_5_vl_text": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
    "swin": {"window_size": 4},
    "swinv2": {"window_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_n_groups": 1, "mamba_d_state": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16},
}

TIME_LIMIT = 120
"""Seconds for one class: some cannot be shrunk by the names of their fields."""


# ---------------------------------------------------------------------------------------------- models and inputs


def shrink(config: PretrainedConfig, **changes: Any) -> PretrainedConfig:
    """A small configuration of the same class; composed ones from the inside."""
    fields = {}
    for key, value in vars(config).items():
        rule = _rule(key)
        if isinstance(value, PretrainedConfig):
            fields[key] = shrink(value).to_dict()
        elif rule == "ends":  # one of each kind, as a rule
            fields[key] = [value[0], value[-1]] if isinstance(value, list | tuple) and len(value) > 1 else value
        elif rule is None or isinstance(value, bool):
            continue
        elif isinstance(value, int) or isinstance(value, list | tuple) and key in ("image_size", "input_size", "patch_size"):
            fields[key] = rule(value) if callable(rule) else rule
        elif isinstance(value, list | tuple) and value and isinstance(value[0], int):
            fields[key] = [rule(v) if callable(rule) else rule for v in value]
    if "kv_lora_rank" in fields:  # multi-head latent attention
        fields["num_key_value_heads"] = fields.get("num_attention_heads", 4)
    fields |= FAMILIES.get(config.model_type, {}) | changes
    return type(config)(**fields)


def _rule(key: str) -> Any:
    return next((rule for pattern, rule in SIZES.items() if re.fullmatch(pattern, key)), None)


def tiny(cls: type[PreTrainedModel], **changes: Any) -> Callable[[], PreTrainedModel]:
    """What makes the same tiny model of a class at every call."""
    config = shrink(cls.config_class(), **changes)

    def make() -> PreTrainedModel:
        torch.manual_seed(0)
        return cls(copy.deepcopy(config)).float()

    return make


def inputs_of(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Batches that the model may take, the largest first."""
    random = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    config, text = model.config, model.config.get_text_config()
    ids = 5 + torch.arange(24).reshape(2, 12) * 7 % (min(getattr(text, "vocab_size", None) or 32, 90) - 5)
    vision = next((c for c in (config, getattr(config, "vision_config", None)) if hasattr(c, "image_size")), config)
    size = getattr(vision, "image_size", 32)
    height, width = size if isinstance(size, list | tuple) else (size or 32, size or 32)
    channels = getattr(vision, "num_channels", 3)
    audio = next((c for c in (config, getattr(config, "audio_config", None)) if hasattr(c, "num_mel_bins")), config)
    mels, frames = getattr(audio, "num_mel_bins", 80), 2 * getattr(audio, "max_source_positions", 50)
    pixels = [random(2, channels, height, width), random(2, getattr(vision, "num_frames", 4), channels, height, width)]
    sounds = [random(2, *shape) for shape in ((mels, frames), (frames, mels), (frames, 160), (frames, 80))]
    waves = [random(2, 4000), random(2, getattr(config, "max_length", 64), mels)]
    choices = {"pixel_values": pixels, "input_features": sounds, "input_values": waves, "pixel_values_videos": pixels[1:]}
    known = inspect.signature(model.forward).parameters
    tails = [{"input_ids": ids, "decoder_input_ids": ids}, {"decoder_input_ids": ids}, {"input_ids": ids}, {}]
    for tail in tails:
        if tail.keys() <= known.keys():
            yield from ({name: t, **tail} for name, some in choices.items() if name in known for t in some)
            if tail:
                yield tail


def first_batch(make: Callable[[], PreTrainedModel]) -> dict[str, Tensor]:
    """The first batch that the model runs on, with a finite loss and gradient."""
    model, problem = make().eval(), None
    for batch in inputs_of(model):
        try:
            with torch.no_grad():
                size = loss_of(model(**batch))
        except Exception as error:
            problem = problem or text_of(error)
            continue
        if torch.isfinite(size):
            return batch
    raise ValueError(problem or "no inputs are known for it")


def text_of(error: BaseException) -> str:
    """An error in one line."""
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:150]


def tensors_of(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict | ModelOutput):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_of(value)


def loss_of(output: Any) -> Tensor:
    """A loss that every output takes part in."""
    return sum(t.float().clamp(-1e4, 1e4).square().mean() for t in tensors_of(output))


# ---------------------------------------------------------------------------------------------- the steps


def run_steps(make: Callable[[], PreTrainedModel], batch: dict[str, Tensor], config: Callable[[], LoraConfig]) -> dict[str, Any]:
    """Step -> its output (a flat tensor), or its error (text); after an error nothing."""
    results: dict[str, Any] = {}

    def output(model: nn.Module) -> Tensor:
        transformers.set_seed(3)
        with torch.no_grad():
            return torch.cat([t.float().flatten() for t in tensors_of(model.eval()(**batch))])

    def wrap() -> Tensor:
        torch.manual_seed(2)
        results["model"] = get_peft_model(make(), config())
        return output(results["model"])

    def train() -> Tensor:
        model = results["model"].train()
        transformers.set_seed(3)  # Python's and numpy's, too: SpecAugment
        loss_of(model(**batch)).backward()
        trained = [p for p in model.parameters() if p.grad is not None]
        torch.optim.AdamW(trained, lr=1e-2).step()
        return output(model)

    def merge() -> Tensor:
        return output(results.pop("model").merge_and_unload())

    def unload() -> Tensor:
        torch.manual_seed(2)
        return output(get_peft_model(make(), config()).unload())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, step in zip(STEPS, (wrap, train, merge, unload)):
            try:
                results[name] = step()
            except Exception as error:
                results[name] = text_of(error)
                break
    results.pop("model", None)
    return results


def compare(make: Callable[[], PreTrainedModel], batch: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    """ "stock" or a backend -> step -> "same", "ok", or what differs from stock PEFT. ("-": not reached, as in stock PEFT.)"""
    settings = dict(r=4, lora_alpha=8, target_modules="all-linear")
    peft_nvfp4.unregister()
    try:
        stock = run_steps(make, batch, lambda: LoraConfig(**settings))
    finally:
        peft_nvfp4.register()
    hooked = run_steps(make, batch, lambda: LoraConfig(**settings))
    table = {"stock": {step: _same(stock.get(step), hooked.get(step)) for step in STEPS}}
    for backend in BACKENDS:
        ours = run_steps(make, batch, lambda: NVFP4LoraConfig(**settings, backend=backend))
        table[backend] = {step: _works(stock.get(step), ours.get(step)) for step in STEPS}
    return table


def _same(stock: Any, hooked: Any) -> str:
    if stock is None and hooked is None:
        return "-"
    if isinstance(stock, Tensor) and isinstance(hooked, Tensor):
        return "same" if torch.equal(stock, hooked) or _both_nan(stock, hooked) else "DIFFERS"
    return f"same ({stock})" if isinstance(stock, str) and stock == hooked else f"DIFFERS: {stock if hooked is None else hooked}"


def _both_nan(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _works(stock: Any, ours: Any) -> str:
    if isinstance(ours, Tensor):
        finite = not isinstance(stock, Tensor) or torch.equal(torch.isfinite(stock), torch.isfinite(ours))
        return "ok" if finite else "NOT FINITE"
    if isinstance(stock, Tensor):
        return f"FAILS: {ours}" if ours else "-"
    return f"as stock ({ours})" if ours else "-"


# ---------------------------------------------------------------------------------------------- all classes


def classes() -> dict[type[PreTrainedModel], str]:
    """Class -> modality, one class for every model type and modality."""
    found: dict[type[PreTrainedModel], str] = {}
    taken: set[tuple[str, str]] = set()
    for mapping, modality in MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, mapping).items():
            name = names if isinstance(names, str) else names[0]
            cls = getattr(transformers, name, None)
            if cls is not None and (model_type, modality) not in taken and issubclass(cls, PreTrainedModel):
                taken.add((model_type, modality))
                found.setdefault(cls, modality)
    return found


class _OutOfTime(BaseException):
    """Not an error of a step."""


def sweep(match: str = "") -> dict[str, Any]:
    """Rows (class, modality, table) and, of the other classes, the reason why there is no tiny model."""
    rows, left = [], {}

    def stop(*_: Any) -> None:
        raise _OutOfTime(f"takes more than {TIME_LIMIT} s")

    signal.signal(signal.SIGALRM, stop)
    for cls, modality in classes().items():
        if not re.search(match, cls.__name__):
            continue
        start = time.time()
        signal.alarm(TIME_LIMIT)
        try:
            make = tiny(cls)
            with torch.device("meta"):
                size = sum(p.numel() for p in make().parameters())
            if size > 2e7:
                raise ValueError(f"{size / 1e6:.0f} M parameters when shrunk")
            rows.append({"class": cls.__name__, "modality": modality, "steps": compare(make, first_batch(make))})
        except (Exception, _OutOfTime) as error:
            left[cls.__name__] = text_of(error)
        finally:
            signal.alarm(0)
        shown = f"left out, {left[cls.__name__]}" if cls.__name__ in left else "; ".join(differences(rows[-1])) or "ok"
        print(f"{cls.__name__} ({time.time() - start:.1f} s): {shown}", flush=True)
    return {"transformers": transformers.__version__, "rows": rows, "left_out": left}


def differences(row: dict[str, Any]) -> list[str]:
    """What a class does otherwise than stock PEFT."""
    return [
        f"{who} {step}: {text}"
        for who, steps in row["steps"].items()
        for step, text in steps.items()
        if text.isupper() or text.startswith(("DIFFERS", "FAILS", "NOT FINITE"))
    ]


def page(result: dict[str, Any]) -> str:
    """The Markdown page."""
    import peft

    rows = sorted(result["rows"], key=lambda row: (row["modality"], row["class"]))
    count = Counter(row["modality"] for row in rows)
    different = [f"{row['class']}: {text}" for row in rows for text in differences(row)]
    lines = [
        "# LoRA on transformers' classes, with and without this package",
        "",
        f"Written by `python benchmarks/peft_sweep.py` with transformers {result['transformers']} and PEFT {peft.__version__}, "
        "on a CPU. Each row is a tiny random model of a class. `LoraConfig` with and without this package imported gives the "
        'same bits ("same") or the same error; `NVFP4LoraConfig` on a backend does what stock PEFT can do ("ok"). Steps: wrap, '
        "train, merge, unload.",
        "",
        f"{len(rows)} classes ({', '.join(f'{n} {modality}' for modality, n in sorted(count.items()))}), "
        f"{len(different)} differences." + "".join(f"\n* {text}" for text in different),
        "",
        f"| class | modality | LoraConfig | {' | '.join(BACKENDS)} |",
        f"|---|---|---|{'---|' * len(BACKENDS)}",
    ]
    for row in rows:
        cells = [_cell(row["steps"][who]) for who in ("stock", *BACKENDS)]
        lines.append(f"| {row['class']} | {row['modality']} | {' | '.join(cells)} |")
    lines += ["", f"Not in the table, because shrinking by field names gives no model that runs ({len(result['left_out'])}): "]
    lines[-1] += ", ".join(sorted(result["left_out"])) + "."
    return "\n".join(lines) + "\n"


def _cell(steps: dict[str, str]) -> str:
    """One word where all steps agree."""
    words = set(steps.values())
    if len(words) == 1:
        return words.pop()
    return "; ".join(f"{step} {text}".replace("|", "/") for step, text in steps.items() if text != "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="regular expression for names of classes")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--add-to", type=Path, help="results of an earlier run, for the classes that are not matched")
    parser.add_argument("--page", type=Path, help="write the Markdown page here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    result = sweep(arguments.match)
    if arguments.add_to:
        earlier, again = (
            json.loads(arguments.add_to.read_text()),
            {row["class"] for row in result["rows"]} | {*result["left_out"]},
        )
        result["rows"] += [row for row in earlier["rows"] if row["class"] not in again]
        result["left_out"] |= {name: text for name, text in earlier["left_out"].items() if name not in again}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.page:
        arguments.page.write_text(page(result))
    print(page(result).split("\n")[4])


if __name__ == "__main__":
    main()
