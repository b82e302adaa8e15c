#include "byteps/net/membership/roster_policy.h"

#include "byteps/net/membership/scheduled_job.h"
#include "byteps/net/membership/scheduler_membership.h"

namespace ps {

membership::Refusal RosterPolicy::Reconsider(membership::Refusal refusal,
                                             const Member* /*member*/) {
  return refusal;
}

void RosterPolicy::ChoosePlace(Node* /*server*/) {}

void RosterPolicy::OnArrival(const Member& /*member*/) {}

bool RosterPolicy::Gathers() { return false; }

bool RosterPolicy::HoldsBack(const Message& /*msg*/) { return false; }

bool RosterPolicy::IsExcused(int /*node_id*/) { return false; }

std::string RosterPolicy::AlsoFailed(int /*lost*/) { return ""; }

std::string RosterPolicy::WhyMayNotLeave(int /*node_id*/) { return ""; }

std::vector<Node> RosterPolicy::OnLeft(Member* worker) {
  scheduler_->Depart(worker->node);
  return {worker->node};
}

bool RosterPolicy::IsOver() {
  job_->AssertHeld();
  return job_->roster.AllWorkersLeft();
}

ReplicaView RosterPolicy::Replicas() { return {}; }

AwakeClock::time_point RosterPolicy::NextDue() { return Clock::time_point::max(); }

void RosterPolicy::OnReturn(const Node& node, const membership::Claim& claim,
                            const membership::Account& /*account*/) {
  membership::Refusal refusal = membership::CheckProtocol(claim);
  if (!refusal) {
    refusal = {
        "it is in a job that another scheduler began, and this one begins its own: set "
        "BYTEPS_SCHEDULER_RETURN_S on all nodes to go on with such a job"};
  }
  scheduler_->Refuse(node, refusal);
}

bool RosterPolicy::OnHeard(int /*node_id*/) { return true; }

bool RosterPolicy::HoldsFailure(int /*worker*/, const std::string& /*what*/) { return false; }

bool RosterPolicy::Judge(int /*accuser*/, const Node& /*accused*/, const std::string& /*reason*/) {
  return false;
}

bool RosterPolicy::Lose(int /*node_id*/, const std::string& /*reason*/) { return false; }

bool RosterPolicy::LoseLeaver(int /*node_id*/) { return false; }

}  // namespace ps
