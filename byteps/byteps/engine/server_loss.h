#ifndef BYTEPS_ENGINE_SERVER_LOSS_H_
#define BYTEPS_ENGINE_SERVER_LOSS_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/engine/kept_sums.h"

namespace byteps {
namespace core {

struct ServerLoss {
  ServerLoss(bool keeps, bool has_backups, int num_servers)
      : keeps(keeps),
        has_backups(has_backups),
        held(num_servers),
        came(num_servers),
        turns(num_servers),
        gifts(num_servers),
        kept(num_servers) {}

  // Whether a server may be replaced.  If not, nothing of this is used.
  const bool keeps;
  // Whether another server has a copy of its state for optimizers.
  const bool has_backups;
  // To read: from before a request is remembered until it is sent, or not; and while an answer is
  // taken and kept.  So who holds it to write sees each partition in one place.
  ps::SharedMutex mu;
  std::vector<bool> held PS_GUARDED_BY(mu);  // by server: what is sent to it would be lost
  // By server that has come: the number of the requests by which it is told where this worker goes
  // on; which sums it is still to be given; and how many it was given and has not answered.
  struct Gifts {
    std::deque<KeptSum> waiting;
    size_t in_flight = 0;
  };
  std::vector<uint64_t> came PS_GUARDED_BY(mu);  // by server: the turn in which it came, 0 at first
  std::vector<uint64_t> turns PS_GUARDED_BY(mu);
  std::vector<Gifts> gifts PS_GUARDED_BY(mu);
  uint64_t last_turn PS_GUARDED_BY(mu) = 0;
  // To which these requests go; -1: to one that is lost by now.
  int ServerOf(uint64_t turn) const PS_REQUIRES_SHARED(mu);
  KeptSums kept;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_SERVER_LOSS_H_
