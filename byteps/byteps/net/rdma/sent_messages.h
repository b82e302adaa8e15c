// Which messages of an endpoint the peer has, over all the connections of its life.
#ifndef BYTEPS_NET_RDMA_SENT_MESSAGES_H_
#define BYTEPS_NET_RDMA_SENT_MESSAGES_H_

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "dmlc/logging.h"

namespace ps {
namespace rdma {

// Messages are counted in the order in which the request that completes each of them was posted:
// a frame, or the last write of its values.  A reliable connection delivers these in that order,
// so that one number, of how many have come, says which.  The device tells which have arrived; of
// those that it gives back the peer may have some.
//
// T: a pointer that owns a message.
template <typename T>
class SentMessages {
 public:
  // The device has taken one more.
  void Posted() { ++posted_; }
  // The device gives one back: the next that has not arrived.
  void GaveBack(T message) {
    given_back_.push_back(std::move(message));
    PS_INVARIANT_NOTED("no more comes back than was sent", given_back_.size() <= posted_,
                       std::to_string(given_back_.size()) + " of " + std::to_string(posted_));
  }
  // All of these, for an endpoint that ends.
  std::deque<T> TakeAll() { return std::exchange(given_back_, {}); }
  bool has_arrived_all() const { return given_back_.empty(); }

  // There is another connection, and nothing was posted on it; the peer has received the first
  // `received` messages.  Returns those to be posted again, in order, and adds to `arrived`
  // those that it had got after all.  Throws dmlc::Error when this cannot be.
  std::vector<T> Resume(uint64_t received, std::vector<T>* arrived) {
    const uint64_t known = posted_ - given_back_.size();
    if (received < known || received > posted_) {
      throw dmlc::Error(
          "it says that it has received " + std::to_string(received) +
          " messages over this connection, which is impossible: " + std::to_string(posted_) +
          " were sent, and the device said of " + std::to_string(known) + " that they had arrived");
    }
    for (uint64_t n = known; n < received; ++n) {
      arrived->push_back(std::move(given_back_.front()));
      given_back_.pop_front();
    }
    std::vector<T> again;
    for (T& message : given_back_) again.push_back(std::move(message));
    given_back_.clear();
    posted_ = received;
    return again;
  }

 private:
  uint64_t posted_ = 0;       // since the beginning; those that are posted again count once
  std::deque<T> given_back_;  // the last of these
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_SENT_MESSAGES_H_
