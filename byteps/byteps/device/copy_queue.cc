#include "byteps/device/copy_queue.h"

#include "byteps/base/error.h"

namespace byteps {
namespace core {
namespace {

// Of one turn: its first copy waits for the last, no longer than this takes, 20 to 40 us.  A longer
// one goes by itself, and is not awaited.
constexpr size_t kMostBytes = 1 << 20;

}  // namespace

void CopyQueue::Turn::CallDone() const {
  for (const Entry& entry : entries) entry.done();
}

void CopyQueue::Add(Entry entry) {
  {
    ps::MutexLock lock(&mu_);
    waiting_.push_back(std::move(entry));
    if (taken_) return;
    taken_ = true;
  }
  for (Turn turn; TakeTurn(&turn); turn = Turn()) Give(std::move(turn));
}

bool CopyQueue::Leave(Entry* entry) {
  ps::MutexLock lock(&mu_);
  if (taken_) waiting_.push_back(std::move(*entry));
  return taken_;
}

bool CopyQueue::TakeTurn(Turn* turn) {
  ps::MutexLock lock(&mu_);
  while (!waiting_.empty()) {
    const size_t bytes = waiting_.front().copy.bytes;
    if (!turn->entries.empty() && turn->bytes + bytes > kMostBytes) break;
    turn->bytes += bytes;
    turn->entries.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
  taken_ = !turn->entries.empty();
  return taken_;
}

void CopyQueue::Give(Turn turn) {
  const auto given = std::make_shared<const Turn>(std::move(turn));
  std::string error;
  try {
    AwaitOrCall(given);
  } catch (const Error& e) {
    error = e.what();
  }
  for (const Entry& entry : given->entries) entry.begun(error);
}

void CopyQueue::AwaitOrCall(const std::shared_ptr<const Turn>& turn) {
  std::vector<Copy> copies;
  for (const Entry& entry : turn->entries) copies.push_back(entry.copy);
  DeviceCopies* const device = DeviceCopies::Of(device_);
  const DeviceMoment copied = device->Enqueue(lane_, copies);
  const auto done = [turn] { turn->CallDone(); };
  if (turn->bytes > kMostBytes) return device->CallAfter(lane_, copied, done);
  if (device->AwaitOrCallAfter(lane_, copied, done)) done();
}

CopyQueue* CopyQueues::Of(int device, CopyLane lane) {
  ps::MutexLock lock(&mu_);
  auto& queue = queues_[{device, lane}];
  if (!queue) queue = std::make_unique<CopyQueue>(device, lane);
  return queue.get();
}

}  // namespace core
}  // namespace byteps
