"""What one rank does in one step, derived from model, layout and schedule; and the Plan that holds them."""
