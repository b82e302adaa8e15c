#ifndef BYTEPS_NET_LINK_NIC_SETTINGS_H_
#define BYTEPS_NET_LINK_NIC_SETTINGS_H_

#include <string>

#include "byteps/base/config.h"

namespace ps {

// Settings that decide which NICs this process uses: BYTEPS_NICS, and older variables that name a
// single address or device.
struct NicSettings {
  std::string names = "auto";  // BYTEPS_NICS
  bool uses_rdma = false;
  // Whether older variables restrict the node to the NIC of one address or device.
  bool names_address = false;        // DMLC_NODE_HOST or DMLC_INTERFACE
  bool chooses_rdma_device = false;  // BYTEPS_RDMA_DEVICE
  std::string gpu;                   // PCI bus id of a worker's GPU, "0000:1b:00.0"; "": no GPU
  int local_rank = 0;                // rank among the workers of this host
  int local_size = 1;

  static NicSettings From(const byteps::core::Config& config);
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_NIC_SETTINGS_H_
