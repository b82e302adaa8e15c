#include "byteps/recovery/worker/kept_sums.h"

#include <utility>

#include "byteps/device/pinned_pool.h"

namespace byteps {
namespace core {

KeptSums::Sums::iterator KeptSums::Take(Server* server, Sums::iterator it,
                                        std::vector<KeptSum>* gone) {
  bytes_ -= it->second.values.size();
  server->serials.erase(it->second.serial);
  gone->push_back(std::move(it->second));
  return server->sums.erase(it);
}

void KeptSums::Keep(int server, KeptSum sum) {
  const Key key(sum.tensor->key + sum.index, sum.round);
  ps::MutexLock lock(&mu_);
  bytes_ += sum.values.size();
  if (sum.serial > 0) servers_[server].serials[sum.serial] = key;
  servers_[server].sums[key] = std::move(sum);
}

void KeptSums::Drop(int server, const Tensor& tensor, uint64_t index, uint32_t before) {
  std::vector<KeptSum> gone;  // destroyed after the lock is released
  ps::MutexLock lock(&mu_);
  Server& its = servers_[server];
  const uint64_t key = tensor.key + index;
  for (auto it = its.sums.lower_bound({key, 0});
       it != its.sums.end() && it->first < Key(key, before);) {
    it = Take(&its, it, &gone);
  }
}

void KeptSums::DropBefore(int server, uint64_t serial) {
  std::vector<KeptSum> gone;  // destroyed after the lock is released
  ps::MutexLock lock(&mu_);
  Server& its = servers_[server];
  while (!its.serials.empty() && its.serials.begin()->first < serial) {
    Take(&its, its.sums.find(its.serials.begin()->second), &gone);
  }
}

void KeptSums::SetSerial(int server, uint64_t partition, uint32_t round, uint64_t serial) {
  std::vector<KeptSum> gone;  // destroyed after the lock is released
  ps::MutexLock lock(&mu_);
  Server& its = servers_[server];
  const auto it = its.sums.find({partition, round});
  if (it == its.sums.end()) return;
  if (serial == 0) {
    Take(&its, it, &gone);
  } else {
    its.serials[serial] = it->first;
    it->second.serial = serial;
  }
}

void KeptSums::ForgetSerials(int server) {
  ps::MutexLock lock(&mu_);
  servers_[server].serials.clear();
  for (auto& entry : servers_[server].sums) entry.second.serial = 0;
}

void KeptSums::DropAll(int server, const Tensor& tensor) {
  std::vector<KeptSum> gone;  // destroyed after the lock is released
  ps::MutexLock lock(&mu_);
  Server& its = servers_[server];
  const auto end = its.sums.upper_bound({tensor.key + kMaxPartitions - 1, UINT32_MAX});
  for (auto it = its.sums.lower_bound({tensor.key, 0}); it != end;) it = Take(&its, it, &gone);
}

std::vector<KeptSum> KeptSums::Of(int server) {
  std::vector<KeptSum> sums;
  ps::MutexLock lock(&mu_);
  for (const auto& entry : servers_[server].sums) sums.push_back(entry.second);
  return sums;
}

bool KeptSums::Has(int server) {
  ps::MutexLock lock(&mu_);
  return !servers_[server].sums.empty();
}

uint64_t KeptSums::bytes() {
  ps::MutexLock lock(&mu_);
  return bytes_;
}

}  // namespace core
}  // namespace byteps
