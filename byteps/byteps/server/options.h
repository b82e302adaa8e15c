// The command line of byteps-server, and what all it does demands of the settings.
#ifndef BYTEPS_SERVER_OPTIONS_H_
#define BYTEPS_SERVER_OPTIONS_H_

#include <string>

#include "byteps/base/config.h"
#include "byteps/base/role.h"

namespace byteps {
namespace core {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
// Of --check: nothing is wrong here, but nobody answers at the scheduler's address.
constexpr int kExitNoScheduler = 3;

extern const char kUsage[];

struct Arguments {
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

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_OPTIONS_H_
