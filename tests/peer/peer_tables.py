"""Tables from the outcomes of the peer tests."""

from __future__ import annotations

import re
from collections import Counter

from reasons import reason_for

HELPER = re.compile(r"test_helper\[(nvfp4|nf4|bf16|stock)-(loaded|config)-(\w+?)-(\w+?)-(.+)\]")
MATRIX = re.compile(r"test_matrix\[(nvfp4|nf4|bf16)-(\w+)-(\w+)\]")
QUANTIZER = re.compile(r"test_quantizer\[(nvfp4|stock)-(\w+)-(\w+)\]")
SFT = re.compile(r"test_sft\[(nvfp4|nf4|bf16|stock)-(\w+)-(\w+)\]")
GOOD = ("passed", "passed as quantised")


def counts(outcomes: list[dict]) -> dict[str, int]:
    return dict(Counter(o["outcome"] for o in outcomes))


def compare(plain: list[dict], imported: list[dict]) -> dict:
    """Counts of a run without and one with the package, and every test whose outcome or failure differs."""
    before, after = ({o["test"]: (o["outcome"], o["reason"]) for o in run} for run in (plain, imported))
    differ = {t: [before.get(t), after.get(t)] for t in sorted(before.keys() | after.keys()) if before.get(t) != after.get(t)}
    failures = Counter(shorten(o["reason"]) for o in plain if o["outcome"] in ("failed", "not collected"))
    return {"plain": counts(plain), "imported": counts(imported), "differ": differ, "failures": dict(failures.most_common())}


def shorten(reason: str) -> str:
    """Failures of one cause under one text."""
    if (
        "LocalEntryNotFound" in reason
        or "OfflineMode" in reason
        or "locate the file on the Hub" in reason
        or "outgoing traffic" in reason
    ):
        return "needs a model or file of the Hub that is not made here"
    return reason[:160]


def summarise(outcomes: list[dict]) -> dict:
    """Per base and way: counts; and every failure, with the reason or None."""
    rows, stock = [], {}
    for o in outcomes:
        if match := HELPER.search(o["test"]):
            base, way, model, setting, helper = match.groups()
        elif match := MATRIX.search(o["test"]):
            (base, helper, setting), way, model = match.groups(), "matrix", "opt"
        elif match := QUANTIZER.search(o["test"]):
            (base, model, helper), way, setting = match.groups(), "transformers", "quantiser"
        elif match := SFT.search(o["test"]):
            (base, model, helper), way, setting = match.groups(), "sft", "trainer"
        else:
            raise ValueError(f"unknown test {o['test']}")
        row = dict(base=base, way=way, model=model, setting=setting, helper=helper, outcome=o["outcome"], text=o["reason"])
        rows.append(row)
        if base == "stock":
            stock[model, setting, helper] = o["outcome"]
    table, failures = {}, []
    for row in rows:
        cell = table.setdefault(f"{row['base']} {row['way']}", Counter())
        cell["collected"] += 1
        outcome = row["outcome"]
        if outcome == "failed" and row["base"] != "stock":
            if stock.get((row["model"], row["setting"], row["helper"])) == "failed":
                outcome = "fails in stock too"
            else:
                failures.append({**row, "reason": reason_for(row)})
        cell[outcome] += 1
    return {"table": {name: dict(cell) for name, cell in table.items()}, "failures": failures, "all": by_setting(rows)}


def by_setting(rows: list[dict]) -> dict[str, dict[str, int]]:
    cells: dict[str, Counter] = {}
    for row in rows:
        cells.setdefault(f"{row['base']} {row['way']} {row['model']} {row['setting']}", Counter())[row["outcome"]] += 1
    return {name: dict(cell) for name, cell in cells.items()}


def share(cell: dict[str, int]) -> float:
    """Passed of those that apply: not skipped by PEFT's helper, and passed by stock PEFT on the dense model (or bitsandbytes)."""
    applicable = cell["collected"] - cell.get("skipped", 0) - cell.get("fails in stock too", 0)
    return sum(cell.get(word, 0) for word in GOOD) / applicable


def markdown(content: dict) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    lines = ["# Tests of PEFT, transformers and TRL", "", f"Made by `make peer-tests` ({versions}).", ""]
    if "stock" in content:
        lines += stock_tables(content["stock"])
    if "helpers" in content:
        lines += helper_tables(content["helpers"])
    return "\n".join(lines) + "\n"


def stock_tables(found: dict) -> list[str]:
    lines = ["## LoRA tests of PEFT, without and with `import peft_nvfp4`", ""]
    lines += [
        "| file | collected | passed | skipped, expected to fail | failed | with the import | differ |",
        "|---|---|---|---|---|---|---|",
    ]
    total = Counter()
    for name, entry in found.items():
        before = Counter(entry["plain"])
        failed = before["failed"] + before["not collected"]
        other = sum(before.values()) - before["passed"] - failed
        now = Counter(entry["imported"])
        same = f"{now['passed']} passed, {now['failed'] + now['not collected']} failed"
        lines.append(
            f"| {name} | {sum(before.values())} | {before['passed']} | {other} | {failed} | {same} | {len(entry['differ'])} |"
        )
        total.update(
            collected=sum(before.values()), passed=before["passed"], other=other, failed=failed, differ=len(entry["differ"])
        )
        total.update(now=now["passed"], now_failed=now["failed"] + now["not collected"])
    same = f"{total['now']} passed, {total['now_failed']} failed"
    lines += [
        f"| **all** | {total['collected']} | {total['passed']} | {total['other']} | {total['failed']} | {same} | "
        f"{total['differ']} |",
        "",
    ]
    causes = Counter()
    for entry in found.values():
        causes.update(entry["failures"])
    lines += ["What fails, fails in both runs:", "", "| tests | failure |", "|---|---|"]
    lines += [f"| {n} | {escape(text)} |" for text, n in causes.most_common()]
    differ = [(name, test, pair) for name, entry in found.items() for test, pair in entry["differ"].items()]
    lines += [f"| DIFFERS | {name}: {test}: {escape(str(pair))} |" for name, test, pair in differ[:20]]
    if len(differ) > 20:
        lines.append(f"| DIFFERS | {len(differ) - 20} more, see the JSON file |")
    return [*lines, ""]


def helper_tables(found: dict) -> list[str]:
    lines = ["## Common helpers of PEFT, and what transformers and TRL test, on our bases", ""]
    lines += [
        "*loaded*: the model comes frozen; *config*: `NVFP4LoraConfig` freezes a dense one; *matrix*: `test_quantization`; "
        "*transformers*: what `test_4bit.py` asks of a quantiser, of `PactConfig` (stock: `BitsAndBytesConfig`); "
        "*sft*: what TRL asks of `SFTTrainer` with an adapter. The last two are put by `tests/peer/quantizers.py` and `sft.py`.",
        "",
    ]
    words = ("collected", "passed", "passed as quantised", "skipped", "fails in stock too", "failed")
    lines += [f"| base | {' | '.join(words)} | passed of what applies |", "|---" * (len(words) + 2) + "|"]
    table = dict(found["table"])
    for base in ("nvfp4", "nf4", "bf16"):
        cells = [Counter(cell) for name, cell in found["table"].items() if name.startswith(f"{base} ")]
        if len(cells) > 1:
            table[f"**{base}, all**"] = sum(cells, Counter())
    for name, cell in sorted(table.items(), key=lambda item: item[0].strip("*")):
        lines.append(f"| {name} | {' | '.join(str(cell.get(w, 0)) for w in words)} | {share(cell):.1%} |")
    lines += [
        "",
        "*passed as quantised*: merged into 4 bits, by PEFT's criterion for quantised weights (see `tests/peer/helpers.py`).",
        "",
    ]
    reasons: dict[str, list[str]] = {}
    for row in found["failures"]:
        reasons.setdefault(row["reason"] or "**unexplained**: " + row["text"], []).append(
            f"{row['base']} {row['way']} {row['model']} {row['setting']} {row['helper']}"
        )
    lines += ["| failed | reason | rows |", "|---|---|---|"]
    for reason, rows in sorted(reasons.items(), key=lambda item: -len(item[1])):
        rest = f", and {len(rows) - 3} more" if len(rows) > 3 else ""
        lines.append(f"| {len(rows)} | {escape(reason)} | {escape('; '.join(rows[:3]))}{rest} |")
    return [*lines, ""]


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def verdict(content: dict) -> int:
    differ = any(entry["differ"] for entry in content.get("stock", {}).values())
    unexplained = any(row["reason"] is None for row in content.get("helpers", {}).get("failures", []))
    return int(differ or unexplained)
