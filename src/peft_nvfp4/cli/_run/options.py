"""Options of a training run: one dataclass for flags, YAML files and what a run writes beside its checkpoints.

``--help`` reads it, so importing it imports no PyTorch.
"""

from __future__ import annotations

import types
import typing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...quantization.options import FIELDS, check_known, help_of

if TYPE_CHECKING:
    from ...lora.config import NVFP4LoraConfig

FIXED = ("backend", "rank", "alpha", "targets", "layers", "optimizer", "lora")
"""What a checkpoint was made with: another value is another run."""
FILE = "train.yaml"
"""In the output folder: the options of the run, read by ``--resume``."""


def option(default: Any, help: str | None = None, *flags: str, sft: str | None = None) -> Any:
    """A field; without ``help`` it has no flag and is for the YAML file. ``flags``: if not ``--name``. ``sft``: the field of
    TRL's ``SFTConfig`` that it sets."""
    metadata = {"help": help, "flags": flags, "sft": sft}
    return field(default_factory=dict, metadata=metadata) if default is dict else field(default=default, metadata=metadata)


def base_option(name: str) -> Any:
    """A field that :class:`~peft_nvfp4.quantization.options.Options` defines."""
    return option(FIELDS[name].default, help_of(name))


@dataclass
class TrainOptions:
    """What ``peft-nvfp4 train`` can be told: every name is a key of the YAML file, and those with a help text are flags, too.

    Those that have the name of a field of ``NVFP4LoraConfig`` mean the same. ``lora`` and ``trainer`` are further fields of
    ``NVFP4LoraConfig`` and of TRL's ``SFTConfig``.
    """

    model: str = option("", "Folder or Hub id of the base model.")
    dataset: str = option("", "Data: .jsonl, .csv, .parquet, .txt, ...")
    output: str = option("", "Folder for checkpoints and the adapter.", "--output", "-o", sft="output_dir")
    backend: str = base_option("backend")
    accuracy: str = base_option("accuracy")
    memory: str = base_option("memory")
    calibration: str | None = base_option("calibration")
    cuda_graphs: bool = option(True, "Record steps on a GPU and replay them.")
    rank: int = option(16, "Of the adapter (16).", "--rank", "-r")
    alpha: int = option(32, "LoRA alpha (32).")
    dropout: float = option(0.0, "LoRA dropout (0).")
    targets: str = option("all-linear", "all-linear, or names with commas between.")
    format: str = option("auto", "auto, chat, prompt, text or classification.")
    columns: dict[str, str] = option(dict, "prompt=question, completion=answer")
    template: str | None = option(None, 'Classification: "{text}\\nLabel:".')
    labels: list[str] | None = option(None)  # of a classification: filled in from the data, for eval
    split: str = option("train")
    limit: int | None = option(None, "Rows at most.")
    eval_dataset: str | None = option(None, "Scored during training.")
    eval_rows: int = option(0, "Rows kept back to be scored.")
    max_length: int = option(1024, "Tokens of a row at most (1024).", sft="max_length")
    packing: bool = option(False, "Short rows share a sequence of max_length.", sft="packing")
    steps: int | None = option(None, "Optimizer steps; instead of epochs.")
    epochs: float = option(1.0, "Times through the data (1).", sft="num_train_epochs")
    batch: int = option(8, "Rows at a time (8).", sft="per_device_train_batch_size")
    accumulation: int = option(1, "Times a step (1).", sft="gradient_accumulation_steps")
    lr: float = option(2e-4, "Peak learning rate (2e-4).", sft="learning_rate")
    scheduler: str = option("linear", "linear, cosine, constant, ...", sft="lr_scheduler_type")
    warmup: float = option(0.05, "Share of the steps, never all (0.05).", sft="warmup_steps")
    optimizer: str = option("adamw_torch_fused", "adamw_torch_fused, paged_adamw_8bit, ...", sft="optim")
    checkpointing: bool = option(False, "Keep only the inputs of decoder layers for backward.", sft="gradient_checkpointing")
    deterministic: bool = option(False, "Two runs are equal bit for bit; slower attention.")
    max_memory: str | None = option(None, "16GiB: batch, accumulation, memory, checkpointing are chosen to fit.")
    save_every: int = option(0, "Steps between checkpoints (a tenth).")
    log_every: int = option(0, "Steps between lines of the log.")
    seed: int = option(0, "Of data order, adapter and dropout (0).", sft="seed")
    dtype: str = option("auto", "auto, bf16, fp16 or fp32.")
    layers: int | None = option(None, "Keep only the first: a quick look.")
    lora: dict[str, Any] = option(dict)
    trainer: dict[str, Any] = option(dict)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in fields(self):
            setattr(self, f.name, _checked(f.name, getattr(self, f.name), hints[f.name]))
        for name in ("max_length", "rank", "batch", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1 or self.epochs <= 0:
            raise ValueError("steps and epochs must be positive")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is a share of the steps, below 1, got {self.warmup}")

    def save(self, folder: str | Path) -> None:
        """Write :data:`FILE`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)
        (Path(folder) / FILE).write_text(text, encoding="utf-8")


def adapter_config(options: TrainOptions) -> NVFP4LoraConfig:
    """The config of the adapter and of the base's freezing. Only here do options become fields of ``NVFP4LoraConfig``."""
    from ...lora.config import NVFP4LoraConfig

    known = {f.name for f in fields(NVFP4LoraConfig) if f.init}
    if unknown := sorted(map(str, options.lora.keys() - known)):
        raise ValueError(f"unknown settings of the adapter (lora): {', '.join(unknown)}; they are those of NVFP4LoraConfig")
    words = [word.strip() for word in options.targets.split(",") if word.strip()]
    targets = options.targets if words == ["all-linear"] else words
    shared = {f.name: getattr(options, f.name) for f in fields(options) if f.name in known}
    lora = {"r": options.rank, "lora_alpha": options.alpha, "lora_dropout": options.dropout, "target_modules": targets}
    return NVFP4LoraConfig(**{**shared, **lora, "task_type": "CAUSAL_LM", **options.lora})


def _checked(name: str, value: Any, kind: Any) -> Any:
    """A value of the field's type; whole numbers may stand for others, and ``1e-4``, which YAML takes for text, for a number."""
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (typing.get_origin(kind) or kind,)
    if float in allowed and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if (
        isinstance(value, bool)
        and bool not in allowed
        or not isinstance(value, tuple(typing.get_origin(t) or t for t in allowed))
    ):
        names = " or ".join("nothing" if t is type(None) else t.__name__ for t in allowed)
        raise ValueError(f"{name} must be {names}, got {value!r}")
    return value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Options in a file. Raises ValueError if it is not YAML, or has a key that no option is called."""
    text = Path(path).read_bytes()
    try:
        content = yaml.safe_load(text)
    except Exception as error:  # not only YAMLError: numbers, dates and !!tags that it cannot make sense of, and text in no UTF-8
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no 'name: value' lines")
    try:
        check_known(map(str, content), (f.name for f in fields(TrainOptions)), "options")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return content


def gathered(flags: dict[str, Any], config: str | Path | None = None, resume: bool = False) -> TrainOptions:
    """Defaults, under those of the interrupted run (``resume``), under the YAML file's, under the flags that were given."""
    values = {} if config is None else read_yaml(config)
    values |= {name: value for name, value in flags.items() if value is not None}
    if resume:
        if not (output := values.get("output")):
            raise ValueError("--resume needs the output folder of the run to go on with: --output FOLDER")
        path = Path(output) / FILE
        if not path.is_file():
            raise ValueError(f"{output} holds no run to resume (no {FILE})")
        values = read_yaml(path) | values
    options = TrainOptions(**values)
    if missing := [name for name in ("model", "dataset", "output") if not getattr(options, name)]:
        raise ValueError(f"missing: {', '.join(missing)} (as an option, or in the YAML file)")
    return options
