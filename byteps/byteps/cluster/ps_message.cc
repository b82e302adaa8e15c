#include "byteps/cluster/ps_message.h"

#include <utility>

#include "byteps/base/protocol.h"
#include "byteps/cluster/node_ids.h"
#include "ps/internal/postoffice.h"

namespace byteps {
namespace core {

int WorkerId(int rank) { return ps::Postoffice::WorkerRankToID(rank); }
int ServerId(int rank) { return ps::Postoffice::ServerRankToID(rank); }
int RankOf(int node_id) { return ps::Postoffice::IDtoRank(node_id); }
bool IsWorker(int node_id) { return node_id % 2 == WorkerId(0) % 2; }

ps::Message ToPs(const Message& message) {
  ps::Message msg;
  msg.meta.app_id = 0;
  msg.meta.customer_id = 0;
  msg.meta.timestamp = 0;
  msg.meta.head = message.op;
  // A transport with two planes sends all else, which moves values, by that of data.
  msg.meta.simple_app = message.op == kDeclare;
  msg.meta.request = msg.meta.push = message.is_request;
  const bool to_server = message.is_request || message.between_servers;
  msg.meta.recver = to_server ? ServerId(message.peer) : WorkerId(message.peer);
  msg.meta.key = message.key;
  msg.meta.addr = message.number;
  msg.meta.option = message.failed ? 1 : 0;
  msg.meta.body = message.body;
  msg.meta.val_len = static_cast<int>(message.values.size());
  if (!message.values.empty()) {
    ps::SArray<char> values;
    values.reset(message.values.data(), message.values.size(),
                 [owner = message.values.owner()](char*) {});
    msg.AddData(values);
  }
  return msg;
}

MessageHead HeadOf(const ps::Meta& meta, Role here) {
  MessageHead head;
  head.op = meta.head;
  head.is_request = meta.request;
  head.failed = meta.option != 0;
  head.between_servers = here == Role::kServer && !IsWorker(meta.sender);
  head.peer = RankOf(meta.sender);
  head.key = meta.key;
  head.number = meta.addr;
  return head;
}

Message FromPs(ps::Message* msg, Role here) {
  Message message;
  static_cast<MessageHead&>(message) = HeadOf(msg->meta, here);
  message.body = std::move(msg->meta.body);
  if (msg->data.size() == 1) {
    ps::SArray<char>& values = msg->data[0];
    message.SetValues({std::move(values.ptr()), values.size()});
    if (message.values.empty()) message.sent_bytes = static_cast<uint32_t>(msg->meta.data_size);
  } else if (!msg->data.empty()) {
    message.sent_bytes = Message::kInPieces;
  }
  return message;
}

}  // namespace core
}  // namespace byteps
