// Texts for errors of the verbs library.
#include "byteps/net/rdma/verbs.h"

#include <cstdio>
#include <cstring>

#include "byteps/base/invariant.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/rdma/posted_sends.h"
#include "byteps/net/rdma/settings.h"
#include "byteps/net/rdma/verbs.h"
#include "byteps/net/rdma/wire.h"

namespace ps {
namespace rdma {
void Throw(const std::string& what, int error) {
  throw Error(what + ": " + strerror(error) + " (errno " + std::to_string(error) + ")");
}

std::string Describe(const ibv_wc& wc) {
  char text[64];
  snprintf(text, sizeof(text), " (status %d, vendor 0x%x)", static_cast<int>(wc.status),
           wc.vendor_err);
  return ibv_wc_status_str(wc.status) + std::string(text);
}

}  // namespace rdma
}  // namespace ps
