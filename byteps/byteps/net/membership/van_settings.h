#ifndef BYTEPS_NET_MEMBERSHIP_VAN_SETTINGS_H_
#define BYTEPS_NET_MEMBERSHIP_VAN_SETTINGS_H_

#include <string>

#include "byteps/net/link/nic_settings.h"
#include "byteps/net/membership/membership_settings.h"

namespace ps {

// Settings of a van, whatever its transport.
struct VanSettings {
  std::string scheduler_host;     // DMLC_PS_ROOT_URI
  int scheduler_port = 0;         // DMLC_PS_ROOT_PORT
  bool on_every_address = false;  // DMLC_USE_KUBERNETES: the scheduler listens on all addresses
  std::string host;               // DMLC_NODE_HOST; "": the van chooses
  std::string interface;          // DMLC_INTERFACE; "": the van chooses
  int port = 0;                   // BYTEPS_NODE_PORT, for a server; 0: the kernel chooses
  double reconnect_s = 30;        // BYTEPS_RECONNECT_TIMEOUT_S
  NicSettings nics;
  MembershipSettings membership;
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_VAN_SETTINGS_H_
