"""All-reduces of any PyTorch program through the servers.

=============  ===========================================================================
``hooks``      the backend ``byteps``: a process group that carries gloo or NCCL; and hooks for
               DistributedDataParallel and FSDP2, which need no such group
``reductions`` what both are made of: the all-reduces of one group of ranks, which of them go to
               the servers, and becoming a worker of the job
``scatters``   the reduce-scatters of one group, for FSDP2 (:mod:`byteps.torch.fsdp`)
``work``       an all-reduce in flight, as torch.distributed has it; ``work_of_many`` several as one
``events``     what a profiler shows of it
=============  ===========================================================================

:mod:`byteps.c10d_plugin` tells torch of the backend.
"""
