#include "byteps/engine/small_sums.h"

#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/engine/staged_sum.h"

namespace byteps {
namespace core {

void SmallSums::Add(const OperationPtr& operation, DeviceMoment made) {
  std::vector<Sum> over;  // destroyed after the lock is released
  ps::MutexLock lock(&mu_);
  sums_.push_back({operation, std::move(made)});
  while (!sums_.empty() && DeviceCopies::IsDone(sums_.front().made)) {
    over.push_back(std::move(sums_.front()));
    sums_.pop_front();
  }
}

SmallSums::~SmallSums() {
  ps::MutexLock lock(&mu_);
  for (const auto& [operation, made] : sums_) {
    const PushPullRequest& request = operation->request;
    try {
      DeviceCopies::Of(request.tensor.device)->CallAfter(made, request.stream, [kept = operation] {
      });
    } catch (const Error&) {  // the device failed and may still read
      operation->staged->KeepMemory();
    }
  }
}

}  // namespace core
}  // namespace byteps
