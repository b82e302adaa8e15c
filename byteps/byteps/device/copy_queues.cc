#include "byteps/device/copy_queues.h"

#include "byteps/device/copy_queue.h"
#include "byteps/device/device_copies.h"

namespace byteps {
namespace core {

CopyQueue* CopyQueues::Of(int device, CopyLane lane) {
  ps::MutexLock lock(&mu_);
  auto& queue = queues_[{device, lane}];
  if (!queue) queue = std::make_unique<CopyQueue>(device, lane);
  return queue.get();
}

}  // namespace core
}  // namespace byteps
