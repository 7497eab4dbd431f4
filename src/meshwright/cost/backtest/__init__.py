"""Scoring the cost model against measured runs: rows, what ran, terms, fits, folds and scores."""
