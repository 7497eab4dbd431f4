"""Meshwright: plan, run and prove parallel training of language models."""

__version__ = "0.1.0"
