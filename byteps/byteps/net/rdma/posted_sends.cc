#include "byteps/net/rdma/posted_sends.h"

#include <algorithm>
#include <utility>

namespace ps {
namespace rdma {
namespace {

// Number of requests of which one is signalled. A larger number saves hardly anything, and delays
// reuse of the queue.
constexpr uint32_t kEvery = 16;
constexpr uint32_t kPartsOfDepth = 4;

}  // namespace

PostedSends::PostedSends(uint32_t depth, uint64_t window_bytes)
    : depth_(depth),
      every_(std::clamp(depth / kPartsOfDepth, 1u, kEvery)),
      // The limit is 3/8 of the window. Two of a window's four pieces exceed it, even if pieces are
      // rounded down to pages.
      unheard_bytes_(window_bytes / 8 * 3),
      requests_(depth + kReserved) {}

bool PostedSends::MustSignal(const Request& request) const {
  if (signals_all_ || unheard_.requests + 1 >= every_) return true;
  if (request.bytes > 0 && unheard_.bytes + request.bytes >= unheard_bytes_) return true;
  if (!request.ends_message) return false;
  return request.is_large || !(watched_ || signalled_is_in_flight());
}

void PostedSends::Add(const Request& request, bool signalled) {
  ++last_;
  requests_[last_ % requests_.size()] = request;
  bytes_ += request.bytes;
  if (signalled) {
    last_signalled_ = last_;
    unheard_ = {};
    return;
  }
  ++unheard_.requests;
  unheard_.messages += request.ends_message ? 1 : 0;
  unheard_.bytes += request.bytes;
}

bool PostedSends::Retire(uint64_t number, Retired* retired) {
  *retired = {};
  if (number <= retired_ || number > last_) return false;
  while (retired_ < number) {
    const Request& request = requests_[++retired_ % requests_.size()];
    const uint64_t messages = request.ends_message ? 1 : 0;
    retired->messages += messages;
    bytes_ -= request.bytes;
    if (retired_ <= last_signalled_) continue;
    // An unsignalled request is reported only if it failed.
    --unheard_.requests;
    unheard_.messages -= messages;
    unheard_.bytes -= request.bytes;
  }
  retired->last = requests_[number % requests_.size()];
  heard_ = heard_ || retired->messages > 0;
  return true;
}

bool PostedSends::Watch() {
  const bool begins = std::exchange(heard_, false) || any_unheard();
  watched_ = watched_ || begins;
  return begins;
}

bool PostedSends::EndWatch() {
  watched_ = false;
  return any_unheard();
}

}  // namespace rdma
}  // namespace ps
