// What a node hears and says of replicas, and of servers that are lost (docs/design/replicas.md).
#include <set>
#include <string>
#include <utility>

#include "byteps/base/probe.h"
#include "byteps/net/link/node_text.h"
#include "byteps/net/link/who_connects.h"
#include "byteps/net/membership/node_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

void NodeMembership::OnReplicas(const Message& msg) {
  MembershipEvent event;
  membership::MemberWord word;
  if (membership::ParseWord(msg.meta.body, &word)) {
    if (word.kind != membership::MemberWord::kAwaited) return OnServerWord(word, msg);
    event.kind = MembershipEvent::kAwaited;
    event.rank = word.number;
    event.round = word.epoch;
    event.report = word.text;
    return announcer_.Tell(event);
  }
  event.kind = MembershipEvent::kReplicas;
  if (!membership::ParseReplicas(msg.meta.body, &event.replicas)) return;
  const bool server = links_->self().role == Node::SERVER;
  {
    MutexLock lock(&mu_);
    const int last = view_.count() > 0 ? view_.epoch : -1;
    if (state_ != State::kActive || event.replicas.epoch <= last) return;
    view_ = event.replicas;
    view_.news.clear();
    // What breaks of these is no news; and nobody else may come under their names before.
    for (const Node& node : msg.meta.control.node) {
      Member* const member = roster_.Put(node);
      member->left = member->removed = true;
      // Nor is a later life of it to be reported for that.
      broken_links_.erase(node.id);
    }
    const std::set<int> absent = event.replicas.AbsentRanks();
    for (int rank = 0; rank < event.replicas.workers; ++rank) {
      const Member* const member = roster_.Find(IdOf(Node::WORKER, rank));
      if (member != nullptr && member->removed && absent.count(rank) == 0) {
        roster_.Erase(member->node.id);
        if (server) PS_PROBE(kJoinerExpected);
      }
    }
  }
  for (const Node& node : msg.meta.control.node) links_->Disconnect(node.id);
  announcer_.Tell(event);
  if (!server) return;
  SayOfReplica({membership::MemberWord::kAcknowledged, 0, event.replicas.epoch, ""});
}

void NodeMembership::OnServerWord(const membership::MemberWord& word, const Message& msg) {
  const bool replaced = word.kind == membership::MemberWord::kServerReplaced;
  if (!replaced && word.kind != membership::MemberWord::kServerLost) return;
  const int id = IdOf(Node::SERVER, word.number);
  const Node self = links_->self();
  const auto& nodes = msg.meta.control.node;
  if ((self.role != Node::WORKER && !settings_.backups) || id == self.id) return;
  if (replaced && (nodes.size() != 1 || nodes[0].role != Node::SERVER || nodes[0].id != id)) return;
  bool loses = false;
  {
    MutexLock lock(&mu_);
    int& turn = turns_[word.number];
    // A scheduler that has returned says again what this node may have heard.
    if (state_ != State::kActive || word.turn <= turn || (word.turn % 2 == 0) != replaced) return;
    loses = turn % 2 == 0;
    turn = word.turn;
    broken_links_.erase(id);
    Member* const member = roster_.Find(id);
    if (member != nullptr) member->left = member->removed = true;  // what breaks of it is no news
  }
  MembershipEvent event;
  event.rank = word.number;
  if (loses) {
    links_->Disconnect(id);
    event.kind = MembershipEvent::kServerLost;
    event.reason = replaced ? RoleAndRank(id) + " was lost" : word.text;
    announcer_.Tell(event);
  }
  if (!replaced) return;
  {
    MutexLock lock(&mu_);
    roster_.Erase(id);
    event.node = InfoOf(roster_.Put(nodes[0])->node);
  }
  const bool linked = self.role == Node::WORKER ||
                      AreNeighbors(Postoffice::IDtoRank(self.id), word.number, word.epoch);
  if (linked) links_->Connect(nodes[0]);
  event.kind = MembershipEvent::kServerReplaced;
  event.reason = "";
  announcer_.Tell(event);
}

void NodeMembership::SayOfReplica(membership::MemberWord word) {
  {
    MutexLock lock(&mu_);
    if (word.kind == membership::MemberWord::kLate) word.epoch = view_.epoch;
    Remember(word);
  }
  Tell(Control::MEMBERS, membership::PackWord(word));
}

}  // namespace ps
