// What a server asks of a channel besides Send: nothing happens.
#ifndef BYTEPS_TESTS_SUPPORT_SERVER_CHANNEL_H_
#define BYTEPS_TESTS_SUPPORT_SERVER_CHANNEL_H_

#include <cstddef>
#include <string>

#include "byteps/cluster/channel.h"

namespace byteps {
namespace core {

class ServerChannel : public Channel {
 public:
  void Start(ChannelUser*) override {}
  void Leave(const ps::Farewell&) override {}
  void Stop() override {}
  void Abandon(const void*, size_t) override {}
  bool RegistersMemory() const override { return false; }
  double link_gbps() const override { return 0; }
  int rank() const override { return 0; }
  std::string NameOfServer(int) override { return "server"; }
  std::string NameOfWorker(int) override { return "worker"; }
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_TESTS_SUPPORT_SERVER_CHANNEL_H_
