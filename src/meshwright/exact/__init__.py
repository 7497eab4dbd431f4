"""The exact memory tier: one rank of a layout played on tensors without memory, its live bytes read over a step."""
