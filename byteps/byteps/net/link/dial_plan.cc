#include "byteps/net/link/dial_plan.h"

#include <arpa/inet.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/link_outage.h"
#include "byteps/net/link/name_service.h"
#include "byteps/net/link/net_address.h"

namespace ps {
namespace {

// Limit of NIC pairs that a connection tries when its own pair fails: each try may take seconds.
constexpr size_t kMostTries = 8;

struct Bits {
  unsigned char bytes[sizeof(in6_addr)] = {};
  int count = 0;  // 0 if there is no address
};

Bits BitsOf(const std::string& address) {
  Bits bits;
  if (inet_pton(AF_INET, address.c_str(), bits.bytes) == 1) {
    bits.count = 32;
  } else if (inet_pton(AF_INET6, address.c_str(), bits.bytes) == 1) {
    bits.count = 128;
  }
  return bits;
}

bool SameSubnet(const Nic& a, const Nic& b) {
  const Bits x = BitsOf(a.address), y = BitsOf(b.address);
  if (x.count == 0 || x.count != y.count) return false;
  const int prefix = std::clamp(a.prefix, 0, x.count);
  for (int i = 0; i < prefix; ++i) {
    if (((x.bytes[i / 8] ^ y.bytes[i / 8]) >> (7 - i % 8) & 1) != 0) return false;
  }
  return prefix > 0;
}

using Indices = std::pair<size_t, size_t>;

std::vector<Indices> Pairs(const std::vector<Nic>& from, const std::vector<Nic>& to) {
  std::vector<Indices> own, near, all;
  for (size_t i = 0; i < from.size(); ++i) {
    for (size_t j = 0; j < to.size(); ++j) {
      all.emplace_back(i, j);
      if (from[i].address == to[j].address) own.emplace_back(i, j);
      if (SameSubnet(from[i], to[j])) near.emplace_back(i, j);
    }
  }
  if (!own.empty()) return own;
  return near.empty() ? all : near;
}

// Load of each NIC while connections are assigned to pairs of NICs.
class Loads {
 public:
  Loads(const std::vector<Nic>& from, const std::vector<Nic>& to)
      : from_(Costs(from)), to_(Costs(to)), from_load_(from.size()), to_load_(to.size()) {}

  // Returns the loads of the pair's two NICs if it gets one more connection: the higher load first.
  std::pair<double, double> With(const Indices& pair) const {
    const double a = from_load_[pair.first] + from_[pair.first];
    const double b = to_load_[pair.second] + to_[pair.second];
    return {std::max(a, b), std::min(a, b)};
  }
  void Add(const Indices& pair) {
    from_load_[pair.first] += from_[pair.first];
    to_load_[pair.second] += to_[pair.second];
  }

 private:
  // Returns the load that one connection adds to each NIC: the node's rate divided by the NIC's
  // rate. All loads are equal if a rate is unknown.
  static std::vector<double> Costs(const std::vector<Nic>& nics) {
    double sum = 0;
    bool known = true;
    for (const Nic& nic : nics) {
      sum += nic.mbps;
      known = known && nic.mbps > 0;
    }
    std::vector<double> costs;
    for (const Nic& nic : nics) {
      costs.push_back(known ? sum / nic.mbps : static_cast<double>(nics.size()));
    }
    return costs;
  }

  const std::vector<double> from_, to_;
  std::vector<double> from_load_, to_load_;
};

// Returns the pairs in the order in which a connection tries them when its own pair fails. Pairs
// that share no NIC with `own` come first, so that the second attempt avoids a failed NIC. The
// order starts `skip` pairs after `own`, so that connections of the same NIC fall back to different
// NICs.
std::vector<Indices> Tries(std::vector<Indices> pairs, size_t own, size_t skip) {
  const Indices first = pairs[own];
  pairs.erase(pairs.begin() + static_cast<ptrdiff_t>(own));
  if (!pairs.empty()) {
    const size_t begin = (own + skip) % pairs.size();
    std::rotate(pairs.begin(), pairs.begin() + static_cast<ptrdiff_t>(begin), pairs.end());
  }
  std::stable_partition(pairs.begin(), pairs.end(), [&](const Indices& pair) {
    return pair.first != first.first && pair.second != first.second;
  });
  std::vector<Indices> order = {first};
  order.insert(order.end(), pairs.begin(), pairs.end());
  order.resize(std::min(order.size(), kMostTries));
  return order;
}

}  // namespace

int LeastConnections(const std::vector<Nic>& from, const std::vector<Nic>& to) {
  if (from.empty() || to.empty()) return 1;
  return static_cast<int>(std::max(from.size(), to.size()));
}

std::vector<std::vector<NicPair>> PairNics(const std::vector<Nic>& from, const Node& peer,
                                           int count, int turn) {
  const NicPair any{"", peer.hostname};
  const std::vector<Nic>& to = peer.nics;
  const std::vector<Indices> pairs = Pairs(from, to);
  std::vector<std::vector<NicPair>> plan(count);
  if (pairs.empty() || (from.size() == 1 && to.size() == 1 && to[0].address == peer.hostname)) {
    for (auto& tries : plan) tries.push_back(any);
    return plan;
  }
  Loads loads(from, to);
  const auto first = static_cast<size_t>(std::max(turn, 0));
  for (int i = 0; i < count; ++i) {
    size_t best = first % pairs.size();
    for (size_t j = 1; j < pairs.size(); ++j) {
      const size_t other = (first + j) % pairs.size();
      if (loads.With(pairs[other]) < loads.With(pairs[best])) best = other;
    }
    loads.Add(pairs[best]);
    const size_t row = pairs.size() / from.size();
    for (const Indices& pair : Tries(pairs, best, (first + i) * row)) {
      plan[i].push_back({from[pair.first].address, to[pair.second].address});
    }
    plan[i].push_back(any);
  }
  return plan;
}

namespace {

// Pauses between probes. A probe costs seconds if the NIC accepts connections but loses later
// packets.
constexpr auto kFirstLook = std::chrono::seconds(1);
constexpr auto kLongestLook = std::chrono::seconds(64);
constexpr auto kLasts = std::chrono::seconds(60);

}  // namespace

DialPlan::DialPlan(Clock::duration first, Clock::duration longest)
    : redial_(first, longest), look_(kFirstLook) {}

void DialPlan::Begin(const std::vector<NicPair>& pairs, int port, Clock::time_point deadline) {
  for (const NicPair& pair : pairs) pairs_.push_back({pair, pairs_.empty()});
  port_ = port;
  deadline_ = deadline;
  MakeRoutes();
  LookUp();
}

void DialPlan::Add(const std::vector<NicPair>& pairs) {
  for (const NicPair& pair : pairs) {
    const auto same = [&pair](const Pair& one) { return one.ends == pair; };
    if (std::none_of(pairs_.begin(), pairs_.end(), same)) pairs_.push_back({pair, true});
  }
  MakeRoutes();
}

void DialPlan::LookUp() {
  if (lookup_) return;
  std::set<std::string> names;
  for (const Pair& pair : pairs_) {
    if (!IsNumeric(pair.ends.to)) names.insert(pair.ends.to);
  }
  if (!names.empty()) lookup_.emplace(names, port_);
}

void DialPlan::TakeNames() {
  if (!lookup_ || !lookup_->Take(&names_, &unknown_)) return;
  lookup_.reset();
  MakeRoutes();
}

void DialPlan::MakeRoutes() {
  std::vector<Route> routes;
  for (const Pair& pair : pairs_) {
    const auto named = names_.find(pair.ends.to);
    const bool is_known = named != names_.end();
    if (!is_known && !IsNumeric(pair.ends.to)) continue;
    for (const Address& to : is_known ? named->second : Resolve(pair.ends.to, port_)) {
      routes.push_back({pair.ends.from, to, pair.is_home});
    }
  }
  // Returns the new index of an old route, or 0 if the route is gone.
  const auto place_of = [&](size_t index) -> size_t {
    if (index >= routes_.size()) return 0;
    const std::string text = routes_[index].Text();
    const auto same = std::find_if(routes.begin(), routes.end(),
                                   [&text](const Route& route) { return route.Text() == text; });
    return same == routes.end() ? 0 : same - routes.begin();
  };
  next_ = place_of(next_);
  start_ = place_of(start_);
  routes_ = std::move(routes);
}

void DialPlan::Restart(bool elsewhere) {
  redial_.Begin();
  LookUp();
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
  TakeNames();
  if (routes_.empty()) throw UnknownHost(unknown_);
  return routes_[next_];
}

DialPlan::Clock::time_point DialPlan::Failed(const std::string& error, bool nobody_listens,
                                             Clock::time_point now) {
  ++attempt_;
  redial_.Failed(error, nobody_listens, now);
  next_ = routes_.empty() ? 0 : (next_ + 1) % routes_.size();
  if (next_ != start_) return now;
  LookUp();
  return now + redial_.NextPause();
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
