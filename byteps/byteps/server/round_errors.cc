#include "byteps/server/round_errors.h"

#include <cstdio>

#include "byteps/base/log.h"
#include "byteps/base/process.h"
#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

uint32_t MostRoundsKept(const Declaration& declaration) { return 2 * declaration.MostRoundsOpen(); }

std::string OutOfReach(const Partition& partition, int rank, uint32_t number) {
  const Declaration& declaration = partition.declaration();
  if (const auto failed = partition.failures.find(number); failed != partition.failures.end()) {
    return failed->second;
  }
  const std::string what = "worker " + std::to_string(rank) + " pushed round " +
                           std::to_string(number) + " of '" + declaration.name + "'";
  if (number < partition.first_round) return what + ", which is over";
  const uint32_t limit = MostRoundsKept(declaration);
  if (number - partition.first_round < limit) return what + " twice";
  return what + " while round " + std::to_string(partition.first_round) +
         " is open: of this tensor of " + std::to_string(declaration.bytes) + " bytes at most " +
         std::to_string(limit) + " rounds are kept; install the same byteps on every node";
}

namespace {

std::string MissingRanks(const Partition& partition, const Round& round) {
  const auto& group = partition.declaration().group;
  std::string missing;
  for (size_t i = 0; i < group.size(); ++i) {
    if (round.pushed[i]) continue;
    missing += (missing.empty() ? "worker " : ", worker ") + std::to_string(group[i]);
  }
  return missing;
}

}  // namespace

std::string TimedOut(const Partition& partition, const Round& round, Round::Clock::time_point as_of,
                     Round::Clock::time_point grace_until, Round::Clock::duration stood_still) {
  const Declaration& declaration = partition.declaration();
  char limit[96];
  snprintf(limit, sizeof(limit), "%.1f s (BYTEPS_OP_TIMEOUT_S=%g)",
           std::chrono::duration<double>(as_of - round.started).count(), round.timeout_s);
  std::string pause;
  if (round.started < grace_until) {
    pause = "; this server stood still for " +
            Seconds(std::chrono::duration<double>(stood_still).count()) + " meanwhile";
  }
  return "push_pull of '" + declaration.name + "' timed out: partition " +
         std::to_string(partition.index) + ", key " + Hex(partition.key) + ", " +
         std::to_string(declaration.PartitionSize(partition.index)) +
         " bytes, still lacks the push of " + MissingRanks(partition, round) + " after " + limit +
         pause;
}

}  // namespace core
}  // namespace byteps
