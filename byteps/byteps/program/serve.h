// The program byteps-server: its command line, its checks, and its job.
#ifndef BYTEPS_PROGRAM_SERVE_H_
#define BYTEPS_PROGRAM_SERVE_H_

#include <string>

#include "byteps/base/config.h"
#include "byteps/program/parent.h"

namespace byteps {
namespace core {

// The command line of byteps-server, and what all it does demands of the settings.

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
// Of --check: nothing is wrong here, but nobody answers at the scheduler's address.
constexpr int kExitNoScheduler = 3;

extern const char kUsage[];

struct Arguments {
  GivenSettings settings;  // that options set
  std::string role;
  std::string port_file;
  bool die_with_parent = false;
  std::string parent_name;
  std::string log;
  int check = 0;  // so many processes like this one, on this machine; 0: no check
};

// The role that --role, or else DMLC_ROLE, gives.  Throws UsageError where there is none, or one
// that byteps-server does not run.
Role ChooseRole(const Arguments& arguments, const Config& config);

// Throws UsageError where an address or a number that the role needs is missing.
void CheckAddress(const Config& config, Role role);

void WarnOfUnknownVariables();

// byteps-server --check: whether this process could join the job, and joins nothing.

// Prints a line for each thing that was tried: "ok    ..." or "WRONG ...".  Returns the exit
// status.
int Check(const Arguments& arguments, const char* version);

// The scheduler or a server, from its start to the end of its job.

// Returns the exit status.  Throws Error when the job fails or cannot be joined.
int Serve(const Arguments& arguments, const Parent& parent, const char* version);

// The signal that this process was told to end by; 0: none.
int CaughtSignal();

// The exit status of a process that ends by it.
int SignalStatus();

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_PROGRAM_SERVE_H_
