"""All-reduces of any PyTorch program through the servers.

=============  ===========================================================================
``hooks``      the backend ``byteps``, a process group that carries gloo or NCCL; and hooks for
               DistributedDataParallel and FSDP2, which do not need this backend
``reductions`` the all-reduces of one group of ranks: decides which of them go through the servers,
               starts these, and joins the job
``scatters``   the reduce-scatters of one group, for FSDP2 (:mod:`byteps.torch.fsdp`)
``ddp``        error feedback for DistributedDataParallel; ``replaced``: methods of torch's classes
               that call this package
``work``       an all-reduce in flight, as a Work of torch.distributed; ``work_of_many``: several
               works as one Work
``events``     the events that a profiler shows for an all-reduce
=============  ===========================================================================

:mod:`byteps.c10d_plugin` registers the backend with torch.
"""
