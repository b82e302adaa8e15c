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
// The successor gets finished sums in two ways: from members (GivenSums), or as a backup's copy of
// the resulting state (CopiedRounds). It treats both alike. A member that pushes a round with such
// a sum lacks the answer, and gets it. A member that has the answer pushes the next round, which is
// summed as usual. Earlier rounds are over.
class ResumedRounds {
 public:
  ResumedRounds(ServerContext* context, Rounds* rounds, const AbsentMembers* absent)
      : context_(context), rounds_(rounds), absent_(absent) {}

  // Skips this tensor's rounds before `first_round`, because all members have ended them.
  void GoOnFrom(const DeclaredTensor* tensor, uint32_t first_round);
  // Answers a push to a round that the lost server has summed. Returns false if the round has no
  // such sum.
  bool Answers(Partition* partition, const Message& push, int64_t received);

  // Marks a round whose sum the lost server has made. Every member except those in `lacks` has
  // pushed the round.
  static void Resume(Round* round, size_t members, std::vector<bool> lacks);
  // Creates the last complete round in a partition without rounds.
  static void Restore(Partition* partition, UpdatedRound last);

 private:
  ServerContext* const context_;
  Rounds* const rounds_;
  const AbsentMembers* const absent_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_RESUMED_ROUNDS_H_
