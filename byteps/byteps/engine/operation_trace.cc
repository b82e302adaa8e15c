#include "byteps/engine/operation_trace.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/process.h"

namespace byteps {
namespace core {
namespace {

// Time for the GPU to complete its last copies. Later copies are missing in the trace.
constexpr auto kPatience = std::chrono::seconds(1);

}  // namespace

OperationTrace::OperationTrace(std::unique_ptr<Tracer> tracer, int rank)
    : tracer_(std::move(tracer)), rank_(rank) {
  if (!tracer_) return;
  tracer_->Begin(Role::kWorker, rank);
  to_host_.name = "copies from the GPU";
  to_device_.name = "copies to the GPU";
}

int OperationTrace::AddTrack(const std::string& name) {
  return tracer_ ? tracer_->AddThread(name) : 0;
}

void OperationTrace::Begin(Operation* operation) {
  if (!tracer_ || !operation->tensor || !tracer_->Wants(operation->round)) return;
  operation->times = std::vector<PartitionTimes>(operation->tensor->declaration.NumPartitions());
  const int64_t now = SteadyNs();
  for (PartitionTimes& times : operation->times) times.queued = now;
}

TracedPartition OperationTrace::Traced(const Operation& operation, uint64_t index) const {
  const Tensor& tensor = *operation.tensor;
  return {tensor.declaration.name,
          tensor.key + index,
          index,
          operation.round,
          rank_,
          tensor.declaration.PartitionSize(index)};
}

void OperationTrace::Slice(const Operation& operation, uint64_t index, int track, const char* name,
                           int64_t begin, TraceArrow arrow) {
  if (operation.times.empty()) return;
  tracer_->AddSlice(Traced(operation, index), track, name, begin, arrow);
}

void OperationTrace::Expect(const Operation& operation) {
  if (operation.times.empty()) return;
  ps::MutexLock lock(&mu_);
  ++expected_;
}

void OperationTrace::Told(const Operation& operation) {
  if (operation.times.empty()) return;
  ps::MutexLock lock(&mu_);
  --expected_;
  cond_.NotifyAll();
}

void OperationTrace::CopySlice(const Operation& operation, uint64_t index, bool to_host,
                               int64_t enqueued) {
  if (operation.times.empty()) return;
  Copies& copies = to_host ? to_host_ : to_device_;
  const int64_t before = copies.last_done.exchange(SteadyNs());
  // The track is made on first use, because a worker of CPU tensors needs none.
  std::call_once(copies.made, [&] { copies.track = AddTrack(copies.name); });
  tracer_->AddSlice(Traced(operation, index), copies.track, "copy", std::max(enqueued, before),
                    TraceArrow::kNone);
  Told(operation);
}

void OperationTrace::Row(const Operation& operation, uint64_t index, int64_t done) {
  if (operation.times.empty()) return;
  const PartitionTimes& times = operation.times[index];
  std::vector<TraceStage> stages;
  if (operation.on_gpu()) stages.push_back({"compute", times.ready});
  if (operation.is_copied_by_caller()) stages.push_back({"copy from GPU", times.ready});
  stages.push_back({"queue", times.taken});
  if (operation.on_gpu()) stages.push_back({"copy from GPU", times.copied});
  // The transport may report that it has sent a message after the answer has arrived.
  const int64_t sent = times.sent;
  const bool told_late = times.answered != 0 && (sent == 0 || sent > times.answered);
  stages.push_back({"push", told_late ? times.answered : sent});
  stages.push_back({"server", times.answered});
  stages.push_back({"pull queue", times.pulling});
  stages.push_back({operation.on_gpu() ? "copy to GPU" : "pull", done});
  tracer_->AddRow(Traced(operation, index), times.queued, stages);
}

void OperationTrace::Write() {
  if (!tracer_) return;
  {
    ps::MutexLock lock(&mu_);
    // The wait is ended by the last slice; deadline: kPatience.
    cond_.WaitFor(&mu_, kPatience, [this]() PS_REQUIRES(mu_) { return expected_ == 0; });
  }
  tracer_->End();
}

}  // namespace core
}  // namespace byteps
