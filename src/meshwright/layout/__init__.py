"""How a job is cut: the layout, its ranks and groups, its batches, and the rules that refuse."""
