// What this process has carried, by endpoint and by NIC, for metrics, the status and tests.
#ifndef BYTEPS_NET_LINK_COUNTERS_H_
#define BYTEPS_NET_LINK_COUNTERS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ps {

// What each endpoint of a transport has carried, for metrics and tests.

// Counts whole messages, and the bytes of their meta and values; what a transport says
// to itself (credits, rendezvous) is not among them.  Of the values received it tells where
// the device wrote them: where they belong, in memory of the transport's, from which somebody
// copies them, or in a message's frame, as small ones are.
struct EndpointCounters {
  EndpointCounters(std::string plane, int index) : plane(std::move(plane)), index(index) {}

  const std::string plane;    // "control" or "data"
  const int index;            // among the endpoints of its plane
  std::atomic<int> peer{-1};  // node id; less than 0 while it is not known
  std::atomic<uint64_t> messages_sent{0};
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> messages_received{0};
  std::atomic<uint64_t> bytes_received{0};
  std::atomic<uint64_t> values_in_place{0};
  std::atomic<uint64_t> bytes_in_place{0};
  std::atomic<uint64_t> values_offered{0};  // of those in place: the sender did not have to ask
  std::atomic<uint64_t> values_in_pool{0};
  std::atomic<uint64_t> bytes_in_pool{0};
  std::atomic<uint64_t> values_in_frames{0};
  std::atomic<uint64_t> bytes_in_frames{0};
  std::atomic<uint64_t> send_completions{0};  // of a device
};

struct EndpointReading {
  std::string peer;  // "scheduler", "server 0", "worker 1"; "" while it is not known
  std::string plane;
  int index = 0;
  uint64_t messages_sent = 0;
  uint64_t bytes_sent = 0;
  uint64_t messages_received = 0;
  uint64_t bytes_received = 0;
  uint64_t values_in_place = 0;
  uint64_t bytes_in_place = 0;
  uint64_t values_offered = 0;
  uint64_t values_in_pool = 0;
  uint64_t bytes_in_pool = 0;
  uint64_t values_in_frames = 0;
  uint64_t bytes_in_frames = 0;
  uint64_t send_completions = 0;
};

// The counters of this process's endpoints live on after these are closed, until the next
// job begins.  All three may be called by any thread.
std::shared_ptr<EndpointCounters> NewEndpointCounters(const std::string& plane, int index);
void ForgetEndpointCounters();
std::vector<EndpointReading> ReadEndpointCounters();

// What this process has sent and received over each NIC, for metrics and the status.

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

#endif  // BYTEPS_NET_LINK_COUNTERS_H_
