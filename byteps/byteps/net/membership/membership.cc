#include "byteps/net/membership/membership.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <sstream>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/event.h"
#include "byteps/net/membership/membership_links.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/node_membership.h"
#include "byteps/net/membership/replica_view.h"
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
namespace {

// Of each role.  A job that claims to have more is not believed: the scheduler would count them.
constexpr int kMaxNodes = 1 << 20;
// How the LEAVE of a worker begins that will come back, and of one whose process fails.
constexpr char kSuspend[] = "suspend";
constexpr char kWithFailure[] = "failed: ";
// In the LEAVE of a worker in which an operation failed, before what failed.
constexpr char kAfter[] = " after: ";

// Of up to nine digits; -1 for anything else.
int NumberIn(const std::string& text) {
  int number = -1;
  const bool is_number = !text.empty() && text.size() <= 9 &&
                         text.find_first_not_of("0123456789") == std::string::npos;
  if (is_number) sscanf(text.c_str(), "%9d", &number);
  return number;
}

// "0,5,-": a "-" for each that is below 0.
std::string PackNumbers(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) {
    text += (text.empty() ? "" : ",") + (number < 0 ? "-" : std::to_string(number));
  }
  return text;
}

std::vector<int> NumbersIn(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream in(text);
  for (std::string one; std::getline(in, one, ',');) numbers.push_back(NumberIn(one));
  return numbers;
}

// By MemberWord::Kind.
constexpr const char* kWords[] = {"acknowledged", "ready",       "admit",           "awaited",
                                  "late",         "server-lost", "server-replaced", "left-known"};

}  // namespace

std::string PackClaim(const Claim& claim) {
  std::ostringstream text;
  text << "protocol=" << claim.protocol << " workers=" << claim.workers
       << " servers=" << claim.servers << " link=" << claim.link_mbps << " probe=" << claim.probe
       << " replicas=" << claim.replicas << " backups=" << claim.backups;
  return text.str();
}

bool ParseClaim(const std::string& text, Claim* claim) {
  // So many digits fit into an int, whatever comes.
  const int found =
      sscanf(text.c_str(),
             "protocol=%9d workers=%9d servers=%9d link=%9d probe=%9d replicas=%9d backups=%1d",
             &claim->protocol, &claim->workers, &claim->servers, &claim->link_mbps, &claim->probe,
             &claim->replicas, &claim->backups);
  return found == 7 && claim->replicas >= 0 && claim->link_mbps >= 0 &&
         claim->workers <= kMaxNodes && claim->servers <= kMaxNodes && claim->probe >= 0 &&
         claim->probe <= kMaxNodes;
}

std::string PackTurns(const Turns& turns) {
  std::string text;
  for (const auto& [rank, turn] : turns) {
    if (turn > 0) text += std::to_string(rank) + ":" + std::to_string(turn) + ",";
  }
  return text;
}

bool ParseTurns(const std::string& text, Turns* turns) {
  turns->clear();
  std::istringstream in(text);
  for (std::string one; std::getline(in, one, ',');) {
    const size_t colon = one.find(':');
    if (colon == std::string::npos) return false;
    const int rank = NumberIn(one.substr(0, colon));
    const int turn = NumberIn(one.substr(colon + 1));
    if (rank < 0 || rank >= kMaxNodes || turn < 1 || turns->count(rank) > 0) return false;
    (*turns)[rank] = turn;
  }
  return true;
}

int TurnOf(const Turns& turns, int rank) {
  const auto it = turns.find(rank);
  return it == turns.end() ? 0 : it->second;
}

bool IsVacant(const Turns& turns, int rank) { return TurnOf(turns, rank) % 2 == 1; }

std::string PackBeginning(const Beginning& beginning) {
  return "link=" + std::to_string(beginning.link_mbps) +
         " late=" + std::to_string(beginning.late ? 1 : 0) + " turns=" + PackTurns(beginning.turns);
}

Beginning ParseBeginning(const std::string& text) {
  Beginning beginning;
  int late = 0, end = 0;
  if (sscanf(text.c_str(), "link=%9d late=%1d turns=%n", &beginning.link_mbps, &late, &end) != 2 ||
      end == 0 || beginning.link_mbps < 0 || !ParseTurns(text.substr(end), &beginning.turns)) {
    return {};
  }
  beginning.late = late == 1;
  return beginning;
}

std::string PackWelcome(int incarnation, int life) {
  return std::to_string(incarnation) + " life=" + std::to_string(life);
}

int LifeIn(const std::string& text) {
  int life = 0;
  return sscanf(text.c_str(), "%*d life=%9d", &life) == 1 ? std::max(life, 0) : 0;
}

std::string PackReplicas(const ReplicaView& view) {
  return "workers=" + std::to_string(view.workers) + " epoch=" + std::to_string(view.epoch) +
         " present=" + view.present + " waiting=" + view.waiting +
         " lives=" + PackNumbers(view.lives) + " donors=" + PackNumbers(view.donors) + " " +
         view.news;
}

bool ParseReplicas(const std::string& text, ReplicaView* view) {
  static const char* const kNames[] = {
      "workers=", "epoch=", "present=", "waiting=", "lives=", "donors="};
  std::string field[std::size(kNames)];
  std::istringstream in(text);
  for (size_t i = 0; i < std::size(kNames); ++i) {
    in >> field[i];
    if (!BeginsWith(field[i], kNames[i])) return false;
    field[i].erase(0, strlen(kNames[i]));
  }
  const size_t count = field[2].size();
  for (const std::string& bits : {field[2], field[3]}) {
    if (bits.size() != count || bits.find_first_not_of("01") != std::string::npos) return false;
  }
  view->workers = NumberIn(field[0]);
  view->epoch = NumberIn(field[1]);
  view->present = field[2];
  view->waiting = field[3];
  view->lives = NumbersIn(field[4]);
  view->donors = NumbersIn(field[5]);
  if (count < 2 || view->lives.size() != count || view->donors.size() != count ||
      *std::max_element(view->donors.begin(), view->donors.end()) >= view->count() ||
      view->epoch < 0 || view->workers < view->count() || view->workers > kMaxNodes ||
      view->workers % view->count() != 0 ||
      *std::min_element(view->lives.begin(), view->lives.end()) < 0) {
    return false;
  }
  in.get();
  std::getline(in, view->news, '\0');
  return true;
}

std::string PackWord(const MemberWord& word) {
  return std::string(kWords[word.kind]) + " number=" + std::to_string(word.number) +
         " epoch=" + std::to_string(word.epoch) + " turn=" + std::to_string(word.turn) + " " +
         word.text;
}

bool ParseWord(const std::string& text, MemberWord* word) {
  char name[20];
  int end = 0;
  if (sscanf(text.c_str(), "%19s number=%9d epoch=%9d turn=%9d%n", name, &word->number,
             &word->epoch, &word->turn, &end) != 4 ||
      word->number < 0 || word->epoch < 0 || word->turn < 0 || text[end] != ' ') {
    return false;
  }
  const auto* const found = std::find(std::begin(kWords), std::end(kWords), std::string(name));
  if (found == std::end(kWords)) return false;
  word->kind = static_cast<MemberWord::Kind>(found - std::begin(kWords));
  word->text = text.substr(end + 1);
  return true;
}

std::string PackFarewell(const Farewell& farewell) {
  if (!farewell.failure.empty()) return kWithFailure + farewell.failure;
  const std::string text = farewell.suspend ? kSuspend : "finish";
  return farewell.error.empty() ? text : text + kAfter + farewell.error;
}

Departure ParseFarewell(const std::string& text, bool errors_count) {
  Departure departure;
  const size_t after = text.find(kAfter);
  if (BeginsWith(text, kStopped)) {
    departure.failure = "was " + text;
  } else if (BeginsWith(text, kWithFailure)) {
    departure.failure = text;
  } else if (errors_count && after != std::string::npos) {
    departure.failure = kWithFailure + text.substr(after + strlen(kAfter));
  } else {
    departure.suspend = BeginsWith(text, kSuspend);
  }
  return departure;
}

std::string PackEnd(bool suspended) { return suspended ? kSuspend : "finish"; }

bool ParseEnd(const std::string& text) { return text == kSuspend; }

void Send(MembershipLinks* links, Control::Command command, int recver, const std::string& body,
          const std::vector<Node>& nodes) {
  Message msg;
  msg.meta.recver = recver;
  msg.meta.control.cmd = command;
  msg.meta.control.node = nodes;
  msg.meta.body = body;
  links->Send(&msg);
}

bool BeginsWith(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
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
