"""All-reduces of any PyTorch program through the servers.

=============  ===========================================================================
``group``      the backend ``byteps``: a process group that carries gloo or NCCL
``hooks``      for DistributedDataParallel and FSDP2, which need no such group
``reductions`` what both are made of: the all-reduces of one group of ranks
``work``       an all-reduce in flight, as torch.distributed has it
``policy``     which all-reduces go to the servers, and how
``joining``    becoming a worker of the job
=============  ===========================================================================

:mod:`byteps.c10d_plugin` tells torch of the backend, :mod:`byteps.autoload` has torch call that.
"""
