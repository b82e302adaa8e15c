// What the worker tells the timeline.
#include "byteps/engine/worker.h"

namespace byteps {
namespace core {

int Worker::AddTrack(const char* name, long number) {
  return tracer_ ? tracer_->AddThread(std::string(name) + " " + std::to_string(number)) : 0;
}

void Worker::StartTrace(Operation* operation, uint64_t partitions) {
  if (!tracer_ || !tracer_->Wants(operation->round)) return;
  operation->times = std::vector<Times>(partitions);
  const int64_t now = SteadyNs();
  for (Times& times : operation->times) times.queued = now;
}

TracedPartition Worker::Traced(const Task& task) const {
  const Declaration& d = task.operation->tensor->declaration;
  return {d.name,       d.Key() + task.index,       task.index, task.operation->round,
          launch_.rank, d.PartitionSize(task.index)};
}

void Worker::TraceRow(const Task& task, int64_t done) {
  const Times* times = TimesOf(task);
  if (times == nullptr) return;
  std::vector<TraceStage> stages = {{"queue", times->taken}};
  if (task.operation->staging != nullptr) stages.push_back({"copy from GPU", times->copied});
  // The transport may drop a sent message later than its answer comes.
  const int64_t sent = times->sent;
  const bool told_late = times->answered != 0 && (sent == 0 || sent > times->answered);
  stages.push_back({"push", told_late ? times->answered : sent});
  stages.push_back({"server", times->answered});
  stages.push_back({"pull queue", times->pulling});
  stages.push_back({"pull", done});
  tracer_->AddRow(Traced(task), times->queued, stages);
}

void Worker::TraceUnfinished() {
  if (!tracer_) return;
  for (const auto& entry : push_queue_) TraceRow(entry.second, 0);
  for (const auto& entry : pending_) {
    if (entry.second.task.operation) TraceRow(entry.second.task, 0);
  }
}

}  // namespace core
}  // namespace byteps
