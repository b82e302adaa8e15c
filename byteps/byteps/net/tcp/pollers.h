#ifndef BYTEPS_NET_TCP_POLLERS_H_
#define BYTEPS_NET_TCP_POLLERS_H_

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "byteps/net/link/nics.h"
#include "byteps/net/tcp/memory_pool.h"
#include "byteps/net/tcp/poller.h"

namespace ps {
namespace tcp {

// Pollers of a process, and the memory into which they receive.
//
// On a host with several NUMA nodes, a NIC's connections use pollers that run on the NIC's NUMA
// node. The memory of these pollers is on that node, too: the kernel places a page on the node of
// the thread that first writes to it, and only threads of that node reuse the memory.

class Pollers {
 public:
  // Keeps at most `pool_bytes` of unused memory.
  Pollers(int threads, size_t pool_bytes);

  // Poller and memory of a connection.
  struct Place {
    std::shared_ptr<Poller> poller;
    std::shared_ptr<MemoryPool> pool;
  };

  // Moves the pollers to the NUMA nodes of these NICs. Call before the first connection.
  void ServeNics(const std::vector<HostNic>& nics, const NumaNodes& nodes);
  // Returns the poller for the next connection over the NIC with this address, round robin. For an
  // unknown address, returns any poller. Thread-safe.
  Place Next(const std::string& address);

  const std::shared_ptr<Poller>& first() const { return pollers_.front(); }
  int size() const { return static_cast<int>(pollers_.size()); }
  void ServeReady();
  void Stop();

 private:
  // Pollers that share connections.
  struct Group {
    std::vector<Place> places;
    std::atomic<size_t> next{0};
  };

  const size_t pool_bytes_;
  std::vector<std::shared_ptr<Poller>> pollers_;
  Group all_;
  std::map<int, Group> of_node_;      // by NUMA node
  std::map<std::string, int> nodes_;  // each NIC's NUMA node, by its address
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_POLLERS_H_
