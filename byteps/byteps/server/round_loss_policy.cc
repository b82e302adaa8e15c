#include "byteps/server/round_loss_policy.h"

#include "byteps/base/invariant.h"
#include "byteps/server/rounds.h"

namespace byteps {
namespace core {
namespace {

std::string WaitedFor(const std::string& reason, const Declaration& declaration) {
  return reason + " while the push_pull of '" + declaration.name + "' waited for it";
}

}  // namespace

void RoundLossPolicy::OnPush(Partition* partition, Round* round) {
  const Declaration& declaration = partition->declaration();
  for (const auto& [rank, reason] : gone_) {
    const int lost = declaration.MemberIndex(rank);
    if (round->done || lost < 0 || round->pushed[lost]) continue;
    PS_PROBE(kRoundAfterLost);
    rounds_->Fail(partition, round, WaitedFor(reason, declaration));
  }
}

void RoundLossPolicy::OnWorkerGone(int rank, const std::string& reason) {
  gone_[rank] = reason;
  for (Partition* partition : rounds_->WithOpenRounds()) {
    const Declaration& declaration = partition->declaration();
    const int member = declaration.MemberIndex(rank);
    if (member < 0) continue;
    for (auto& round : partition->rounds) {
      if (round.done || round.pushed[member]) continue;
      PS_PROBE(kRoundOfLost);
      rounds_->Fail(partition, &round, WaitedFor(reason, declaration));
    }
    rounds_->DropDone(partition);
  }
}

}  // namespace core
}  // namespace byteps
