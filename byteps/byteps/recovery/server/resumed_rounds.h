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

// Continues rounds of a lost server on its successor.
//
// The successor learns of sums in two ways: members give them (GivenSums), or a backup has a copy
// of the state that they produced (CopiedRounds). Sums of both origins are treated alike. If a
// member pushes a round with such a sum, it is missing the answer, and gets it. A member that has
// the answer pushes the next round, which is summed as usual. Earlier rounds are over.
class ResumedRounds {
 public:
  ResumedRounds(ServerContext* context, Rounds* rounds, const AbsentMembers* absent)
      : context_(context), rounds_(rounds), absent_(absent) {}

  // Skips this tensor's rounds before `first_round`: all members have ended these rounds.
  void GoOnFrom(const DeclaredTensor* tensor, uint32_t first_round);
  // Answers a push to a round that the lost server has summed. Returns false if the round has none.
  bool Answers(Partition* partition, const Message& push, int64_t received);

  // Marks a round as one whose sum the lost server has made: every member has pushed the round, or
  // is missing in its sum (`lacks`).
  static void Resume(Round* round, size_t members, std::vector<bool> lacks);
  // Gives a partition without rounds its last complete round.
  static void Restore(Partition* partition, UpdatedRound last);

 private:
  ServerContext* const context_;
  Rounds* const rounds_;
  const AbsentMembers* const absent_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_RESUMED_ROUNDS_H_
