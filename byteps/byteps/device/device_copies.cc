#include "byteps/device/device_copies.h"

#include <chrono>
#include <iterator>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/device/device.h"

namespace byteps {
namespace core {
namespace {

// Number of callers' streams that get a callback stream of their own. Further callers share these
// callback streams.
constexpr size_t kMaxCallers = 32;
// Limit of polling before the thread waits for the driver's callback. 128 KiB take 10 to 30 us, 1
// MiB takes 50 us; the callback comes 40 us later.
constexpr std::chrono::microseconds kAwaited(100);

}  // namespace

// Pool of unused events.
class DeviceCopies::Events : public std::enable_shared_from_this<DeviceCopies::Events> {
 public:
  DeviceMoment Take() {
    DeviceEvent event = nullptr;
    {
      ps::MutexLock lock(&mu_);
      if (!idle_.empty()) {
        event = idle_.back();
        idle_.pop_back();
      }
    }
    if (event == nullptr) event = MakeEvent();
    return DeviceMoment(event, [all = shared_from_this()](DeviceEvent unused) {
      ps::MutexLock lock(&all->mu_);
      all->idle_.push_back(unused);
    });
  }

 private:
  ps::Mutex mu_;
  std::vector<DeviceEvent> idle_ PS_GUARDED_BY(mu_);
};

DeviceCopies* DeviceCopies::Of(int device) {
  static ps::Mutex mu;
  static auto* all = new std::map<int, std::unique_ptr<DeviceCopies>>();
  ps::MutexLock lock(&mu);
  auto& copies = (*all)[device];
  if (!copies) copies = std::make_unique<DeviceCopies>(device);
  return copies.get();
}

DeviceCopies::DeviceCopies(int device) : device_(device), events_(std::make_shared<Events>()) {
  const CurrentDevice current(device);
  for (const CopyLane lane :
       {CopyLane::kToHost, CopyLane::kFewToHost, CopyLane::kWholeToHost, CopyLane::kToDevice}) {
    lanes_[lane] = {MakeStream(), MakeStream()};
  }
}

DeviceMoment DeviceCopies::MomentOf(DeviceStream stream) {
  DeviceMoment moment = events_->Take();
  RecordEvent(moment.get(), stream);
  return moment;
}

DeviceMoment DeviceCopies::Now(DeviceStream stream) {
  const CurrentDevice current(device_);
  return NowIn(stream);
}

DeviceMoment DeviceCopies::NowIn(DeviceStream stream) {
  // Even in an idle stream, an event takes some microseconds until it is done. So an idle stream
  // gets none.
  return StreamIsIdle(stream) ? nullptr : MomentOf(stream);
}

bool DeviceCopies::IsDone(const DeviceMoment& moment) {
  return !moment || EventIsDone(moment.get());
}

void DeviceCopies::Check() {
  const CurrentDevice current(device_);
  (void)StreamIsIdle(lanes_.at(CopyLane::kToDevice).work);
}

DeviceStream DeviceCopies::CallsFor(DeviceStream stream) {
  ps::MutexLock lock(&mu_);
  const auto it = callers_.find(stream);
  if (it != callers_.end()) return it->second;
  const DeviceStream calls =
      callers_.size() < kMaxCallers
          ? MakeStream()
          : std::next(callers_.begin(), callers_.size() % kMaxCallers)->second;
  return callers_[stream] = calls;
}

void DeviceCopies::CallAfter(const DeviceMoment& moment, DeviceStream stream,
                             std::function<void()> then) {
  const CurrentDevice current(device_);
  const DeviceStream calls = CallsFor(stream);
  if (moment) WaitForEvent(calls, moment.get());
  CallWhenDone(calls, std::move(then));
}

DeviceMoment DeviceCopies::Enqueue(CopyLane lane, const std::vector<Copy>& copies) {
  const CurrentDevice current(device_);
  const DeviceStream stream = lanes_.at(lane).work;
  for (const Copy& copy : copies) {
    if (lane == CopyLane::kToDevice) {
      CopyToDevice(copy.to, copy.from, copy.bytes, stream);
    } else {
      CopyToHost(copy.to, copy.from, copy.bytes, stream);
    }
  }
  return MomentOf(stream);
}

void DeviceCopies::CallAfter(CopyLane lane, const DeviceMoment& copied,
                             std::function<void()> then) {
  const CurrentDevice current(device_);
  const DeviceStream calls = lanes_.at(lane).calls;
  WaitForEvent(calls, copied.get());
  CallWhenDone(calls, std::move(then));
}

bool DeviceCopies::AwaitOrCallAfter(CopyLane lane, const DeviceMoment& copied,
                                    std::function<void()> then) {
  const auto end = std::chrono::steady_clock::now() + kAwaited;
  do {
    if (IsDone(copied)) return true;
  } while (std::chrono::steady_clock::now() < end);
  PS_PROBE(kCopyCalled);
  CallAfter(lane, copied, std::move(then));
  return false;
}

DeviceMoment DeviceCopies::CopiedToDevice() {
  const CurrentDevice current(device_);
  return NowIn(lanes_.at(CopyLane::kToDevice).work);
}

void DeviceCopies::MakeWait(DeviceStream stream, const DeviceMoment& moment) {
  if (!moment) return;
  const CurrentDevice current(device_);
  WaitForEvent(stream, moment.get());
}

void DeviceCopies::MakeWait(CopyLane lane, const DeviceMoment& moment) {
  MakeWait(lanes_.at(lane).work, moment);
}

DeviceMoment DeviceCopies::CopyIn(DeviceStream stream, const std::vector<Copy>& copies) {
  const CurrentDevice current(device_);
  for (const Copy& copy : copies) CopyToDevice(copy.to, copy.from, copy.bytes, stream);
  return MomentOf(stream);
}

void DeviceCopies::CopyOnceSet(DeviceStream stream, const DeviceWord* word,
                               const std::vector<Copy>& copies) {
  const CurrentDevice current(device_);
  WaitForWord(stream, word);
  for (const Copy& copy : copies) CopyToDevice(copy.to, copy.from, copy.bytes, stream);
}

}  // namespace core
}  // namespace byteps
