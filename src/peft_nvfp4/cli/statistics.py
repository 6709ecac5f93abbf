"""``peft-nvfp4 statistics``: what :mod:`peft_nvfp4.diagnostics.statistics` measures, on a user's data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..quantization.options import Options
from .common import Base, Batch, Calibration, Columns, Dtype, Layers, Outcome, base_option, command, pairs, table

if TYPE_CHECKING:
    from ..diagnostics.statistics import Statistics, TensorStatistics

MEANS = ("tensor", "error %", "underflow %", "saturation %")
WORST = ("layer", "tensor", "error", "underfl.", "satur.", "amax", "scales")


@command(busy="Measuring")
def statistics(
    dataset: Annotated[str, typer.Argument(help="A data file as for train.")],
    model: Base = None,
    adapter: Annotated[str | None, typer.Option(help="A trained adapter: its base and settings.")] = None,
    backend: Annotated[str, base_option("backend")] = Options.backend,
    accuracy: Annotated[str, base_option("accuracy")] = Options.accuracy,
    calibration: Calibration = None,
    limit: Annotated[int, typer.Option(help="Rows of the data.")] = 8,
    batch: Batch = 2,
    max_length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    columns: Columns = None,
    tokens: Annotated[int | None, typer.Option(help="Look at so many tokens of a tensor only.")] = None,
    layers: Layers = None,
    dtype: Dtype = "auto",
    worst: Annotated[int, typer.Option(help="Rows of the table.")] = 12,
    by: Annotated[str, typer.Option(help="error, underflow or saturation.")] = "error",
    png: Annotated[Path | None, typer.Option(help="Heat maps, layer by linear.")] = None,
) -> Outcome:
    """What quantising does to weights, activations and gradients, layer by layer, on your data.

    Nothing is trained: forward and backward passes with a fresh adapter, or with a trained one.
    """
    from peft import get_peft_model

    from ..diagnostics.statistics import PERCENT, tensor_statistics
    from ..fusion.loss_attach import attach_loss
    from ..lora.config import NVFP4LoraConfig
    from ._run import evaluation, models, texts

    if by not in PERCENT:
        raise ValueError(f"--by must be one of {', '.join(PERCENT)}, got {by!r}")
    data = texts.read(dataset, columns=pairs(columns), limit=limit)
    numbered = evaluation.encode(data, models.tokenizer_of(model, adapter), max_length)
    if adapter is None:
        frozen = {"backend": backend, "accuracy": accuracy, "calibration": calibration}
        config = NVFP4LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **frozen)
        base, tokenizer = models.load(model, dtype, layers, config.options)
    else:
        config, base, tokenizer = models.load_base(adapter, model, dtype, layers, calibration)
    encoded, places = list(numbered.values()), data.by_turn().data["place"]
    models.check_tokens(base, ((f"{dataset}, {places[number]}", row["input_ids"]) for number, row in numbered.items()))
    dense = {key: p.detach() for key, p in base.named_parameters() if p.is_floating_point()}
    if adapter is None:
        adapted = get_peft_model(base, config)
    else:
        adapted = models.put_on(base, adapter, config, is_trainable=True)  # trainable: gradients come back
    attach_loss(adapted.to(models.default_device()).train())
    collate = evaluation.collator(tokenizer)
    batches = (collate(encoded[i : i + batch]) for i in range(0, len(encoded), batch))
    measured = tensor_statistics(adapted, batches, weights=dense, rows=tokens)
    shown = [*data.losses(), *_tables(measured, worst, by)]
    if png is not None:
        measured.png(png, by)
        shown.append(f"Drawn: {png}")
    return Outcome(measured.as_dict(), shown)


def _tables(measured: "Statistics", worst: int, by: str) -> list:
    """Means over the layers, the layers that are worst, and a note."""
    from ..diagnostics.statistics import PERCENT, TITLES

    sites = [site for site in TITLES if measured.of(site, "amax")]
    means = [(TITLES[site], *(percent(measured.mean(site, number)) for number in PERCENT)) for site in sites]
    rows = [cells(*row) for row in measured.worst(worst, by=by)]
    unused = any(not s.used for sites in measured.layers.values() for s in sites.values())
    return [
        table(f"{len(measured.layers)} frozen linears, on average", MEANS, means),
        table(f"the largest {by} (in per cent)", WORST, rows, words=2),
        *["* not quantised by this model: what one NVFP4 term would do"] * unused,
    ]


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def cells(name: str, site: str, s: "TensorStatistics") -> tuple[str, ...]:
    """A row of :data:`WORST`."""
    from ..diagnostics.statistics import PERCENT, short

    scales = "–" if s.scale_min is None else f"{s.scale_min:.2g}–{s.scale_max:.3g}"
    mark = "" if s.used else " *"
    return (short(name), site + mark, *(percent(getattr(s, number)) for number in PERCENT), f"{s.amax:.3g}", scales)
