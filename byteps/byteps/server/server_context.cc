#include "byteps/server/server_context.h"

#include "byteps/base/process.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"

namespace byteps {
namespace core {
namespace {

TracedPartition Traced(const Partition& partition, const Round& round, const Caller& caller) {
  const Declaration& d = partition.declaration();
  return {d.name,       partition.key, partition.index,
          round.number, caller.rank,   d.PartitionSize(partition.index)};
}

}  // namespace

ServerContext::ServerContext(const Config& config, Channel* how)
    : channel(how),
      deterministic(config.Bool("BYTEPS_DETERMINISTIC")),
      wide_float32(config.Bool("BYTEPS_SERVER_WIDE_FLOAT32")),
      tracer(Tracer::Make(config)) {}

void ServerContext::Answer(const Caller& caller, uint64_t key, const std::string& error,
                           const SharedBytes* values, const std::string& note) {
  Message message = MakeAnswer(caller.op, caller.rank, key, caller.request, error);
  if (values != nullptr && caller.bytes > 0) {
    message.SetValues(values->Part(caller.offset, caller.bytes));
  }
  if (!note.empty()) message.body = note;
  channel->Send(message);
}

void ServerContext::Refuse(const Message& request, const std::string& error) {
  counters.refused_requests.Add();
  Answer(Caller{request.peer, request.number, request.op}, request.key, error);
}

void ServerContext::RefuseUnknown(const Message& request) {
  Refuse(request, "the server does not know operation " + std::to_string(request.op) +
                      ": install the same byteps on every node");
}

void ServerContext::TraceRound(const Partition& partition, const Round& round, bool answered) {
  if (!tracer || !tracer->Wants(round.number)) return;
  const int64_t now = SteadyNs();
  for (const Caller& caller : round.callers) {
    tracer->AddRow(Traced(partition, round, caller), caller.received,
                   {{"receive queue", caller.taken},
                    {"add", caller.added},
                    {"other workers", answered ? round.last_added : 0},
                    {"answer", now}});
  }
}

void ServerContext::TraceAddition(const Partition& partition, const Round& round,
                                  const Caller& caller, int track) {
  if (!tracer || !tracer->Wants(round.number)) return;
  tracer->AddSlice(Traced(partition, round, caller), track, "add", caller.taken,
                   TraceArrow::kPasses);
}

}  // namespace core
}  // namespace byteps
