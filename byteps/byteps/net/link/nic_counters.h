// What this process has sent and received over each NIC, for metrics and the status.
#ifndef BYTEPS_NET_LINK_NIC_COUNTERS_H_
#define BYTEPS_NET_LINK_NIC_COUNTERS_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ps {

// Bytes of authenticated connections as they are written and read, before encryption: messages,
// their values, and what the transport says to itself.
struct NicCounters {
  explicit NicCounters(std::string nic) : nic(std::move(nic)) {}

  const std::string nic;  // the interface's name
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> bytes_received{0};
};

struct NicReading {
  std::string nic;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
};

// The counters of the NIC over which packets from `here`, an address of this host, go to `there`.
// Between two processes of a host that is "lo", whatever address they use.  They live as long as
// the process.  Any thread.
NicCounters* CountersOfNic(const std::string& here, const std::string& there);
// Those of the NIC that has this address of this host: over RDMA it carries also what stays in the
// host.  Any thread.
NicCounters* CountersOfNic(const std::string& here);
// By name.  Any thread.
std::vector<NicReading> ReadNicCounters();

}  // namespace ps
#endif  // BYTEPS_NET_LINK_NIC_COUNTERS_H_
