"""Ranks and the mesh: what the environment says, how processes start, and the mesh they form."""
