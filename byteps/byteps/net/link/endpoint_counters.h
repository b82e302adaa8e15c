// What each endpoint of a transport has carried, for metrics and tests.
#ifndef BYTEPS_NET_LINK_ENDPOINT_COUNTERS_H_
#define BYTEPS_NET_LINK_ENDPOINT_COUNTERS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ps {

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

}  // namespace ps
#endif  // BYTEPS_NET_LINK_ENDPOINT_COUNTERS_H_
