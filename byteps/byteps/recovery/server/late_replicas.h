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

// Rounds of one thread that wait for replicas that are late (Patience, docs/design/replicas.md).
//
//   first ── quorum ──▶ quorum ── first word ──▶ awaited ── grace ──▶ accused ── 3 s ──▶ fails
//     └───────────────── as long as a sum may take ──────────────────────▶┘
//
// While the place of another server is vacant, or there is no scheduler to say so, nobody is late:
// the grace, or the time that a sum may take, begins anew once that is over.
//
// Those that are late are accused if enough of the others have pushed; kOthersFirst later in a
// group of more than two replicas.
class LateReplicas {
 public:
  LateReplicas(ServerContext* context, Rounds* rounds, const Vacancies* vacancies)
      : context_(context), rounds_(rounds), vacancies_(vacancies) {}

  // The worker of `rank` has pushed a round; its replica is removed, and may come again.
  void OnPush(Partition* partition, int rank);
  void OnLost(Partition* partition, int rank);
  // Lets replicas that were accused be accused again.
  void Forget() { accused_.clear(); }
  // A push came that completes a quorum, perhaps: the others have so long now.
  void BeginGrace(Partition* partition, Round* round);
  // Whether those that are late may wait for a server that is lost: the round is looked at later.
  bool AreExcused(Partition* partition, Round* round, Round::Clock::time_point as_of);
  // Decides on a round at its deadline.  False: it fails.
  bool WaitOn(Partition* partition, Round* round, Round::Clock::time_point as_of);

 private:
  // Replicas of which all members of the group have pushed, and of which some have not.
  struct Standing {
    std::set<uint32_t> pushed, late;
    size_t replicas = 0;  // in the group, also those that are excused
    bool anew = false;    // one that is late has pushed no round of this partition yet
  };
  Standing StandingOf(const Partition& partition, const Round& round) const;
  // Asks the scheduler to remove the replicas that have not pushed.
  void Accuse(const Partition& partition, const Round& round, Round::Clock::time_point as_of);

  ServerContext* const context_;
  Rounds* const rounds_;
  const Vacancies* const vacancies_;
  std::set<uint32_t> accused_;  // replicas that the scheduler was asked to remove
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_LATE_REPLICAS_H_
