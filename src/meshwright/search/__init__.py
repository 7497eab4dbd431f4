"""Which layout to run: every legal one priced, the best explained."""
