// How a link ended, or a connection that carried it.
#ifndef BYTEPS_NET_LINK_LINK_ENDING_H_
#define BYTEPS_NET_LINK_LINK_ENDING_H_

#include <string>

namespace ps {

struct LinkEnding {
  std::string reason;
  bool by_peer = false;  // and this side has nothing to say of the reason
  bool orderly = false;  // the peer said goodbye, or this side closed it in order
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_LINK_ENDING_H_
