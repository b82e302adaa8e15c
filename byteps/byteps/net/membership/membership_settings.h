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
  int workers = -1;  // number the job should have; -1: the scheduler decides
  int servers = -1;
  int rank = -1;        // a worker's; -1: the scheduler chooses
  bool rejoin = false;  // for a server that outlived a job: adopt the next job's settings
  // Scheduler: survives failures; each generation has as many workers as its first worker says.
  // Server: accepts any number of workers.
  bool keep = false;
  // With `keep`: the scheduler gives up if no worker comes this long after a failure; 0: never.
  double keep_timeout_s = 1800;
  // Time that a job waits for the replacement of a lost server; 0: the loss ends the job.
  double replace_servers_s = 0;
  // Neighboring servers have links (link/admission.h), and are told of lost and replaced servers.
  bool backups = false;
  // Time that nodes wait for a dead scheduler's return, and the returned one for them
  // (recovery/scheduler); 0: the scheduler's death ends the job.
  double scheduler_return_s = 0;
  int link_mbps = 0;  // rate of a worker's NIC; 0: as the NIC reports
  int replicas = 1;   // a worker's: number of jobs that train its model
  // Positive: Join asks whether this many nodes like this one would be admitted, and does not join.
  // A scheduler then admits no node.
  int probe = 0;
  MakeRosterPolicy make_roster_policy = nullptr;  // a scheduler's; null: a loss ends the job
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_SETTINGS_H_
