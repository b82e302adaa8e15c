#include "byteps/engine/kept_sums.h"

#include <algorithm>
#include <utility>

namespace byteps {
namespace core {

void KeptSums::Keep(int server, KeptSum sum) {
  const Key key(sum.tensor->key + sum.index, sum.round);
  ps::MutexLock lock(&mu_);
  bytes_ += sum.values.size();
  servers_[server][key] = std::move(sum);
}

void KeptSums::Drop(int server, const Tensor& tensor, uint64_t index, uint32_t before) {
  std::vector<KeptSum> gone;  // without the lock
  ps::MutexLock lock(&mu_);
  auto& sums = servers_[server];
  const uint64_t key = tensor.key + index;
  for (auto it = sums.lower_bound({key, 0}); it != sums.end() && it->first < Key(key, before);) {
    bytes_ -= it->second.values.size();
    gone.push_back(std::move(it->second));
    it = sums.erase(it);
  }
}

void KeptSums::DropAll(int server, const Tensor& tensor) {
  std::vector<KeptSum> gone;  // without the lock
  ps::MutexLock lock(&mu_);
  auto& sums = servers_[server];
  const auto end = sums.upper_bound({tensor.key + kMaxPartitions - 1, UINT32_MAX});
  for (auto it = sums.lower_bound({tensor.key, 0}); it != end; it = sums.erase(it)) {
    bytes_ -= it->second.values.size();
    gone.push_back(std::move(it->second));
  }
}

std::vector<KeptSum> KeptSums::Of(int server) {
  std::vector<KeptSum> sums;
  ps::MutexLock lock(&mu_);
  for (const auto& entry : servers_[server]) sums.push_back(entry.second);
  return sums;
}

uint64_t KeptSums::bytes() {
  ps::MutexLock lock(&mu_);
  return bytes_;
}

int ServerLoss::ServerOf(uint64_t turn) const {
  const auto found = std::find(turns.begin(), turns.end(), turn);
  return turn == 0 || found == turns.end() ? -1 : static_cast<int>(found - turns.begin());
}

}  // namespace core
}  // namespace byteps
