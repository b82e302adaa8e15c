// Traffic counters of this process by endpoint and by NIC, for metrics, the status and tests.
#ifndef BYTEPS_NET_LINK_COUNTERS_H_
#define BYTEPS_NET_LINK_COUNTERS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ps {

// Traffic of one endpoint of a transport.
//
// Counts whole messages and the bytes of their meta and values, without the transport's own
// messages (credits, rendezvous). Received values are counted by where the device writes them: to
// their destination ("in place"); to the transport's pool, from which they are copied; or, if they
// are small, to the message's frame.
struct EndpointCounters {
  EndpointCounters(std::string plane, int index) : plane(std::move(plane)), index(index) {}

  const std::string plane;    // "control" or "data"
  const int index;            // index within the plane
  std::atomic<int> peer{-1};  // node id; negative while unknown
  std::atomic<uint64_t> messages_sent{0};
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> messages_received{0};
  std::atomic<uint64_t> bytes_received{0};
  std::atomic<uint64_t> values_in_place{0};
  std::atomic<uint64_t> bytes_in_place{0};
  std::atomic<uint64_t> values_offered{0};  // values in place whose destination was offered early
  std::atomic<uint64_t> values_in_pool{0};
  std::atomic<uint64_t> bytes_in_pool{0};
  std::atomic<uint64_t> values_in_frames{0};
  std::atomic<uint64_t> bytes_in_frames{0};
  std::atomic<uint64_t> send_completions{0};  // completions that the device reported
};

struct EndpointReading {
  std::string peer;  // "scheduler", "server 0", "worker 1"; "" while unknown
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

// Functions that make, forget and read the counters of this process. Counters outlive their
// endpoints, until the next job begins. Thread-safe.
std::shared_ptr<EndpointCounters> NewEndpointCounters(const std::string& plane, int index);
void ForgetEndpointCounters();
std::vector<EndpointReading> ReadEndpointCounters();

// Bytes sent and received over one NIC, for metrics and the status.
//
// Counts the bytes of authenticated connections before encryption: messages, values, and the
// transport's own messages.
struct NicCounters {
  explicit NicCounters(std::string nic) : nic(std::move(nic)) {}

  const std::string nic;  // name of the interface
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> bytes_received{0};
};

struct NicReading {
  std::string nic;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
};

// Returns the counters of the NIC that routes packets from `here`, an address of this host, to
// `there`. Traffic inside the host counts for "lo", whatever the addresses. Counters live as long
// as the process. Thread-safe.
NicCounters* CountersOfNic(const std::string& here, const std::string& there);
// Returns the counters of the NIC with this address. This is for RDMA, whose traffic inside the
// host passes the NIC, too. Thread-safe.
NicCounters* CountersOfNic(const std::string& here);
// Returns the counters of all NICs, by name. Thread-safe.
std::vector<NicReading> ReadNicCounters();

}  // namespace ps

#endif  // BYTEPS_NET_LINK_COUNTERS_H_
