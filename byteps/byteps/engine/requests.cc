#include "byteps/engine/requests.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"

namespace byteps {
namespace core {
uint64_t Requests::Remember(Request request) {
  ps::MutexLock lock(&mu_);
  if (tracks_) open_[request.server].insert(last_ + 1);
  const bool is_new = by_number_.emplace(++last_, std::move(request)).second;
  BPS_INVARIANT("a request has a number of its own", is_new, "number " + std::to_string(last_));
  return last_;
}

bool Requests::Take(uint64_t number, Request* request) {
  ps::MutexLock lock(&mu_);
  const auto it = by_number_.find(number);
  if (it == by_number_.end()) {
    if (taken_back_.erase(number) > 0) return false;
    // Only Clear, when the job ends, drops requests without an answer.
    BPS_INVARIANT("a request is answered once", cleared_,
                  "request " + std::to_string(number) + " of " + std::to_string(last_) +
                      " was answered without being open");
    return false;
  }
  *request = std::move(it->second);
  by_number_.erase(it);
  if (tracks_) open_[request->server].erase(number);
  return true;
}

uint64_t Requests::FirstOpen(int server) {
  ps::MutexLock lock(&mu_);
  const std::set<uint64_t>& open = open_[server];
  return open.empty() ? last_ + 1 : *open.begin();
}

bool Requests::HasOpen(int server) {
  ps::MutexLock lock(&mu_);
  return !open_[server].empty();
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

std::vector<Request> Requests::TakeBack(int server) {
  std::map<uint64_t, Request> taken;
  {
    ps::MutexLock lock(&mu_);
    for (auto it = by_number_.begin(); it != by_number_.end();) {
      if (it->second.server != server) {
        ++it;
        continue;
      }
      taken_back_.insert(it->first);
      if (tracks_) open_[server].erase(it->first);
      taken[it->first] = std::move(it->second);
      it = by_number_.erase(it);
    }
  }
  std::vector<Request> requests;
  for (auto& entry : taken) requests.push_back(std::move(entry.second));
  return requests;
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
  std::unordered_map<uint64_t, Request> gone;  // destroyed after the lock is released
  ps::MutexLock lock(&mu_);
  cleared_ = true;
  gone.swap(by_number_);
}

}  // namespace core
}  // namespace byteps
