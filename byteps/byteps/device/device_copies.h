#ifndef BYTEPS_DEVICE_DEVICE_COPIES_H_
#define BYTEPS_DEVICE_DEVICE_COPIES_H_

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/device/device.h"

namespace byteps {
namespace core {

// Copies between one GPU and pinned host memory, of which the host only hears.
//
// Each direction has one stream: a GPU moves the copies of one direction one after the other
// anyway, and copies of a partition are long enough to fill PCIe.  What is to happen when a copy
// is done is called from another stream, which waits for an event behind the copy: a callback
// holds up the stream that it is in, and the next copy must not wait for it.  Nothing polls, and
// no thread sleeps in the driver, so that none is stuck there when the GPU's work never ends
// (an NCCL kernel whose peer was lost).

// A moment in the work of a stream; null: it had none left.  When the last copy goes, it is kept
// for reuse: that may be inside a callback of the driver's, where no event may be destroyed.
using DeviceMoment = std::shared_ptr<void>;

// Copies of a lane are made one after the other.
enum class CopyLane {
  kToHost,
  kFewToHost,    // few bytes, which do not wait for long copies
  kWholeToHost,  // all of a tensor at once, as the caller of a sum enqueues it
  kToDevice,
};

// What is copied: one end is on the device, the other in pinned memory.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// Any thread may call anything.  Each function throws Error when the device fails.
// Callbacks are as CallWhenDone has them: on the driver's thread, not to block.
class DeviceCopies {
 public:
  // That of `device`, made at its first use.  It lives as long as the process.
  static DeviceCopies* Of(int device);

  explicit DeviceCopies(int device);
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;

  // All that the caller's `stream` has been given so far.
  DeviceMoment Now(DeviceStream stream);
  static bool IsDone(const DeviceMoment& moment);
  // Calls `then` when all that `stream` was given before `moment` is done.
  void CallAfter(const DeviceMoment& moment, DeviceStream stream, std::function<void()> then);
  // Does nothing but throw where the device has failed, whose callbacks never come.
  void Check();

  // Enqueues copies.  The result: all are done.
  DeviceMoment Enqueue(CopyLane lane, const std::vector<Copy>& copies);
  // Copies that a lane is given from now on wait for `moment`.
  void MakeWait(CopyLane lane, const DeviceMoment& moment);
  // Calls `then` when `copied`, which Enqueue gave, is done.
  void CallAfter(CopyLane lane, const DeviceMoment& copied, std::function<void()> then);
  // Likewise, but first this thread waits a moment: a short copy takes a fraction of the time until
  // the driver calls.  True: it is done, and nothing is called.
  bool AwaitOrCallAfter(CopyLane lane, const DeviceMoment& copied, std::function<void()> then);
  // All copies to the device so far are done.
  DeviceMoment CopiedToDevice();
  // What the caller's `stream` is given from now on waits for `moment`.
  void MakeWait(DeviceStream stream, const DeviceMoment& moment);
  // Enqueues copies to the device in the caller's `stream`.  The result: all are made.
  DeviceMoment CopyIn(DeviceStream stream, const std::vector<Copy>& copies);
  // Likewise, but the stream waits until `word` is 1.
  void CopyOnceSet(DeviceStream stream, const DeviceWord* word, const std::vector<Copy>& copies);

 private:
  // The stream of a lane, and the one from which is called.
  struct Streams {
    DeviceStream work = nullptr;
    DeviceStream calls = nullptr;
  };
  class Events;

  DeviceMoment MomentOf(DeviceStream stream);
  DeviceMoment NowIn(DeviceStream stream);
  // One for each stream of the caller's, so that none waits for what another one computes.
  DeviceStream CallsFor(DeviceStream stream);

  const int device_;
  const std::shared_ptr<Events> events_;
  std::map<CopyLane, Streams> lanes_;  // does not change
  ps::Mutex mu_;
  std::map<DeviceStream, DeviceStream> callers_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_DEVICE_COPIES_H_
