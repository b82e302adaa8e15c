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

// Members whose replicas were removed (docs/design/replicas.md), in the rounds of one thread.
//
// Pushes that these members have made still count. Rounds wait neither for their further pushes nor
// for their decisions about a step: they close without them.
class AbsentMembers {
 public:
  AbsentMembers(ServerContext* context, Rounds* rounds) : context_(context), rounds_(rounds) {}

  // Makes workers of these ranks absent, and all others present. Absent workers take part in no new
  // round. Returns ranks that are newly absent.
  std::vector<int> Set(const std::set<int>& ranks);
  bool Has(int rank) const { return ranks_.count(rank) > 0; }
  // Refuses a request of an absent worker. Returns false if the worker is present.
  bool Refuse(const Partition& partition, const Message& message) const;
  void OnBegin(const Partition& partition, Round* round) const;
  // ExcuseAll and Excuse make the round wait no longer for all absent members, or for the member of
  // `rank`.
  void ExcuseAll(Partition* partition, Round* round) const;
  void Excuse(Partition* partition, Round* round, int rank) const;
  // Closes a round that will get no more pushes. Its sum lacks the values of absent members.
  void CloseShort(Partition* partition, Round* round) const;
  // Returns whether the round will get no more pushes.
  static bool HasAll(const Round& round);

 private:
  ServerContext* const context_;
  Rounds* const rounds_;
  std::set<int> ranks_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_ABSENT_MEMBERS_H_
