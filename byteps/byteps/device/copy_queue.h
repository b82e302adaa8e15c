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

// Queue of an engine's copies between a GPU and pinned memory, in one direction.
//
// A driver serves one caller at a time, and concurrent callers delay each other for longer than
// their copies take. So only one thread calls the driver, and passes copies in batches. Copies that
// other threads add during a call go with the next batch. The calling thread polls briefly for the
// copies of a batch. This takes less time and CPU time than a callback by the driver, which wakes
// two threads.
//
// Thread-safe.
class CopyQueue {
 public:
  struct Entry {
    Copy copy;
    // Called once, by a thread in Add, when the device has accepted the copy or failed with
    // `error`. After a failure the copy may still happen, at any time.
    std::function<void(const std::string& error)> begun;
    // Called when the copy is done, perhaps before `begun`: by the driver's thread or a thread in
    // Add. Must not block; see CallWhenDone.
    std::function<void()> done;
  };

  CopyQueue(int device, CopyLane lane) : device_(device), lane_(lane) {}
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // Gives the copy to the device, or leaves it to the thread that is giving copies now.
  void Add(Entry entry);
  // Leaves the copy to the thread that is giving copies to the device now, and moves it from
  // *entry. Returns false if there is no such thread.
  bool Leave(Entry* entry);

 private:
  // Moving list nodes needs no memory, so it cannot fail.
  using Entries = std::list<Entry>;

  // Copies given to the device together; at least one.
  struct Batch {
    Entries entries;
    size_t bytes = 0;

    void CallDone() const;
  };

  // Returns false if there is nothing to give; this thread then stops giving.
  bool TakeBatch(Batch* batch);
  // Gives the batch to the driver. Does not throw, because this thread goes on with further copies.
  void Give(Batch batch) noexcept;
  // Tells the entry whether its copy has begun.
  static void TellBegun(const Entry& entry, const std::string& error);
  // Waits briefly until the copies are done. If they take long, asks the driver to report their
  // end.
  void AwaitOrCall(const std::shared_ptr<const Batch>& batch);

  const int device_;
  const CopyLane lane_;
  ps::Mutex mu_;
  Entries waiting_ PS_GUARDED_BY(mu_);
  bool taken_ PS_GUARDED_BY(mu_) = false;  // whether a thread gives copies to the device
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_COPY_QUEUE_H_
