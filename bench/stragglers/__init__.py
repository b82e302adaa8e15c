"""How much of a late rank's delay a step shows."""
