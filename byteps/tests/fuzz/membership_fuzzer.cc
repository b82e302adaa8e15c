// A scheduler that any nodes may ask to join, and members that say anything; and a node to which
// its scheduler says anything.  Whatever they say, both can be stopped, and tell of one end at
// most.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <string>
#include <vector>

#include "byteps/base/error.h"
#include "byteps/net/link/meta_codec.h"
#include "byteps/net/membership/account.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/protocol.h"
#include "demand.h"
#include "ps/base.h"

namespace {

// Remembers whom it was told of, and sends nothing.
class NoLinks : public ps::MembershipLinks {
 public:
  explicit NoLinks(ps::Node::Role role) {
    scheduler_.role = ps::Node::SCHEDULER;
    scheduler_.id = ps::kScheduler;
    scheduler_.hostname = "10.0.0.1";
    scheduler_.port = 9000;
    self_ = scheduler_;
    self_.role = role;
    if (role != ps::Node::SCHEDULER) self_.id = ps::Node::kEmpty;
  }
  ps::Node self() const override { return self_; }
  const ps::Node& scheduler() const override { return scheduler_; }
  void SetSelf(const ps::Node& node) override { self_ = node; }
  void Connect(const ps::Node& node) override { DEMAND(node.id != ps::Node::kEmpty); }
  void Disconnect(int) override {}
  void SetIncarnation(int) override {}
  uint64_t job() const override { return 1; }
  void SetJob(uint64_t) override {}
  void Send(ps::Message* message) override {
    // What it says can be read.
    ps::Meta meta;
    const std::string bytes = ps::EncodeMeta(message->meta);
    DEMAND(ps::DecodeMeta(bytes.data(), bytes.size(), &meta));
  }

 private:
  ps::Node self_;
  ps::Node scheduler_;
};

ps::Node AnyNode(FuzzedDataProvider* data) {
  ps::Node node;
  node.role = static_cast<ps::Node::Role>(data->ConsumeIntegralInRange<int>(0, 2));
  const bool likely = data->ConsumeIntegralInRange<int>(0, 7) > 0;
  node.id = likely ? data->ConsumeIntegralInRange<int>(0, 15) : data->ConsumeIntegral<int32_t>();
  node.aux_id =
      likely ? data->ConsumeIntegralInRange<int>(-1, 3) : data->ConsumeIntegral<int32_t>();
  node.port = data->ConsumeIntegralInRange<int>(0, 65535);
  node.hostname = "10.0.0." + std::to_string(data->ConsumeIntegralInRange<int>(0, 9));
  return node;
}

ps::Message AnyMessage(FuzzedDataProvider* data) {
  ps::Message message;
  const ps::Control::Command likely[] = {
      ps::Control::ADD_NODE,   ps::Control::WELCOME,   ps::Control::REFUSED,
      ps::Control::JOB_FAILED, ps::Control::HEARTBEAT, ps::Control::LEAVE,
      ps::Control::NODE_LEFT,  ps::Control::JOB_END,   ps::Control::MEMBERS};
  message.meta.control.cmd = data->PickValueInArray(likely);
  if (data->ConsumeIntegralInRange<int>(0, 15) == 0) {
    message.meta.control.cmd =
        static_cast<ps::Control::Command>(data->ConsumeIntegralInRange<int>(0, 15));
  }
  const int nodes = data->ConsumeIntegralInRange<int>(0, 3);
  for (int i = 0; i < (nodes == 3 ? 3 : nodes > 0); ++i) {
    message.meta.control.node.push_back(AnyNode(data));
  }
  switch (data->ConsumeIntegralInRange<int>(0, 3)) {
    case 0:
      message.meta.body = data->ConsumeRandomLengthString(40);
      break;
    case 1:
      if (data->ConsumeBool()) {
        if (data->ConsumeIntegralInRange<int>(0, 3) == 0) {
          message.meta.body = "workers=2 epoch=1 present=01 waiting=10 lives=3,0 news";
          break;
        }
        using Word = ps::membership::MemberWord;
        message.meta.body = ps::membership::PackWord(
            {static_cast<Word::Kind>(
                 data->ConsumeIntegralInRange<int>(Word::kAcknowledged, Word::kLeftKnown)),
             data->ConsumeIntegralInRange<int>(0, 3), data->ConsumeIntegralInRange<int>(0, 3),
             "why", data->ConsumeIntegralInRange<int>(0, 5)});
        break;
      }
      message.meta.body = data->ConsumeBool() ? "suspend" : "finish";
      break;
    default:
      message.meta.body =
          "protocol=" + std::to_string(ps::membership::kProtocol) +
          " workers=" + std::to_string(data->ConsumeIntegralInRange<int>(-1, 3)) +
          " servers=" + std::to_string(data->ConsumeIntegralInRange<int>(-1, 2)) +
          " link=" + std::to_string(data->ConsumeIntegralInRange<int>(-1, 400'000)) +
          " probe=" + std::to_string(std::max(data->ConsumeIntegralInRange<int>(-9, 3), 0)) +
          " replicas=" + std::to_string(data->ConsumeIntegralInRange<int>(0, 3)) +
          " backups=" + std::to_string(data->ConsumeIntegralInRange<int>(0, 1));
      if (data->ConsumeIntegralInRange<int>(0, 3) == 0) {
        ps::membership::Account account;
        account.job = data->ConsumeIntegralInRange<int>(0, 2);
        account.life = data->ConsumeIntegralInRange<int>(0, 3);
        account.is_late = data->ConsumeBool();
        account.left.insert(data->ConsumeIntegralInRange<int>(0, 3));
        account.turns[data->ConsumeIntegralInRange<int>(0, 3)] =
            data->ConsumeIntegralInRange<int>(0, 3);
        if (data->ConsumeBool()) {
          account.replicas = {2,
                              data->ConsumeIntegralInRange<int>(0, 3),
                              data->ConsumeBool() ? "10" : "11",
                              "01",
                              {0, 3},
                              ""};
        }
        message.meta.body += PackAccount(account);
      }
  }
  return message;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  const bool is_scheduler = data.ConsumeBool();
  NoLinks links(is_scheduler ? ps::Node::SCHEDULER : ps::Node::WORKER);
  ps::MembershipSettings settings;
  settings.is_scheduler = is_scheduler;
  settings.workers = data.ConsumeIntegralInRange<int>(-1, 2);
  settings.servers = data.ConsumeIntegralInRange<int>(-1, 2);
  settings.rank = 0;
  settings.replace_servers_s = data.ConsumeBool() ? 60 : 0;
  settings.scheduler_return_s = data.ConsumeBool() ? 60 : 0;
  std::atomic<int> failures{0};
  const auto membership =
      ps::Membership::Make(&links, settings, [&](const ps::MembershipEvent& event) {
        if (event.kind == ps::MembershipEvent::kFailed) ++failures;
      });
  if (is_scheduler) membership->Join();
  while (data.remaining_bytes() > 0) {
    const int who = data.ConsumeIntegralInRange<int>(0, 15);
    const int sender = who == 15 ? ps::Node::kEmpty : who;
    const int what = data.ConsumeIntegralInRange<int>(0, 15);
    if (what == 0) {
      membership->OnDisconnect(sender);
    } else if (what == 1) {
      membership->OnLinkLost(sender, "it broke", data.ConsumeBool());
    } else {
      ps::Message message;
      const std::string sent = ps::EncodeMeta(AnyMessage(&data).meta);
      // What no van would hand on is not handed on.
      if (!ps::DecodeMeta(sent.data(), sent.size(), &message.meta)) continue;
      message.meta.sender = sender;
      // As a van does: what a handler does not bear ends the connection.
      try {
        membership->Handle(message);
      } catch (const ps::Error&) {
      }
    }
    (void)membership->NameOf(sender);
  }
  membership->Stop();
  DEMAND(failures <= 1);
  return 0;
}
