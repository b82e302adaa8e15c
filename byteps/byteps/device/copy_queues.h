#ifndef BYTEPS_DEVICE_COPY_QUEUES_H_
#define BYTEPS_DEVICE_COPY_QUEUES_H_

#include <map>
#include <memory>
#include <utility>

#include "byteps/base/mutex.h"
#include "byteps/device/copy_queue.h"
#include "byteps/device/device_copies.h"

namespace byteps {
namespace core {

// Copy queues of all devices.
class CopyQueues {
 public:
  CopyQueue* Of(int device, CopyLane lane);

 private:
  ps::Mutex mu_;
  std::map<std::pair<int, CopyLane>, std::unique_ptr<CopyQueue>> queues_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_COPY_QUEUES_H_
