#ifndef BYTEPS_ENGINE_ENGINE_CONTEXT_H_
#define BYTEPS_ENGINE_ENGINE_CONTEXT_H_

#include <memory>

#include "byteps/base/config.h"
#include "byteps/cluster/channel.h"
#include "byteps/cluster/vacancies.h"
#include "byteps/device/copy_queues.h"
#include "byteps/device/pinned_pool.h"
#include "byteps/engine/loss_policy.h"
#include "byteps/engine/missing_ranks.h"
#include "byteps/engine/operation_trace.h"
#include "byteps/engine/operations.h"
#include "byteps/engine/push_scheduler.h"
#include "byteps/engine/requests.h"
#include "byteps/engine/small_sums.h"
#include "byteps/engine/speed_meter.h"
#include "byteps/engine/streamed_sums.h"
#include "byteps/observe/metrics.h"

namespace byteps {
namespace core {

// State that the parts of one engine share.
struct EngineContext {
  EngineContext(const Config& config, const Launch& launch, int num_servers,
                std::unique_ptr<Channel> how, std::unique_ptr<LossPolicy> policy,
                WorkerCounters* counted, SpeedMeter* speed);

  // Makes the message for a partition's request, and records the request until its answer.
  Message MakeRequestMessage(Request request);

  Plan plan;
  const double op_timeout_s;
  // Pools of pinned memory for GPU tensors: for partitions in flight, for streamed sums, and for
  // small sums. All jobs of this process share the pools; each job counts its demand anew.
  PinnedPool* const pool;
  PinnedPool* const pool_for_streamed;
  PinnedPool* const pool_for_small;
  const std::unique_ptr<Channel> channel;
  WorkerCounters* const counters;
  Operations operations;
  Requests requests;
  MissingRanks missing;
  const std::unique_ptr<LossPolicy> losses;
  Vacancies vacancies;
  CopyQueues copies;
  StreamedSums streamed;
  SmallSums small;
  // The engine shares these with callbacks of the device and the transport, which may outlive it.
  const std::shared_ptr<PushScheduler> scheduler;
  const std::shared_ptr<OperationTrace> trace;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_ENGINE_CONTEXT_H_
