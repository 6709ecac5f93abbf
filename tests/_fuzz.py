"""What the fuzz tests share: damage done to files at random, and what is allowed to come of it.

The rule: it works, or it is a ``ValueError`` (or another error that is meant for the user) that names the file. No other
exception, no hang, no model that is half changed, no code run. What an earlier search found is kept as an example.

Every run draws the same few damages. To search (a seed, so that parts of a long search differ):

    HYPOTHESIS_EXAMPLES=2000 python -m pytest tests/checkpoints -k fuzz --hypothesis-seed=1"""

import copy
import json
import signal
import struct
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")
from _hypothesis import json_values
from hypothesis import strategies as st

import peft_nvfp4

PACKAGE = str(Path(peft_nvfp4.__file__).parent)
SECONDS = 30  # of one example: hundreds of times what it takes


# ---------------------------------------------------------------------------------------------- damage
@st.composite
def edits(draw):
    """A function that damages bytes: some changed, cut out, put in, doubled, the rest cut off."""
    found = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["set", "cut", "insert", "double", "end"]), st.floats(0, 1), st.binary(min_size=1, max_size=6)
            ),
            min_size=1,
            max_size=4,
        )
    )

    def damage(data):
        for how, place, content in found:
            at = int(place * len(data))
            if how == "set":
                data = data[:at] + content + data[at + len(content) :]
            elif how == "cut":
                data = data[:at] + data[at + len(content) ** 2 :]
            elif how == "insert":
                data = data[:at] + content + data[at:]
            elif how == "double":
                data = data[:at] + data[at : at + 16] + data[at:]
            else:
                data = data[:at]
        return data

    return "bytes", damage


@st.composite
def changes(draw, values=json_values, kind="json"):
    """A function that changes one or two places of a JSON value: another value there, the key gone or called something else."""
    found = draw(
        st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=6), st.sampled_from("vvvdk"), values), min_size=1, max_size=2)
    )

    def change(content):
        content = copy.deepcopy(content)
        for path, how, value in found:
            place, parent, key = content, None, None
            for step in path:
                if not isinstance(place, dict | list) or not place:
                    break
                parent, key = place, (list(place)[step % len(place)] if isinstance(place, dict) else step % len(place))
                place = place[key]
            if parent is None:
                content = value if how == "v" and not path else content
            elif how == "v":
                parent[key] = value
            elif how == "d":
                del parent[key]
            elif isinstance(parent, dict):
                parent[str(value)] = parent.pop(key)
        return content

    return kind, change


def split(data):
    """(header, rest) of a safetensors file."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header, rest):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


words = st.sampled_from(["F32", "U8", "F8_E4M3", "BF16", "I64", "F4", "", "weight", "../x", "re:[", "NVFP4", "dense"])
numbers = st.sampled_from([0, 1, -1, 16, 2**31, 2**63, 2**70, 1e308, float("nan"), float("inf")])
header_values = st.one_of(words, numbers, st.lists(st.integers(-1, 200), max_size=3), json_values)
headers = changes(header_values, "header")


def spoil(damage, data):
    """Bytes of a file, damaged: as bytes, as JSON, or in the header of a safetensors file."""
    kind, function = damage
    if kind == "bytes":
        return function(data)
    if kind == "json":
        return json.dumps(function(json.loads(data))).encode()
    header, rest = split(data)
    return joined(function(header), rest)


@contextmanager
def spoiled(path, damage):
    """A file is damaged for a while."""
    data = path.read_bytes()
    try:
        path.write_bytes(spoil(damage, data))
        yield path
    finally:
        path.write_bytes(data)


# ---------------------------------------------------------------------------------------------- what is allowed
class TooLong(BaseException):
    """Not an Exception: nothing may take it for a bad file."""


@contextmanager
def in_time():
    def late(*_):
        raise TooLong(f"longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ours(error):
    """Whether the package had a hand in it; transformers reads some of these files first, and says what it likes. (A function of
    its own that we only pass calls on to is its own.)"""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.startswith(PACKAGE) and frame.name != "get_hf_quantizer" for frame in frames)


class Outcome:
    """``done``: it worked. Else it was refused in words for the user."""

    done = False


@contextmanager
def done_or_refused(*names, kinds=(ValueError,), foreign=False):
    """Works, or raises one of ``kinds`` that names one of ``names``. ``foreign``: errors that never touched the package pass."""
    outcome = Outcome()
    with in_time():
        try:
            yield outcome
        except AssertionError:  # of the test
            raise
        except Exception as error:
            if foreign and not ours(error):
                return
            text = "".join(traceback.format_exception(error))
            assert type(error) in kinds, text
            assert any(str(name) in str(error) for name in names), text
            assert len(str(error)) < 3000
        else:
            outcome.done = True


@pytest.fixture(autouse=True)
def nothing_is_run(tmp_path, monkeypatch):
    """Unpickling, ``eval`` and processes are what damaged files could start."""
    import os
    import pickle
    import subprocess

    def forbidden(*args, **kwargs):
        raise TooLong("code from a file was about to run")

    for module, name in ((pickle, "load"), (pickle, "loads"), (os, "system"), (subprocess, "Popen")):
        monkeypatch.setattr(module, name, forbidden)
