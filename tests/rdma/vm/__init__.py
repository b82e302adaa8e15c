"""Virtual machines whose kernel has real RDMA verbs (soft-RoCE), for hosts that have none."""
