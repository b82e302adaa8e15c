"""The least time that links allow a sum: the bytes that the busiest link must carry, over its rate.

With n workers on h hosts, k servers, M bytes and links of B bytes per second each way:

- a ring sends 2 (n - 1) / n M over each host's link, each way; in two levels 2 (h - 1) / h M;
- through servers on hosts of their own, a host's link carries M each way, and a server's h/k M;
- a server next to workers sends its share, M/k, to the h - 1 other hosts, while the workers
  send what is not summed next to them. The host with the most servers, s, carries
  (k + s (h - 2)) M/k: for k = h what a ring's does.

Where several workers share a host they are taken to sum inside it first.
"""

from __future__ import annotations

from byteps import cost_model

from bench.kit.plan import Topology, through_servers


def busiest_link(backend: str, topology: Topology) -> float:
    """Bytes each way over the busiest link, for each byte that a worker has summed."""
    n, hosts, k = topology.workers, topology.worker_hosts, topology.servers
    if backend == "gloo":
        return 2 * (n - 1) / n
    if not through_servers(backend):  # NCCL does as much by its trees, or by rings inside hosts
        return 2 * (hosts - 1) / hosts
    if topology.colocate:
        most = -(-k // hosts)
        return max(0.0, (k + most * (hosts - 2)) / k)
    servers = cost_model.Servers(
        hosts=hosts,
        extra=k,
        local=topology.local_servers,
        per_machine=topology.servers_per_machine,
    )
    load = cost_model.push_pull(servers, 1.0, 1.0)
    return max(load.host, load.server)


def least_seconds(backend: str, topology: Topology, size: int) -> float | None:
    """The physical limit for ``size`` bytes, headers left out; None where it is not known."""
    share = busiest_link(backend, topology)
    if not topology.host_bits or not share:
        return None
    return share * size * 8 / topology.host_bits
