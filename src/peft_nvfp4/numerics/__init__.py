"""Number formats and the definition of every operator in plain PyTorch. Imports nothing but PyTorch."""
