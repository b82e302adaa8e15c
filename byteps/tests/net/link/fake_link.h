// A link that is only told what it is: for what decides about links.
#ifndef BYTEPS_TESTS_NET_LINK_FAKE_LINK_H_
#define BYTEPS_TESTS_NET_LINK_FAKE_LINK_H_

#include <memory>

#include "byteps/net/link/admission.h"
#include "byteps/net/link/choice.h"

namespace ps {

struct FakeLink : std::enable_shared_from_this<FakeLink> {
  explicit FakeLink(int peer = Node::kEmpty) : peer_id(peer) {}

  LinkLoad load() const { return state; }
  bool closed() const { return state.is_closed; }
  int peer() const { return peer_id; }
  void set_peer(int id) { peer_id = id; }

  PeerIdentity identity;
  LinkLoad state{true, false, 0};
  int peer_id;
};
using FakeLinkPtr = std::shared_ptr<FakeLink>;

}  // namespace ps
#endif  // BYTEPS_TESTS_NET_LINK_FAKE_LINK_H_
