#ifndef BYTEPS_NET_LINK_NIC_SETTINGS_H_
#define BYTEPS_NET_LINK_NIC_SETTINGS_H_

#include <string>

#include "byteps/base/config.h"

namespace ps {

// Settings of this process's NICs, by the table and by a caller who knows better.
struct NicSettings {
  std::string names = "auto";  // BYTEPS_NICS
  bool uses_rdma = false;
  // One address or device that was named before there were several NICs stays one.
  bool names_address = false;        // DMLC_NODE_HOST or DMLC_INTERFACE
  bool chooses_rdma_device = false;  // BYTEPS_RDMA_DEVICE
  std::string gpu;                   // of a worker: the PCI bus id, "0000:1b:00.0"; empty: none
  int local_rank = 0;                // among the workers of this host
  int local_size = 1;

  static NicSettings From(const byteps::core::Config& config);
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_NIC_SETTINGS_H_
