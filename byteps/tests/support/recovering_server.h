#ifndef BYTEPS_TESTS_SUPPORT_RECOVERING_SERVER_H_
#define BYTEPS_TESTS_SUPPORT_RECOVERING_SERVER_H_

#include <memory>

#include "byteps/base/config.h"
#include "byteps/cluster/channel.h"
#include "byteps/recovery/server/server_recovery.h"
#include "byteps/server/sum_server.h"

namespace byteps {
namespace core {

// A server that continues after losses, like byteps-server.
class RecoveringServer : public SumServer {
 public:
  RecoveringServer(const Config& config, Channel* channel)
      : SumServer(config, channel, std::make_unique<ServerRecovery>(config, channel)) {}
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_TESTS_SUPPORT_RECOVERING_SERVER_H_
