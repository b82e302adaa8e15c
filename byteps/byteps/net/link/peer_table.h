// The processes at the other ends of this node's links.
//
// A process that connected to this one is known by its token (admission.h), which it has proved.
// It gets its node id later: from the scheduler, which names those that join, or, at a server, by
// its own word, which is proved too.  Of a server that connects to a server the scheduler has told
// both before, so that there is a link that it will take, and what is sent by it waits.  A node
// that this one connected to is known by its id alone.
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

// How a link ended, or a connection that carried it.
struct LinkEnding {
  std::string reason;
  bool by_peer = false;  // and this side has nothing to say of the reason
  bool orderly = false;  // the peer said goodbye, or this side closed it in order
};

// Which link of a pair of nodes the next message takes.

// How a link stands.
struct LinkLoad {
  bool is_open = false;    // messages go over it now
  bool is_closed = false;  // and none ever will
  size_t queued_bytes = 0;
  size_t in_flight_bytes = 0;  // written, and the other end has not told that they have come
  uint64_t nics = 0;           // tells pairs of NICs apart
  double bytes_per_ns = 0;     // that the other end takes; 0: not known

  size_t bytes() const { return queued_bytes + in_flight_bytes; }
};

// Whether one of two links takes so many more bytes that not as many should wait on the other.
inline bool DifferInRate(const LinkLoad& a, const LinkLoad& b) {
  constexpr double kUneven = 2;  // rates are measured: what differs less is taken to be equal
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

// That on which the fewest bytes wait, and one that is broken only where all are.  Where nothing
// waits the kernel may hold much: of links over different NICs that with fewer bytes in flight; and
// where their rates differ, that which is done first.  So each NIC carries what its rate allows.
// Null: none is there.  Of `links` some may be null.
template <typename Link>
std::shared_ptr<Link> BestOf(const std::vector<std::shared_ptr<Link>>& links) {
  // There is nothing to compare, and so nothing to ask under the link's lock.
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

// Link: has `PeerIdentity identity`, load(), closed(), peer() and set_peer(), which take no lock
// under which the table is called.  Any thread may call anything.
template <typename Link>
class PeerTable {
 public:
  using LinkPtr = std::shared_ptr<Link>;
  using Links = std::vector<LinkPtr>;
  static constexpr int kPlanes = 2;

  // A process at the other end of links.  Guarded by the table's lock once it is in the table.
  struct Peer {
    int id = Node::kEmpty;
    std::array<Links, kPlanes> links;  // of each plane, by index; null: not there
  };
  using PeerPtr = std::shared_ptr<Peer>;

  // Peers are admitted from now on.
  void Open() {
    MutexLock lock(&mu_);
    stopping_ = false;
  }
  // None is admitted any more, and links that end are nobody's loss.
  void Stop() {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  void Clear() {
    std::unordered_map<uint64_t, PeerPtr> by_token;  // let go of without the lock
    std::unordered_map<int, PeerPtr> by_id;
    MutexLock lock(&mu_);
    by_token.swap(by_token_);
    by_id.swap(by_id_);
  }

  // This node connects to `peer`, which has its id.
  void Add(PeerPtr peer) {
    MutexLock lock(&mu_);
    by_id_[peer->id] = std::move(peer);
  }

  // The process `who` will connect, as node `id`.  `link`: its first.
  void Expect(const PeerIdentity& who, int id, LinkPtr link) {
    auto peer = std::make_shared<Peer>();
    peer->id = id;
    link->identity = who;
    peer->links[0].push_back(std::move(link));
    MutexLock lock(&mu_);
    by_token_[who.token] = peer;
    by_id_[id] = std::move(peer);
  }
  // Whether it is known that this process is this node.
  bool Expects(uint64_t token, int id) {
    MutexLock lock(&mu_);
    const auto it = by_token_.find(token);
    return id != Node::kEmpty && it != by_token_.end() && it->second->id == id;
  }

  struct Admitted {
    std::string refusal;
    LinkPtr link;      // null: refused
    LinkPtr replaced;  // that was there in its place
  };
  // What becomes of a link that is there where its peer asks for it and does not resume it.
  enum class Again {
    kTakesTheLink,  // the peer had not heard that it was taken before
    kMakesAnother,  // and would not ask again, had it not given that one up
  };
  // The link for `applicant`, which nothing else stands against (ReasonToRefuse).  Where there is
  // none, `make(id)` makes it, with the lock held.
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
    // Who comes once more to the scheduler, over another link, has its name already.
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
    bool is_there = false;  // else it came, and has gone already
    Links displaced;        // of another process, which had this name
  };
  // The scheduler gives a node id to a process that came.
  Named Name(uint64_t token, int id) {
    Named named;
    MutexLock lock(&mu_);
    const auto it = by_token_.find(token);
    if (it == by_token_.end()) return named;
    named.is_there = true;
    const PeerPtr peer = it->second;
    // It may have had another name.
    const auto last = by_id_.find(peer->id);
    if (last != by_id_.end() && last->first != id && last->second == peer) by_id_.erase(last);
    peer->id = id;
    const PeerPtr before = std::exchange(by_id_[id], peer);
    for (const LinkPtr& link : LinksOf(*peer)) link->set_peer(id);
    if (before && before != peer) named.displaced = LinksOf(*before);
    return named;
  }

  struct Loss {
    PeerPtr peer;  // whose loss it is; null: nobody's
    int id = Node::kEmpty;
    LinkPtr link;  // null: it was not in the table
  };
  // A link has closed.  Who has lost all its links is not there any more.
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
    // One that never was more than a link is nobody's loss.
    if (loss.peer && loss.peer->id == Node::kEmpty) loss.peer.reset();
    return loss;
  }

  // Whether another process has the name of one that was lost: then nobody has lost a node.
  bool IsReplaced(int id, const PeerPtr& lost) {
    MutexLock lock(&mu_);
    const auto it = by_id_.find(id);
    return it != by_id_.end() && it->second != lost;
  }

  // The process that has this id has it no more, and the loss of its links is nobody's.  They are
  // to be closed.
  Links Forget(int id) {
    MutexLock lock(&mu_);
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) return {};
    const PeerPtr peer = it->second;
    by_id_.erase(it);
    peer->id = Node::kEmpty;
    return LinksOf(*peer);
  }

  // For the next message; null when there is none.  A peer without links of this plane has all by
  // plane 0.
  LinkPtr Choose(int id, int plane) {
    return Choose(id, plane, [](Link&) { return false; });
  }
  // Where there are several, the first that `is_meant(link)` says yes to.
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

  // Whether a worker cannot have this id, since another process or this one has another.
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
