// Common part of all vans: it joins a job, runs the receiving thread, and ends.
#include <algorithm>
#include <atomic>
#include <limits>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/name_service.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/nics.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/membership_links.h"
#include "byteps/net/membership/van_settings.h"
#include "byteps/net/net_settings.h"
#include "byteps/net/tcp/van.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"
#include "ps/internal/van.h"
#ifdef BYTEPS_WITH_RDMA
#include "byteps/net/rdma/van.h"
#endif

namespace ps {

const int Node::kEmpty = std::numeric_limits<int>::max();
const int Meta::kEmpty = std::numeric_limits<int>::max();

namespace {

// Logs one warning if other machines that look up this name would find themselves: Debian's
// /etc/hosts maps a machine's own name to 127.0.1.1. `remedy`: advice for the user.
void WarnOfLoopback(const std::string& name, const std::string& remedy) {
  static std::atomic<bool> warned{false};
  if (IsNumeric(name) || name.find("localhost") != std::string::npos) return;
  const std::vector<Address> addresses = Resolve(name, 0);
  const bool stays = std::all_of(addresses.begin(), addresses.end(),
                                 [](const Address& address) { return IsLoopback(address.Host()); });
  if (!stays || warned.exchange(true)) return;
  BPS_LOG(WARNING) << name << " is " << addresses.front().Host()
                   << " here: nodes on other machines cannot reach this one; " << remedy;
}

// Returns the address at which this node listens. A node that does not listen announces it.
std::string OwnAddress(const VanSettings& settings, const Node& scheduler, bool listens) {
  if (!settings.host.empty()) return settings.host;
  if (!settings.interface.empty()) return AddressOfInterface(settings.interface);
  const std::string own = AwaitHost(settings.membership.start_timeout_s, [&] {
    return LocalAddressTowards(scheduler.hostname, scheduler.port);
  });
  if (listens && IsLoopback(own)) {
    WarnOfLoopback(scheduler.hostname, "set DMLC_NODE_HOST to an address of this machine");
  }
  return own;
}

std::vector<Nic> OwnNics(const Node& self, const NicSettings& settings) {
  const NicUser user = NicUserFor(self, settings);
  if (user.uses_rdma && settings.chooses_rdma_device) {
    if (user.setting != "auto") {
      throw Error("BYTEPS_NICS=" + user.setting +
                  " names NICs, and BYTEPS_RDMA_DEVICE chooses one: unset it");
    }
    return {};  // the transport determines the address
  }
  return ChooseNics(ListNics(), user).nics;
}

// Membership's links, implemented by the van.
class VanLinks : public MembershipLinks {
 public:
  VanLinks(Van* van, const NicSettings& nics) : van_(van), nics_(nics) {}
  Node self() const override { return van_->node(); }
  const Node& scheduler() const override { return van_->scheduler(); }
  void SetSelf(const Node& node) override { van_->SetNode(node); }
  void Connect(const Node& node) override { van_->Connect(node); }
  void Disconnect(int node_id) override { van_->Disconnect(node_id); }
  void Send(Message* msg) override { van_->Send(*msg); }
  std::string DialError() override { return OfItsJob()->DialError(kScheduler); }
  bool IsBroken(int node_id) override { return OfItsJob()->IsBroken(node_id); }
  int host_mbps() const override { return HostMbps(van_->node(), nics_); }
  void SetGeneration(int generation) override { van_->SetGeneration(generation); }
  uint64_t job() const override { return Number()->get(); }
  void SetJob(uint64_t job) override { Number()->Set(job); }

 private:
  // All vans of this project are LinkVans.
  OfAJob* OfItsJob() const { return dynamic_cast<OfAJob*>(van_); }
  JobNumber* Number() const { return OfItsJob()->job_number(); }

  Van* const van_;
  const NicSettings nics_;
};

}  // namespace

Van::Van(const VanSettings& settings) : settings_(std::make_unique<VanSettings>(settings)) {}
Van::~Van() = default;

void Van::OnDisconnect(int node_id) { membership_->OnDisconnect(node_id); }

Van* Van::Create(const NetSettings& settings) {
  const std::string& type = settings.transport;
  if (type == "tcp" || type == "0") return new TcpVan(settings.van, settings.tcp);
#ifdef BYTEPS_WITH_RDMA
  if (type == "ibverbs" || type == "1") return new RdmaVan(settings.van, settings.rdma);
#endif
  throw Error("DMLC_ENABLE_RDMA=" + type + " names no transport of this build");
}

void Van::Start(int customer_id, bool /*standalone*/) {
  const Postoffice* post = Postoffice::Get();
  is_scheduler_ = post->is_scheduler();
  scheduler_.hostname = settings().scheduler_host;
  scheduler_.port = settings().scheduler_port;
  scheduler_.role = Node::SCHEDULER;
  scheduler_.id = kScheduler;
  Node self = scheduler_;
  if (!is_scheduler_) {
    self = Node();
    self.hostname = OwnAddress(settings(), scheduler_, post->is_server());
    self.role = post->is_worker() ? Node::WORKER : Node::SERVER;
    self.port = post->is_server() ? settings().port : 0;
    self.customer_id = customer_id;
  }
  my_role_ = self.role;
  self.nics = OwnNics(self, settings().nics);
  SetNode(self);
  links_ = std::make_unique<VanLinks>(this, settings().nics);
  const MembershipSettings& membership = settings().membership;
  membership_ = Membership::Make(links_.get(), membership, post->handlers().on_event);
  if (post->handlers().on_van) post->handlers().on_van(post->shared_van());
  // The name may not resolve yet, or may still resolve to an old address.
  const int port = AwaitHost(membership.start_timeout_s, [&] { return Bind(self, 0); });
  self = node();  // a transport may know a more precise address
  self.port = port;
  SetNode(self);
  if (is_scheduler_) {
    scheduler_.port = port;
    if (!settings().on_every_address) {
      WarnOfLoopback(scheduler_.hostname,
                     "let DMLC_PS_ROOT_URI (--host) be an address of this machine");
    }
  }
  if (port != 0 && post->handlers().on_event) {
    MembershipEvent event;
    event.kind = MembershipEvent::kListens;
    event.node = InfoOf(self);
    post->handlers().on_event(event);
  }
  Connect(scheduler_);
  receiver_thread_ = std::make_unique<std::thread>(&Van::Receiving, this);
  pthread_setname_np(receiver_thread_->native_handle(), "bps-control");
  membership_->Join();
}

void Van::Stop() {
  if (membership_) membership_->Stop();
  if (receiver_thread_) {
    Message exit;
    exit.meta.control.cmd = Control::TERMINATE;
    exit.meta.recver = node().id;
    SendMsg(exit);
    // The thread was told to stop, so this wait is ended by its return; deadline: none.
    receiver_thread_->join();
    receiver_thread_.reset();
  }
  // The membership and the node stay, because threads may still ask for names.
}

int Van::Send(Message& msg) {
  const int bytes = SendMsg(msg);
  if (bytes >= 0 && Postoffice::Get()->verbose() >= 2) {
    PS_VLOG(2) << GetType() << "\tsent: " << msg.DebugString();
  }
  return bytes;
}

bool Van::IsValidPushpull(const Message& msg) {
  return msg.meta.control.empty() && !msg.meta.simple_app;
}

void Van::ProcessDataMsg(Message* msg) {
  const auto& handler = Postoffice::Get()->handlers().on_message;
  if (handler) handler(msg);
}

void Van::Receiving() {
  while (true) {
    Message msg;
    try {
      RecvMsg(&msg);
      // Only the van's own TERMINATE, which has no sender, may end this thread. A peer's TERMINATE
      // must not.
      if (msg.meta.control.cmd == Control::TERMINATE && msg.meta.sender == Meta::kEmpty) return;
      if (Postoffice::Get()->verbose() >= 2) {
        PS_VLOG(2) << GetType() << "\treceived: " << msg.DebugString();
      }
      if (msg.meta.control.empty()) {
        ProcessDataMsg(&msg);
      } else {
        membership_->Handle(msg);
      }
    } catch (const std::exception& e) {
      // Only the sender's connection is dropped. Other nodes are unaffected.
      BPS_LOG(WARNING) << "a message of node " << msg.meta.sender
                       << " could not be handled: " << e.what();
      Disconnect(msg.meta.sender);
    }
  }
}

}  // namespace ps
