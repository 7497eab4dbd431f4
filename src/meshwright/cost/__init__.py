"""What a layout costs: memory by category, and seconds by cause, before anything runs."""
