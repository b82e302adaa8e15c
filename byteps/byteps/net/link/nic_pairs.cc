#include "byteps/net/link/nic_pairs.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace ps {
namespace {

// Pairs that a connection tries when its own one fails: each may take seconds.
constexpr size_t kMostTries = 8;

struct Bits {
  unsigned char bytes[sizeof(in6_addr)] = {};
  int count = 0;  // 0: no address
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

// What each connection adds to the load of its two NICs.
class Loads {
 public:
  Loads(const std::vector<Nic>& from, const std::vector<Nic>& to)
      : from_(Costs(from)), to_(Costs(to)), from_load_(from.size()), to_load_(to.size()) {}

  // The load of the busier NIC of the pair once it has another connection, and that of the other.
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
  // Of a connection, the part of its node's rate that the NIC has counted.  Where a rate is not
  // known, all are alike.
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

// Behind its own pair those that share neither NIC with it, then the others: whichever NIC has
// failed, the second try avoids it.  They begin `skip` pairs behind the own one, so that
// connections that leave the same NIC go to different ones.
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

}  // namespace ps
