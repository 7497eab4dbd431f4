"""Parallel execution of one layout: one file per axis, joined by ``apply`` in one fixed order."""
