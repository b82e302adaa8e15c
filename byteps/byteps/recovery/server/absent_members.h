#ifndef BYTEPS_RECOVERY_SERVER_ABSENT_MEMBERS_H_
#define BYTEPS_RECOVERY_SERVER_ABSENT_MEMBERS_H_

#include <set>
#include <vector>

#include "byteps/cluster/channel.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"
#include "byteps/server/rounds.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

// Members whose replica was removed (docs/design/replicas.md), in the rounds of one thread.
//
// What one of them has pushed counts; what it has not, no round waits for: a round closes without
// it, and nobody waits to hear what it wants of a step.
class AbsentMembers {
 public:
  AbsentMembers(ServerContext* context, Rounds* rounds) : context_(context), rounds_(rounds) {}

  // Workers of these ranks take part in no round from now on, all others in each that begins.
  // Returns those who did before.
  std::vector<int> Set(const std::set<int>& ranks);
  bool Has(int rank) const { return ranks_.count(rank) > 0; }
  // Refuses what one of them asks.  False: the worker is none of them.
  bool Refuse(const Partition& partition, const Message& message) const;
  void OnBegin(const Partition& partition, Round* round) const;
  // Takes them, or this one, out of a round that has begun.
  void ExcuseAll(Partition* partition, Round* round) const;
  void Excuse(Partition* partition, Round* round, int rank) const;
  // The round will get no more pushes, and lacks those of some members.
  void CloseShort(Partition* partition, Round* round) const;
  // Whether no more pushes will come.
  static bool HasAll(const Round& round);

 private:
  ServerContext* const context_;
  Rounds* const rounds_;
  std::set<int> ranks_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_ABSENT_MEMBERS_H_
