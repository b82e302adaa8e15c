// Declarations that the files of the Python module share.
#ifndef BYTEPS_TORCH_C_PARTS_H_
#define BYTEPS_TORCH_C_PARTS_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/engine/worker.h"

namespace byteps {
namespace core {

// Handles of ended operations, for the thread that completes futures in Python.
//
// Thread-safe. Engine threads push, and never wait for Python.
class EndedQueue {
 public:
  void Push(int64_t handle) {
    {
      ps::MutexLock lock(&mu_);
      ended_.push_back(handle);
    }
    cond_.NotifyAll();
  }

  // Blocks until operations have ended. Returns their handles in that order; none if Wake was
  // called.
  std::vector<int64_t> Await() {
    ps::MutexLock lock(&mu_);
    // The wait is ended by the end of an operation or Wake; deadline: none, the thread is idle.
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return woken_ || !ended_.empty(); });
    if (ended_.empty()) woken_ = false;
    return std::exchange(ended_, {});
  }

  void Wake() {
    {
      ps::MutexLock lock(&mu_);
      woken_ = true;
    }
    cond_.NotifyAll();
  }

 private:
  ps::Mutex mu_;
  ps::CondVar cond_;
  std::vector<int64_t> ended_ PS_GUARDED_BY(mu_);
  bool woken_ PS_GUARDED_BY(mu_) = false;
};

Worker* GetWorker();

// Ranks of a group, ascending; empty: all workers. This is a class, so that Python converts the
// ranks of a large group once, not for each push.
struct Ranks {
  RankGroup values;
};

// A spec as a tuple: name, dtype, bytes, bytes of the whole tensor if it is a piece, average,
// feedback, group, placement, device, in order.
using SpecTuple = std::tuple<std::string, std::string, uint64_t, uint64_t, bool, bool, Ranks,
                             std::optional<uint64_t>, int, bool>;

inline DType ParsedDType(const std::string& name) {
  DType dtype;
  if (!ParseDType(name, &dtype)) throw UsageError("tensors of " + name + " cannot be summed");
  return dtype;
}

inline TensorSpec Spec(const std::string& name, const std::string& dtype, uint64_t bytes,
                       uint64_t piece_of, bool average, bool feedback, const Ranks& group,
                       std::optional<uint64_t> placement, int device, bool in_order) {
  TensorSpec spec;
  spec.dtype = ParsedDType(dtype);
  spec.name = name;
  spec.bytes = bytes;
  spec.piece_of = piece_of;
  spec.average = average;
  spec.feedback = feedback;
  spec.group = group.values;
  spec.placement = placement;
  spec.device = device;
  spec.in_order = in_order;
  return spec;
}

// Tensor that is summed repeatedly. It is described once, and looked up once per job.
class KnownTensor {
 public:
  explicit KnownTensor(TensorSpec spec) : spec_(std::move(spec)) {}

  const TensorSpec& spec() const { return spec_; }
  // Starts an operation on this tensor, and returns its handle.
  int64_t PushPull(PushPullRequest request) const {
    request.tensor = spec_;
    TensorPtr known = Known();
    const TensorPtr before = known;
    const int64_t handle = GetWorker()->PushPull(request, &known);
    if (known != before) {
      ps::MutexLock lock(&mu_);
      known_ = std::move(known);
    }
    return handle;
  }

 private:
  TensorPtr Known() const {
    ps::MutexLock lock(&mu_);
    return known_;
  }

  const TensorSpec spec_;
  mutable ps::Mutex mu_;
  mutable TensorPtr known_ PS_GUARDED_BY(mu_);  // tensor of this job, or of an earlier one
};

// Defines the class UpdatedTensor, release, load_feedback and read_feedback; in c_update.cc.
void DefineUpdatedTensor(nanobind::module_* m);

// Defines the functions about replicas; in c_update.cc.
void DefineReplicas(nanobind::module_* m);

// Defines the function end_children_at_exit; in c_lib.cc.
void DefineChildren(nanobind::module_* m);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_TORCH_C_PARTS_H_
