#include "byteps/net/membership/refusal.h"

#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/roster_policy.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace membership {

Refusal CheckProtocol(const Claim& claim) {
  if (claim.protocol == kProtocol) return {};
  return {"it speaks membership protocol " + std::to_string(claim.protocol) + ", the scheduler " +
          std::to_string(kProtocol) + ": install the same byteps on every node"};
}

namespace {

Refusal Check(const Roster& roster, RosterPolicy* policy, const MembershipSettings& settings,
              const Claim& claim, const Node& node) {
  if (const Refusal refusal = CheckProtocol(claim)) return refusal;
  if (node.role == Node::SCHEDULER) return {"it says that it is a scheduler"};
  if (claim.backups != settings.backups) {
    return {
        std::string("BYTEPS_BACKUP_STATE is ") +
        (settings.backups ? "set on the scheduler, and not there" : "not set on the scheduler") +
        ": set it alike on all nodes"};
  }
  // The claim may conflict with nodes of the previous generation, which have some time to reconnect
  // before the scheduler ends that generation. So a cluster that is kept asks the node to come
  // later.
  const bool later = settings.keep;
  const bool worker = node.role == Node::WORKER;
  const JobSize& expected = roster.expected();
  const int workers = expected.workers < 0 && worker ? claim.workers : expected.workers;
  const int servers = expected.servers < 0 && worker ? claim.servers : expected.servers;
  if (claim.workers >= 0 && workers >= 0 && claim.workers != workers) {
    return {"it was started for " + Plural(claim.workers, "worker") + ", the scheduler for " +
                Plural(workers, "worker") + " (WORLD_SIZE, DMLC_NUM_WORKER)",
            later};
  }
  if (claim.servers >= 0 && servers >= 0 && claim.servers != servers) {
    return {"it was started for " + Plural(claim.servers, "server") + ", the scheduler for " +
            Plural(servers, "server") + " (DMLC_NUM_SERVER)"};
  }
  if (worker && expected.replicas >= 0 && claim.replicas != expected.replicas) {
    return {"it is of a job of " + Plural(claim.replicas, "replica") + ", the others of " +
                Plural(expected.replicas, "replica") + " (worker.sh --replica, BYTEPS_REPLICA)",
            later};
  }
  if (!worker) {
    if (servers < 0 || roster.Count(Node::SERVER) < servers) return {};
    const Refusal full{"the job has its " + Plural(servers, "server") + " already", later};
    return policy->Reconsider(full, nullptr);
  }
  if (node.aux_id < 0 || node.aux_id >= workers) {
    return {"its rank " + std::to_string(node.aux_id) + " is not below the number of workers, " +
                std::to_string(workers) + " (RANK, DMLC_WORKER_ID)",
            later};
  }
  if (const Member* other = roster.Find(IdOf(Node::WORKER, node.aux_id))) {
    const Refusal taken{
        "the job has a " + Describe(other->node) + " already; does another job use this scheduler?",
        later};
    return policy->Reconsider(taken, other);
  }
  return {};
}

}  // namespace

Refusal Assign(const Roster& roster, RosterPolicy* policy, const MembershipSettings& settings,
               const Claim& claim, Node* node) {
  if (roster.IsBeingSuspended()) return {"the job before it is being suspended", true};
  const bool worker = node->role == Node::WORKER;
  if (worker && node->aux_id < 0) node->aux_id = roster.FirstFreeRank(Node::WORKER);
  Refusal refusal = Check(roster, policy, settings, claim, *node);
  if (refusal) return refusal;
  node->id = IdOf(node->role, worker ? node->aux_id : roster.FirstFreeRank(Node::SERVER));
  return {};
}

Refusal AssignAll(const Roster& roster, RosterPolicy* policy, const MembershipSettings& settings,
                  const Claim& claim, Node node) {
  const bool any_rank = node.role == Node::SERVER || node.aux_id < 0;
  const int first = node.aux_id;
  Refusal refusal = Assign(roster, policy, settings, claim, &node);
  if (refusal || claim.probe == 1) return refusal;
  if (any_rank) {
    const bool server = node.role == Node::SERVER;
    const int expected = server ? roster.expected().servers : roster.expected().workers;
    const int room = expected < 0 ? claim.probe : expected - roster.Count(node.role);
    if (claim.probe <= room) return {};
    return {"the job has room for " + Plural(room, server ? "more server" : "more worker") +
            ", and this machine has " + std::to_string(claim.probe)};
  }
  // Checks the nodes after the first, up to the first refusal.
  for (int i = 1; i < claim.probe && !refusal; ++i) {
    node.aux_id = first + i;
    refusal = Assign(roster, policy, settings, claim, &node);
  }
  return refusal;
}

}  // namespace membership
}  // namespace ps
