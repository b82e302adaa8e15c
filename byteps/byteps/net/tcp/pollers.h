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

// The pollers of a process, and the memory that each of them receives into.
//
// On a host of several NUMA nodes the connections over a NIC have pollers on the NIC's node.  Their
// memory is there as well: the kernel takes a page from the node of the thread that writes to it
// first, and blocks are used again by threads of the same node only.

class Pollers {
 public:
  // Keeps at most `pool_bytes` of memory that nobody uses.
  Pollers(int threads, size_t pool_bytes);

  // Of one connection.
  struct Place {
    std::shared_ptr<Poller> poller;
    std::shared_ptr<MemoryPool> pool;
  };

  // These NICs are used.  Before the first connection.
  void ServeNics(const std::vector<HostNic>& nics, const NumaNodes& nodes);
  // For the next connection over the NIC with this address, round robin; any poller where it is the
  // address of none of them.  Any thread.
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
  std::map<int, Group> of_node_;      // by the number of the NUMA node
  std::map<std::string, int> nodes_;  // of each NIC, by its address
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_POLLERS_H_
