"""Tables from the outcomes of the peer tests, and why some of them fail."""

import re
from collections import Counter

HELPER = re.compile(r"test_helper\[(?P<base>\w+?)-(?P<way>loaded|config)-(?P<model>\w+?)-(?P<setting>\w+?)-(?P<helper>.+)\]")
MATRIX = re.compile(r"test_matrix\[(?P<base>\w+?)-(?P<helper>\w+)-(?P<setting>\w+)\]")
OF_THE_MATRIX = {"way": "matrix", "model": "opt"}
GOOD = ("passed", "passed as quantised")

REASONS = (
    (
        lambda r: r["way"] == "config" and r["helper"] in ("unload_adapter", "disable_adapter"),
        "compares the model without its adapter with the dense model before get_peft_model, which has frozen (quantised) it",
    ),
    (
        lambda r: r["way"] == "config" and r["helper"] == "get_base_model_state_dict",
        "compares state dicts before and after get_peft_model, which has packed the weights",
    ),
    (
        lambda r: r["base"] == "nf4" and r["model"] == "mlp10" and r["helper"] in ("merge_layers", "safe_merge"),
        "requantised merge: correlation .999, squared error 3.5 (limit 1) of values up to 16; with stock bitsandbytes 3.5 too",
    ),
    (
        lambda r: r["helper"] == "quantization_backend_is_set_and_repr",
        "PEFT's LoRA layers do not set quantization_backend (its other methods do), those for bitsandbytes included",
    ),
)
"""Why a helper of PEFT fails on one of our bases where stock PEFT passes it, and is right to. The first that applies counts."""


def counts(outcomes: list[dict]) -> dict[str, int]:
    return dict(Counter(o["outcome"] for o in outcomes))


def shorten(reason: str) -> str:
    """Failures of one cause under one text."""
    if re.search("LocalEntryNotFound|OfflineMode|locate the file on the Hub|outgoing traffic", reason):
        return "needs a model or file of the Hub that is not made here"
    return reason[:160]


def compare(plain: list[dict], imported: list[dict]) -> dict:
    """Counts of a run without and one with the package, and every test whose outcome or failure differs."""
    before, after = ({o["test"]: (o["outcome"], o["reason"]) for o in run} for run in (plain, imported))
    differ = {t: [before.get(t), after.get(t)] for t in sorted(before.keys() | after.keys()) if before.get(t) != after.get(t)}
    failures = Counter(shorten(o["reason"]) for o in plain if o["outcome"] in ("failed", "not collected"))
    return {"plain": counts(plain), "imported": counts(imported), "differ": differ, "failures": dict(failures.most_common())}


def row_of(outcome: dict) -> dict[str, str]:
    if match := HELPER.search(outcome["test"]):
        named = match.groupdict()
    elif match := MATRIX.search(outcome["test"]):
        named = match.groupdict() | OF_THE_MATRIX
    else:
        raise ValueError(f"unknown test {outcome['test']}")
    return {**named, "outcome": outcome["outcome"], "text": outcome["reason"]}


def summarise(outcomes: list[dict]) -> dict:
    """Per base and way: counts; and every failure, with the reason or None."""
    rows = [row_of(o) for o in outcomes]
    stock = {(r["model"], r["setting"], r["helper"]): r["outcome"] for r in rows if r["base"] == "stock"}
    table, failures = {}, []
    for row in rows:
        outcome = row["outcome"]
        if outcome == "failed" and row["base"] != "stock":
            if stock.get((row["model"], row["setting"], row["helper"])) == "failed":
                outcome = "fails in stock too"
            else:
                failures.append({**row, "reason": next((text for applies, text in REASONS if applies(row)), None)})
        table.setdefault(f"{row['base']} {row['way']}", Counter()).update(["collected", outcome])
    return {"table": {name: dict(cell) for name, cell in table.items()}, "failures": failures}


def share(cell: dict[str, int]) -> float:
    """Passed of those that apply: not skipped by PEFT's helper, and passed by stock PEFT on the dense model."""
    applicable = cell["collected"] - cell.get("skipped", 0) - cell.get("fails in stock too", 0)
    return sum(cell.get(word, 0) for word in GOOD) / applicable


def verdict(content: dict) -> int:
    """The exit code: 1 where the import changes an outcome, or a helper fails for no reason known here."""
    differ = any(entry["differ"] for entry in content.get("stock", {}).values())
    unexplained = any(row["reason"] is None for row in content.get("helpers", {}).get("failures", []))
    return int(differ or unexplained)


# ---------------------------------------------------------------------------------------------- as text
def line(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def head(*cells: str) -> list[str]:
    return [line(*cells), "|---" * len(cells) + "|"]


def markdown(content: dict) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    lines = ["# Tests of PEFT", "", f"Made by `make peer-tests` ({versions}).", ""]
    if "stock" in content:
        lines += stock_tables(content["stock"])
    if "helpers" in content:
        lines += helper_tables(content["helpers"])
    return "\n".join(lines) + "\n"


def stock_tables(found: dict) -> list[str]:
    lines = ["## LoRA tests of PEFT, without and with `import peft_nvfp4`", ""]
    lines += head("file", "collected", "passed", "skipped, expected to fail", "failed", "with the import", "differ")
    entries = {name: (Counter(e["plain"]), Counter(e["imported"]), len(e["differ"])) for name, e in found.items()}
    sums = [sum((e[i] for e in entries.values()), Counter()) for i in (0, 1)]
    for name, (before, now, differ) in {**entries, "**all**": (*sums, sum(e[2] for e in entries.values()))}.items():
        failed = [c["failed"] + c["not collected"] for c in (before, now)]
        other = before.total() - before["passed"] - failed[0]
        same = f"{now['passed']} passed, {failed[1]} failed"
        lines.append(line(name, before.total(), before["passed"], other, failed[0], same, differ))
    causes = sum((Counter(entry["failures"]) for entry in found.values()), Counter())
    lines += ["", "What fails, fails in both runs:", "", *head("tests", "failure")]
    lines += [line(n, text) for text, n in causes.most_common()]
    differ = [f"{name}: {test}: {pair}" for name, entry in found.items() for test, pair in entry["differ"].items()]
    lines += [line("DIFFERS", text) for text in differ[:20]]
    if len(differ) > 20:
        lines.append(line("DIFFERS", f"{len(differ) - 20} more, see the JSON file"))
    return [*lines, ""]


def helper_tables(found: dict) -> list[str]:
    lines = ["## Common helpers of PEFT on our bases", ""]
    lines += ["*loaded*: the model comes frozen; *config*: `NVFP4LoraConfig` freezes a dense one; *matrix*: `test_quantization`."]
    words = ("collected", "passed", "passed as quantised", "skipped", "fails in stock too", "failed")
    lines += ["", *head("base", *words, "passed of what applies")]
    table = dict(found["table"])
    for base in ("nvfp4", "nf4", "bf16"):
        cells = [Counter(cell) for name, cell in found["table"].items() if name.startswith(f"{base} ")]
        if len(cells) > 1:
            table[f"**{base}, all**"] = sum(cells, Counter())
    for name, cell in sorted(table.items(), key=lambda item: item[0].strip("*")):
        lines.append(line(name, *(cell.get(word, 0) for word in words), f"{share(cell):.1%}"))
    lines += [
        "",
        "*passed as quantised*: merged into 4 bits, by PEFT's criterion for quantised weights (see `tests/peer/helpers.py`).",
    ]
    reasons: dict[str, list[str]] = {}
    for row in found["failures"]:
        reason = row["reason"] or "**unexplained**: " + row["text"]
        reasons.setdefault(reason, []).append(" ".join(row[word] for word in ("base", "way", "model", "setting", "helper")))
    lines += ["", *head("failed", "reason", "rows")]
    for reason, rows in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(line(len(rows), reason, "; ".join(rows[:3]) + (f", and {len(rows) - 3} more" if len(rows) > 3 else "")))
    return [*lines, ""]
