#ifndef BYTEPS_DEVICE_COPY_QUEUE_H_
#define BYTEPS_DEVICE_COPY_QUEUE_H_

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "byteps/base/mutex.h"
#include "byteps/device/device_copies.h"

namespace byteps {
namespace core {

// Copies of one engine between a GPU and pinned memory, one queue for each direction.
//
// A driver serves one caller at a time, and callers that come in crowds hold each other up for
// longer than their copies take.  So one thread at a time gives copies to it, a turn after the
// other; what others ask for meanwhile goes with its next turn.  It awaits the copies of a turn for
// a moment: that takes less time than a call by the driver, of the cores too, since a call
// wakes two threads.
//
// Any thread may call anything.
class CopyQueue {
 public:
  struct Entry {
    Copy copy;
    // Called once, by Add of this thread or of another one that is in it: the device has the copy,
    // or failed, with its words.  After a failure the copy may still be made, at any time.
    std::function<void(const std::string& error)> begun;
    // As CallWhenDone has it: on the driver's thread, or on one that is in Add; not to block;
    // perhaps before `begun`.
    std::function<void()> done;
  };

  CopyQueue(int device, CopyLane lane) : device_(device), lane_(lane) {}
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // Gives the copy to the device, or leaves that to the thread that does so now.
  void Add(Entry entry);
  // Leaves the copy to the thread that gives copies to the device now, and takes it from *entry.
  // False: no thread does.
  bool Leave(Entry* entry);

 private:
  // Moving entries from one to another takes no memory, and so cannot fail.
  using Entries = std::list<Entry>;

  // What goes in one turn; at least one entry.
  struct Turn {
    Entries entries;
    size_t bytes = 0;

    void CallDone() const;
  };

  // False, with nothing to give: this thread does so no longer.
  bool TakeTurn(Turn* turn);
  // Does not throw: who gives copies to the device goes on with the next ones.
  void Give(Turn turn) noexcept;
  // Without its error, or the operation, a waiting one is ended by its time-out.
  static void TellBegun(const Entry& entry, const std::string& error);
  // Until the copies are done, or will be told of by the driver.
  void AwaitOrCall(const std::shared_ptr<const Turn>& turn);

  const int device_;
  const CopyLane lane_;
  ps::Mutex mu_;
  Entries waiting_ PS_GUARDED_BY(mu_);
  bool taken_ PS_GUARDED_BY(mu_) = false;  // a thread gives copies to the device
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_COPY_QUEUE_H_
