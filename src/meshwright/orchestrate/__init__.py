"""Whole jobs from a command's options to its result: training, proving, the demos."""
