#ifndef BYTEPS_NET_NET_SETTINGS_H_
#define BYTEPS_NET_NET_SETTINGS_H_

#include <string>

#include "byteps/base/config.h"
#include "byteps/net/membership/van_settings.h"
#include "byteps/net/rdma/settings.h"
#include "byteps/net/tcp/settings.h"

namespace ps {

// All that a process's part of the network is told.  Nothing in net/ looks a setting up by itself.
struct NetSettings {
  byteps::core::Role role = byteps::core::Role::kWorker;
  std::string transport = "tcp";  // DMLC_ENABLE_RDMA
  int verbose = 0;                // PS_VERBOSE
  VanSettings van;
  tcp::Settings tcp;
  rdma::Settings rdma;

  // Reads the job's secret and the files of BYTEPS_TLS_*, too.  Role, counts and rank of
  // `van.membership`, and the place among the workers, are those of the settings; a caller who
  // knows better sets them.  Throws Error that says what to set.
  static NetSettings From(const byteps::core::Config& config);

  // Lowers the time that the start may take to `seconds`.
  void LimitStartTimeout(double seconds);
};

}  // namespace ps
#endif  // BYTEPS_NET_NET_SETTINGS_H_
