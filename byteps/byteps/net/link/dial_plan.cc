#include "byteps/net/link/dial_plan.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "byteps/base/error.h"

namespace ps {
namespace {

// A NIC that takes connections and loses what follows costs seconds each time.
constexpr auto kFirstLook = std::chrono::seconds(1);
constexpr auto kLongestLook = std::chrono::seconds(64);
constexpr auto kLasts = std::chrono::seconds(60);

}  // namespace

DialPlan::DialPlan(Clock::duration first, Clock::duration longest)
    : redial_(first, longest), look_(kFirstLook) {}

void DialPlan::Begin(std::vector<NicPair> pairs, int port, Clock::time_point deadline) {
  pairs_ = std::move(pairs);
  port_ = port;
  deadline_ = deadline;
  try {
    Resolve();
  } catch (const Error&) {  // the name may be known later
  }
}

void DialPlan::Add(const std::vector<NicPair>& pairs) {
  for (const NicPair& pair : pairs) {
    if (std::find(pairs_.begin(), pairs_.end(), pair) != pairs_.end()) continue;
    pairs_.push_back(pair);
    for (const Address& to : ps::Resolve(pair.to, port_)) routes_.push_back({pair.from, to, true});
  }
}

void DialPlan::Resolve() {
  std::vector<Route> routes;
  for (const NicPair& pair : pairs_) {
    for (const Address& to : ps::Resolve(pair.to, port_)) {
      routes.push_back({pair.from, to, &pair == &pairs_.front()});
    }
  }
  routes_ = std::move(routes);
}

void DialPlan::Restart(bool elsewhere) {
  redial_.Begin();
  if (!has_several_pairs()) {
    next_ = 0;
  } else if (elsewhere) {
    next_ = (next_ + 1) % routes_.size();
  }
  start_ = next_;
}

void DialPlan::GoHome() {
  redial_.Begin();
  start_ = next_ = 0;
}

const DialPlan::Route& DialPlan::Current() {
  if (routes_.empty()) Resolve();
  return routes_[next_];
}

DialPlan::Clock::time_point DialPlan::Failed(const std::string& error, bool nobody_listens,
                                             Clock::time_point now) {
  ++attempt_;
  redial_.Failed(error, nobody_listens, now);
  next_ = routes_.empty() ? 0 : (next_ + 1) % routes_.size();
  return next_ == start_ ? now + redial_.NextPause() : now;
}

DialPlan::Clock::time_point DialPlan::Postponed(const std::string& error, Clock::time_point now) {
  ++attempt_;
  redial_.Failed(error, false, now);
  redial_.Hurry();
  return now + redial_.NextPause();
}

void DialPlan::Succeeded(Clock::time_point now) {
  redial_.Succeeded();
  if (is_away()) {
    if (home_since_ != Clock::time_point() && now - home_since_ >= kLasts) look_ = kFirstLook;
    home_since_ = {};
  } else {
    home_since_ = now;
  }
}

DialPlan::Clock::duration DialPlan::NextLook() {
  const Clock::duration look = look_;
  look_ = std::min<Clock::duration>(2 * look_, kLongestLook);
  return look;
}

}  // namespace ps
