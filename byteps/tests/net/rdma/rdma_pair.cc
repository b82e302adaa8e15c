// The contract's pair over RDMA: two connectors of one process, by way of a device.
#ifdef BYTEPS_WITH_RDMA
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "byteps/base/mutex.h"
#include "byteps/net/link/endpoint_counters.h"
#include "byteps/net/link/meta_codec.h"
#include "byteps/net/link/node_text.h"
#include "byteps/net/rdma/connector.h"
#include "byteps/net/rdma/endpoint.h"
#include "byteps/net/rdma/message_parts.h"
#include "byteps/net/rdma/verbs_library.h"
#include "dmlc/logging.h"
#include "link_pair.h"

namespace contract {
namespace {

using ps::rdma::Connector;
using ps::rdma::Endpoint;
using ps::rdma::Plane;
using EndpointPtr = std::shared_ptr<Endpoint>;

constexpr uint64_t kJob = 0x5678 << 16;
// A worker's and a server's.
constexpr int kPeerOf[] = {8, 9};

class RdmaEnd : public ps::rdma::EndpointOwner, public ps::rdma::ConnectorOwner {
 public:
  RdmaEnd(Side side, const ps::rdma::Settings& settings, Seen* seen)
      : side_(side),
        settings_(settings),
        seen_(seen),
        connector_(std::make_unique<Connector>(this, settings, side + 1)) {}

  ~RdmaEnd() override {
    if (const EndpointPtr last = endpoint()) {
      last->Fail("the test is over");
      CHECK(WaitUntil([&] { return seen_->get().closed > 0 && last->finished(); }));
    }
    MakeNone();
    if (const auto transport = connector_->transport()) {
      for (auto& poller : transport->pollers) {
        poller->Wake();
        CHECK(WaitUntil([&] { return poller->size() == 0; }));
      }
    }
    connector_.reset();
  }

  Connector* connector() { return connector_.get(); }
  // Null: it has not been connected to.
  EndpointPtr endpoint() {
    ps::MutexLock lock(&mu_);
    return endpoint_;
  }
  EndpointPtr Make() {
    auto made =
        std::make_shared<Endpoint>(this, Plane::kData, 0, side_ == kConnects, settings_,
                                   ps::NewEndpointCounters(ps::rdma::NameOf(Plane::kData), 0));
    made->set_peer(kPeerOf[side_]);
    ps::MutexLock lock(&mu_);
    endpoint_ = made;
    return made;
  }

  uint8_t Role() override { return side_ == kConnects ? ps::Node::WORKER : ps::Node::SERVER; }
  int32_t Rank() override { return side_ == kConnects ? 0 : -1; }
  uint64_t Job() override { return kJob; }
  EndpointPtr OnRequest(const ps::rdma::ConnectRequest& request, const std::string& /*address*/,
                        ps::rdma::Refusal* /*refusal*/) override {
    return request.resumes ? endpoint() : Make();
  }
  std::string OnReply(Endpoint* /*endpoint*/, const ps::rdma::ConnectReply& reply) override {
    return reply.job == kJob ? "" : "it belongs to another job";
  }

  char* PlaceFor(Endpoint* /*endpoint*/, const ps::Meta& /*meta*/, size_t /*bytes*/) override {
    return seen_->place();
  }
  void OnMessage(Endpoint* /*endpoint*/, ps::rdma::Received received) override {
    std::string text;
    for (const auto& value : received.msg.data) text.append(value.data(), value.size());
    seen_->Came(std::move(text));
  }
  ps::LinkOutage::Clock::duration Patience(Endpoint* /*endpoint*/,
                                           ps::LinkFault /*fault*/) override {
    return ps::ToDuration(settings_.reconnect_s);
  }
  void OnBroken(Endpoint* endpoint, bool path_failed) override {
    connector_->Reconnect(endpoint->shared_from_this(), path_failed);
  }
  void OnResumed(Endpoint* /*endpoint*/, ps::LinkOutage::Clock::duration /*after*/,
                 size_t again) override {
    seen_->Resumed(again);
  }
  void OnClosed(Endpoint* endpoint, const ps::LinkEnding& ending) override {
    connector_->Disconnect(endpoint->shared_from_this());
    seen_->Closed(ending);
  }

 private:
  void MakeNone() {
    ps::MutexLock lock(&mu_);
    endpoint_.reset();
  }

  const Side side_;
  const ps::rdma::Settings settings_;
  Seen* const seen_;
  std::unique_ptr<Connector> connector_;
  ps::Mutex mu_;
  EndpointPtr endpoint_ PS_GUARDED_BY(mu_);
};

class RdmaPair : public LinkPair {
 public:
  RdmaPair(const std::string& address, const ps::rdma::Settings& settings)
      : settings_(settings),
        listens_(kListens, settings, seen(kListens)),
        connects_(kConnects, settings, seen(kConnects)) {
    const int port = listens_.connector()->Listen({address}, 0);
    listens_.connector()->Run();
    connects_.connector()->UseDevicesOf({address});
    connects_.connector()->Run();
    connects_.connector()->Connect(connects_.Make(), {{address, address}}, port, 0);
    CHECK(WaitUntil([&] { return Load(kConnects).is_open && listens_.endpoint() != nullptr; }));
  }

  void Send(Side from, const ps::SArray<char>& value) override {
    const auto transport = EndOf(from)->connector()->transport();
    Of(from)->Send(ps::rdma::MakeOutgoing(ps::EncodeMeta(ps::Meta()), {value}, 0,
                                          settings_.inline_bytes, settings_.slot_bytes(),
                                          transport->devices, transport->pool.get()));
  }
  void Break() override {
    Of(breaks_++ % 2 == 0 ? kConnects : kListens)
        ->Break("it was broken for a test", ps::LinkFault::kBroken);
  }
  void CloseInOrder(Side side) override { Of(side)->CloseWhenFlushed(); }
  void Close(Side side) override { Of(side)->Fail("it was closed for a test"); }
  void Abandon(Side side, const void* begin, size_t bytes) override {
    Of(side)->Abandon(begin, bytes, Endpoint::Clock::now() + std::chrono::seconds(10));
  }
  bool AllArrived(Side side) override { return Of(side)->all_arrived(); }
  ps::LinkLoad Load(Side side) override { return Of(side)->load(); }

 private:
  RdmaEnd* EndOf(Side side) { return side == kConnects ? &connects_ : &listens_; }
  EndpointPtr Of(Side side) { return EndOf(side)->endpoint(); }

  const ps::rdma::Settings settings_;
  RdmaEnd listens_;
  RdmaEnd connects_;
  std::atomic<int> breaks_{0};
};

}  // namespace

std::unique_ptr<LinkPair> MakeRdmaPair(const std::string& address) {
  ps::rdma::LoadVerbsLibraries();
  auto settings = ps::rdma::Settings();
  settings.send_depth = 64;
  settings.receive_depth = 128;
  settings.inline_bytes = 4096;
  settings.pool_bytes = 64 << 20;
  settings.window_bytes = 1 << 20;
  settings.receive_window_bytes = 16 << 20;
  settings.secret = ps::auth::Secret("what both ends know");
  return std::make_unique<RdmaPair>(address, settings);
}

}  // namespace contract
#endif  // BYTEPS_WITH_RDMA
