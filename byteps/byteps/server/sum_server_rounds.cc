// How rounds begin, and how those end that have no sum.
#include <algorithm>
#include <cstdio>
#include <new>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/probe.h"
#include "byteps/base/text.h"
#include "byteps/server/sum_server.h"

namespace byteps {
namespace core {
namespace {

// A worker may be ahead of the others by as many rounds of a tensor as hold so many bytes, but by
// no fewer and no more rounds than these.
constexpr uint64_t kMaxBytesAhead = 1ull << 30;
constexpr uint64_t kLeastRoundsAhead = 16;
constexpr uint64_t kMostRoundsAhead = 1024;
// Of each partition.
constexpr size_t kFailuresKept = 16;
// After this process stood still.  Shorter than the grace of workers (engine_watch.cc), which would
// not know what is late.
constexpr ps::StallWatch::Duration kMostGrace = std::chrono::seconds(3);

}  // namespace

uint32_t Server::MaxRoundsAhead(const Declaration& declaration) {
  return static_cast<uint32_t>(
      std::clamp(kMaxBytesAhead / declaration.bytes, kLeastRoundsAhead, kMostRoundsAhead));
}

std::string Server::OutOfReach(const Partition& partition, int rank, uint32_t number) {
  const Declaration& declaration = partition.tensor->declaration;
  if (const auto failed = partition.failures.find(number); failed != partition.failures.end()) {
    return failed->second;
  }
  const std::string what = "worker " + std::to_string(rank) + " pushed round " +
                           std::to_string(number) + " of '" + declaration.name + "'";
  if (number < partition.first_round) return what + ", which is over";
  const uint32_t limit = MaxRoundsAhead(declaration);
  if (number - partition.first_round < limit) return what + " twice";
  return what + " while round " + std::to_string(partition.first_round) +
         " is open: of this tensor of " + std::to_string(declaration.bytes) +
         " bytes a worker may be " + std::to_string(limit) +
         " rounds ahead of the others; wait for earlier sums before starting more";
}

Server::Round* Server::FindRound(Engine* engine, Partition* partition, const PushHeader& header) {
  // Unsigned, so that a round before the first open one is far ahead as well.
  const uint32_t ahead = header.round - partition->first_round;
  if (ahead >= MaxRoundsAhead(partition->tensor->declaration)) return nullptr;
  if (partition->first_round == 0 && partition->rounds.empty())
    engine->partitions.push_back(partition);
  const size_t members = partition->tensor->declaration.group.size();
  if (ahead > 0 && partition->rounds.size() <= ahead) PS_PROBE(kRoundsOpen);
  while (partition->rounds.size() <= ahead) {
    Round round;
    round.number = partition->first_round + static_cast<uint32_t>(partition->rounds.size());
    round.pushed.resize(members);
    round.told.resize(members);
    round.started = Clock::now();
    round.timeout_s = header.timeout_ms / 1000.0;
    round.deadline = round.started + std::chrono::milliseconds(header.timeout_ms);
    partition->rounds.push_back(std::move(round));
    try {
      engine->open.emplace(DeadlineOf(*partition, partition->rounds.back()), partition);
    } catch (const std::bad_alloc&) {
      partition->rounds.pop_back();
      throw;
    }
    ++engine->open_rounds;
  }
  Round* const round = &partition->rounds[ahead];
  BPS_INVARIANT("rounds are numbered without a gap", round->number == header.round,
                "round " + std::to_string(round->number) + " where " +
                    std::to_string(header.round) + " belongs");
  return round;
}

void Server::GiveUpBefore(Engine* engine, Partition* partition, int rank, uint32_t number) {
  if (number <= partition->first_round) return;
  const Declaration& declaration = partition->tensor->declaration;
  const int member = declaration.MemberIndex(rank);
  const size_t ahead = number - partition->first_round;
  for (size_t i = 0; i < std::min(ahead, partition->rounds.size()); ++i) {
    Round* const round = &partition->rounds[i];
    if (round->told[member]) continue;
    if (!round->done) {
      PS_PROBE(kRoundGivenUp);
      FailRound(engine, partition, round,
                "worker " + std::to_string(rank) + " gave up round " +
                    std::to_string(round->number) + " of '" + declaration.name +
                    "', in which something of it failed, and went on");
    }
    round->pushed[member] = round->told[member] = true;
  }
}

void Server::FailWithoutThoseGone(Engine* engine, Partition* partition, Round* round) {
  const Declaration& declaration = partition->tensor->declaration;
  for (const auto& [rank, reason] : engine->gone) {
    const int lost = declaration.MemberIndex(rank);
    if (round->done || lost < 0 || round->pushed[lost]) continue;
    PS_PROBE(kRoundAfterLost);
    FailRound(engine, partition, round,
              reason + " while the push_pull of '" + declaration.name + "' waited for it");
  }
}

void Server::FailRoundsWithout(Engine* engine, int rank, const std::string& reason) {
  for (Partition* partition : engine->partitions) {
    const Declaration& declaration = partition->tensor->declaration;
    const int member = declaration.MemberIndex(rank);
    if (member < 0) continue;
    for (auto& round : partition->rounds) {
      if (round.done || round.pushed[member]) continue;
      PS_PROBE(kRoundOfLost);
      FailRound(engine, partition, &round,
                reason + " while the push_pull of '" + declaration.name + "' waited for it");
    }
    DropDoneRounds(partition);
  }
}

Server::Clock::time_point Server::EndOfGrace(const ps::StallWatch::Stall& stall) {
  return stall.ended + std::min(stall.length, kMostGrace);
}

void Server::NoteStall(Engine* engine) {
  const auto now = Clock::now();
  const auto stall = ps::StallWatch::Get()->LastStall(now);
  if (stall.ended == engine->stall.ended) return;
  engine->stall = stall;
  const auto left = EndOfGrace(stall) - now;
  if (left <= Clock::duration::zero()) return;
  BPS_LOG(INFO) << "server " << channel_->rank() << " stood still for "
                << Seconds(std::chrono::duration<double>(stall.length).count())
                << ": sums that are late have "
                << Seconds(std::chrono::duration<double>(left).count()) << " more";
}

Server::Clock::time_point Server::NextLook(const Engine& engine) {
  if (engine.open.empty()) return Clock::time_point::max();
  return std::max(std::get<0>(engine.open.begin()->first), EndOfGrace(engine.stall));
}

void Server::FailLateRounds(Engine* engine, Clock::time_point as_of) {
  if (engine->open.empty() || as_of < std::get<0>(engine->open.begin()->first)) return;
  NoteStall(engine);
  const auto grace_until = EndOfGrace(engine->stall);
  if (as_of < grace_until) return;
  while (!engine->open.empty()) {
    const auto& [deadline, key, number] = engine->open.begin()->first;
    if (as_of < deadline) return;
    PS_PROBE(kRoundLate);
    Partition* const partition = engine->open.begin()->second;
    const Declaration& declaration = partition->tensor->declaration;
    Round* const round = &partition->rounds[number - partition->first_round];
    char limit[96];
    snprintf(limit, sizeof(limit), "%.1f s (BYTEPS_OP_TIMEOUT_S=%g)",
             std::chrono::duration<double>(as_of - round->started).count(), round->timeout_s);
    std::string pause;
    if (round->started < grace_until) {
      pause = "; this server stood still for " +
              Seconds(std::chrono::duration<double>(engine->stall.length).count()) + " meanwhile";
    }
    FailRound(engine, partition, round,
              "push_pull of '" + declaration.name + "' timed out: partition " +
                  std::to_string(partition->index) + ", key " + Hex(partition->key) + ", " +
                  std::to_string(declaration.PartitionSize(partition->index)) +
                  " bytes, still lacks the push of " + MissingRanks(*partition, *round) +
                  " after " + limit + pause);
    DropDoneRounds(partition);
  }
}

std::string Server::MissingRanks(const Partition& partition, const Round& round) const {
  const auto& group = partition.tensor->declaration.group;
  std::string missing;
  for (size_t i = 0; i < group.size(); ++i) {
    if (round.pushed[i]) continue;
    missing += (missing.empty() ? "worker " : ", worker ") + std::to_string(group[i]);
  }
  return missing;
}

void Server::FailRound(Engine* engine, Partition* partition, Round* round,
                       const std::string& reason) {
  const Declaration& declaration = partition->tensor->declaration;
  counters_.failed_sums.Add();
  TraceRound(*partition, *round, false);
  for (const Caller& caller : round->callers) {
    CheckUntold(*partition, *round, declaration.MemberIndex(caller.rank));
    Answer(caller, partition->key, reason, nullptr);
    round->told[declaration.MemberIndex(caller.rank)] = true;
  }
  round->failure = reason;
  round->callers.clear();
  round->waiting.clear();
  engine->scratch.Return(std::move(round->wide));
  round->sum = round->spare = ps::SArray<char>();
  round->done = true;
  Close(engine, *partition, *round);
}

void Server::CheckUntold(const Partition& partition, const Round& round, int member) {
  PS_INVARIANT_NOTED("a round is answered once to each member", !round.told[member],
                     "round " + std::to_string(round.number) + " of '" +
                         partition.tensor->declaration.name + "', member " +
                         std::to_string(member));
}

void Server::DropDoneRounds(Partition* partition) {
  // A round stays until every member has its sum.  Of one that failed the reason is enough.
  while (!partition->rounds.empty()) {
    Round& round = partition->rounds.front();
    if (!round.done || (round.failure.empty() && !round.all_told())) return;
    if (!round.failure.empty() && !round.all_told()) {
      partition->failures[round.number] = std::move(round.failure);
      if (partition->failures.size() > kFailuresKept) {
        partition->failures.erase(partition->failures.begin());
      }
    }
    partition->rounds.pop_front();
    ++partition->first_round;
  }
}

Server::Deadline Server::DeadlineOf(const Partition& partition, const Round& round) {
  return {round.deadline, partition.key, round.number};
}

void Server::Close(Engine* engine, const Partition& partition, const Round& round) {
  const size_t closed = engine->open.erase(DeadlineOf(partition, round));
  PS_INVARIANT_NOTED("a round is closed once", closed == 1,
                     "round " + std::to_string(round.number) + " of '" +
                         partition.tensor->declaration.name + "' was not open");
  engine->open_rounds -= closed;
}

uint64_t Server::OpenRounds() const {
  uint64_t open = 0;
  for (const auto& engine : engines_) open += engine->open_rounds;
  return open;
}

}  // namespace core
}  // namespace byteps
