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
// A member that has the sum of a round gives it to this server, and other members push. So if a
// present member has the sum, the round cannot end by pushes alone.
class GivenSums {
 public:
  GivenSums(ServerContext* context, Rounds* rounds, Confirmations* confirmations,
            const AbsentMembers* absent)
      : context_(context), rounds_(rounds), confirmations_(confirmations), absent_(absent) {}

  // Takes a round's sum from a member, or the notice that the member had only a part of it. After a
  // notice, returns the round if it is open; the caller then checks whether it must end. Otherwise
  // returns null.
  Round* Take(Partition* partition, Message* message);
  // Confirms to the member that this server has its sum. Only then does the member push later
  // rounds.
  void Acknowledge(Partition* partition, const Message& message);
  // Adds notes to the answer, for callers that keep the round's sum.
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
