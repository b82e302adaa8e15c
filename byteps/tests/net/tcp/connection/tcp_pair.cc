// The contract's pair over TCP: a relay stands between, and resets its connections.
#include <memory>
#include <string>

#include "dmlc/logging.h"
#include "link.h"
#include "link_pair.h"

namespace contract {
namespace {

using connection_test::Hub;
using connection_test::Link;

class TcpPair : public LinkPair {
 public:
  explicit TcpPair(bool encrypts)
      : hub_(encrypts), link_(&hub_, connection_test::kJob, seen(kConnects), seen(kListens)) {
    CHECK(WaitUntil([&] { return Load(kConnects).is_open; }));
  }

  void Send(Side from, const ps::SArray<char>& value) override {
    link_.Send(from == kConnects, value);
  }
  void Break() override { hub_.relay.Reset(link_.route, {}); }
  void CloseInOrder(Side side) override {
    End(side)->SayGoodbye();
    End(side)->CloseWhenFlushed();
  }
  void Close(Side side) override { End(side)->Close({"it was closed for a test", false, true}); }
  void Abandon(Side side, const void* begin, size_t bytes) override {
    End(side)->Abandon(begin, bytes);
  }
  bool AllArrived(Side side) override { return End(side)->all_arrived(); }
  ps::LinkLoad Load(Side side) override { return End(side)->load(); }

 private:
  ps::tcp::ConnectionPtr End(Side side) { return link_.EndOf(side == kConnects); }

  Hub hub_;
  Link link_;
};

}  // namespace

std::unique_ptr<LinkPair> MakeTcpPair(bool encrypts) { return std::make_unique<TcpPair>(encrypts); }

}  // namespace contract
