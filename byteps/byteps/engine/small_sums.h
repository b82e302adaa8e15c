#ifndef BYTEPS_ENGINE_SMALL_SUMS_H_
#define BYTEPS_ENGINE_SMALL_SUMS_H_

#include <deque>

#include "byteps/base/mutex.h"
#include "byteps/device/device_copies.h"
#include "byteps/engine/operation.h"

namespace byteps {
namespace core {

// Keeps small sums that have arrived, with their memory, until the copies to the GPU are done.
class SmallSums {
 public:
  SmallSums() = default;
  // Leaves sums whose copies are not done to the driver, which frees them after the copies.
  ~SmallSums();
  SmallSums(const SmallSums&) = delete;
  SmallSums& operator=(const SmallSums&) = delete;

  // Adds a sum. Drops the oldest sums whose copies are done. `made`: the moment at which the copies
  // of the added sum are done.
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
