#ifndef BYTEPS_RECOVERY_SERVER_GIVEN_SUMS_H_
#define BYTEPS_RECOVERY_SERVER_GIVEN_SUMS_H_

#include <cstdint>

#include "byteps/cluster/channel.h"
#include "byteps/recovery/server/absent_members.h"
#include "byteps/recovery/server/confirmations.h"
#include "byteps/server/partition.h"
#include "byteps/server/round_loss_policy.h"
#include "byteps/server/rounds.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

// Sums that members keep, and sums of a lost server that members give to this one.
//
// For each round a member either gives the sum to this server, or pushes. So no round can end by
// pushes alone while a present member has the round's sum.
class GivenSums {
 public:
  GivenSums(ServerContext* context, Rounds* rounds, Confirmations* confirmations,
            const AbsentMembers* absent)
      : context_(context), rounds_(rounds), confirmations_(confirmations), absent_(absent) {}

  // Takes a round's sum from a member, or the notice that the member had only a part of it. Returns
  // the round after a notice, if the round is open: the caller checks whether it must end.
  // Otherwise returns null.
  Round* Take(Partition* partition, Message* message);
  // Confirms to the member that its sum was taken. It pushes later rounds only after that.
  void Acknowledge(Partition* partition, const Message& message);
  // Completes the answer to callers that keep the round's sum.
  void Describe(Round* round, AnswerNotes* notes);

 private:
  ServerContext* const context_;
  Rounds* const rounds_;
  Confirmations* const confirmations_;
  const AbsentMembers* const absent_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_GIVEN_SUMS_H_
