#ifndef BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_SETTINGS_H_
#define BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_SETTINGS_H_

#include <memory>

namespace ps {

class RosterPolicy;
struct ScheduledJob;
class SchedulerMembership;

// Makes a scheduler's policy for losses; see RosterPolicy.
using MakeRosterPolicy = std::unique_ptr<RosterPolicy> (*)(SchedulerMembership* scheduler,
                                                           ScheduledJob* job);

// Settings of membership. NetSettings::From or a test makes them.
struct MembershipSettings {
  bool is_scheduler = false;
  double peer_timeout_s = 30;
  double start_timeout_s = 30;
  int workers = -1;  // number of workers that the job should have; -1: the scheduler decides
  int servers = -1;
  int rank = -1;  // rank of a worker; -1: the scheduler chooses
  // For a server that outlived a job: whether to adopt the next job's settings.
  bool rejoin = false;
  // On the scheduler: whether it survives failures; each generation of the job then has as many
  // workers as the first worker of that generation says. On a server: whether it accepts any number
  // of workers.
  bool keep = false;
  // Seconds within which a worker must come after a failure. Otherwise a scheduler with `keep`
  // gives up. 0: it never gives up.
  double keep_timeout_s = 1800;
  // Seconds that a job waits for the replacement of a lost server; 0: the loss ends the job.
  double replace_servers_s = 0;
  // Whether neighboring servers have links (link/admission.h). If so, the scheduler tells servers
  // of lost and replaced servers.
  bool backups = false;
  // Seconds that nodes wait for a new scheduler when theirs has died, and that the new scheduler
  // waits for the nodes (recovery/scheduler). 0: the scheduler's death ends the job.
  double scheduler_return_s = 0;
  int link_mbps = 0;  // rate of a worker's NIC in Mbit/s; 0: the rate that the NIC reports
  int replicas = 1;   // on a worker: number of replicas of its model
  // If positive on a node, Join does not join, and asks whether this many nodes like this one would
  // be admitted. If positive on a scheduler, it admits no node.
  int probe = 0;
  MakeRosterPolicy make_roster_policy = nullptr;  // on a scheduler; null: a loss ends the job
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_SETTINGS_H_
