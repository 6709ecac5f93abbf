"""Options of a training run: one dataclass for flags, YAML files and what a run writes beside its checkpoints."""

from __future__ import annotations

import types
import typing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...quantization.options import NAMES, check_known, option

FILE = "train.yaml"
"""In the output folder: the options of the run, read by ``--resume``."""


@dataclass
class TrainOptions:
    """What ``peft-nvfp4 train`` can be told; every name is a flag and a key of the YAML file.

    Attributes:
        model, dataset, output: folder or Hub id of the base (or ``smollm2``), data (:mod:`.texts`), where results go.
        format, columns, template, split, limit: of the data.
        eval_dataset, eval_rows: scored during training: other data, or so many rows kept back.
        max_length: tokens of a row at most.
        backend, accuracy, memory, calibration: of ``NVFP4LoraConfig``. With ``memory="smallest"`` the model is loaded on the CPU.
        cuda_graphs: training steps are recorded (:func:`peft_nvfp4.enable_cuda_graphs`).
        rank, alpha, dropout, targets: of the adapter; ``targets`` is ``all-linear`` or names with commas between.
        steps, epochs: how long; steps counts if it is given.
        batch, accumulation: rows at a time, and times a step.
        lr, scheduler, warmup, weight_decay, max_grad_norm, optimizer: ``warmup`` is a share of the steps.
        checkpointing: of decoder layers.
        deterministic: two runs with these options on one device are equal bit for bit (:func:`peft_nvfp4.training.callbacks.deterministic`).
        max_memory: of the GPU; batch, accumulation, what is kept for backward and layouts are then chosen to fit, with the step's
            rows (batch x accumulation) as they were asked for.
        save_every, keep, log_every: steps between checkpoints (0: ten a run), how many are kept, steps between lines of the log.
        seed, dtype, layers: ``layers`` keeps only the model's first ones, for a quick look.
        lora, trainer: further fields of ``NVFP4LoraConfig`` and of transformers' ``TrainingArguments``.
    """

    model: str = ""
    dataset: str = ""
    output: str = ""
    format: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    split: str = "train"
    limit: int | None = None
    eval_dataset: str | None = None
    eval_rows: int = 0
    max_length: int = 1024
    backend: str = option("backend")
    accuracy: str = option("accuracy")
    memory: str = option("memory")
    calibration: str | None = option("calibration")
    cuda_graphs: bool = False
    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    targets: str = "all-linear"
    steps: int | None = None
    epochs: float = 1.0
    batch: int = 8
    accumulation: int = 1
    lr: float = 2e-4
    scheduler: str = "linear"
    warmup: float = 0.05
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    optimizer: str = "adamw_torch_fused"
    checkpointing: bool = False
    deterministic: bool = False
    max_memory: str | None = None
    save_every: int = 0
    keep: int = 2
    log_every: int = 0
    seed: int = 0
    dtype: str = "auto"
    layers: int | None = None
    lora: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in fields(self):
            setattr(self, f.name, _checked(f.name, getattr(self, f.name), hints[f.name]))
        for name in ("max_length", "rank", "batch", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1 or self.epochs <= 0:
            raise ValueError("steps and epochs must be positive")

    def require(self) -> None:
        """Raises ValueError if one of the three that every run needs is missing."""
        missing = [name for name in ("model", "dataset", "output") if not getattr(self, name)]
        if missing:
            raise ValueError(f"missing: {', '.join(missing)} (as an option, or in the YAML file)")

    def lora_settings(self) -> dict[str, Any]:
        """Fields of ``NVFP4LoraConfig``."""
        targets = self.targets if self.targets == "all-linear" else [t.strip() for t in self.targets.split(",") if t.strip()]
        return {
            **{name: getattr(self, name) for name in NAMES if hasattr(self, name)},
            **{"r": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout, "target_modules": targets},
            **{"task_type": "CAUSAL_LM", **self.lora},
        }

    def save(self, folder: str | Path) -> None:
        """Write :data:`FILE`."""
        import yaml

        Path(folder).mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)
        (Path(folder) / FILE).write_text(text, encoding="utf-8")


def _checked(name: str, value: Any, kind: Any) -> Any:
    """A value of the field's type; whole numbers may stand for others, and ``1e-4``, which YAML takes for text, for a number."""
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (typing.get_origin(kind) or kind,)
    if float in allowed and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, bool) and bool not in allowed or not isinstance(value, tuple(allowed)):
        names = " or ".join("nothing" if t is type(None) else t.__name__ for t in allowed)
        raise ValueError(f"{name} must be {names}, got {value!r}")
    return value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Options in a file.

    Raises:
        ValueError: it is not YAML, or has a key that no option is called; the message lists the known ones.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError:
        raise
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
    values: dict[str, Any] = {}
    given = {name: value for name, value in flags.items() if value is not None}
    from_file = {} if config is None else read_yaml(config)
    if resume:
        output = given.get("output") or from_file.get("output")
        if not output:
            raise ValueError("--resume needs the output folder of the run to go on with: --output FOLDER")
        path = Path(output) / FILE
        if not path.is_file():
            raise ValueError(f"{output} holds no run to resume (no {FILE})")
        values = read_yaml(path)
    options = TrainOptions(**{**values, **from_file, **given})
    options.require()
    return options
