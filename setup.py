"""Gives the package its dependencies: the pins of requirements.txt. Everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

lines = Path(__file__).with_name("requirements.txt").read_text(encoding="utf-8").splitlines()
setup(install_requires=[line for line in lines if line and not line.startswith(("#", "-"))])
