#ifndef BYTEPS_NET_NET_SETTINGS_H_
#define BYTEPS_NET_NET_SETTINGS_H_

#include <string>

#include "byteps/base/config.h"
#include "byteps/net/membership/van_settings.h"
#include "byteps/net/rdma/settings.h"
#include "byteps/net/tcp/settings.h"

namespace ps {

// All settings of a process's network. Code in net/ reads no setting itself.
struct NetSettings {
  byteps::core::Role role = byteps::core::Role::kWorker;
  std::string transport = "tcp";  // DMLC_ENABLE_RDMA
  int verbose = 0;                // PS_VERBOSE
  VanSettings van;
  tcp::Settings tcp;
  rdma::Settings rdma;

  // Takes the settings from `config`. Reads the job's secret, and the files that BYTEPS_TLS_* name.
  // A caller may override role, counts and rank in `van.membership`, and the local rank and size.
  // Throws Error that says what to set.
  static NetSettings From(const byteps::core::Config& config);

  // Limits BYTEPS_START_TIMEOUT_S to `seconds`.
  void LimitStartTimeout(double seconds);
};

}  // namespace ps
#endif  // BYTEPS_NET_NET_SETTINGS_H_
