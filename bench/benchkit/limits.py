"""The least time that links allow a sum: the bytes that the busiest link must carry, over its rate.

With n workers, k servers, M bytes and links of B bytes a second each way:

- a ring sends 2 (n - 1) / n M over each worker's link, each way;
- through servers on hosts of their own, a worker's link carries M each way, and a server's n/k M;
- a server beside a worker sends its share, M/k, to the n - 1 workers elsewhere, while the worker
  sends what is not summed beside it. The host with the most servers, s, carries
  (k + s (n - 2)) M/k: for k = n what a ring's does.
"""

from __future__ import annotations

from benchkit.plan import Topology, through_servers


def busiest_link(backend: str, topology: Topology) -> float:
    """Bytes each way over the busiest link, for each byte that a worker has summed."""
    n, k = topology.workers, topology.servers
    if not through_servers(backend):
        return 2 * (n - 1) / n
    if not topology.colocate:
        return max(1.0, n / k)
    most = -(-k // n)
    return max(0.0, (k + most * (n - 2)) / k)


def least_seconds(backend: str, topology: Topology, size: int) -> float | None:
    """The physical limit for ``size`` bytes, headers left out; None where it is not known."""
    share = busiest_link(backend, topology)
    if not topology.link_bits or not share:
        return None
    return share * size * 8 / topology.link_bits
