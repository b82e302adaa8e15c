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

// The moment at which sums are in their tensors.
struct Landing {
  int device = kCpu;
  DeviceMoment made;

  bool is_done() const;
  void MakeWait(DeviceStream stream) const;
};

// Those that have not ended, for the thread that watches over them.
class StreamedSums {
 public:
  void Add(const OperationPtr& operation);
  // Those that have ended by an error are not named again.
  std::vector<OperationPtr> TakeFailed();
  bool empty();

 private:
  // Forgets those that have ended well.
  void Sweep() PS_REQUIRES(mu_);

  ps::Mutex mu_;
  std::vector<std::weak_ptr<Operation>> operations_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_STREAMED_SUMS_H_
