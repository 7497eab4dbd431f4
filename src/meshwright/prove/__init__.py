"""Proof that a layout computes what one device computes: loss, every gradient, norm and updated weight."""
