"""Checkpoints: state of a run on disk, keyed by logical names, and its export to Hugging Face files."""
