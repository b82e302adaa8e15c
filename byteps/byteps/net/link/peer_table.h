// PeerTable: the processes at the other ends of this node's links.
//
// The authenticated token (admission.h) of a process that connects to this node identifies it. The
// process gets its node id later: the scheduler assigns it, and a server takes it from the
// process's authenticated claim. If a server will connect to this server, the scheduler announces
// it first: the table then has a link for it, on which messages wait. A process to which this node
// connects is identified by its node id alone.
#ifndef BYTEPS_NET_LINK_PEER_TABLE_H_
#define BYTEPS_NET_LINK_PEER_TABLE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/admission.h"
#include "ps/internal/message.h"

namespace ps {

// End of a link, or of a connection that carried the link.
struct LinkEnding {
  std::string reason;
  bool by_peer = false;  // the peer ended the link; this side knows no other reason
  bool orderly = false;  // the peer said goodbye, or this side closed it on purpose
};

// State of a link, from which BestOf chooses the link of the next message.
struct LinkLoad {
  bool is_open = false;    // the link can carry messages now
  bool is_closed = false;  // the link will never carry messages again
  size_t queued_bytes = 0;
  size_t in_flight_bytes = 0;  // bytes written and not acknowledged
  uint64_t nics = 0;           // identifies the pair of NICs
  double bytes_per_ns = 0;     // rate at which the peer takes bytes; 0: unknown

  size_t bytes() const { return queued_bytes + in_flight_bytes; }
};

// Returns whether the rates of two links differ so much that the faster one should get a longer
// queue.
inline bool DifferInRate(const LinkLoad& a, const LinkLoad& b) {
  constexpr double kUneven = 2;  // measured rates that differ less count as equal
  const auto [low, high] = std::minmax(a.bytes_per_ns, b.bytes_per_ns);
  return low > 0 && high > kUneven * low;
}

inline bool IsBetter(const LinkLoad& load, const LinkLoad& than) {
  if (load.is_open != than.is_open) return load.is_open;
  if (load.nics != than.nics && DifferInRate(load, than)) {
    return static_cast<double>(load.bytes()) * than.bytes_per_ns <
           static_cast<double>(than.bytes()) * load.bytes_per_ns;
  }
  if (load.queued_bytes != than.queued_bytes) return load.queued_bytes < than.queued_bytes;
  return load.nics != than.nics && load.in_flight_bytes < than.in_flight_bytes;
}

// Returns the link with the fewest queued bytes. A broken link is returned only if all links are
// broken. Links over different NICs are compared by bytes in flight, because the kernel may hold
// many bytes while nothing is queued. Links of different rates are compared by the time at which
// they would have sent everything. So each NIC carries as much as its rate allows. Returns null if
// all links are closed. `links` may contain nulls.
template <typename Link>
std::shared_ptr<Link> BestOf(const std::vector<std::shared_ptr<Link>>& links) {
  // A single link needs no comparison, and so no lock for reading its load.
  if (links.size() == 1) return links.front();
  const std::shared_ptr<Link>* best = nullptr;
  LinkLoad least;
  for (const auto& link : links) {
    if (!link) continue;
    const LinkLoad load = link->load();
    if (load.is_closed) continue;
    if (best != nullptr && !IsBetter(load, least)) continue;
    best = &link;
    least = load;
  }
  return best == nullptr ? nullptr : *best;
}

// Link has `PeerIdentity identity`, load(), closed(), peer() and set_peer(). These functions must
// not take a lock under which the table is called. Thread-safe.
template <typename Link>
class PeerTable {
 public:
  using LinkPtr = std::shared_ptr<Link>;
  using Links = std::vector<LinkPtr>;
  static constexpr int kPlanes = 2;

  // A process at the other end of links. The table's lock guards peers in the table.
  struct Peer {
    int id = Node::kEmpty;
    std::array<Links, kPlanes> links;  // by plane and index; null: no such link
  };
  using PeerPtr = std::shared_ptr<Peer>;

  // Admits peers from now on.
  void Open() {
    MutexLock lock(&mu_);
    stopping_ = false;
  }
  // Refuses peers from now on. Links that end are no longer reported as losses.
  void Stop() {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  void Clear() {
    std::unordered_map<uint64_t, PeerPtr> by_token;  // destroyed without the lock
    std::unordered_map<int, PeerPtr> by_id;
    MutexLock lock(&mu_);
    by_token.swap(by_token_);
    by_id.swap(by_id_);
  }

  // Adds a peer to which this node connects. The peer's id must be set.
  void Add(PeerPtr peer) {
    MutexLock lock(&mu_);
    by_id_[peer->id] = std::move(peer);
  }

  // Adds the process `who` as node `id` before it connects. `link`: its first link, on which
  // messages can already be queued.
  void Expect(const PeerIdentity& who, int id, LinkPtr link) {
    auto peer = std::make_shared<Peer>();
    peer->id = id;
    link->identity = who;
    peer->links[0].push_back(std::move(link));
    MutexLock lock(&mu_);
    by_token_[who.token] = peer;
    by_id_[id] = std::move(peer);
  }
  // Returns whether the process with this token was announced as node `id`.
  bool Expects(uint64_t token, int id) {
    MutexLock lock(&mu_);
    const auto it = by_token_.find(token);
    return id != Node::kEmpty && it != by_token_.end() && it->second->id == id;
  }

  struct Admitted {
    std::string refusal;
    LinkPtr link;      // null: refused
    LinkPtr replaced;  // the link that `link` replaces; null: none
  };
  // Policy for a peer that asks again for an existing link without resuming it.
  enum class Again {
    kTakesTheLink,  // the peer gets the same link: it may not know that it was accepted before
    kMakesAnother,  // the peer gets a new link: it asks again only after it gave up the old one
  };
  // Returns the link for an applicant that ReasonToRefuse accepts. If there is none, makes a link
  // by `make(id)`, with the lock held.
  template <typename Make>
  Admitted Admit(const Applicant& applicant, bool is_scheduler, Again again, const Make& make) {
    Admitted admitted;
    MutexLock lock(&mu_);
    if (stopping_) return Refused("this node is leaving the job");
    const auto found = by_token_.find(applicant.who.token);
    PeerPtr peer = found == by_token_.end() ? nullptr : found->second;
    if (!is_scheduler && IsAnothers(applicant.node_id, peer)) {
      return Refused("another process is connected under its node id");
    }
    LinkPtr there = peer ? LinkOf(*peer, applicant.plane, applicant.index) : nullptr;
    if (there && (applicant.resumes || again == Again::kTakesTheLink)) {
      if (there->closed()) return Refused("this node has closed the connection");
      const PeerIdentity& before = there->identity;
      if (before.role != applicant.who.role || before.rank != applicant.who.rank) {
        return Refused("it was another role or rank before");
      }
      admitted.link = std::move(there);
      return admitted;
    }
    if (applicant.resumes) return Refused("this node has given the connection up");
    if (!peer) peer = by_token_[applicant.who.token] = std::make_shared<Peer>();
    if (!is_scheduler) {
      peer->id = applicant.node_id;
      by_id_[peer->id] = peer;
    }
    // An applicant with another link to the scheduler has its id already.
    admitted.link = make(peer->id);
    admitted.link->identity = applicant.who;
    Links& links = peer->links[applicant.plane];
    const auto index = static_cast<size_t>(applicant.index);
    if (links.size() <= index) links.resize(index + 1);
    links[index] = admitted.link;
    admitted.replaced = std::move(there);
    return admitted;
  }

  struct Named {
    bool is_there = false;  // whether the process is still connected
    Links displaced;        // links of the process that had this id before
  };
  // Gives a node id to a connected process. The scheduler calls this.
  Named Name(uint64_t token, int id) {
    Named named;
    MutexLock lock(&mu_);
    const auto it = by_token_.find(token);
    if (it == by_token_.end()) return named;
    named.is_there = true;
    const PeerPtr peer = it->second;
    // The process may have had another id before.
    const auto last = by_id_.find(peer->id);
    if (last != by_id_.end() && last->first != id && last->second == peer) by_id_.erase(last);
    peer->id = id;
    const PeerPtr before = std::exchange(by_id_[id], peer);
    for (const LinkPtr& link : LinksOf(*peer)) link->set_peer(id);
    if (before && before != peer) named.displaced = LinksOf(*before);
    return named;
  }

  struct Loss {
    PeerPtr peer;  // peer to which the link belonged; null: no loss to report
    int id = Node::kEmpty;
    LinkPtr link;  // null: the link was not in the table
  };
  // Removes a closed link. A peer without any link is removed too.
  Loss LetGo(const Link* link) {
    Loss loss;
    MutexLock lock(&mu_);
    if (stopping_) return loss;
    for (auto it = by_token_.begin(); it != by_token_.end(); ++it) {
      if (!Remove(link, it->second.get(), &loss)) continue;
      loss.peer = it->second;
      if (IsEmpty(*it->second)) by_token_.erase(it);
      break;
    }
    loss.id = link->peer();
    const auto named = by_id_.find(loss.id);
    if (named != by_id_.end()) {
      if (Remove(link, named->second.get(), &loss)) loss.peer = named->second;
      if (named->second == loss.peer && IsEmpty(*loss.peer)) by_id_.erase(named);
    }
    // A peer without an id is not a loss.
    if (loss.peer && loss.peer->id == Node::kEmpty) loss.peer.reset();
    return loss;
  }

  // Returns whether another process has taken over the id of the lost process. If so, the node is
  // not lost.
  bool IsReplaced(int id, const PeerPtr& lost) {
    MutexLock lock(&mu_);
    const auto it = by_id_.find(id);
    return it != by_id_.end() && it->second != lost;
  }

  // Takes the id away from its process. The end of the process's links is then no longer reported
  // as a loss. The caller closes the returned links.
  Links Forget(int id) {
    MutexLock lock(&mu_);
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) return {};
    const PeerPtr peer = it->second;
    by_id_.erase(it);
    peer->id = Node::kEmpty;
    return LinksOf(*peer);
  }

  // Returns the link for the next message to node `id`, or null. Uses plane 0 if the peer has no
  // links of this plane.
  LinkPtr Choose(int id, int plane) {
    return Choose(id, plane, [](Link&) { return false; });
  }
  // Returns the same, except that it prefers the first of several links for which `is_meant(link)`
  // is true.
  template <typename IsMeant>
  LinkPtr Choose(int id, int plane, const IsMeant& is_meant) {
    MutexLock lock(&mu_);
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) return nullptr;
    const Peer& peer = *it->second;
    const Links& links = peer.links[plane].empty() ? peer.links[0] : peer.links[plane];
    if (links.size() > 1) {
      for (const LinkPtr& link : links) {
        if (link && is_meant(*link)) return link;
      }
    }
    return BestOf(links);
  }

  Links Of(int id) {
    MutexLock lock(&mu_);
    const auto it = by_id_.find(id);
    return it == by_id_.end() ? Links() : LinksOf(*it->second);
  }

  Links All() {
    MutexLock lock(&mu_);
    Links all;
    const auto add = [&all](const Peer& peer) {
      for (LinkPtr& link : LinksOf(peer)) all.push_back(std::move(link));
    };
    for (const auto& entry : by_id_) add(*entry.second);
    for (const auto& entry : by_token_) {
      const auto named = by_id_.find(entry.second->id);
      if (named == by_id_.end() || named->second != entry.second) add(*entry.second);
    }
    return all;
  }

  static Links LinksOf(const Peer& peer) {
    Links there;
    for (const Links& links : peer.links) {
      for (const LinkPtr& link : links) {
        if (link) there.push_back(link);
      }
    }
    return there;
  }

 private:
  static Admitted Refused(const char* reason) {
    Admitted refused;
    refused.refusal = reason;
    return refused;
  }

  static LinkPtr LinkOf(const Peer& peer, int plane, int index) {
    const Links& links = peer.links[plane];
    return static_cast<size_t>(index) < links.size() ? links[index] : nullptr;
  }

  static bool IsEmpty(const Peer& peer) { return LinksOf(peer).empty(); }

  static bool Remove(const Link* link, Peer* peer, Loss* loss) {
    for (Links& links : peer->links) {
      for (LinkPtr& mine : links) {
        if (mine.get() != link) continue;
        loss->link = std::move(mine);
        return true;
      }
    }
    return false;
  }

  // Returns whether another process has this id, or `peer` has another id.
  bool IsAnothers(int id, const PeerPtr& peer) const PS_REQUIRES(mu_) {
    const auto known = by_id_.find(id);
    if (known != by_id_.end() && known->second != peer) return true;
    return peer && peer->id != Node::kEmpty && peer->id != id;
  }

  Mutex mu_;
  std::unordered_map<uint64_t, PeerPtr> by_token_ PS_GUARDED_BY(mu_);
  std::unordered_map<int, PeerPtr> by_id_ PS_GUARDED_BY(mu_);
  bool stopping_ PS_GUARDED_BY(mu_) = false;
};

}  // namespace ps

#endif  // BYTEPS_NET_LINK_PEER_TABLE_H_
