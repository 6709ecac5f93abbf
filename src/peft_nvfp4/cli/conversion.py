"""From one kind of model folder to another: ``peft-nvfp4 quantize``, ``peft-nvfp4 calibrate``, ``peft-nvfp4 merge``,
``peft-nvfp4 export``; and ``peft-nvfp4 inspect``, whether an adapter fits a model."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from ..quantization.options import Options
from ._run.folders import check_writable, kept_writes, new_folder
from .common import Base, Calibration, Columns, Dtype, Layers, Limit, Outcome, Output, base_option, command, pairs

Model = Annotated[str, typer.Argument(help="Folder or Hub id of a dense model.")]
Adapter = Annotated[str, typer.Argument(help="Folder of the adapter.")]


def _written(folder: Path, model: Any, tokenizer: Any) -> tuple[dict[str, Any], str]:
    """A folder with a model, which gets its tokenizer: (for JSON, in words). Packed are linears and projections of experts."""
    from ..quantization.freeze import frozen_modules
    from ..transformers.prepare import num_parameters

    tokenizer.save_pretrained(folder)
    count = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    packed = sum(m.experts * len(m.projections) if hasattr(m, "projections") else 1 for _, m in frozen_modules(model))
    dense = 2 * num_parameters(model)
    words = f"{folder}: {decimal(count)} ({decimal(dense)} in BF16), {packed} linears packed in NVFP4"
    return {"folder": str(folder), "bytes": count, "packed": packed, "dense_bytes": dense}, words


@command
def quantize(
    model: Model,
    output: Output,
    skip_modules: Annotated[str, typer.Option(help="Names to leave dense, with commas between.")] = "",
    layers: Layers = None,
) -> Outcome:
    """Pack a model's linears in NVFP4 and save it: 4.5 bits a weight, loaded with from_pretrained."""
    import torch

    from ..transformers.config import PactConfig
    from ._run import models

    device = models.default_device()
    names = [name.strip() for name in skip_modules.split(",") if name.strip()]
    settings: dict[str, Any] = {"quantization_config": PactConfig(skip_modules=names or None)}
    if device.type == "cuda":
        settings["device_map"] = {"": device}
    with new_folder(output) as path:
        if getattr(models.config_of(model), "quantization_config", None) is not None:
            raise ValueError(f"{model} is quantised already; peft-nvfp4 export writes it in another layout")
        packed, tokenizer = models.load(model, "bf16", layers, device=torch.device("cpu"), **settings)
        packed.save_pretrained(path)
        content, words = _written(path, packed, tokenizer)
    return Outcome(content, [words])


@command
def calibrate(
    model: Model,
    dataset: Annotated[str, typer.Argument(help="Texts: .txt, .jsonl, .csv, ...")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder; the same command goes on where it was stopped.")],
    method: Annotated[str, typer.Option(help="gptq or nearest.")] = "gptq",
    accuracy: Annotated[str, base_option("accuracy")] = Options.accuracy,
    budget: Annotated[float | None, typer.Option(help="Choose terms by measured errors, for this share of forward work.")] = None,
    offset: Annotated[bool, typer.Option(help="Subtract the mean input (of one term: balanced, paper).")] = False,
    backward: Annotated[str, typer.Option(help="Backward layouts: requantize or gptq.")] = "requantize",
    samples: Annotated[int, typer.Option(help="Sequences.")] = 128,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence (2048, or as many as the model takes).")] = None,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    columns: Columns = None,
    limit: Limit = None,
    seed: Annotated[int, typer.Option(help="Of the choice of texts.")] = 0,
    layers: Layers = None,
) -> Outcome:
    """GPTQ weights, terms and offsets from a few texts, for train --calibration."""
    import torch

    from ..calibration import run as calibration
    from ._run import models, texts

    models.check_model(model)
    longest = models.positions(models.config_of(model)) or seq or 2048
    if seq is not None and seq > longest:
        raise ValueError(f"--seq {seq}: {model} was made for {longest} tokens, give --seq {longest} or less")
    check_writable(output)
    how = {"method": method, "accuracy": accuracy, "budget": budget, "offset": offset, "backward": backward}
    options = calibration.CalibrationOptions(
        **how, samples=samples, seq_len=seq or min(2048, longest), batch_size=batch, seed=seed
    )
    rows, tokenizer = texts.read(dataset, columns=pairs(columns), limit=limit), models.load_tokenizer(model)
    rows.check_template(tokenizer) if rows.format == "chat" else rows.rendered(tokenizer)
    dense, _ = models.load(model, layers=layers, device=torch.device("cpu"), tokenizer=tokenizer)
    with kept_writes(output, "Finished layers are kept: make room, and give the same command again"):
        report = calibration.calibrate(dense, rows.plain(), tokenizer, options, output_dir=output, device=models.default_device())
    hint = f"Train with it: peft-nvfp4 train MODEL DATA --calibration {output}"
    return Outcome(report.as_dict(), [*rows.losses(), str(report), hint])


@command
def merge(
    adapter: Adapter,
    output: Output,
    model: Base = None,
    to: Annotated[str, typer.Option(help="bf16, fp16, fp32 or nvfp4.")] = "bf16",
    layout: Annotated[str, typer.Option(help="Of a model in nvfp4: compressed-tensors or modelopt.")] = "compressed-tensors",
    gguf: Annotated[str | None, typer.Option(help="Write model.gguf and a Modelfile, too: bf16, q8_0, f16, f32, nvfp4.")] = None,
    probe: Annotated[str | None, typer.Option(help="Data on which to compare the logits: a file.")] = None,
    calibration: Calibration = None,
    dtype: Dtype = "auto",
    layers: Layers = None,
) -> Outcome:
    """Merge an adapter into its base model, and say how much of it is left."""
    import torch

    from ..checkpoints import export_checkpoint
    from ..lora import merge as merging
    from ._run import models

    if gguf is not None:
        _check_gguf(gguf, to)
    with new_folder(output) as path:
        rows = None
        if probe is not None:
            from ._run import evaluation, texts

            rows = evaluation.first_tokens(texts.read(probe, limit=8), models.tokenizer_of(model, adapter), 128)
        adapted, tokenizer = models.load_with_adapter(model, adapter, dtype, layers, calibration)
        batches = None
        if rows is not None:
            rows = [ids[: models.positions(adapted.config)] for ids in rows]
            models.check_tokens(adapted, ((f"{probe}: a row", ids) for ids in rows))
            batches = [{"input_ids": torch.tensor([ids], device=adapted.device)} for ids in rows]
        merged, report = merging.merge(adapted, to, probe=batches)
        if to == "nvfp4":
            export_checkpoint(merged, path, layout)
        else:
            merged.save_pretrained(path)
        content, words = _written(path, merged, tokenizer)
        shown = [str(report), words]
        if gguf is not None:
            shown.append(_write_gguf(path, merged, tokenizer, gguf))
    return Outcome({**content, "report": asdict(report)}, shown)


def _check_gguf(dtype: str, to: str) -> None:
    """Before hours of work: the package is there, and the type is one of what is merged."""
    from ..checkpoints.gguf import DTYPES
    from ..checkpoints.gguf.model import require_gguf

    require_gguf()
    known = ("nvfp4",) if to == "nvfp4" else DTYPES
    if dtype not in known:
        raise ValueError(f"a model merged --to {to} is written as --gguf {', '.join(known)}, got {dtype!r}")


def _write_gguf(folder: Path, model: Any, tokenizer: Any, dtype: str) -> str:
    """``model.gguf`` and a ``Modelfile`` in a folder. Returns what to do with them."""
    from ..checkpoints.gguf import export_gguf, write_modelfile

    export_gguf(model, tokenizer, folder / "model.gguf", dtype)
    missing = write_modelfile(folder, tokenizer, "./model.gguf", generation=model.generation_config)
    use = f"llama-cli -m {folder}/model.gguf, or ollama create NAME -f {folder}/Modelfile"
    return use if missing is None else f"{use}. {missing}"


@command(busy="Exporting")
def export(
    model: Annotated[str, typer.Argument(help="Model in NVFP4 (of quantize, or merge --to nvfp4), or dense; gguf: adapter.")],
    output: Output,
    layout: Annotated[str, typer.Option(help="compressed-tensors (vLLM), modelopt (TensorRT-LLM), gguf.")] = "compressed-tensors",
    layers: Layers = None,
) -> Outcome:
    """Write an NVFP4 model in the layout of a serving engine, or an adapter for llama.cpp and Ollama."""
    from ..checkpoints import export_checkpoint
    from ..quantization.freeze import freeze_model, frozen_modules
    from ._run import models

    with new_folder(output) as path:
        if layout == "gguf" and (Path(model) / models.ADAPTER).is_file():
            return _export_adapter(model, path)
        packed, tokenizer = models.load(model, "stored", layers)
        if not frozen_modules(packed):
            freeze_model(packed, "nvfp4")
        if layout == "gguf":
            words = _write_gguf(path, packed, tokenizer, "nvfp4")
            return Outcome({"folder": str(path), "bytes": (path / "model.gguf").stat().st_size}, [words])
        report = export_checkpoint(packed, path, layout)
        content, words = _written(path, packed, tokenizer)
    inexact = f"; {len(report.inexact)} global scales are off by one unit in the last place" if report.inexact else ""
    kind = f"{layout}, {report.scheme}, {len(report.dense)} linears dense{inexact}"
    return Outcome({**content, "report": asdict(report)}, [words, kind])


def _export_adapter(adapter: str, folder: Path) -> Outcome:
    """``adapter.gguf`` and a ``Modelfile`` in a folder."""
    from ..checkpoints.gguf import export_gguf_adapter, write_modelfile
    from ..checkpoints.gguf.model import require_gguf
    from ._run import models

    require_gguf()
    adapted, tokenizer = models.load_with_adapter(None, adapter, "bf16", None)
    file = export_gguf_adapter(adapted, folder / "adapter.gguf")
    base = adapted.get_base_model()
    missing = write_modelfile(folder, tokenizer, "./base.gguf", file.name, base.generation_config)
    words = [f"{file}: {decimal(file.stat().st_size)}, for a GGUF file of {base.name_or_path}"]
    words += [f"llama-cli -m BASE.gguf --lora {file}; Modelfile takes the base from {folder}/base.gguf"]
    return Outcome({"folder": str(folder), "bytes": file.stat().st_size}, words if missing is None else [*words, missing])


@command(busy="Inspecting")
def inspect(
    adapter: Adapter,
    model: Base = None,
    probe: Annotated[bool, typer.Option(help="Run a few tokens with and without it.")] = True,
    calibration: Calibration = None,
    dtype: Dtype = "auto",
    layers: Layers = None,
) -> Outcome:
    """Does an adapter fit a base model, and is that the one it was trained on? Exit code 1 if it does not fit."""
    from ..lora.hooks import freeze_base
    from ..lora.inspection import inspect_adapter
    from ..quantization.freeze import frozen_modules
    from ._run import models

    config, base, _ = models.load_base(adapter, model, dtype, layers, calibration)
    if not frozen_modules(base):
        freeze_base(config, base)
    report = inspect_adapter(base.to(models.default_device()), adapter, probe=probe)
    return Outcome(asdict(report), [str(report)], 0 if report.binds else 1)
