"""How much of a late rank's delay a step of verl's workers shows."""
