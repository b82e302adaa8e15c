#include "byteps/engine/requests.h"

#include <utility>

namespace byteps {
namespace core {

uint64_t Requests::Remember(Request request) {
  ps::MutexLock lock(&mu_);
  by_number_.emplace(++last_, std::move(request));
  return last_;
}

bool Requests::Take(uint64_t number, Request* request) {
  ps::MutexLock lock(&mu_);
  const auto it = by_number_.find(number);
  if (it == by_number_.end()) return false;
  *request = std::move(it->second);
  by_number_.erase(it);
  return true;
}

bool Requests::Peek(uint64_t number, Request* request) {
  ps::MutexLock lock(&mu_);
  const auto it = by_number_.find(number);
  if (it == by_number_.end()) return false;
  *request = it->second;
  return true;
}

bool Requests::KeepBlock(uint64_t number, PinnedBlock block) {
  ps::MutexLock lock(&mu_);
  const auto it = by_number_.find(number);
  if (it == by_number_.end()) return false;
  it->second.block.swap(block);
  return true;
}

std::vector<Request> Requests::All() {
  std::vector<Request> all;
  ps::MutexLock lock(&mu_);
  for (const auto& entry : by_number_) all.push_back(entry.second);
  return all;
}

size_t Requests::size() {
  ps::MutexLock lock(&mu_);
  return by_number_.size();
}

void Requests::Clear() {
  std::unordered_map<uint64_t, Request> gone;  // goes without the lock
  ps::MutexLock lock(&mu_);
  gone.swap(by_number_);
}

}  // namespace core
}  // namespace byteps
