"""How tests draw examples with hypothesis, and the values that several of them draw."""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "0"))


def tried(n):
    """Examples of one test; always the same ones, unless asked to search."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=EXAMPLES or n, derandomize=not EXAMPLES, deadline=None, database=None, suppress_health_check=checks
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
