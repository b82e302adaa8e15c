#include "link.h"

#include <cstring>
#include <utility>

#include "dmlc/logging.h"

namespace connection_test {

using ps::MutexLock;
using ps::tcp::Connection;
using ps::tcp::ConnectionPtr;
using ps::tcp::Poller;

namespace {

constexpr char kSecret[] = "what both ends know";
constexpr char kOtherSecret[] = "what nobody else knows";
constexpr uint64_t kConnects = 0x1111;
constexpr uint64_t kListens = 0x2222;
// A worker's and a server's.
constexpr int kWorkerId = 9;
constexpr int kServerId = 8;
constexpr size_t kManyFiles = 4096;

std::shared_ptr<const ps::tls::Context> NewContext(const ps::auth::Secret& secret) {
  return std::make_shared<const ps::tls::Context>(secret, ps::tls::Files());
}

}  // namespace

Hub::Hub(bool encrypts, double reconnect_s)
    : pool(std::make_shared<ps::tcp::MemoryPool>(1 << 20)),
      connects(std::make_shared<Poller>(0)),
      listens(std::make_shared<Poller>(1)) {
  ps::tcp::MakeRoomForFiles(kManyFiles);
  pending = std::make_unique<ps::tcp::PendingPeers>(
      listens.get(), ps::tcp::PendingPeers::Limits{.room = kManyFiles,
                                                   .least = {},
                                                   .time = std::chrono::milliseconds(1500),
                                                   .late = "it did not say in time who it is",
                                                   .has_not_done = "authenticated"});
  settings.secret = ps::auth::Secret(kSecret);
  settings.reconnect_s = reconnect_s;
  settings.silence_s = reconnect_s / 2;
  if (encrypts) settings.tls = NewContext(settings.secret);
}

Hub::~Hub() {
  connects->Stop();
  listens->Stop();
}

// ---------------------------------------------------------------------- end

std::vector<std::string> End::texts() { return seen_->get().texts; }

std::string End::ending() {
  const auto state = seen_->get();
  if (state.closed == 0) return "";
  return state.ending.reason.empty() ? "closed" : state.ending.reason;
}

int End::times_resumed() { return seen_->get().resumed; }

size_t End::sent_again() { return seen_->get().again; }

void End::ReceiveAt(char* place) { seen_->ReceiveAt(place); }

std::string End::OnChallenge(const ConnectionPtr& /*connection*/,
                             const ps::tcp::Challenge& challenge) {
  return challenge.job == kJob ? "" : "it belongs to another job";
}

char* End::PlaceFor(const ps::Meta& /*meta*/, size_t /*bytes*/) { return seen_->place(); }

void End::OnMessage(Connection* /*connection*/, ps::Message* msg, size_t /*bytes*/) {
  std::string text;
  for (const auto& value : msg->data) text.append(value.data(), value.size());
  seen_->Came(std::move(text));
}

Poller::Clock::duration End::Patience(Connection* /*connection*/, ps::LinkFault /*fault*/) {
  return std::chrono::duration_cast<Poller::Clock::duration>(
      std::chrono::duration<double>(hub_->settings.reconnect_s));
}

void End::OnResumed(Connection* /*connection*/, Poller::Clock::duration /*after*/, size_t again) {
  seen_->Resumed(again);
}

void End::OnClosed(const ConnectionPtr& /*connection*/, const ps::LinkEnding& ending) {
  seen_->Closed(ending);
}

// --------------------------------------------------------------------- link

Link::Link(Hub* hub, uint64_t listeners_job, contract::Seen* connecting, contract::Seen* listening,
           int nics)
    : connecting(hub, connecting),
      listening(hub, listening),
      hub_(hub),
      other_secret_(kOtherSecret),
      other_tls_(hub->settings.tls ? NewContext(other_secret_) : nullptr),
      job_(listeners_job) {
  host_.secret = &hub->settings.secret;
  host_.tls = hub->settings.tls;
  host_.challenge = [this](const ps::tcp::Hello&) {
    MutexLock lock(&mu_);
    ps::tcp::Challenge challenge;
    challenge.job = job_;
    challenge.sender = kListens;
    return challenge;
  };
  host_.admit = [this](const ps::tcp::StreamPtr& socket, const ps::tcp::Hello& hello) {
    return Admit(socket, hello);
  };
  host_.done = [this](const ps::tcp::Greeter* greeter) {
    hub_->pending->Remove(greeter);
    greeters_.remove_if([=](const auto& one) { return one.get() == greeter; });
  };
  ps::tcp::Fd fd = ps::tcp::Listen(ps::Resolve("127.0.0.1", 0)[0], &port_);
  listener_ = std::make_shared<ps::tcp::Listener>(
      hub->listens.get(), std::move(fd), [] { return true; },
      [this](ps::tcp::Fd accepted, const ps::Address& address) {
        const auto greeter =
            std::make_shared<ps::tcp::Greeter>(&host_, hub_->listens, std::move(accepted));
        greeters_.push_back(greeter);
        hub_->pending->Add(greeter, address);
        greeter->Start();
      });
  listener_->Start();
  route = hub->relay.AddRoute(port_);

  connects_ =
      std::make_shared<Connection>(&this->connecting, &hub->settings, hub->connects, hub->pool);
  connects_->set_peer(kServerId);
  ps::tcp::Hello hello;
  hello.job = kJob;
  hello.sender = kConnects;
  hello.node_id = kWorkerId;
  hello.role = ps::Node::WORKER;
  hello.rank = 0;
  std::vector<ps::NicPair> pairs = {{"", "127.0.0.1"}};
  if (nics == 2) {
    other_route = hub->relay.AddRoute(port_, 2, hub->relay.PortOf(route));
    pairs = {{"127.0.0.1", "127.0.0.1"}, {"127.0.0.2", "127.0.0.2"}};
  }
  connects_->Dial(pairs, hub->relay.PortOf(route), hello,
                  Connection::Clock::now() + std::chrono::seconds(60));
}

Link::~Link() {
  const auto close = [](const ConnectionPtr& connection, End* end) {
    if (!connection) return;
    connection->Close({"the test is over", false, true});
    CHECK(WaitUntil([&] { return !end->ending().empty(); }));
  };
  close(connects_, &connecting);
  close(EndOf(false), &listening);
  listener_->Stop();
  // What the poller's thread still does for greeters of ours ends before they do.
  std::atomic<bool> done{false};
  hub_->listens->Post([&] {
    while (!greeters_.empty()) greeters_.front()->End("the test is over");
    done = true;
  });
  CHECK(WaitUntil([&] { return done.load(); }));
}

ConnectionPtr Link::EndOf(bool to_listener) {
  if (to_listener) return connects_;
  MutexLock lock(&mu_);
  return listens_;
}

std::string Link::Admit(const ps::tcp::StreamPtr& socket, const ps::tcp::Hello& hello) {
  ConnectionPtr connection;
  {
    MutexLock lock(&mu_);
    if (given_up_) return "this node has given the connection up";
    if (hello.receiver != 0 && hello.receiver != kListens) return "another process is meant";
    if (hello.resumes != (listens_ != nullptr)) return "it is not as it was before";
    if (!listens_) {
      listens_ =
          std::make_shared<Connection>(&listening, &hub_->settings, hub_->listens, hub_->pool);
      listens_->set_peer(kWorkerId);
    }
    connection = listens_;
  }
  connection->Adopt(socket, hello);
  return "";
}

void Link::Send(bool to_listener, const std::string& text) {
  ps::SArray<char> value(text.size());
  memcpy(value.data(), text.data(), text.size());
  Send(to_listener, value);
}

void Link::Send(bool to_listener, const ps::SArray<char>& value) {
  ps::Message msg;
  msg.data.push_back(value);
  EndOf(to_listener)->Send(msg);
}

bool Link::Has(const std::vector<std::string>& at_listener, const std::vector<std::string>& back) {
  return listening.texts() == at_listener && connecting.texts() == back;
}

std::string Link::Text() {
  const auto of = [](End* end) {
    std::string text = std::to_string(end->texts().size()) + " messages, resumed " +
                       std::to_string(end->times_resumed()) + " times";
    return text + (end->ending().empty() ? "" : ", closed: " + end->ending());
  };
  return "who connects: " + of(&connecting) + "; who listens: " + of(&listening);
}

void Link::GiveUp() {
  MutexLock lock(&mu_);
  given_up_ = true;
}

void Link::BelongTo(uint64_t job) {
  MutexLock lock(&mu_);
  job_ = job;
}

void Link::ForgetTheSecret() {
  std::atomic<bool> done{false};
  hub_->listens->Post([&] {
    host_.secret = &other_secret_;
    host_.tls = other_tls_;
    done = true;
  });
  CHECK(WaitUntil([&] { return done.load(); }));
}

}  // namespace connection_test
