"""Training: one step that fits on a screen, the loop around it, data, state and metrics."""
