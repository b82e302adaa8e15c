#include "byteps/engine/streamed_sums.h"

#include <algorithm>
#include <utility>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

bool Landing::is_done() const {
  const CurrentDevice current(device);
  return DeviceCopies::IsDone(made);
}

void Landing::MakeWait(DeviceStream stream) const {
  DeviceCopies::Of(device)->MakeWait(stream, made);
}

void StreamedSums::Add(const OperationPtr& operation) {
  ps::MutexLock lock(&mu_);
  Sweep();
  operations_.push_back(operation);
}

std::vector<OperationPtr> StreamedSums::TakeFailed() {
  std::vector<OperationPtr> failed;
  ps::MutexLock lock(&mu_);
  Sweep();
  for (auto& reference : operations_) {
    OperationPtr operation = reference.lock();
    if (operation && operation->is_done()) {
      failed.push_back(std::move(operation));
      reference.reset();
    }
  }
  return failed;
}

bool StreamedSums::empty() {
  ps::MutexLock lock(&mu_);
  Sweep();
  return operations_.empty();
}

void StreamedSums::Sweep() {
  const auto is_over = [](const std::weak_ptr<Operation>& one) {
    const OperationPtr operation = one.lock();
    return !operation || (operation->is_done() && operation->error().empty());
  };
  operations_.erase(std::remove_if(operations_.begin(), operations_.end(), is_over),
                    operations_.end());
}

}  // namespace core
}  // namespace byteps
