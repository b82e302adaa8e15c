#ifndef BYTEPS_ENGINE_SMALL_SUMS_H_
#define BYTEPS_ENGINE_SMALL_SUMS_H_

#include <deque>

#include "byteps/base/mutex.h"
#include "byteps/device/device_copies.h"
#include "byteps/engine/operation.h"

namespace byteps {
namespace core {

// Small sums that have come, until the copies back are made: their memory stays as long.
class SmallSums {
 public:
  SmallSums() = default;
  // Leaves those whose copies are not made to the driver.
  ~SmallSums();
  SmallSums(const SmallSums&) = delete;
  SmallSums& operator=(const SmallSums&) = delete;

  // Lets go of those before it whose copies are made.
  void Add(const OperationPtr& operation, DeviceMoment made);

 private:
  struct Sum {
    OperationPtr operation;
    DeviceMoment made;
  };

  ps::Mutex mu_;
  std::deque<Sum> sums_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_SMALL_SUMS_H_
