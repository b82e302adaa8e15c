"""A tiny GPT through BytePS and through torch.distributed: every sum is compared."""
