// EarlyMessages: messages that arrive before this node knows its rank in the job.
//
// A server that replaces a lost server gets the lost server's rank. Workers may learn this before
// the new server does, and send messages to it. If the scheduler dies at that moment, the new
// server never gets that rank. It then asks for another rank, and must drop these messages.
#ifndef BYTEPS_CLUSTER_EARLY_MESSAGES_H_
#define BYTEPS_CLUSTER_EARLY_MESSAGES_H_

#include <atomic>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/cluster/channel.h"

namespace byteps {
namespace core {

// Thread-safe.
class EarlyMessages {
 public:
  // Delivers the message, or keeps it until the node knows its rank.
  void Take(Message* message, ChannelUser* user) {
    if (!has_place_.load(std::memory_order_acquire) && Keep(message)) return;
    user->OnMessage(message);
  }

  // Delivers the kept messages, now that the node knows its rank.
  void Release(ChannelUser* user) {
    std::vector<Message> kept;
    {
      ps::MutexLock lock(&mu_);
      kept.swap(kept_);
      has_place_.store(true, std::memory_order_release);
    }
    for (Message& message : kept) user->OnMessage(&message);
  }

  // Drops the kept messages, because the node has no rank, or has lost it.
  void Drop() {
    ps::MutexLock lock(&mu_);
    kept_.clear();
    has_place_.store(false, std::memory_order_release);
  }

 private:
  bool Keep(Message* message) {
    ps::MutexLock lock(&mu_);
    if (has_place_.load(std::memory_order_relaxed)) return false;
    kept_.push_back(std::move(*message));
    return true;
  }

  std::atomic<bool> has_place_{false};
  ps::Mutex mu_;
  std::vector<Message> kept_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_CLUSTER_EARLY_MESSAGES_H_
