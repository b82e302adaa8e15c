#include "network.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "byteps/base/error.h"
#include "byteps/base/invariant.h"
#include "byteps/base/probe.h"
#include "byteps/cluster/session.h"
#include "byteps/net/link/node_token.h"
#include "dmlc/logging.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"
#include "virtual_threads.h"

namespace byteps {
namespace simulation {
namespace {

constexpr int kDataThreads = 2;
constexpr auto kJoinPause = std::chrono::milliseconds(200);

std::string AddressOf(int number) { return "10.0.0." + std::to_string(number); }
int NumberOf(const std::string& address) { return atoi(address.c_str() + strlen("10.0.0.")); }

std::chrono::steady_clock::duration Duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

bool IsControl(const ps::Message& message) { return !message.meta.control.empty(); }

}  // namespace

// ------------------------------------------------------------------ network

Network::Network() {
  thread_ = std::thread([this] { Run(); });
  pthread_setname_np(thread_.native_handle(), "network");
}

Network::~Network() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
  }
  cond_.notify_all();
  thread_.join();
}

void Network::Add(SimulatedChannel* node) {
  std::lock_guard<std::mutex> lock(mu_);
  nodes_[node->number()] = node;
}

uint64_t Network::LifeOf(int node) const {
  const auto it = nodes_.find(node);
  return it == nodes_.end() ? 0 : it->second->life();
}

Network::Clock::time_point Network::ArrivalOf(int from, int to, bool in_order) {
  auto at = Clock::now() + std::chrono::microseconds(Random(2000));
  for (const int node : {from, to}) {
    const auto paused = paused_.find(node);
    if (paused != paused_.end()) at = std::max(at, paused->second);
  }
  const auto delayed = delayed_.find(PairOf(from, to));
  if (delayed != delayed_.end()) at = std::max(at, delayed->second);
  if (in_order) {
    auto& last = last_[{from, to}];
    at = last = std::max(at, last + std::chrono::nanoseconds(1));
  }
  return at;
}

void Network::Carry(const SimulatedChannel& from, int to, ps::Message message) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto link = links_.find(PairOf(from.number(), to));
  if (link == links_.end() || link->second.lives[from.number()] != from.life()) {
    return;
  }
  Item item;
  item.from = from.number();
  item.to = to;
  item.from_life = from.life();
  item.to_life = link->second.lives[to];
  item.link = link->second.number;
  const auto at = ArrivalOf(from.number(), to, IsControl(message));
  item.message = std::move(message);
  under_way_.emplace(at, std::move(item));
  cond_.notify_one();
}

bool Network::IsLinked(int node, uint64_t life) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto link = links_.find(PairOf(0, node));
  return link != links_.end() && link->second.lives[node] == life;
}

void Network::Close(int node, uint64_t life) {
  const End closed{"its connection closed", true, true};
  if (IsLinked(node, life)) Unlink(node, 0, &closed, nullptr);
}

void Network::Link(int a, int b) {
  std::lock_guard<std::mutex> lock(mu_);
  if (killed_.count(a) || killed_.count(b)) return;
  LinkState link;
  link.number = next_link_++;
  link.lives = {{a, LifeOf(a)}, {b, LifeOf(b)}};
  links_.emplace(PairOf(a, b), link);
}

void Network::Unlink(int a, int b, const End* at_a, const End* at_b) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto link = links_.find(PairOf(a, b));
  if (link == links_.end()) return;
  const auto tell = [&](int node, int peer, const End* end) {
    if (end == nullptr) return;
    // What was sent in good order comes before the end; all else is gone.
    Item item;
    item.from = peer;
    item.to = node;
    item.from_life = link->second.lives[peer];
    item.to_life = link->second.lives[node];
    item.is_end = true;
    item.end = *end;
    under_way_.emplace(ArrivalOf(peer, node, true), std::move(item));
  };
  const bool flushed = at_a != nullptr && at_b == nullptr && at_a->by_peer;
  for (auto it = under_way_.begin(); it != under_way_.end() && !flushed;) {
    it = it->second.link == link->second.number ? under_way_.erase(it) : std::next(it);
  }
  if (flushed) {  // b closed it: what it sent still comes
    for (auto it = under_way_.begin(); it != under_way_.end();) {
      Item& item = it->second;
      const bool on_it = item.link == link->second.number;
      const bool lost = on_it && item.to == b;
      if (on_it) item.link = 0;
      // The sender may let go of its memory: the network has the values.
      for (auto& values : item.message.data) {
        if (!on_it || lost) break;
        ps::SArray<char> copy;
        copy.CopyFrom(values);
        values = copy;
      }
      it = lost ? under_way_.erase(it) : std::next(it);
    }
  }
  tell(a, b, at_a);
  tell(b, a, at_b);
  links_.erase(link);
  cond_.notify_one();
}

void Network::Reset(int a, int b) {
  const End reset{"its connection was reset", false, false};
  Unlink(a, b, &reset, &reset);
}

void Network::Kill(int node) {
  std::vector<int> peers;
  {
    std::lock_guard<std::mutex> lock(mu_);
    killed_.insert(node);
    for (const auto& link : links_) {
      if (link.first.first == node) peers.push_back(link.first.second);
      if (link.first.second == node) peers.push_back(link.first.first);
    }
  }
  const End closed{"its connection closed", true, false};
  // Its own threads live on here, unseen, until they find out.
  const End dead{"this process is dead", false, false};
  for (const int peer : peers) Unlink(peer, node, &closed, &dead);
}

void Network::Pause(int node, double seconds) {
  std::lock_guard<std::mutex> lock(mu_);
  auto& until = paused_[node];
  until = std::max(until, Clock::now() + Duration(seconds));
}

void Network::Delay(int a, int b, double seconds) {
  std::lock_guard<std::mutex> lock(mu_);
  auto& until = delayed_[PairOf(a, b)];
  until = std::max(until, Clock::now() + Duration(seconds));
}

void Network::Run() {
  std::unique_lock<std::mutex> lock(mu_);
  while (!stopping_) {
    if (under_way_.empty()) {
      cond_.wait(lock);
    } else if (under_way_.begin()->first > Clock::now()) {
      const auto at = under_way_.begin()->first;
      cond_.wait_until(lock, at);
    } else {
      Item item = std::move(under_way_.begin()->second);
      under_way_.erase(under_way_.begin());
      Deliver(std::move(item));
    }
  }
}

// mu_ is held: a node that has gone gets nothing more.
void Network::Deliver(Item item) {
  const auto node = nodes_.find(item.to);
  if (node == nodes_.end() || node->second->life() != item.to_life) return;
  Note(static_cast<uint64_t>(item.from) << 8 | item.to);
  if (item.is_end) {
    node->second->OnEnd(item.from, item.from_life, item.end);
  } else {
    node->second->Receive(item.from, item.from_life, std::move(item.message));
  }
}

// ------------------------------------------------------------------ channel

// How the membership of a node reaches others, as a van's.
class SimulatedChannel::Links : public ps::MembershipLinks {
 public:
  explicit Links(SimulatedChannel* channel) : channel_(channel) {
    const NodeSettings& settings = channel->settings_;
    scheduler_.role = ps::Node::SCHEDULER;
    scheduler_.id = ps::kScheduler;
    scheduler_.hostname = AddressOf(0);
    scheduler_.port = 9000;
    self_.role = settings.role;
    self_.hostname = AddressOf(settings.number);
    self_.port = settings.role == ps::Node::SERVER ? 9001 : 0;
    if (settings.role == ps::Node::SCHEDULER) self_ = scheduler_;
    ps::SetToken(channel->life(), &self_);
  }

  ps::Node self() const override { return self_; }
  const ps::Node& scheduler() const override { return scheduler_; }
  void SetSelf(const ps::Node& node) override { self_ = node; }

  void Connect(const ps::Node& node) override {
    const int peer = NumberOf(node.hostname);
    const bool scheduler = self_.role == ps::Node::SCHEDULER;
    const uint64_t life = scheduler ? ps::TokenOf(node) : 0;
    {
      std::lock_guard<std::mutex> lock(channel_->mu_);
      auto& names = channel_->names_;
      // It may have had another name.
      for (auto it = names.begin(); it != names.end() && scheduler;) {
        const bool same = it->second.number == peer && it->second.life == life;
        it = same ? names.erase(it) : std::next(it);
      }
      names[node.id] = {peer, life};
    }
    if (!scheduler) return channel_->network_->Connect(*channel_, peer);
    if (node.role == ps::Node::SCHEDULER || channel_->network_->IsLinked(peer, life)) return;
    channel_->OnEnd(peer, life, {"its connection closed", true, false});  // it came, and has gone
  }

  void Disconnect(int node_id) override {
    Name name;
    {
      std::lock_guard<std::mutex> lock(channel_->mu_);
      const auto it = channel_->names_.find(node_id);
      if (it == channel_->names_.end()) return;
      name = it->second;
    }
    if (self_.role == ps::Node::SCHEDULER) channel_->network_->Close(name.number, name.life);
  }

  void Send(ps::Message* message) override {
    const auto& control = message->meta.control;
    const bool worker = !control.node.empty() && control.node[0].role == ps::Node::WORKER;
    if (control.cmd == ps::Control::WELCOME && worker) ++channel_->network_->admitted_;
    channel_->Transmit(*message);
  }

  void SetIncarnation(int incarnation) override {
    channel_->incarnation_ = incarnation;
    if (self_.role == ps::Node::SCHEDULER) channel_->network_->incarnation_ = incarnation;
  }

 private:
  SimulatedChannel* const channel_;
  ps::Node self_;
  ps::Node scheduler_;
};

void Network::Connect(const SimulatedChannel& from, int to) {
  bool there = false;
  int its = from.incarnation();
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto node = nodes_.find(to);
    there = node != nodes_.end() && killed_.count(to) == 0;
    if (there && to != 0) its = node->second->incarnation();
  }
  // As the transports do: it will hear of the new incarnation, or be lost.
  if (there && its < from.incarnation()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Connect(from, to);
  }
  const bool ours = there && its == from.incarnation();
  if (ours) return Link(from.number(), to);
  std::lock_guard<std::mutex> lock(mu_);
  TellOfEnd(from, to,
            there ? "it is of incarnation " + std::to_string(its) +
                        " of the job, and this node of " + std::to_string(from.incarnation())
                  : "connecting to it failed: connection refused");
}

void Network::TellOfEnd(const SimulatedChannel& node, int peer, const std::string& how) {
  Item item;
  item.from = peer;
  item.to = node.number();
  item.to_life = node.life();
  item.is_end = true;
  item.end = {how, false, false};
  under_way_.emplace(ArrivalOf(peer, node.number(), true), std::move(item));
  cond_.notify_one();
}

SimulatedChannel::SimulatedChannel(Network* network, const NodeSettings& settings)
    : network_(network), settings_(settings) {}

SimulatedChannel::~SimulatedChannel() { Stop(); }

void SimulatedChannel::Start(core::ChannelUser* user) {
  user_ = user;
  const auto deadline = std::chrono::steady_clock::now() + Duration(settings_.start_timeout_s);
  while (true) {
    try {
      return StartOnce();
    } catch (const ps::ComeAgain& e) {
      if (std::chrono::steady_clock::now() >= deadline) throw core::Error(e.what());
    } catch (const ps::JobFailed& e) {
      throw core::JobFailedError(e.what());
    } catch (const dmlc::Error& e) {
      throw core::Error(e.what());
    }
    std::this_thread::sleep_for(kJoinPause);
  }
}

void SimulatedChannel::StartOnce() {
  life_ = network_->NewLife();
  // As the scheduler says to who connects.
  incarnation_ = network_->incarnation_.load();
  closed_ = false;
  names_.clear();
  links_ = std::make_unique<Links>(this);
  ps::MembershipSettings membership;
  membership.is_scheduler = settings_.role == ps::Node::SCHEDULER;
  membership.peer_timeout_s = settings_.peer_timeout_s;
  membership.start_timeout_s = settings_.start_timeout_s;
  membership.workers = settings_.workers;
  membership.servers = settings_.servers;
  membership.rank = settings_.role == ps::Node::WORKER ? settings_.rank : -1;
  membership.keep = settings_.keep;
  membership.keep_timeout_s = settings_.keep_timeout_s;
  membership.rejoin = settings_.rejoin;
  membership_ = std::make_unique<ps::Membership>(
      links_.get(), membership,
      [this](const ps::MembershipEvent& event) { user_->OnEvent(event); });
  network_->Add(this);
  links_->Connect(links_->scheduler());
  threads_.emplace_back([this] { ReceiveControl(); });
  pthread_setname_np(threads_.back().native_handle(), "control");
  for (int i = 0; i < kDataThreads; ++i) {
    threads_.emplace_back([this] { ReceiveData(); });
    pthread_setname_np(threads_.back().native_handle(), "data");
  }
  try {
    membership_->Join();
  } catch (...) {
    Stop();
    throw;
  }
}

void SimulatedChannel::Stop() {
  if (threads_.empty()) return;
  membership_->Stop();
  {
    std::lock_guard<std::mutex> lock(mu_);
    closed_ = true;
  }
  control_cond_.notify_all();
  data_cond_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  network_->Leave(this);
  std::lock_guard<std::mutex> lock(mu_);
  control_.clear();
  data_.clear();
}

void Network::Leave(SimulatedChannel* channel) {
  const int node = channel->number();
  std::vector<int> peers;
  {
    std::lock_guard<std::mutex> lock(mu_);
    nodes_.erase(node);
    for (const auto& link : links_) {
      if (link.first.first == node) peers.push_back(link.first.second);
      if (link.first.second == node) peers.push_back(link.first.first);
    }
  }
  const End closed{"its connection closed", true, true};
  for (const int peer : peers) Unlink(peer, node, &closed, nullptr);
}

void SimulatedChannel::Transmit(ps::Message message) {
  Name name;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (closed_) return;
    const auto it = names_.find(message.meta.recver);
    if (it == names_.end()) return;
    name = it->second;
  }
  const int to = name.number;
  if (settings_.role == ps::Node::SCHEDULER && !network_->IsLinked(to, name.life)) return;
  message.meta.sender = links_->self().id;
  if (to != settings_.number) network_->Carry(*this, to, std::move(message));
}

void SimulatedChannel::Abandon(const void* begin, size_t bytes) {
  const char* const from = static_cast<const char*>(begin);
  std::lock_guard<std::mutex> lock(place_mu_);
  for (auto& placing : placing_) {
    const bool apart = placing.begin + placing.bytes <= from || from + bytes <= placing.begin;
    if (!apart) PS_PROBE(kAbandoned);
    placing.abandoned = placing.abandoned || !apart;
  }
}

int SimulatedChannel::rank() const { return ps::Postoffice::IDtoRank(links_->self().id); }

std::string SimulatedChannel::NameOfServer(int rank) {
  return membership_->NameOf(ps::Postoffice::ServerRankToID(rank));
}

std::string SimulatedChannel::NameOfWorker(int rank) {
  return membership_->NameOf(ps::Postoffice::WorkerRankToID(rank));
}

void SimulatedChannel::Receive(int from, uint64_t from_life, ps::Message message) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (closed_) return;
    Event event;
    event.from = from;
    event.from_life = from_life;
    const bool control = IsControl(message);
    event.message = std::move(message);
    (control ? control_ : data_).push_back(std::move(event));
  }
  control_cond_.notify_one();
  data_cond_.notify_one();
}

void SimulatedChannel::OnEnd(int from, uint64_t from_life, const Network::End& end) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (closed_) return;
    Event event;
    event.from = from;
    event.from_life = from_life;
    event.is_end = true;
    event.end = end;
    control_.push_back(std::move(event));
  }
  control_cond_.notify_one();
}

int SimulatedChannel::IdOf(int number, uint64_t life) const {
  std::lock_guard<std::mutex> lock(mu_);
  int id = ps::Node::kEmpty;
  for (const auto& [node_id, name] : names_) {
    if (name.number == number && (name.life == 0 || name.life == life)) id = node_id;
  }
  return id;
}

void SimulatedChannel::ReceiveControl() {
  while (true) {
    Event event;
    {
      std::unique_lock<std::mutex> lock(mu_);
      control_cond_.wait(lock, [this] { return closed_ || !control_.empty(); });
      if (closed_) return;
      event = std::move(control_.front());
      control_.pop_front();
    }
    if (event.is_end) {
      HandleEnd(event);
      continue;
    }
    event.message.meta.sender = IdOf(event.from, event.from_life);
    // Who registers has no id yet, whatever it was called before.
    if (event.message.meta.control.cmd == ps::Control::ADD_NODE &&
        settings_.role == ps::Node::SCHEDULER) {
      event.message.meta.sender = ps::Node::kEmpty;
    }
    membership_->Handle(event.message);
  }
}

void SimulatedChannel::HandleEnd(const Event& event) {
  const Network::End& end = event.end;
  const int id = IdOf(event.from, event.from_life);
  if (id == ps::Node::kEmpty) return;  // it never was more than a connection
  if (end.orderly) return membership_->OnDisconnect(id);
  membership_->OnLinkLost(id, end.how, end.by_peer);
}

void SimulatedChannel::ReceiveData() {
  while (true) {
    Event event;
    {
      std::unique_lock<std::mutex> lock(mu_);
      data_cond_.wait(lock, [this] { return closed_ || !data_.empty(); });
      if (closed_) return;
      // Messages from one node may overtake each other.
      const size_t pick = Random(data_.size());
      std::swap(data_[pick], data_.front());
      event = std::move(data_.front());
      data_.pop_front();
    }
    ps::Message& message = event.message;
    // A worker says to its servers who it is; its servers it knows by the scheduler's list.
    if (settings_.role == ps::Node::SERVER) {
      std::lock_guard<std::mutex> lock(mu_);
      names_[message.meta.sender] = {event.from, 0};
    } else {
      message.meta.sender = IdOf(event.from, event.from_life);
    }
    ps::SArray<char> values;
    if (!message.data.empty()) values = Place(message.meta, message.data[0]);
    if (!message.data.empty()) message.data[0] = values;
    const int sender = message.meta.sender;
    core::Message received = core::FromPs(&message);
    try {
      user_->OnMessage(&received);
    } catch (const std::exception& e) {
      // A transport closes the connection.
      membership_->OnLinkLost(sender, e.what(), false);
    }
    std::lock_guard<std::mutex> lock(place_mu_);
    if (values.size() > 0) {
      placing_.remove_if([&](const Placing& placing) { return placing.begin == values.data(); });
    }
  }
}

ps::SArray<char> SimulatedChannel::Place(const ps::Meta& meta, const ps::SArray<char>& values) {
  Placing* placing = nullptr;
  {
    std::lock_guard<std::mutex> lock(place_mu_);
    if (char* const place = user_->PlaceFor(core::HeadOf(meta), values.size())) {
      placing_.push_back({place, values.size(), false});
      placing = &placing_.back();
    }
  }
  ps::SArray<char> received;
  if (placing == nullptr) {
    received.CopyFrom(values);
    return received;
  }
  const size_t half = values.size() / 2;
  for (const auto& [begin, end] : {std::pair<size_t, size_t>(0, half), {half, values.size()}}) {
    // Now and then it takes long to come.
    if (begin > 0 && Random(16) == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(Random(20'000)));
    }
    std::lock_guard<std::mutex> lock(place_mu_);
    if (!placing->abandoned) memcpy(placing->begin + begin, values.data() + begin, end - begin);
  }
  received.reset(placing->begin, values.size(), [](char*) {});
  return received;
}

}  // namespace simulation
}  // namespace byteps
