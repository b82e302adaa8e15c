"""What tells verl and Megatron to do without GPUs; to be set before either is imported."""

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "megatron_byteps_rl.cpu",
    "VERL_USE_EXTERNAL_PLUGINS": "none",
    "MEGATRON_CPU": "1",
    # The compiler cannot tell Megatron's stand-ins for torch.cuda apart, and would gain nothing.
    "TORCHDYNAMO_DISABLE": "1",
    # Megatron's engine shows a bar for each batch.
    "TQDM_DISABLE": "1",
}
"""Of every process of a job."""
