#ifndef BYTEPS_NET_LINK_RDMA_CHOICE_H_
#define BYTEPS_NET_LINK_RDMA_CHOICE_H_

#include <string>

namespace ps {

// The RDMA device, its port and its GID, as BYTEPS_RDMA_DEVICE names them.
struct RdmaChoice {
  std::string device;  // "": that of the node's address
  int port = 0;        // 0: that of the address
  int gid_index = -1;  // -1: that of the address

  // From NAME[:PORT[:GID]], each of which may be empty.  Throws UsageError.
  static RdmaChoice Parse(const std::string& text);

  // Whether it leaves all to the address.
  bool is_any() const { return device.empty() && port == 0 && gid_index < 0; }
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_RDMA_CHOICE_H_
