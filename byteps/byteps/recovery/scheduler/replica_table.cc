#include "byteps/recovery/scheduler/replica_table.h"

#include <algorithm>

namespace ps {

void ReplicaTable::Begin(int replicas, int workers) {
  workers_ = workers;
  epoch_ = 0;
  replicas_.assign(replicas, {});
  acknowledged_.clear();
}

void ReplicaTable::Restore(const std::vector<Past>& replicas, int workers, int epoch,
                           AwakeClock::time_point now) {
  Begin(static_cast<int>(replicas.size()), workers);
  epoch_ = epoch;
  for (int i = 0; i < count(); ++i) {
    Replica* const one = &replicas_[i];
    one->state = replicas[i].state;
    one->ready_epoch = replicas[i].ready_epoch;
    one->donor = replicas[i].donor;
    const bool changes = one->state == State::kLeaving || one->state == State::kJoining;
    // A node that reports an earlier ready epoch did not know this one.
    one->epoch = changes ? epoch : one->ready_epoch;
    one->since = now;
    one->ready.assign(ranks(), false);
  }
}

bool ReplicaTable::IsComing(int replica) const {
  const State state = replicas_[replica].state;
  return state == State::kGathering || state == State::kWaiting || state == State::kJoining;
}

void ReplicaTable::Lose(int replica) {
  replicas_[replica].state = State::kLeaving;
  replicas_[replica].epoch = ++epoch_;
}

void ReplicaTable::Arrive(int replica, AwakeClock::time_point now) {
  Replica* const one = &replicas_[replica];
  if (one->state != State::kAway) return;
  one->state = State::kGathering;
  one->since = now;
  one->ready.assign(ranks(), false);
}

bool ReplicaTable::Ready(int rank) {
  Replica* const one = &replicas_[Of(rank)];
  if (one->state != State::kGathering) return false;
  one->ready[rank % ranks()] = true;
  if (std::find(one->ready.begin(), one->ready.end(), false) != one->ready.end()) return false;
  one->state = State::kWaiting;
  one->ready_epoch = ++epoch_;
  return true;
}

bool ReplicaTable::Admit(int replica, int ready_epoch) {
  if (replica < 0 || replica >= count() || state(replica) != State::kWaiting) return false;
  if (replicas_[replica].ready_epoch != ready_epoch) return false;
  replicas_[replica].state = State::kJoining;
  replicas_[replica].epoch = ++epoch_;
  return true;
}

std::vector<int> ReplicaTable::Acknowledge(int server, int epoch, const std::vector<int>& servers) {
  int* const last = &acknowledged_[server];
  *last = std::max(*last, std::min(epoch, epoch_));
  int all = epoch_;
  for (const int id : servers) all = std::min(all, acknowledged_[id]);
  std::vector<int> joined;
  int donor = 0;
  while (donor < count() && state(donor) != State::kPresent) ++donor;
  if (donor == count()) donor = -1;
  for (int i = 0; i < count(); ++i) {
    Replica* const one = &replicas_[i];
    if (one->epoch > all) continue;
    if (one->state == State::kLeaving) one->state = State::kAway;
    if (one->state != State::kJoining) continue;
    one->donor = donor;
    one->state = State::kPresent;
    ++epoch_;
    joined.push_back(i);
  }
  return joined;
}

ReplicaView ReplicaTable::View(bool to_servers) const {
  ReplicaView view;
  view.workers = workers_;
  view.epoch = epoch_;
  for (const Replica& one : replicas_) {
    const bool present =
        one.state == State::kPresent || (to_servers && one.state == State::kJoining);
    view.present += present ? '1' : '0';
    const bool waiting = one.state == State::kWaiting || one.state == State::kJoining;
    view.waiting += waiting && !present ? '1' : '0';
    view.ready_epochs.push_back(one.ready_epoch);
    view.donors.push_back(present && one.state == State::kPresent ? one.donor : -1);
  }
  return view;
}

}  // namespace ps
