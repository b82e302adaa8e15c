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

// Asynchronous copies between a GPU and pinned host memory.
//
// Each direction has a stream. A GPU runs the copies of a direction one after another anyway, and a
// partition's copy is long enough to fill PCIe. Callbacks run in another stream, which waits for an
// event after the copy: a callback blocks its stream, and must not delay the next copy. No thread
// polls or sleeps in the driver, so none hangs there if the GPU's work never ends (an NCCL kernel
// whose peer was lost).

// Point in a stream's work. Null: the stream was idle. The event of a moment is reused, not
// destroyed, because the moment may end inside a driver's callback, where events must not be
// destroyed.
using DeviceMoment = std::shared_ptr<void>;

// Lanes of copies. Copies of one lane run one after another.
enum class CopyLane {
  kToHost,
  kFewToHost,    // small copies, which do not wait for long ones
  kWholeToHost,  // a whole tensor, enqueued by the caller of an all-reduce
  kToDevice,
};

// A copy between the device and pinned memory, in either direction.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// Thread-safe. All functions throw Error if the device has failed. Callbacks run on the driver's
// thread and must not block: see CallWhenDone.
class DeviceCopies {
 public:
  // Returns the object for `device`, made at its first use. It lives as long as the process.
  static DeviceCopies* Of(int device);

  explicit DeviceCopies(int device);
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;

  // Returns the current end of the caller's `stream`.
  DeviceMoment Now(DeviceStream stream);
  static bool IsDone(const DeviceMoment& moment);
  // Calls `then` when all work of `stream` before `moment` is done.
  void CallAfter(const DeviceMoment& moment, DeviceStream stream, std::function<void()> then);
  // Throws if the device has failed. (A failed device runs no callbacks.)
  void Check();

  // Enqueues copies. Returns the moment at which all are done.
  DeviceMoment Enqueue(CopyLane lane, const std::vector<Copy>& copies);
  // Makes later copies of the lane wait for `moment`.
  void MakeWait(CopyLane lane, const DeviceMoment& moment);
  // Calls `then` when `copied`, a result of Enqueue, is reached.
  void CallAfter(CopyLane lane, const DeviceMoment& copied, std::function<void()> then);
  // Polls briefly, because a short copy takes a fraction of the time until the driver would call.
  // Returns true if the copies are done; `then` is not called in that case.
  bool AwaitOrCallAfter(CopyLane lane, const DeviceMoment& copied, std::function<void()> then);
  // Returns the moment at which all copies to the device so far are done.
  DeviceMoment CopiedToDevice();
  // Makes later work of the caller's `stream` wait for `moment`.
  void MakeWait(DeviceStream stream, const DeviceMoment& moment);
  // Enqueues copies to the device in the caller's `stream`. Returns the moment of their end.
  DeviceMoment CopyIn(DeviceStream stream, const std::vector<Copy>& copies);
  // Enqueues, in the caller's `stream`, a wait until `word` is 1, and then copies to the device.
  void CopyOnceSet(DeviceStream stream, const DeviceWord* word, const std::vector<Copy>& copies);

 private:
  // A lane's stream, and the stream for its callbacks.
  struct Streams {
    DeviceStream work = nullptr;
    DeviceStream calls = nullptr;
  };
  class Events;

  DeviceMoment MomentOf(DeviceStream stream);
  DeviceMoment NowIn(DeviceStream stream);
  // Returns the callback stream for a caller's stream. Callers have different ones, so that they do
  // not wait for each other's work.
  DeviceStream CallsFor(DeviceStream stream);

  const int device_;
  const std::shared_ptr<Events> events_;
  std::map<CopyLane, Streams> lanes_;  // immutable
  ps::Mutex mu_;
  std::map<DeviceStream, DeviceStream> callers_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_DEVICE_COPIES_H_
