#include "byteps/device/copy_queue.h"

#include "byteps/base/error.h"

namespace byteps {
namespace core {
namespace {

// Of one turn: its first copy waits for the last, no longer than this takes, 20 to 40 us.
constexpr size_t kMostBytes = 1 << 20;

}  // namespace

void CopyQueue::Add(Entry entry) {
  ps::MutexLock lock(&mu_);
  waiting_.push_back(std::move(entry));
  if (taken_) return;
  taken_ = true;
  while (!waiting_.empty()) {
    const Entries entries = TakeTurn();
    lock.Unlock();
    Begin(entries);
    lock.Lock();
  }
  taken_ = false;
}

CopyQueue::Entries CopyQueue::TakeTurn() {
  Entries entries;
  size_t bytes = 0;
  do {
    bytes += waiting_.front().copy.bytes;
    entries.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  } while (!waiting_.empty() && bytes + waiting_.front().copy.bytes <= kMostBytes);
  return entries;
}

void CopyQueue::Begin(const Entries& entries) {
  std::vector<Copy> copies;
  std::vector<std::function<void()>> done;
  for (const Entry& entry : entries) {
    copies.push_back(entry.copy);
    done.push_back(entry.done);
  }
  const auto all_done = [done = std::move(done)] {
    for (const auto& one : done) one();
  };
  std::string error;
  try {
    DeviceCopies* const device = DeviceCopies::Of(device_);
    if (direction_ == CopyDirection::kToHost) {
      device->ToHost(copies, all_done);
    } else {
      device->ToDevice(copies, all_done);
    }
  } catch (const Error& e) {
    error = e.what();
  }
  for (const Entry& entry : entries) entry.begun(error);
}

CopyQueue* CopyQueues::Of(int device, CopyDirection direction) {
  ps::MutexLock lock(&mu_);
  auto& queue = queues_[{device, direction}];
  if (!queue) queue = std::make_unique<CopyQueue>(device, direction);
  return queue.get();
}

}  // namespace core
}  // namespace byteps
