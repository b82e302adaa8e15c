"""The RDMA transport, measured in a virtual machine."""
