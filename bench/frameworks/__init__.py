"""How long a training step of DDP and FSDP2 takes, by BytePS and by gloo or NCCL alone."""
