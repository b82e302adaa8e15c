// The contract's pair over TCP: a relay stands between, and resets its connections, or takes one of
// two NICs down.
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
  TcpPair(bool encrypts, int nics)
      : nics_(nics),
        hub_(encrypts),
        link_(&hub_, connection_test::kJob, seen(kConnects), seen(kListens), nics) {
    CHECK(WaitUntil([&] { return Load(kConnects).is_open; }));
  }

  void Send(Side from, const ps::SArray<char>& value) override {
    link_.Send(from == kConnects, value);
  }
  // With two NICs that which is in use fails, and the other one works again.
  void Break() override {
    if (nics_ == 1) return hub_.relay.Reset(link_.route, {});
    hub_.relay.SetDown(first_is_down_ ? link_.route : link_.other_route, false);
    first_is_down_ = !first_is_down_;
    hub_.relay.SetDown(first_is_down_ ? link_.route : link_.other_route, true);
  }
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

  const int nics_;
  bool first_is_down_ = false;
  Hub hub_;
  Link link_;
};

}  // namespace

std::unique_ptr<LinkPair> MakeTcpPair(bool encrypts, int nics) {
  return std::make_unique<TcpPair>(encrypts, nics);
}

}  // namespace contract
