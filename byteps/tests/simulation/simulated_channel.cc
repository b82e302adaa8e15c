#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "byteps/base/invariant.h"
#include "byteps/cluster/channel.h"
#include "byteps/cluster/session.h"
#include "byteps/net/link/admission.h"
#include "byteps/recovery/scheduler/make_roster_recovery.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"
#include "world.h"

namespace byteps {
namespace simulation {
namespace {

constexpr int kDataThreads = 2;
constexpr auto kJoinPause = std::chrono::milliseconds(200);

}  // namespace

std::string AddressOf(int number) { return "10.0.0." + std::to_string(number); }
int NumberOf(const std::string& address) { return atoi(address.c_str() + strlen("10.0.0.")); }

// Links of a node's membership, as a van's.
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
    const bool comes =
        self_.role == ps::Node::SERVER && node.role == ps::Node::SERVER &&
        !ps::DialsNeighbor(ps::Postoffice::IDtoRank(self_.id), ps::Postoffice::IDtoRank(node.id));
    const uint64_t life = scheduler || comes ? ps::TokenOf(node) : 0;
    {
      std::lock_guard<std::mutex> lock(channel_->mu_);
      auto& names = channel_->names_;
      // The node may have had another id.
      for (auto it = names.begin(); it != names.end() && scheduler;) {
        const bool same = it->second.number == peer && it->second.life == life;
        it = same ? names.erase(it) : std::next(it);
      }
      names[node.id] = {peer, life, comes};
      auto& unnamed = channel_->unnamed_;
      for (auto it = unnamed.begin(); it != unnamed.end() && comes;) {
        const bool same = it->from == peer && it->from_life == life;
        if (same) channel_->data_.push_back(std::move(*it));
        it = same ? unnamed.erase(it) : std::next(it);
      }
    }
    if (comes) return channel_->data_cond_.notify_all();
    if (!scheduler) return channel_->network_->Connect(*channel_, peer);
    if (node.role == ps::Node::SCHEDULER || channel_->network_->IsLinked(peer, life)) return;
    // The peer has connected, and has ended since.
    channel_->OnEnd(peer, life, {"its connection closed", true, false});
  }

  void Disconnect(int node_id) override {
    Name name;
    {
      std::lock_guard<std::mutex> lock(channel_->mu_);
      const auto it = channel_->names_.find(node_id);
      if (it == channel_->names_.end()) return;
      name = it->second;
    }
    if (self_.role == ps::Node::SCHEDULER) {
      return channel_->network_->Close(name.number, name.life);
    }
    {
      std::lock_guard<std::mutex> lock(channel_->mu_);
      channel_->names_.erase(node_id);
    }
    const Network::End closed{"its connection closed", true, false};
    channel_->network_->Unlink(name.number, channel_->number(), &closed, nullptr);
  }

  void Send(ps::Message* message) override {
    const auto& control = message->meta.control;
    const bool worker = !control.node.empty() && control.node[0].role == ps::Node::WORKER;
    if (control.cmd == ps::Control::WELCOME && worker) ++channel_->network_->admitted_;
    channel_->Transmit(*message);
  }

  void SetGeneration(int generation) override {
    channel_->generation_ = generation;
    if (self_.role == ps::Node::SCHEDULER) channel_->network_->generation_ = generation;
  }
  uint64_t job() const override { return channel_->job_; }
  void SetJob(uint64_t job) override { channel_->job_ = channel_->network_->job_ = job; }

 private:
  SimulatedChannel* const channel_;
  ps::Node self_;
  ps::Node scheduler_;
};

SimulatedChannel::SimulatedChannel(Network* network, const NodeSettings& settings)
    : network_(network), settings_(settings) {}

SimulatedChannel::~SimulatedChannel() { Stop(); }

void SimulatedChannel::Start(core::ChannelUser* user) {
  user_ = user;
  auto deadline = std::chrono::steady_clock::now() + Duration(settings_.start_timeout_s);
  // The server waits for a vacant rank, and the scheduler may restart.
  const bool waits = settings_.role == ps::Node::SERVER && settings_.scheduler_return_s > 0 &&
                     settings_.replace_servers_s > 0;
  while (true) {
    try {
      return StartOnce();
    } catch (const ps::ComeAgain& e) {
      if (waits) deadline = std::chrono::steady_clock::now() + Duration(settings_.start_timeout_s);
      if (std::chrono::steady_clock::now() >= deadline) throw core::Error(e.what());
    } catch (const ps::JobFailed& e) {
      throw core::JobFailedError(e.what());
    } catch (const core::Error&) {
      if (!waits || std::chrono::steady_clock::now() >= deadline) throw;
    }
    std::this_thread::sleep_for(kJoinPause);
  }
}

void SimulatedChannel::StartOnce() {
  life_ = network_->NewLife();
  // The scheduler tells this to nodes that connect.
  generation_ = network_->generation_.load();
  if (settings_.role == ps::Node::SCHEDULER) network_->job_ = life_ << 16 | 1;
  job_ = network_->job_.load();
  closed_ = false;
  names_.clear();
  early_.Drop();
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
  membership.replicas = settings_.replicas;
  membership.replace_servers_s = settings_.replace_servers_s;
  membership.backups = settings_.backups;
  membership.scheduler_return_s = settings_.scheduler_return_s;
  membership.make_roster_policy = ps::MakeRosterRecovery;
  membership_ =
      ps::Membership::Make(links_.get(), membership,
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
  early_.Release(user_);
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
  unnamed_.clear();
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
  if (to == settings_.number) return;
  network_->Carry(*this, to, name.comes ? name.life : 0, std::move(message));
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

bool SimulatedChannel::is_late() const { return membership_->AsNode()->is_late(); }

bool SimulatedChannel::lacks_scheduler() const { return membership_->AsNode()->lacks_scheduler(); }

void SimulatedChannel::SayReady() { membership_->AsNode()->SayOfReplica(ps::membership::Ready()); }

void SimulatedChannel::SayAwaited(int rank, const std::string& name, uint32_t round) {
  membership_->AsNode()->SayOfReplica(ps::membership::Awaited{rank, static_cast<int>(round), name});
}

void SimulatedChannel::SayLate(int rank, const std::string& why) {
  membership_->AsNode()->SayOfReplica(ps::membership::Late{rank, 0, why});
}

void SimulatedChannel::AskToAdmit(int replica, int life) {
  membership_->AsNode()->SayOfReplica(ps::membership::Admit{replica, life});
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
    // Copy: the sender may be gone, and its memory with it.
    for (auto& values : message.data) {
      ps::SArray<char> copy;
      copy.CopyFrom(values);
      values = copy;
    }
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

core::Role SimulatedChannel::role() const {
  return settings_.role == ps::Node::SERVER ? core::Role::kServer : core::Role::kWorker;
}

int SimulatedChannel::IdOf(int number, uint64_t life) const {
  std::lock_guard<std::mutex> lock(mu_);
  return FindId(number, life);
}

int SimulatedChannel::FindId(int number, uint64_t life) const {
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
    // A node that registers has no id yet, whatever id it had before.
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
  if (id == ps::Node::kEmpty) return;  // the peer was never more than a connection
  if (end.orderly) return membership_->OnDisconnect(id);
  membership_->OnLinkLost(id, end.how, end.by_peer);
}

bool SimulatedChannel::NameSender(Event* event) {
  int* const sender = &event->message.meta.sender;
  std::lock_guard<std::mutex> lock(mu_);
  // Workers tell servers their ranks. Servers are known from the scheduler's list.
  if (settings_.role == ps::Node::SERVER && core::IsWorker(*sender)) {
    names_[*sender] = {event->from, 0};
    return true;
  }
  const int known = FindId(event->from, event->from_life);
  if (settings_.role == ps::Node::SERVER && known == ps::Node::kEmpty) {
    unnamed_.push_back(std::move(*event));
    return false;
  }
  *sender = known;
  return true;
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
    if (!NameSender(&event)) continue;
    ps::Message& message = event.message;
    ps::SArray<char> values;
    if (!message.data.empty()) values = Place(message.meta, message.data[0]);
    if (!message.data.empty()) message.data[0] = values;
    const int sender = message.meta.sender;
    core::Message received = core::FromPs(&message, role());
    try {
      early_.Take(&received, user_);
    } catch (const std::exception& e) {
      // A transport would close the connection.
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
    if (char* const place = user_->PlaceFor(core::HeadOf(meta, role()), values.size())) {
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
    // In some cases the second half is delayed.
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
