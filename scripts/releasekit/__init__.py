"""What scripts/release.py and scripts/audit.py are made of."""
