#include "byteps/server/options.h"

#include <cstring>

#include "byteps/base/error.h"
#include "byteps/base/log_line.h"

namespace byteps {
namespace core {

const char kUsage[] =
    "usage: byteps-server [--role scheduler|server] [--keep] [--port-file PATH]\n"
    "                     [--die-with-parent[=NAME] [--log PATH]]\n"
    "       byteps-server --check[=N] [--role scheduler|server|worker] [--keep]\n"
    "       byteps-server --new-secret PATH\n"
    "       byteps-server --health\n"
    "       byteps-server --print-config | --config-markdown | --metrics-markdown |\n"
    "                     --features | --version | -h\n"
    "\n"
    "Runs the scheduler or one server of a BytePS cluster until its job ends.\n"
    "\n"
    "  --role ROLE         scheduler or server; default: DMLC_ROLE\n"
    "  --keep              survive a failure of the job, and accept its restart, with as\n"
    "                      many workers as then come; the same as BYTEPS_KEEP=1.  A job that ends\n"
    "                      well, or a signal, ends this process as always\n"
    "  --port-file PATH    write \"HOST PORT\" there once this process listens\n"
    "  --die-with-parent[=NAME]\n"
    "                      end when the process that started this one ends, and tell the other\n"
    "                      nodes that NAME was lost\n"
    "  --log PATH          the file that the output goes to: with the parent's end it is removed,\n"
    "                      and its folder with the last file in it\n"
    "  --check[=N]         look whether N (1) such processes of this machine could join the job,\n"
    "                      and join nothing: reads all settings, listens for a moment, opens the\n"
    "                      network device, and asks the scheduler, also one whose job runs\n"
    "  --new-secret PATH   write a random secret for a job there, which this user alone may read;\n"
    "                      the file must not exist\n"
    "  --health            ask the process at BYTEPS_HEALTH_SOCKET how it is: prints its answer\n"
    "                      and exits with 0, or with 1 if there is none within 3 s\n"
    "  --print-config      print the settings in force and exit\n"
    "  --config-markdown   print the reference of all settings and exit\n"
    "  --metrics-markdown  print the reference of all metrics and exit\n"
    "  --features          print what this build has, and can use on this machine, and exit\n"
    "\n"
    "Settings come from the environment, at least DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT,\n"
    "DMLC_NUM_WORKER (not with --keep), DMLC_NUM_SERVER and BYTEPS_SECRET_FILE.\n"
    "\n"
    "Exit status: 0 every worker left in order; 1 the job failed; 2 bad usage or settings;\n"
    "128+n ended by signal n.  A second signal ends the process within 3 s.\n"
    "Of --check: 0 it would be admitted; 1 something is wrong; 2 a setting is; 3 nothing that can "
    "be\n"
    "seen here is wrong, but the scheduler does not answer: start it, and check again.\n";

Role ChooseRole(const Arguments& arguments, const Config& config) {
  const std::string name = arguments.role.empty() ? config.String("DMLC_ROLE") : arguments.role;
  if (name == "scheduler") return Role::kScheduler;
  if (name == "server") return Role::kServer;
  if (name == "worker" && arguments.check > 0) return Role::kWorker;
  if (arguments.role.empty()) {
    throw UsageError("say --role scheduler or --role server, or set DMLC_ROLE to one of them");
  }
  throw UsageError("--role " + name + " is not allowed: it must be scheduler or server" +
                   (arguments.check > 0 ? ", or worker" : ""));
}

void CheckAddress(const Config& config, Role role) {
  for (const char* name :
       {"DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER"}) {
    const bool workers = strcmp(name, "DMLC_NUM_WORKER") == 0;
    // A kept cluster takes as many as come, and a worker may be told by its launcher.
    if (workers && (config.Bool("BYTEPS_KEEP") || role == Role::kWorker)) continue;
    if (!config.IsSet(name)) throw UsageError(std::string(name) + " is not set");
  }
  if (config.String("DMLC_PS_ROOT_URI").empty()) throw UsageError("DMLC_PS_ROOT_URI is empty");
  if (role != Role::kScheduler && config.Int("DMLC_PS_ROOT_PORT") == 0) {
    throw UsageError(std::string("DMLC_PS_ROOT_PORT=0 is for the scheduler alone; give the ") +
                     NameOf(role) + " the port it listens on");
  }
}

void WarnOfUnknownVariables() {
  for (const auto& warning : Config::UnknownVariables()) {
    ps::WriteLogLine('W', __FILE__, __LINE__, warning);
  }
}

}  // namespace core
}  // namespace byteps
