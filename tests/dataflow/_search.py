"""Many random cases, one after the other; what fails is made as simple as can be."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from _cases import Case, cases
from _oracle import Wrong, check, simplest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis.errors import Unsatisfiable, UnsatisfiedAssumption

TOLD = "PYTHONPATH=src:tests/dataflow python -c 'from _cases import *; from _oracle import check; check({case})'"


def reproduction(case: Case) -> str:
    return TOLD.format(case=str(case).replace("'", '"'))


class Search:
    """One process's search. ``without``: words of tokens (:attr:`Case.tokens`) that no case may have."""

    def __init__(self, without: Sequence[str] = ()):
        self.without, self.known, self.failures = without, [], []
        self.tried = self.rejected = 0
        self.shown: Counter[bool] = Counter()

    def go(self, first_seed: int, count: int, power_of: int = 10, until: float = float("inf")) -> None:
        """Try ``count`` cases. The loss of interventions is measured in one case of ``power_of``."""
        number = first_seed
        while self.tried < count and time.time() < until:
            self.batch(number, min(200, count - self.tried), power_of, until)
            print(f"{self.tried} cases", flush=True)
            number += 1

    def batch(self, number: int, count: int, power_of: int, until: float) -> None:
        found: list[tuple[Case, str]] = []

        @seed(number)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases())
        def search(case: Case) -> None:
            assume(time.time() < until and not any(needs <= case.tokens for needs in self.known))
            assume(not any(word in token for word in self.without for token in case.tokens))
            self.tried += 1
            try:
                self.shown.update(check(case, power=self.tried % power_of == 0))
            except UnsatisfiedAssumption:
                self.rejected += 1
                raise
            except Wrong:
                found.append(case)
                raise

        try:
            search()
        except Wrong:
            case, error = simplest(found[0], self.known)
            self.known.append(case.tokens)
            self.failures.append({"why": error, "case": case.as_json(), "python": reproduction(case)})
            print(f"seed {number}, after {self.tried} cases: {error}\n    {reproduction(case)}", flush=True)
        except Unsatisfiable:
            pass
