#include "byteps/net/tcp/pending_peers.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "byteps/base/log.h"
#include "byteps/net/link/net_address.h"

namespace ps {
namespace tcp {

std::string OriginOf(const Address& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (address.storage.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address.storage);
    inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text));
    return text;
  }
  if (address.storage.ss_family != AF_INET6) return text;
  in6_addr network = reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr;
  const bool loopback = IN6_IS_ADDR_LOOPBACK(&network);
  if (!loopback) memset(network.s6_addr + 8, 0, 8);
  inet_ntop(AF_INET6, &network, text, sizeof(text));
  return loopback ? text : std::string(text) + "/64";
}

bool PendingPeers::MayAdd() const {
  return entries_.size() < limits_.room ||
         Poller::Clock::now() - entries_.front().since >= limits_.least;
}

void PendingPeers::Add(Ptr peer, const Address& address) {
  while (!entries_.empty() && entries_.size() >= limits_.room) EvictOne();
  const PendingPeer* const key = peer.get();
  Entry entry{std::move(peer), OriginOf(address), Poller::Clock::now()};
  ++per_origin_[entry.origin];
  places_[key] = entries_.insert(entries_.end(), std::move(entry));
  ArmTimer();
}

void PendingPeers::Remove(const PendingPeer* peer) {
  const auto position = places_.find(peer);
  if (position == places_.end()) return;
  const auto count = per_origin_.find(position->second->origin);
  if (--count->second == 0) per_origin_.erase(count);
  const Ptr last = std::move(position->second->peer);
  entries_.erase(position->second);
  places_.erase(position);
}

void PendingPeers::Clear() {
  places_.clear();
  per_origin_.clear();
  entries_.clear();
}

void PendingPeers::EvictOne() {
  auto victim = std::find_if(entries_.begin(), entries_.end(),
                             [](const Entry& entry) { return entry.peer->answered(); });
  if (victim == entries_.end()) {
    const auto most =
        std::max_element(per_origin_.begin(), per_origin_.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    // If no address has several connections, the oldest connection is closed.
    victim = most->second == 1
                 ? entries_.begin()
                 : std::find_if(entries_.begin(), entries_.end(),
                                [&](const Entry& entry) { return entry.origin == most->first; });
    ++evicted_;
    WarnOfFlood(most->first, most->second);
  }
  const Ptr peer = victim->peer;
  peer->ResetOnEnd();
  peer->End("too many connect and do not say who they are");
  Remove(peer.get());  // needed if End has not removed the peer
}

void PendingPeers::WarnOfFlood(const std::string& origin, size_t of_origin) {
  const auto now = Poller::Clock::now();
  if (warned_ && now - last_warning_ < kWarnAgain) return;
  warned_ = true;
  last_warning_ = now;
  BPS_LOG(WARNING)
      << "a flood of connections: " << entries_.size() << " at once " << limits_.has_not_done
      << ", " << of_origin << " of them from " << origin << "; closed " << evicted_
      << " so far to admit new ones (logged at most once a minute). Keep that address away "
         "from this port, by a firewall or a network of the job's own";
}

void PendingPeers::ArmTimer() {
  if (timer_armed_ || entries_.empty()) return;
  timer_armed_ = true;
  poller_->At(entries_.front().since + limits_.time, [this] {
    timer_armed_ = false;
    EndLate();
    ArmTimer();
  });
}

void PendingPeers::EndLate() {
  const auto now = Poller::Clock::now();
  while (!entries_.empty() && entries_.front().since + limits_.time <= now) {
    const Ptr peer = entries_.front().peer;
    peer->End(limits_.late);
    Remove(peer.get());
  }
}

}  // namespace tcp
}  // namespace ps
