"""A job's own launch line, a few steps plain and a few through servers: ``megatron-byteps try``.

Each host runs the same command, as with torchrun. `__main__` launches the job several times, plain
and through servers, interleaved. `meter` runs in every rank: `byteps.c10d_plugin` installs it when
torch is imported, so the script needs no change. It times steps, sees losses, and ends the job
after the last step. Ranks report to `reports` in the process that launched them; `hosts` keeps
launches on several hosts in step.
"""
