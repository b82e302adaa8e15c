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

// Any thread may call anything.
struct ServerContext {
  // Answers by `channel`, which outlives this.
  ServerContext(const Config& config, Channel* channel);

  // An answer with an `error` says that the request failed.  `values`: all of what the caller wants
  // a part of.  `note`: what it says beside them.
  void Answer(const Caller& caller, uint64_t key, const std::string& error,
              const SharedBytes* values = nullptr, const std::string& note = "");
  void Refuse(const Message& request, const std::string& error);
  // Refuses a request of an operation that no server of this version knows.
  void RefuseUnknown(const Message& request);

  // Tells the timeline of a round's pushes, which were answered now or never.
  void TraceRound(const Partition& partition, const Round& round, bool answered);
  // Of one push: that it was added.
  void TraceAddition(const Partition& partition, const Round& round, const Caller& caller,
                     int track);

  Channel* const channel;
  const bool deterministic;
  const bool wide_float32;
  ServerCounters counters;
  Lateness lateness;
  std::atomic<size_t> open_rounds{0};    // that some members have pushed and others have not
  const std::unique_ptr<Tracer> tracer;  // null: nothing is traced
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_SERVER_CONTEXT_H_
