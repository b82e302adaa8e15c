#ifndef BYTEPS_RECOVERY_SERVER_RESUMED_ROUNDS_H_
#define BYTEPS_RECOVERY_SERVER_RESUMED_ROUNDS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "byteps/cluster/channel.h"
#include "byteps/recovery/server/absent_members.h"
#include "byteps/recovery/server/copies.h"
#include "byteps/server/declared_tensor.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"
#include "byteps/server/rounds.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

// Continues the rounds of a lost server at the server that has its place.
//
// Both ways come here in which it learns of a sum: members give it (GivenSums), or a backup has a
// copy of the state that was made of it (CopiedRounds).  From then on they are alike.  A member
// that pushes a round with such a sum lacks the answer, and gets it; one that has the answer pushes
// the next round, which is summed.  Rounds before are over.
class ResumedRounds {
 public:
  ResumedRounds(ServerContext* context, Rounds* rounds, const AbsentMembers* absent)
      : context_(context), rounds_(rounds), absent_(absent) {}

  // All members have ended the rounds of this tensor before this one.
  void GoOnFrom(const DeclaredTensor* tensor, uint32_t first_round);
  // Answers a push whose round has such a sum.  False: it has none.
  bool Answers(Partition* partition, const Message& push, int64_t received);

  // A round has such a sum: all members have pushed it, or are among those that the sum lacks.
  static void Resume(Round* round, size_t members, std::vector<bool> lacks);
  // The partition, in which no round has begun, goes on with this one, which is complete.
  static void Restore(Partition* partition, UpdatedRound last);

 private:
  ServerContext* const context_;
  Rounds* const rounds_;
  const AbsentMembers* const absent_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_RESUMED_ROUNDS_H_
