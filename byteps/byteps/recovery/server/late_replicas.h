#ifndef BYTEPS_RECOVERY_SERVER_LATE_REPLICAS_H_
#define BYTEPS_RECOVERY_SERVER_LATE_REPLICAS_H_

#include <cstddef>
#include <cstdint>
#include <set>

#include "byteps/cluster/vacancies.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"
#include "byteps/server/rounds.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

// Rounds of one thread that wait for late replicas (Patience, docs/design/replicas.md).
//
//   first ── quorum ──▶ quorum ── first word ──▶ awaited ── grace ──▶ accused ── 3 s ──▶ fails
//     └───────────────── as long as a sum may take ──────────────────────▶┘
//
// No replica counts as late while another server's rank is vacant, or while there is no scheduler.
// Afterwards the grace period, or the time limit of a sum, begins anew.
//
// Late replicas are accused if enough other replicas have pushed. In a group of more than two
// replicas, this happens kOthersFirst later.
class LateReplicas {
 public:
  LateReplicas(ServerContext* context, Rounds* rounds, const Vacancies* vacancies)
      : context_(context), rounds_(rounds), vacancies_(vacancies) {}

  // OnPush: the worker of `rank` has pushed a round. OnLost: the replica of that worker was
  // removed.
  void OnPush(Partition* partition, int rank);
  void OnLost(Partition* partition, int rank);
  // Allows accused replicas to be accused again.
  void Forget() { accused_.clear(); }
  // Starts the grace period of the late replicas if there is a quorum. Call after a push.
  void BeginGrace(Partition* partition, Round* round);
  // Returns whether late replicas may be waiting for a lost server. If so, the round is checked
  // again later.
  bool AreExcused(Partition* partition, Round* round, Round::Clock::time_point as_of);
  // Decides about a round at its deadline. Returns false if it fails.
  bool WaitOn(Partition* partition, Round* round, Round::Clock::time_point as_of);

 private:
  // Replicas of which all members have pushed, and replicas of which some members have not.
  struct Standing {
    std::set<uint32_t> pushed, late;
    size_t replicas = 0;  // replicas of the group, excused ones included
    bool anew = false;    // whether a late replica has not pushed any round of this partition
  };
  Standing StandingOf(const Partition& partition, const Round& round) const;
  // Asks the scheduler to remove the replicas that have not pushed.
  void Accuse(const Partition& partition, const Round& round, Round::Clock::time_point as_of);

  ServerContext* const context_;
  Rounds* const rounds_;
  const Vacancies* const vacancies_;
  std::set<uint32_t> accused_;  // removal was requested
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_LATE_REPLICAS_H_
