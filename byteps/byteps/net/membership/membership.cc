#include "byteps/net/membership/membership.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/event.h"
#include "byteps/net/membership/membership_links.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/node_membership.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/base.h"
#include "ps/internal/message.h"

namespace ps {
std::unique_ptr<Membership> Membership::Make(MembershipLinks* links,
                                             const MembershipSettings& settings,
                                             Listener listener) {
  if (settings.is_scheduler) {
    return std::make_unique<SchedulerMembership>(links, settings, std::move(listener));
  }
  return std::make_unique<NodeMembership>(links, settings, std::move(listener));
}

namespace membership {
void Send(MembershipLinks* links, Control::Command command, int recver, const std::string& body,
          const std::vector<Node>& nodes) {
  Message msg;
  msg.meta.recver = recver;
  msg.meta.control.cmd = command;
  msg.meta.control.node = nodes;
  msg.meta.body = body;
  links->Send(&msg);
}

std::string NameOfScheduler(const MembershipLinks& links) {
  return "scheduler (" + JoinHostPort(links.scheduler().hostname, links.scheduler().port) + ")";
}

namespace {

// Sets of roles.
constexpr unsigned kWorkers = 1U << Node::WORKER;
constexpr unsigned kServers = 1U << Node::SERVER;
constexpr unsigned kNodes = kWorkers | kServers;

struct Rule {
  Control::Command command;
  const char* name;
  unsigned to_nodes;    // roles that may receive the command from the scheduler
  unsigned from_nodes;  // roles that may send the command to the scheduler
};

constexpr Rule kRules[] = {
    {Control::ADD_NODE, "ADD_NODE", kNodes, kNodes},
    {Control::WELCOME, "WELCOME", kNodes, 0},
    {Control::REFUSED, "REFUSED", kNodes, 0},
    {Control::HEARTBEAT, "HEARTBEAT", kNodes, kNodes},
    {Control::JOB_FAILED, "JOB_FAILED", kNodes, kNodes},
    {Control::LEAVE, "LEAVE", 0, kNodes},
    {Control::NODE_LEFT, "NODE_LEFT", kNodes, 0},
    {Control::JOB_END, "JOB_END", kServers, 0},
    {Control::MEMBERS, "MEMBERS", kNodes, kNodes},
};

const Rule* Find(Control::Command command) {
  const auto* rule = std::find_if(std::begin(kRules), std::end(kRules),
                                  [=](const Rule& one) { return one.command == command; });
  return rule == std::end(kRules) ? nullptr : rule;
}

}  // namespace

bool MaySend(Control::Command command, Node::Role from, Node::Role to, const std::string& body) {
  const Rule* const rule = Find(command);
  if (rule == nullptr) return false;
  if (from == Node::SCHEDULER) return (rule->to_nodes & (1U << to)) != 0;
  if (to != Node::SCHEDULER || (rule->from_nodes & (1U << from)) == 0) return false;
  if (command != Control::LEAVE) return true;
  // Only a server may say in its LEAVE that it was stopped. A worker says that it is done, or has
  // failed.
  const auto leave = Parse<Leave>(body);
  return leave && std::holds_alternative<Stopped>(*leave) == (from == Node::SERVER);
}

std::string NameOf(Control::Command command) {
  const Rule* const rule = Find(command);
  return rule == nullptr ? "command " + std::to_string(static_cast<int>(command)) : rule->name;
}

}  // namespace membership

NodeInfo InfoOf(const Node& node) {
  using byteps::core::Role;
  const Role role = node.role == Node::SCHEDULER ? Role::kScheduler
                    : node.role == Node::WORKER  ? Role::kWorker
                                                 : Role::kServer;
  const int nics = std::max(static_cast<int>(node.nics.size()), 1);
  return {role, node.id, AddressOf(node), nics};
}

std::string PlaceOf(const NodeInfo& node) {
  return node.address + (node.nics > 1 ? " on " + Plural(node.nics, "NIC") : "");
}

}  // namespace ps
