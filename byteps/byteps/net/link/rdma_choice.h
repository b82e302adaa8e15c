#ifndef BYTEPS_NET_LINK_RDMA_CHOICE_H_
#define BYTEPS_NET_LINK_RDMA_CHOICE_H_

#include <string>

namespace ps {

// RDMA device, port and GID index, as BYTEPS_RDMA_DEVICE names them.
struct RdmaChoice {
  std::string device;  // "": the device of the node's address
  int port = 0;        // 0: the port of the address
  int gid_index = -1;  // -1: the GID of the address

  // Parses NAME[:PORT[:GID]]; each part may be empty. Throws UsageError.
  static RdmaChoice Parse(const std::string& text);

  // Returns whether every part is left to the node's address.
  bool is_any() const { return device.empty() && port == 0 && gid_index < 0; }
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_RDMA_CHOICE_H_
