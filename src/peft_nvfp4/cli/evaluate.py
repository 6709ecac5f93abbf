"""``peft-nvfp4 eval``."""

from dataclasses import asdict
from typing import Annotated

import typer

from .common import Base, Batch, Calibration, Columns, Dtype, Layers, Limit, Outcome, command, pairs, table


@command
def evaluate(
    dataset: Annotated[str, typer.Argument(help="Data: .jsonl, .csv, .parquet, .txt, ...")],
    model: Base = None,
    adapter: Annotated[str | None, typer.Option("--adapter", "-a", help="Folder of the adapter.")] = None,
    format: Annotated[str, typer.Option(help="auto, chat, prompt, text or classification.")] = "auto",
    columns: Columns = None,
    template: Annotated[str | None, typer.Option(help="The one of the adapter's training, else of train.")] = None,
    labels: Annotated[str | None, typer.Option(help="positive,negative: besides those of data and training.")] = None,
    split: Annotated[str, typer.Option(help="Of a data set that is no file.")] = "test",
    limit: Limit = None,
    batch: Batch = 8,
    max_length: Annotated[int, typer.Option(help="Tokens of a row at most.")] = 1024,
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 64,
    generate: Annotated[bool, typer.Option(help="Let the model answer (prompt, chat).")] = True,
    base: Annotated[bool, typer.Option("--base", help="Score the base without the adapter as well.")] = False,
    calibration: Calibration = None,
    dtype: Dtype = "auto",
    layers: Layers = None,
) -> Outcome:
    """Score a model, with or without an adapter.

    Labels: accuracy and F1. Answers: exact match, F1 and ROUGE-L. Everything: perplexity.
    """
    from ._run import evaluation, models, texts

    if base and adapter is None:
        raise ValueError("--base scores the base beside the adapter: give an --adapter")
    trained = models.training_options(adapter)
    given = [label.strip() for label in (labels or "").split(",") if label.strip()] + [*(trained.get("labels") or ())]
    rows = texts.read(dataset, format, pairs(columns), template or trained.get("template"), split, limit, given)
    rows.rendered(models.tokenizer_of(model, adapter))  # raises before weights are loaded
    loaded, tokenizer = models.load_with_adapter(model, adapter, dtype, layers, calibration)
    sizes = {"batch": batch, "max_length": max_length, "max_new_tokens": max_new_tokens, "generate": generate}
    results = {}
    if base:
        with loaded.disable_adapter():
            results["base"] = evaluation.evaluate(loaded, tokenizer, rows, **sizes)
    results["model" if adapter is None else "adapter"] = first = evaluation.evaluate(loaded, tokenizer, rows, **sizes)
    left_out = f"; {first.left_out} left out, whose prompt alone is too long" if first.left_out else ""
    title = "; ".join([f"{first.rows} rows ({first.format}){left_out}", *rows.losses()])
    lines = [(key.replace("_", " "), *(f"{score.scores[key]:.4f}" for score in results.values())) for key in first.scores]
    return Outcome({key: asdict(score) for key, score in results.items()}, [table(title, ("", *results), lines)])
