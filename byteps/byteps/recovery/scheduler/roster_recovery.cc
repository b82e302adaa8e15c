#include "byteps/recovery/scheduler/roster_recovery.h"

#include <algorithm>

#include "byteps/net/link/admission.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

RosterRecovery::RosterRecovery(SchedulerMembership* scheduler, ScheduledJob* job)
    : RosterPolicy(scheduler, job),
      places_(scheduler, job, &table_,
              [this](int server) {
                leavers_.Forget(server);
                trials_.Forget(server);
              }),
      leavers_(scheduler, job, &table_, &places_),
      replicas_(scheduler, job, &table_, &places_, &leavers_),
      trials_(scheduler, job, &table_, &places_, &replicas_),
      failure_(scheduler, job),
      return_(scheduler, job, &table_, &places_, &replicas_, &leavers_) {}

membership::Refusal RosterRecovery::Reconsider(membership::Refusal refusal, const Member* member) {
  if (member != nullptr) return replicas_.WhyTaken(refusal, *member);
  // The server may come later, and replace a server that is lost by then.
  refusal.later = refusal.later || job_->settings.replace_servers_s > 0;
  return refusal;
}

void RosterRecovery::OnComplete() {
  job_->AssertHeld();
  const JobSize& size = job_->roster.expected();
  table_.Begin(std::max(size.replicas, 1), size.workers);
}

void RosterRecovery::OnArrival(const Member& member) {
  if (!places_.Fill(member.node.id)) replicas_.OnArrival(member);
}

bool RosterRecovery::IsExcused(int node_id) {
  return return_.Forget(node_id) || failure_.Includes(node_id);
}

std::string RosterRecovery::WhyMayNotLeave(int node_id) {
  return replicas_.IsComing(node_id) ? "left before its replica had joined" : "";
}

void RosterRecovery::Clear() {
  places_.Clear();
  leavers_.Clear();
  replicas_.Clear();
  trials_.Clear();
  failure_.Clear();
}

ReplicaView RosterRecovery::Replicas() {
  job_->AssertHeld();
  return table_.active() ? table_.View(false) : ReplicaView();
}

AwakeClock::time_point RosterRecovery::NextDue() {
  return std::min(trials_.NextDue(), failure_.due());
}

void RosterRecovery::OnReturn(const Node& node, const membership::Claim& claim,
                              const membership::Account& account) {
  if (job_->settings.scheduler_return_s > 0) return return_.OnReturn(node, claim, account);
  RosterPolicy::OnReturn(node, claim, account);
}

void RosterRecovery::OnNewcomer(const Node& node) {
  node.role == Node::SERVER ? places_.OnFilled(node) : replicas_.OnNewcomer(node);
}

void RosterRecovery::OnWord(int sender, const std::string& text) {
  const auto word = membership::Parse<membership::MemberWord>(text);
  if (!word) return;
  const auto* left = std::get_if<membership::LeftKnown>(&*word);
  if (left == nullptr) return replicas_.OnWord(sender, *word);
  if (IsServerId(sender)) leavers_.OnKnown(sender, left->rank);
}

bool RosterRecovery::HoldsFailure(int worker, const std::string& what) {
  return failure_.Hold(worker, what);
}

bool RosterRecovery::Judge(int accuser, const Node& accused, const std::string& reason) {
  if (accused.role == Node::SERVER) return trials_.AccuseServer(accuser, accused, reason);
  return accused.role == Node::WORKER && trials_.AccuseWorker(accuser, accused.id, reason);
}

bool RosterRecovery::Lose(int node_id, const std::string& reason) {
  return replicas_.Lose(node_id, reason) || places_.Lose(node_id, reason);
}

void RosterRecovery::OnDue(Clock::time_point now) {
  trials_.Condemn(now);
  failure_.Decide(now);
}

void RosterRecovery::OnBeat(Clock::time_point now) {
  const std::string reason = places_.ReasonToGiveUp(now);
  if (!reason.empty()) scheduler_->FailJob(reason);
  replicas_.CheckComing(now);
  leavers_.LetGo(now);
  return_.OnBeat(now);
}

}  // namespace ps
