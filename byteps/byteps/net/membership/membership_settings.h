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
  int workers = -1;  // number that the job should have, as `servers`; -1: the scheduler decides
  int servers = -1;
  int rank = -1;        // rank of a worker; -1: the scheduler chooses
  bool rejoin = false;  // for a server that outlived a job: adopt the next job's settings
  // On the scheduler: it survives failures, and each generation of the job has as many workers as
  // the first worker of that generation says. On a server: it accepts any number of workers.
  bool keep = false;
  // Seconds after a failure within which a worker must come; otherwise a scheduler with `keep`
  // gives up. 0: it never gives up.
  double keep_timeout_s = 1800;
  // Seconds that a job waits for the replacement of a lost server; 0: the loss ends the job.
  double replace_servers_s = 0;
  // Whether neighboring servers have links (link/admission.h). If so, the scheduler tells servers
  // of lost and replaced servers.
  bool backups = false;
  // Seconds that nodes wait for a new scheduler after theirs died, and that a new scheduler waits
  // for the nodes (recovery/scheduler). 0: the scheduler's death ends the job.
  double scheduler_return_s = 0;
  int link_mbps = 0;  // rate of a worker's NIC in Mbit/s; 0: the rate that the NIC reports
  int replicas = 1;   // on a worker: number of replicas of its model
  // If positive, Join does not join, and asks whether this many nodes like this one would be
  // admitted. A scheduler with a positive number admits no node.
  int probe = 0;
  MakeRosterPolicy make_roster_policy = nullptr;  // on a scheduler; null: a loss ends the job
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_SETTINGS_H_
