"""For tools that look for this file; everything is in pyproject.toml."""

from setuptools import setup

setup()
