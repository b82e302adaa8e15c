#include "byteps/device/copy_queue.h"

#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/device/device_copies.h"

namespace byteps {
namespace core {
namespace {

// Limit of a batch's bytes. The first copy of a batch waits for the last one: at most the 20 to 40
// us that this many bytes take. A larger copy goes alone, without polling.
constexpr size_t kMostBytes = 1 << 20;

}  // namespace

void CopyQueue::Batch::CallDone() const {
  for (const Entry& entry : entries) entry.done();
}

void CopyQueue::Add(Entry entry) {
  {
    ps::MutexLock lock(&mu_);
    waiting_.push_back(std::move(entry));
    if (taken_) return PS_PROBE(kCopyLeft);
    taken_ = true;
  }
  for (Batch batch; TakeBatch(&batch); batch = Batch()) Give(std::move(batch));
}

bool CopyQueue::Leave(Entry* entry) {
  ps::MutexLock lock(&mu_);
  if (!taken_) return false;
  PS_PROBE(kCopyLeft);
  waiting_.push_back(std::move(*entry));
  return true;
}

bool CopyQueue::TakeBatch(Batch* batch) {
  ps::MutexLock lock(&mu_);
  BPS_INVARIANT_NOTED("one thread at a time gives copies", taken_, "nobody had begun to");
  while (!waiting_.empty()) {
    const size_t bytes = waiting_.front().copy.bytes;
    if (!batch->entries.empty() && batch->bytes + bytes > kMostBytes) break;
    batch->bytes += bytes;
    batch->entries.splice(batch->entries.end(), waiting_, waiting_.begin());
  }
  taken_ = !batch->entries.empty();
  return taken_;
}

void CopyQueue::Give(Batch batch) noexcept {
  // The text is made in advance, because there may be no memory for it later.
  static const std::string kNoMemory =
      "this process is out of memory: it cannot copy between a GPU and memory";
  std::shared_ptr<Batch> given;
  std::string failure;
  const std::string* error = &failure;
  try {
    given = std::make_shared<Batch>();
    std::swap(*given, batch);
    AwaitOrCall(given);
  } catch (const std::bad_alloc&) {
    error = &kNoMemory;
  } catch (const std::exception& e) {
    failure = e.what();
  }
  for (const Entry& entry : given ? given->entries : batch.entries) TellBegun(entry, *error);
}

void CopyQueue::TellBegun(const Entry& entry, const std::string& error) {
  try {
    entry.begun(error);
  } catch (const std::exception& e) {
    BPS_LOG(ERROR) << "a copy between a GPU and memory: " << e.what();
  }
}

void CopyQueue::AwaitOrCall(const std::shared_ptr<const Batch>& batch) {
  std::vector<Copy> copies;
  for (const Entry& entry : batch->entries) copies.push_back(entry.copy);
  DeviceCopies* const device = DeviceCopies::Of(device_);
  const DeviceMoment copied = device->Enqueue(lane_, copies);
  const auto done = [batch] { batch->CallDone(); };
  if (batch->bytes > kMostBytes) return device->CallAfter(lane_, copied, done);
  if (device->AwaitOrCallAfter(lane_, copied, done)) done();
}

}  // namespace core
}  // namespace byteps
