"""From a dense model to a frozen one: which modules are frozen and how (plan, sites), and the conversion in place (freeze)."""
