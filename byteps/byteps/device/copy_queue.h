// Copies of one engine between a GPU and pinned memory, one queue for each direction.
//
// A driver serves one caller at a time, and callers that come in crowds hold each other up for
// longer than their copies take.  So one thread at a time gives copies to it; what others ask for
// meanwhile goes with its next turn, and one call of the driver's says that all of a turn are
// done.
#ifndef BYTEPS_DEVICE_COPY_QUEUE_H_
#define BYTEPS_DEVICE_COPY_QUEUE_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "byteps/device/copies.h"
#include "ps/mutex.h"

namespace byteps {
namespace core {

enum class CopyDirection { kToHost, kToDevice };

// Any thread may call anything.
class CopyQueue {
 public:
  struct Entry {
    Copy copy;
    // Called once, by Add of this thread or of another one that is in it: the device has the copy,
    // or failed, with its words.  After a failure the copy may still be made, at any time.
    std::function<void(const std::string& error)> begun;
    // As CallWhenDone has it: on the driver's thread, not to block; perhaps before `begun`.
    std::function<void()> done;
  };

  CopyQueue(int device, CopyDirection direction) : device_(device), direction_(direction) {}
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // Gives the copy to the device, or leaves that to whoever does so now.
  void Add(Entry entry);

 private:
  using Entries = std::vector<Entry>;

  // What goes in one turn; at least one entry.
  Entries TakeTurn() PS_REQUIRES(mu_);
  void Begin(const Entries& entries);

  const int device_;
  const CopyDirection direction_;
  ps::Mutex mu_;
  std::deque<Entry> waiting_ PS_GUARDED_BY(mu_);
  bool taken_ PS_GUARDED_BY(mu_) = false;  // a thread gives copies to the device
};

// The queues of all devices.
class CopyQueues {
 public:
  CopyQueue* Of(int device, CopyDirection direction);

 private:
  ps::Mutex mu_;
  std::map<std::pair<int, CopyDirection>, std::unique_ptr<CopyQueue>> queues_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_COPY_QUEUE_H_
