#ifndef BYTEPS_RECOVERY_SCHEDULER_ROSTER_RECOVERY_H_
#define BYTEPS_RECOVERY_SCHEDULER_ROSTER_RECOVERY_H_

#include <string>
#include <vector>

#include "byteps/net/membership/roster_policy.h"
#include "byteps/net/membership/scheduled_job.h"
#include "byteps/recovery/scheduler/held_failure.h"
#include "byteps/recovery/scheduler/leavers.h"
#include "byteps/recovery/scheduler/replica_table.h"
#include "byteps/recovery/scheduler/replicas.h"
#include "byteps/recovery/scheduler/scheduler_return.h"
#include "byteps/recovery/scheduler/server_places.h"
#include "byteps/recovery/scheduler/trials.h"

namespace ps {

// Continues the job after nodes were lost, if the settings and the job's replicas allow that
// (docs/design/losses.md).
class RosterRecovery : public RosterPolicy {
 public:
  RosterRecovery(SchedulerMembership* scheduler, ScheduledJob* job);

  membership::Refusal Reconsider(membership::Refusal refusal, const Member* member) override;
  void ChoosePlace(Node* server) override { places_.Choose(server); }
  void OnComplete() override;
  void OnArrival(const Member& member) override;
  bool Gathers() override { return return_.gathers(); }
  bool HoldsBack(const Message& msg) override { return return_.HoldsBack(msg); }
  bool IsExcused(int node_id) override;
  std::string AlsoFailed(int lost) override { return failure_.Then(lost); }
  std::string WhyMayNotLeave(int node_id) override;
  std::vector<Node> OnLeft(Member* worker) override { return leavers_.OnLeft(worker); }
  bool IsOver() override { return leavers_.IsOver(); }
  void Clear() override;
  ReplicaView Replicas() override;
  Clock::time_point NextDue() override;

  void OnReturn(const Node& node, const membership::Claim& claim,
                const membership::Account& account) override;
  void OnBegun() override { replicas_.OnBegun(); }
  void OnNewcomer(const Node& node) override;
  bool OnHeard(int node_id) override { return trials_.Acquit(node_id); }
  void OnWord(int sender, const std::string& text) override;
  bool HoldsFailure(int worker, const std::string& what) override;
  bool Judge(int accuser, const Node& accused, const std::string& reason) override;
  bool Lose(int node_id, const std::string& reason) override;
  bool LoseLeaver(int node_id) override { return leavers_.Lose(node_id); }
  void LetGo(Clock::time_point now) override { leavers_.LetGo(now); }
  void OnJobFailed() override { leavers_.LetAllGo(); }
  void OnDue(Clock::time_point now) override;
  void OnBeat(Clock::time_point now) override;

 private:
  ReplicaTable table_ PS_GUARDED_BY(job_->mu);
  ServerPlaces places_;
  Leavers leavers_;
  ps::Replicas replicas_;
  Trials trials_;
  HeldFailure failure_;
  SchedulerReturn return_;
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_ROSTER_RECOVERY_H_
