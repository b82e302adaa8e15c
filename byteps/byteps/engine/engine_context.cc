#include "byteps/engine/engine_context.h"

#include <algorithm>
#include <string>
#include <utility>

#include "byteps/base/protocol.h"
#include "byteps/engine/staged_sum.h"

namespace byteps {
namespace core {
namespace {

using Use = PinnedPool::Use;

// Limit of pinned memory for small sums: for the one in flight, and for earlier ones whose copies
// are not done.
constexpr uint64_t kPinnedForSmall = 4 * StagedSum::kSmall;

PinnedPool* PoolForStreamed(uint64_t limit, uint64_t largest_partition) {
  const uint64_t largest = StagedSum::LargestBlock(limit, largest_partition);
  return PinnedPool::Shared(Use::kStreamedSums, limit, largest);
}

}  // namespace

EngineContext::EngineContext(const Config& config, const Launch& launch, int num_servers,
                             std::unique_ptr<Channel> how, std::unique_ptr<LossPolicy> policy,
                             WorkerCounters* counted, SpeedMeter* speed)
    : plan(config, launch, num_servers),
      op_timeout_s(config.Float("BYTEPS_OP_TIMEOUT_S")),
      pool(PinnedPool::Shared(Use::kPartitions, config.Int("BYTEPS_PINNED_BYTES"),
                              plan.largest_partition())),
      pool_for_streamed(
          PoolForStreamed(config.Int("BYTEPS_STREAMED_BYTES"), plan.largest_partition())),
      pool_for_small(PinnedPool::Shared(Use::kSmallSums, kPinnedForSmall, StagedSum::kSmall)),
      channel(std::move(how)),
      counters(counted),
      operations(counted, speed),
      losses(std::move(policy)),
      vacancies(channel.get()),
      scheduler(
          std::make_shared<PushScheduler>(num_servers, config.Int("BYTEPS_SERVER_WINDOW_BYTES"))),
      trace(std::make_shared<OperationTrace>(Tracer::Make(config), launch.rank)) {}

Message EngineContext::MakeRequestMessage(Request request) {
  const Operation& operation = *request.operation;
  const int op = operation.request.op;
  const Operation::Part wanted = operation.Wanted(request.index);
  PushHeader header;
  header.round = operation.round;
  // The tensor may already have dropped an operation that is failing right now.
  header.oldest = std::min(operation.tensor->oldest.load(), operation.round);
  if (operation.request.forgets_lost) header.flags |= PushHeader::kForgetLost;
  if (op == kPushPull) losses->Complete(&header, request.server);
  header.timeout_ms = static_cast<uint32_t>(std::min(op_timeout_s * 1000, 4e9));
  if (op != kLoadState && op != kPushNorm) {  // these two want no values
    header.pull_offset =
        static_cast<uint32_t>(wanted.offset - operation.Offered(request.index).offset);
    header.pull_bytes = static_cast<uint32_t>(wanted.bytes);
  }
  const int server = request.server;
  const uint64_t key = operation.tensor->key + request.index;
  std::string body = header.Pack() + operation.request.detail;
  return MakeRequest(op, server, key, requests.Remember(std::move(request)), std::move(body));
}

}  // namespace core
}  // namespace byteps
