"""The probe: measures what this machine computes, copies and sends per second."""
