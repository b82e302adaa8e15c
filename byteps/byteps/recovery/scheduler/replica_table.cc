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
    Replica* const entry = &replicas_[i];
    entry->state = replicas[i].state;
    entry->ready_epoch = replicas[i].ready_epoch;
    entry->donor = replicas[i].donor;
    const bool changes = entry->state == State::kLeaving || entry->state == State::kJoining;
    // A node that reports an earlier ready epoch did not know this one.
    entry->epoch = changes ? epoch : entry->ready_epoch;
    entry->since = now;
    entry->ready.assign(ranks(), false);
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
  Replica* const entry = &replicas_[replica];
  if (entry->state != State::kAway) return;
  entry->state = State::kGathering;
  entry->since = now;
  entry->ready.assign(ranks(), false);
}

bool ReplicaTable::Ready(int rank) {
  Replica* const entry = &replicas_[Of(rank)];
  if (entry->state != State::kGathering) return false;
  entry->ready[rank % ranks()] = true;
  if (std::find(entry->ready.begin(), entry->ready.end(), false) != entry->ready.end())
    return false;
  entry->state = State::kWaiting;
  entry->ready_epoch = ++epoch_;
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
    Replica* const entry = &replicas_[i];
    if (entry->epoch > all) continue;
    if (entry->state == State::kLeaving) entry->state = State::kAway;
    if (entry->state != State::kJoining) continue;
    entry->donor = donor;
    entry->state = State::kPresent;
    ++epoch_;
    joined.push_back(i);
  }
  return joined;
}

ReplicaView ReplicaTable::View(bool to_servers) const {
  ReplicaView view;
  view.workers = workers_;
  view.epoch = epoch_;
  for (const Replica& entry : replicas_) {
    const bool present =
        entry.state == State::kPresent || (to_servers && entry.state == State::kJoining);
    view.present += present ? '1' : '0';
    const bool waiting = entry.state == State::kWaiting || entry.state == State::kJoining;
    view.waiting += waiting && !present ? '1' : '0';
    view.ready_epochs.push_back(entry.ready_epoch);
    view.donors.push_back(present && entry.state == State::kPresent ? entry.donor : -1);
  }
  return view;
}

}  // namespace ps
