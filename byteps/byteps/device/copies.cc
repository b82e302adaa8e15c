#include "byteps/device/copies.h"

#include <chrono>
#include <iterator>
#include <utility>

namespace byteps {
namespace core {
namespace {

// Callers' streams that have a stream of their own for calls; further ones share these.
constexpr size_t kMaxCallers = 32;
// A short copy takes some 10 us; a call by the driver comes 40 us after it.
constexpr std::chrono::microseconds kAwaited(50);

}  // namespace

// Events that nobody uses.
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
  for (Lane* lane : {&to_host_, &few_to_host_, &to_device_}) {
    lane->work = MakeStream();
    lane->calls = MakeStream();
  }
}

DeviceMoment DeviceCopies::MomentOf(DeviceStream stream) {
  DeviceMoment moment = events_->Take();
  RecordEvent(moment.get(), stream);
  return moment;
}

DeviceMoment DeviceCopies::Now(DeviceStream stream) {
  const CurrentDevice current(device_);
  return MomentOf(stream);
}

bool DeviceCopies::IsDone(const DeviceMoment& moment) { return EventIsDone(moment.get()); }

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
  WaitForEvent(calls, moment.get());
  CallWhenDone(calls, std::move(then));
}

void DeviceCopies::CallFrom(DeviceStream calls, DeviceStream work, std::function<void()> then) {
  // The event may serve again at once: the stream waits for what it stands for now.
  WaitForEvent(calls, MomentOf(work).get());
  CallWhenDone(calls, std::move(then));
}

void DeviceCopies::ToHost(const std::vector<Copy>& copies, std::function<void()> then) {
  const CurrentDevice current(device_);
  for (const Copy& copy : copies) CopyToHost(copy.to, copy.from, copy.bytes, to_host_.work);
  CallFrom(to_host_.calls, to_host_.work, std::move(then));
}

void DeviceCopies::ToDevice(const std::vector<Copy>& copies, std::function<void()> then) {
  const CurrentDevice current(device_);
  for (const Copy& copy : copies) CopyToDevice(copy.to, copy.from, copy.bytes, to_device_.work);
  CallFrom(to_device_.calls, to_device_.work, std::move(then));
}

bool DeviceCopies::FewToHost(const Copy& copy, std::function<void()> then) {
  const CurrentDevice current(device_);
  CopyToHost(copy.to, copy.from, copy.bytes, few_to_host_.work);
  const DeviceMoment copied = MomentOf(few_to_host_.work);
  const auto end = std::chrono::steady_clock::now() + kAwaited;
  do {
    if (IsDone(copied)) return true;
  } while (std::chrono::steady_clock::now() < end);
  WaitForEvent(few_to_host_.calls, copied.get());
  CallWhenDone(few_to_host_.calls, std::move(then));
  return false;
}

DeviceMoment DeviceCopies::CopiedToDevice() {
  const CurrentDevice current(device_);
  return MomentOf(to_device_.work);
}

void DeviceCopies::MakeWait(DeviceStream stream, const DeviceMoment& moment) {
  const CurrentDevice current(device_);
  WaitForEvent(stream, moment.get());
}

}  // namespace core
}  // namespace byteps
