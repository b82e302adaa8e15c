// The program byteps-server: its command line, its checks, and its job.
#ifndef BYTEPS_PROGRAM_SERVE_H_
#define BYTEPS_PROGRAM_SERVE_H_

#include <string>

#include "byteps/base/config.h"
#include "byteps/program/parent.h"

namespace byteps {
namespace core {

// ----- command line and settings

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
// Exit status of --check: everything is right here, but nothing answers at the scheduler's address.
constexpr int kExitNoScheduler = 3;

extern const char kUsage[];

struct Arguments {
  GivenSettings settings;  // set by options
  std::string role;
  std::string port_file;
  bool die_with_parent = false;
  std::string parent_name;
  std::string log;
  int check = 0;  // --check: number of processes like this one on this machine; 0: no check
};

// Returns the role in --role, else DMLC_ROLE. Throws UsageError if it is missing, or not a role of
// byteps-server.
Role ChooseRole(const Arguments& arguments, const Config& config);

// Throws UsageError if an address or a number that the role needs is missing.
void CheckAddress(const Config& config, Role role);

void WarnOfUnknownVariables();

// Implements --check: tests whether this process could join the job, without joining. For each test
// it prints a line that begins with "ok" or "WRONG". Returns the exit status.
int Check(const Arguments& arguments, const char* version);

// Runs the scheduler or a server until its job ends. Returns the exit status. Throws Error if the
// job fails or cannot be joined.
int Serve(const Arguments& arguments, const Parent& parent, const char* version);

// Returns the signal that told this process to stop; 0: none.
int CaughtSignal();

// Returns the exit status of a process that this signal ends.
int SignalStatus();

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_PROGRAM_SERVE_H_
