"""What is trained: a model as tensors and blocks, read from ``config.json`` without torch."""
