#include "byteps/device/copy_queue.h"

#include "byteps/base/error.h"

namespace byteps {
namespace core {
namespace {

// Of one turn: its first copy waits for the last, no longer than this takes, 20 to 40 us.
constexpr size_t kMostBytes = 1 << 20;

}  // namespace

void CopyQueue::Turn::CallDone() const {
  for (const Entry& entry : entries) entry.done();
}

void CopyQueue::Add(Entry entry) {
  ps::MutexLock lock(&mu_);
  waiting_.push_back(std::move(entry));
  if (taken_) return;
  taken_ = true;
  while (true) {
    Turn turn = TakeTurn();
    lock.Unlock();
    Enqueue(&turn);
    lock.Lock();
    // Who awaits copies leaves the turn to others.
    const bool may_await = waiting_.empty() && turn.bytes <= kMostBytes;
    if (may_await) taken_ = false;
    lock.Unlock();
    Tell(std::move(turn), may_await);
    if (may_await) return;
    lock.Lock();
    if (waiting_.empty()) break;
  }
  taken_ = false;
}

CopyQueue::Turn CopyQueue::TakeTurn() {
  Turn turn;
  do {
    turn.bytes += waiting_.front().copy.bytes;
    turn.entries.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  } while (!waiting_.empty() && turn.bytes + waiting_.front().copy.bytes <= kMostBytes);
  return turn;
}

void CopyQueue::Enqueue(Turn* turn) {
  std::vector<Copy> copies;
  for (const Entry& entry : turn->entries) copies.push_back(entry.copy);
  try {
    turn->copied = DeviceCopies::Of(device_)->Enqueue(lane_, copies);
  } catch (const Error& e) {
    turn->error = e.what();
  }
}

void CopyQueue::Tell(Turn turn, bool may_await) {
  const auto told = std::make_shared<const Turn>(std::move(turn));
  std::string error = told->error;
  try {
    if (error.empty()) CallOrAwait(told, may_await);
  } catch (const Error& e) {
    error = e.what();
  }
  for (const Entry& entry : told->entries) entry.begun(error);
}

void CopyQueue::CallOrAwait(const std::shared_ptr<const Turn>& turn, bool may_await) {
  DeviceCopies* const device = DeviceCopies::Of(device_);
  const auto done = [turn] { turn->CallDone(); };
  if (!may_await) return device->CallAfter(lane_, turn->copied, done);
  if (device->AwaitOrCallAfter(lane_, turn->copied, done)) done();
}

CopyQueue* CopyQueues::Of(int device, CopyLane lane) {
  ps::MutexLock lock(&mu_);
  auto& queue = queues_[{device, lane}];
  if (!queue) queue = std::make_unique<CopyQueue>(device, lane);
  return queue.get();
}

}  // namespace core
}  // namespace byteps
