#include "byteps/recovery/server/confirmations.h"

namespace byteps {
namespace core {

Confirmations::Hold Confirmations::Begin() {
  ps::MutexLock lock(&mu_);
  open_[++last_] = 1;
  return {this, last_};
}

void Confirmations::Answered(int rank, uint64_t request, uint64_t serial) {
  ps::MutexLock lock(&mu_);
  if (gone_.count(rank) > 0 || absent_.count(rank) > 0) return;
  if (answered_[rank].emplace(request, serial).second) ++open_[serial];
}

void Confirmations::Confirm(int rank, uint64_t before) {
  ps::MutexLock lock(&mu_);
  ConfirmLocked(rank, before);
}

void Confirmations::SetGone(int rank) {
  ps::MutexLock lock(&mu_);
  gone_.insert(rank);
  ConfirmLocked(rank, UINT64_MAX);
}

void Confirmations::SetAbsent(const std::set<int>& ranks) {
  ps::MutexLock lock(&mu_);
  absent_ = ranks;
  for (const int rank : ranks) ConfirmLocked(rank, UINT64_MAX);
}

void Confirmations::ConfirmLocked(int rank, uint64_t before) {
  const auto of_rank = answered_.find(rank);
  if (of_rank == answered_.end()) return;
  auto& requests = of_rank->second;
  while (!requests.empty() && requests.begin()->first < before) {
    CloseLocked(requests.begin()->second);
    requests.erase(requests.begin());
  }
}

uint64_t Confirmations::FirstOpen() {
  ps::MutexLock lock(&mu_);
  return open_.empty() ? last_ + 1 : open_.begin()->first;
}

void Confirmations::Close(uint64_t serial) {
  ps::MutexLock lock(&mu_);
  CloseLocked(serial);
}

void Confirmations::CloseLocked(uint64_t serial) {
  const auto it = open_.find(serial);
  if (it != open_.end() && --it->second == 0) open_.erase(it);
}

}  // namespace core
}  // namespace byteps
