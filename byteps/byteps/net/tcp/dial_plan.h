// Where a connection dials, and when next: one address of the host after another at once, and the
// first again after a pause.
#ifndef BYTEPS_NET_TCP_DIAL_PLAN_H_
#define BYTEPS_NET_TCP_DIAL_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "byteps/net/link/redial.h"
#include "byteps/net/tcp/socket.h"

namespace ps {
namespace tcp {

// Of one thread at a time.
class DialPlan {
 public:
  using Clock = Redial::Clock;

  DialPlan();

  // Looks the name up: blocks.
  void Begin(const std::string& host, int port, Clock::time_point deadline);
  // The connection was there, and broke.
  void Restart();

  // The address to try now.  Throws Error while the name is not known.
  const Address& Current();
  // What is about an earlier attempt is not about this one.
  uint64_t attempt() const { return attempt_; }
  void NextAttempt() { ++attempt_; }

  // An attempt has failed; `nobody_listens`: its address says so.  Returns when to make the next.
  Clock::time_point Failed(const std::string& error, bool nobody_listens, Clock::time_point now);
  void Succeeded() { redial_.Succeeded(); }

  const Redial& redial() const { return redial_; }
  // Of the first connection.
  Clock::time_point deadline() const { return deadline_; }

 private:
  std::string host_;
  int port_ = 0;
  std::vector<Address> addresses_;
  size_t next_ = 0;
  uint64_t attempt_ = 0;
  Clock::time_point deadline_;
  Redial redial_;
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_DIAL_PLAN_H_
