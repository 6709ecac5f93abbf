"""What this machine can run and whether it computes right: environment, conformance of operators and GEMMs."""
