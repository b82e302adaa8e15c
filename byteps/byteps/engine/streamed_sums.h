#ifndef BYTEPS_ENGINE_STREAMED_SUMS_H_
#define BYTEPS_ENGINE_STREAMED_SUMS_H_

#include <memory>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/device/device.h"
#include "byteps/device/device_copies.h"
#include "byteps/engine/operation.h"

namespace byteps {
namespace core {

// The moment at which the sums are in their tensors on a device.
struct Landing {
  int device = kCpu;
  DeviceMoment made;

  bool is_done() const;
  void MakeWait(DeviceStream stream) const;
};

// Streamed sums that have not ended. The engine watches them, because no thread waits for them.
class StreamedSums {
 public:
  void Add(const OperationPtr& operation);
  // Returns operations that failed since the last call.
  std::vector<OperationPtr> TakeFailed();
  bool empty();

 private:
  // Drops the operations that have succeeded.
  void Sweep() PS_REQUIRES(mu_);

  ps::Mutex mu_;
  std::vector<std::weak_ptr<Operation>> operations_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_STREAMED_SUMS_H_
