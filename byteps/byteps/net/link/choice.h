// Which link of a pair of nodes the next message takes.
#ifndef BYTEPS_NET_LINK_CHOICE_H_
#define BYTEPS_NET_LINK_CHOICE_H_

#include <cstddef>
#include <memory>
#include <vector>

namespace ps {

// How a link stands.
struct LinkLoad {
  bool is_open = false;    // messages go over it now
  bool is_closed = false;  // and none ever will
  size_t queued_bytes = 0;
};

// That on which the fewest bytes wait, and one that is broken only where all are.  Null: none is
// there.  Of `links` some may be null.
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
    const bool better =
        load.is_open != least.is_open ? load.is_open : load.queued_bytes < least.queued_bytes;
    if (best != nullptr && !better) continue;
    best = &link;
    least = load;
  }
  return best == nullptr ? nullptr : *best;
}

}  // namespace ps
#endif  // BYTEPS_NET_LINK_CHOICE_H_
