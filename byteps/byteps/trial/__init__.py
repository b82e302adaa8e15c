"""``megatron-byteps try``: runs a few steps of a job by its own launch line, plain and through
servers.

Each host runs the same command, as with torchrun. `__main__` launches the job several times, plain
and through servers, interleaved. `meter` runs in every rank: `byteps.c10d_plugin` installs it when
torch is imported, so the script needs no change. It times steps, reads losses, and ends the job
after the last step. Ranks report to `reports` in the process that launched them. `hosts` keeps
launches on several hosts in step.
"""
