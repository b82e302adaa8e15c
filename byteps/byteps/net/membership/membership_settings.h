#ifndef BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_SETTINGS_H_
#define BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_SETTINGS_H_

#include <memory>

namespace ps {

class RosterPolicy;
struct ScheduledJob;
class SchedulerMembership;

// Makes what a scheduler does about losses; see RosterPolicy.
using MakeRosterPolicy = std::unique_ptr<RosterPolicy> (*)(SchedulerMembership* scheduler,
                                                           ScheduledJob* job);

// Settings of membership, made by NetSettings::From or by a test.
struct MembershipSettings {
  bool is_scheduler = false;
  double peer_timeout_s = 30;
  double start_timeout_s = 30;
  int workers = -1;  // that the job should have; -1: whatever the scheduler says
  int servers = -1;
  int rank = -1;        // of a worker; -1: the scheduler chooses
  bool rejoin = false;  // a server that outlived a job takes what the next one brings
  // Scheduler: outlives failures, and takes as many workers as the first one of each generation
  // says.  Server: takes any number of workers.
  bool keep = false;
  // Such a scheduler gives up when no worker comes for so long after a failure; 0: never.
  double keep_timeout_s = 1800;
  // How long a job goes on without a server that is lost, until another one has its place; 0: its
  // loss ends the job.
  double replace_servers_s = 0;
  // Servers have links with their neighbors (link/admission.h), and hear which servers are lost
  // and replaced.
  bool backups = false;
  // How long nodes wait for a scheduler that died to return, and that one for them
  // (recovery/scheduler); 0: its death ends the job.
  double scheduler_return_s = 0;
  int link_mbps = 0;  // of a worker's network card; 0: what the card says
  int replicas = 1;   // of a worker: jobs that train its model
  // More than 0: Join asks whether so many nodes like this one would be admitted, and joins
  // nothing; a scheduler admits nobody.
  int probe = 0;
  MakeRosterPolicy make_roster_policy = nullptr;  // of a scheduler; null: a loss ends the job
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_SETTINGS_H_
