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

// Sums that members keep, and those of a server that is lost, which they give to this one.
//
// Each member speaks of a round once: it gives its sum, or pushes it.  So none ends by pushes alone
// while a member that is there has its sum.
class GivenSums {
 public:
  GivenSums(ServerContext* context, Rounds* rounds, Confirmations* confirmations,
            const AbsentMembers* absent)
      : context_(context), rounds_(rounds), confirmations_(confirmations), absent_(absent) {}

  // A member has the sum of a round, or its part of it, and gives it.  Returns the round if there
  // is nothing more to come but parts; null: otherwise.
  Round* Take(Partition* partition, Message* message);
  // Tells the member that its sum was taken: only then it pushes what is to come behind that.
  void Acknowledge(Partition* partition, const Message& message);
  // Completes what callers that keep the round's sum are answered.
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
