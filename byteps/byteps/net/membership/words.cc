#include "byteps/net/membership/words.h"

#include <algorithm>
#include <cstdio>

namespace ps {
namespace {

// Limit of nodes of one role. The scheduler counts through them, so larger claims are refused.
constexpr int kMaxNodes = 1 << 20;
// Limit of counters.
constexpr int kMaxCount = 1'000'000'000;
// Prefix of a worker's failure when other nodes are told of it.
constexpr char kFailed[] = "failed: ";

bool IsRank(int rank) { return rank >= 0 && rank < kMaxNodes; }
bool IsCount(int count) { return count >= 0 && count < kMaxCount; }

bool AreBits(const std::string& text, size_t count) {
  return text.size() == count && text.find_first_not_of("01") == std::string::npos;
}

bool AreTurns(const membership::Turns& turns) {
  return std::all_of(turns.begin(), turns.end(), [](const auto& entry) {
    return IsRank(entry.first) && IsCount(entry.second);
  });
}

}  // namespace

bool IsValid(const ReplicaView& view) {
  const size_t count = view.present.size();
  if (view.ready_epochs.size() != count || view.donors.size() != count || !IsCount(view.epoch) ||
      !AreBits(view.present, count) || !AreBits(view.waiting, count)) {
    return false;
  }
  if (count == 0) return true;
  return count > 1 && view.workers >= view.count() && view.workers <= kMaxNodes &&
         view.workers % view.count() == 0 &&
         std::all_of(view.ready_epochs.begin(), view.ready_epochs.end(), IsCount) &&
         std::all_of(view.donors.begin(), view.donors.end(),
                     [&](int donor) { return donor >= -1 && donor < view.count(); });
}

namespace membership {

bool IsValid(const Claim& claim) {
  return claim.workers <= kMaxNodes && claim.servers <= kMaxNodes && claim.link_mbps >= 0 &&
         claim.probe >= 0 && claim.probe <= kMaxNodes && claim.replicas >= 0;
}

int TurnOf(const Turns& turns, int rank) {
  const auto it = turns.find(rank);
  return it == turns.end() ? 0 : it->second;
}

bool IsVacant(const Turns& turns, int rank) { return TurnOf(turns, rank) % 2 == 1; }

bool IsValid(const Account& account) {
  return IsCount(account.scheduler_number) && (account.scheduler_number == 0 || account.job != 0) &&
         std::all_of(account.left.begin(), account.left.end(), IsRank) && AreTurns(account.turns);
}

std::string PackRegistration(const Registration& registration) {
  return "protocol=" + std::to_string(registration.claim.protocol) + " " + Pack(registration);
}

Registration ParseRegistration(const std::string& text) {
  Registration registration;
  int protocol = -1, end = 0;
  const bool is_told = sscanf(text.c_str(), "protocol=%9d%n", &protocol, &end) == 1;
  if (is_told && protocol == kProtocol) {
    const auto parsed = Parse<Registration>(text.substr(std::min<size_t>(end + 1, text.size())));
    if (parsed) {
      registration = *parsed;
    } else {
      protocol = -1;
    }
  }
  registration.claim.protocol = protocol;
  return registration;
}

bool IsValid(const Beginning& beginning) {
  return beginning.link_mbps >= 0 && AreTurns(beginning.turns);
}

bool IsValid(const Awaited& word) { return IsRank(word.rank) && IsCount(word.round); }
bool IsValid(const Late& word) { return IsRank(word.rank); }
bool IsValid(const ServerLost& word) {
  return IsRank(word.rank) && IsCount(word.turn) && word.turn % 2 == 1;
}
bool IsValid(const ServerReplaced& word) {
  return IsRank(word.rank) && IsCount(word.turn) && word.turn % 2 == 0 && word.servers > 0;
}
bool IsValid(const LeftKnown& word) { return IsRank(word.rank); }

Departure DepartureOf(const Leave& leave, bool errors_count) {
  if (const auto* stopped = std::get_if<Stopped>(&leave)) return {"was " + stopped->how};
  const Farewell& farewell = std::get<Farewell>(leave);
  if (!farewell.failure.empty()) return {kFailed + farewell.failure};
  if (errors_count && !farewell.error.empty()) return {kFailed + farewell.error};
  return {"", farewell.suspend};
}

}  // namespace membership
}  // namespace ps
