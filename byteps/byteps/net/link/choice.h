// Which link of a pair of nodes the next message takes.
#ifndef BYTEPS_NET_LINK_CHOICE_H_
#define BYTEPS_NET_LINK_CHOICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ps {

// How a link stands.
struct LinkLoad {
  bool is_open = false;    // messages go over it now
  bool is_closed = false;  // and none ever will
  size_t queued_bytes = 0;
  size_t in_flight_bytes = 0;  // written, and the other end has not told that they have come
  uint64_t nics = 0;           // tells pairs of NICs apart
};

inline bool IsBetter(const LinkLoad& load, const LinkLoad& than) {
  if (load.is_open != than.is_open) return load.is_open;
  if (load.queued_bytes != than.queued_bytes) return load.queued_bytes < than.queued_bytes;
  return load.nics != than.nics && load.in_flight_bytes < than.in_flight_bytes;
}

// That on which the fewest bytes wait, and one that is broken only where all are.  Where nothing
// waits the kernel may hold much: of links over different NICs that with fewer bytes in flight, so
// that each NIC carries what its rate allows.  Null: none is there.  Of `links` some may be null.
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

}  // namespace ps
#endif  // BYTEPS_NET_LINK_CHOICE_H_
