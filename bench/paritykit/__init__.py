"""Trains one layout through BytePS and through torch.distributed, and compares every sum."""
