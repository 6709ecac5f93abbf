"""Everything is declared in pyproject.toml; this file exists for tools that still call it and for the CUDA extension to come."""

from setuptools import setup

setup()
