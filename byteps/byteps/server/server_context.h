#ifndef BYTEPS_SERVER_SERVER_CONTEXT_H_
#define BYTEPS_SERVER_SERVER_CONTEXT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "byteps/base/config.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/cluster/channel.h"
#include "byteps/observe/lateness.h"
#include "byteps/observe/metrics.h"
#include "byteps/observe/trace.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"

namespace byteps {
namespace core {

// State that the parts of a server share. Thread-safe.
struct ServerContext {
  // `channel` outlives this.
  ServerContext(const Config& config, Channel* channel);

  // Answers a caller. `error`: why the request failed, or "". `values`: values of the whole
  // partition, of which the caller gets the range that it wants. `note`: body of the answer.
  void Answer(const Caller& caller, uint64_t key, const std::string& error,
              const SharedBytes* values = nullptr, const std::string& note = "");
  void Refuse(const Message& request, const std::string& error);
  // Refuses a request whose op this version does not know.
  void RefuseUnknown(const Message& request);

  // Records a round's pushes in the timeline. `answered`: whether their callers are answered now;
  // otherwise they never are.
  void TraceRound(const Partition& partition, const Round& round, bool answered);
  // Records the addition of a push in the timeline.
  void TraceAddition(const Partition& partition, const Round& round, const Caller& caller,
                     int track);

  Channel* const channel;
  const bool deterministic;
  const bool wide_float32;
  ServerCounters counters;
  Lateness lateness;
  std::atomic<size_t> open_rounds{0};    // number of rounds that only some members have pushed
  const std::unique_ptr<Tracer> tracer;  // null: nothing is traced
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_SERVER_CONTEXT_H_
