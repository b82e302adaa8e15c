#include "byteps/net/membership/commands.h"

#include <algorithm>
#include <iterator>

#include "byteps/base/log.h"

namespace ps {
namespace membership {
namespace {

// Sets of roles.
constexpr unsigned kWorkers = 1U << Node::WORKER;
constexpr unsigned kServers = 1U << Node::SERVER;
constexpr unsigned kNodes = kWorkers | kServers;

struct Rule {
  Control::Command command;
  const char* name;
  unsigned to_nodes;    // that may get it from the scheduler
  unsigned from_nodes;  // that may send it to the scheduler
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
  // A worker leaves when its work is done or it has failed, a server only when it is told to end.
  const bool stopped = body.compare(0, sizeof(kStopped) - 1, kStopped) == 0;
  return command != Control::LEAVE || stopped == (from == Node::SERVER);
}

std::string NameOf(Control::Command command) {
  const Rule* const rule = Find(command);
  return rule == nullptr ? "command " + std::to_string(static_cast<int>(command)) : rule->name;
}

void IgnoredSenders::Add(const Message& msg, const std::function<std::string(int)>& name_of) {
  const int sender = msg.meta.sender;
  {
    MutexLock lock(&mu_);
    if (!senders_.insert(sender).second) return;
  }
  BPS_LOG(WARNING)
      << "ignored " << NameOf(msg.meta.control.cmd) << " from " << name_of(sender)
      << ", which must not send it to this node; more of the kind from there is ignored "
         "without a warning";
}

void IgnoredSenders::Clear() {
  MutexLock lock(&mu_);
  senders_.clear();
}

}  // namespace membership
}  // namespace ps
